"""Pair potentials: a formula, its derivatives of any order, and the one kernel that sums it over neighbors."""
