"""Fixtures for tests that talk to a live server."""

from tests.server.conftest import serve

__all__ = ["serve"]
