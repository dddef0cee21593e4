"""Coulomb interactions."""
