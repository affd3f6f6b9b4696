"""Quire's public face."""

__version__ = "0.1.0"
