"""What an engine process runs: `python -m engine.process_main`, with the arguments of `engine.process`."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    gc.disable()  # looking through PyTorch's modules again and again while they come takes a fifth of a second
    from engine import process

    gc.freeze()  # and they stay
    gc.enable()
    sys.setswitchinterval(
        0.0005
    )  # each time that the loop has waited it may wait so long for a thread that compiles a grammar
    process.main()


if __name__ == "__main__":
    main()
