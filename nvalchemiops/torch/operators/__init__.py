"""Torch ops that know no physics, in families closed under differentiation; kernels: `nvalchemiops.kernels`."""
