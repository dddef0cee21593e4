"""Interactions of JAX arrays."""
