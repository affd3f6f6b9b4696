"""Device functions and layouts for several Gluon kernels."""
