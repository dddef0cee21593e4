"""Interactions of torch tensors."""
