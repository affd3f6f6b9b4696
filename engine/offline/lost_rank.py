"""The loss of another rank of an `LLM`: an error in the call that waits for it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import EngineDeadError
from engine.worker.parallel.losses import RankLostError

_log = logging.getLogger(__name__)

STUCK_SECONDS = 30  # a call that still waits for a lost rank then waits forever, as collectives on GPUs do


class LostRank:
    """Lets the process go on, unless one of its calls cannot end any more."""

    def __init__(self) -> None:
        self._call: object | None = None  # the one in progress

    def __call__(self, reason: str) -> bool:
        """Note the loss: see `launcher.Lost`."""
        timer = threading.Timer(STUCK_SECONDS, self._end_if_stuck, [reason, self._call])
        timer.daemon = True
        timer.start()
        return True

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise `EngineDeadError` for a rank that is lost during a call."""
        self._call = object()
        try:
            yield
        except RankLostError as error:
            raise EngineDeadError(str(error)) from None
        finally:
            self._call = None

    def _end_if_stuck(self, reason: str, call: object | None) -> None:
        if call is not None and self._call is call:
            _log.critical("%s; this process ends, since it waits for it", reason)
            logging.shutdown()
            os._exit(1)
