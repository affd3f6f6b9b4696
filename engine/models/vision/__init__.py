"""Encoders of images: one module for each kind, of layers that they share."""
