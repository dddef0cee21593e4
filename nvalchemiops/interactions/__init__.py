"""Physics: every formula and the kernels that sum it, free of torch."""
