"""The error for a model that cannot be used."""


class ModelError(Exception):
    """A model cannot be used. The message is one line: which file or tensor, what is wrong, and what to do."""
