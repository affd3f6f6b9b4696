"""What Triton and Gluon kernels share: launch, dequantisation, quantised rows, split-K sums."""
