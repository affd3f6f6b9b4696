"""Launch, device properties and device functions for both Triton and Gluon kernels."""
