"""Physics: the formulas, and the kernels that sum them, without torch."""
