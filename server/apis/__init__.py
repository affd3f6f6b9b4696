"""The HTTP APIs, a folder each."""
