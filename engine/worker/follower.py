"""The process of a rank that follows rank 0: `python -m engine.worker.follower DESCRIPTOR`, started by `engine.worker.launcher`.

Its standard input is its lifeline: when that closes, rank 0 is gone, however it ended, and this process ends at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

import torch

from engine.models.errors import ModelError
from engine.worker.lifeline import end_with_parent
from engine.worker.ranks import follow


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which then closes
    end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(torch.get_num_threads() // 2, 1))
    try:
        follow(Connection(int(sys.argv[1])))
    except ModelError as error:
        logging.critical("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
