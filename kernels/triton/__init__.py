"""The operations for NVIDIA GPUs, in Triton. A module is imported by the first call of one of its operations."""
