"""What an engine process runs: `python -m engine.process_main`, with the arguments of `engine.process`."""

from __future__ import annotations

import gc


def main() -> None:
    gc.disable()  # looking through PyTorch's modules again and again while they come takes a fifth of a second
    from engine import process

    gc.freeze()  # and they stay
    gc.enable()
    process.main()


if __name__ == "__main__":
    main()
