"""Interaction energies, forces and virials for torch tensors."""
