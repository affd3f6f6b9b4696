"""The commands of `quire`, one module each, with `add_parser` and `run`. Heavy modules are imported only in `run`."""
