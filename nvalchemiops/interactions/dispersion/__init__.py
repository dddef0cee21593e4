"""London dispersion between atoms that depends on their surroundings: formulas and published parameters."""
