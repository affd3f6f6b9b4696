"""Attention kernels for Hopper."""
