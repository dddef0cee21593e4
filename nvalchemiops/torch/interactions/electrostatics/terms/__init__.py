"""The terms of an Ewald sum, each with its derivatives."""
