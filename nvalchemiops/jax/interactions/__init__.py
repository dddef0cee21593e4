"""Interactions for JAX arrays."""
