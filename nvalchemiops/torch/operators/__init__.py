"""Generic torch ops without physics, in families closed under differentiation; kernels: `nvalchemiops.kernels`."""
