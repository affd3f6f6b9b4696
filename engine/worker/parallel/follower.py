"""The process of a follower, a rank other than 0: `python -m engine.worker.parallel.follower DESCRIPTOR`.

`engine.worker.parallel.launcher` starts it. Its standard input is its lifeline: it closes when rank 0 ends for any
reason, and then this process exits at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

import torch

from engine.models.errors import ModelError
from engine.worker.parallel.lifeline import end_with_parent
from engine.worker.parallel.ranks import follow


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C, and then closes its followers
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
