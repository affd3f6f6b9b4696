"""Gluon kernels that the Triton launchers prefer where they apply: on tensor cores, written for Hopper."""
