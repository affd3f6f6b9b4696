"""The operations whose reference implementation is too slow for use, for CPUs."""
