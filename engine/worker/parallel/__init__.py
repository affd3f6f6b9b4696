"""Ranks: their start, communication and shutdown."""
