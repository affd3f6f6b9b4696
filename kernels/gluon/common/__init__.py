"""What Gluon kernels share."""
