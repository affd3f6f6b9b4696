"""What is wrong with a model on disk, said so that its owner can act. Knows messages only: no files, no tensors."""


class ModelError(Exception):
    """A model cannot be used. The message is one line: which file or tensor, what is wrong, and what to do."""
