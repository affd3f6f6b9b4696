"""Quire's server and command line."""
