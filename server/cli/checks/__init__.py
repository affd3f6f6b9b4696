"""Checks over HTTP whether a server implements the APIs that it claims to."""
