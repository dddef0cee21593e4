"""Slow references, straight from the definitions, in float64 numpy."""
