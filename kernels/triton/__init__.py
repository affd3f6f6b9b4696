"""The operations for NVIDIA GPUs, in Triton."""
