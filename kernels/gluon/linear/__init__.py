"""Linear-layer kernels."""
