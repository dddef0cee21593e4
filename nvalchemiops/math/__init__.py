"""Functions that make sense in a text without atoms."""
