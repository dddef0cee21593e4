"""Pair potentials: the formula, its derivatives to any order, and the kernel that sums it over neighbors."""
