"""Helpers without a subject of their own: logging, memory, progress, fair threads."""
