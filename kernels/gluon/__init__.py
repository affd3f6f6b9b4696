"""Gluon kernels for tensor cores, tuned on Hopper. The launchers in `kernels.triton` prefer them where they apply."""
