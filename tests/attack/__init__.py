"""Attacks on a live server, as an unfriendly network would make them: `python -m tests.attack`, or `make attack`."""
