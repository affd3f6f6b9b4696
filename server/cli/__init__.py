"""The commands of `quire`, one module each. Each has `add_parser` and `run`, and imports what is heavy only in `run`."""
