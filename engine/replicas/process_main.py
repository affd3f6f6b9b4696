"""Entry point of an engine process: `python -m engine.replicas.process_main`, with the arguments of
`engine.replicas.process`.
"""

from __future__ import annotations

import gc
import sys

from engine.utils.imports import uncollected


def main() -> None:
    with uncollected():
        from engine.replicas import process

        gc.freeze()  # the modules stay
    # Seconds that the engine loop, after each wait, may wait for a thread that compiles a grammar.
    sys.setswitchinterval(0.0005)
    process.main()


if __name__ == "__main__":
    main()
