"""Kernels without physics: Fourier sums, splines on meshes, sums over segments, lattices, special functions."""
