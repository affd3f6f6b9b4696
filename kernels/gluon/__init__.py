"""Gluon kernels for tensor cores, tuned on Hopper. `kernels.cuda` chooses them where they are supported and faster."""
