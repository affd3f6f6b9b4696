"""The version of Quire, beside its other copy in pyproject.toml."""

__version__ = "0.2.0"
