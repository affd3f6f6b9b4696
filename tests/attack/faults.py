"""`quire` with faults that can be armed from outside: `python -m tests.attack.faults serve …`.

A fault is armed by a file of its name in the folder that the environment variable `FOLDER` names, and strikes once,
where it is looked for: in the API process, or in the engine process, which is this module, too.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

FOLDER = "QUIRE_TEST_FAULTS"
CLOCK_JUMP = 1e6  # seconds


def arm(folder: Path, name: str) -> None:
    (folder / f"fault-{name}").touch()


def strikes(name: str) -> bool:
    """Return whether the fault was armed; it is not any more."""
    try:
        os.unlink(Path(os.environ[FOLDER], f"fault-{name}"))
    except FileNotFoundError:
        return False
    return True


class PanicException(BaseException):
    """Stand-in for a panic in an extension written in Rust: no `Exception`."""


def api() -> None:
    """The command `quire`, whose tokenizer may panic and whose clock may jump, with this module as its engine
    process.
    """
    from engine.replicas import engine_process
    from engine.text.tokenizer import Tokenizer
    from server.cli.main import main

    engine_process.ENGINE_MODULE = __spec__.name
    encode, now, jump = Tokenizer.encode, time.time, 0.0

    def encode_or_panic(*args: Any, **options: Any) -> list[int]:
        if strikes("panic"):
            raise PanicException("injected")
        return encode(*args, **options)

    def jumping_time() -> float:
        nonlocal jump
        jump += CLOCK_JUMP * strikes("clock")
        return now() + jump

    Tokenizer.encode = encode_or_panic  # type: ignore[assignment, method-assign]
    time.time = jumping_time
    sys.exit(main())


def engine() -> None:
    """The engine process: a forward may fail or run out of memory, logits may be NaN, a disk may be full."""
    from engine.models.decoder import Decoder
    from engine.replicas import process

    forward, logits, pwritev = Decoder.forward, Decoder.logits, os.pwritev

    def failing_forward(*args: Any, **options: Any) -> torch.Tensor:
        if strikes("exception"):
            raise RuntimeError("injected")
        if strikes("memory"):
            raise torch.OutOfMemoryError("injected")
        return forward(*args, **options)

    def corrupt_logits(*args: Any, **options: Any) -> torch.Tensor:
        found = logits(*args, **options)
        if strikes("nan"):
            found[0] = torch.nan
        return found

    def full_disk(*args: Any) -> int:
        if strikes("disk"):
            raise OSError(errno.ENOSPC, "injected")
        return pwritev(*args)

    Decoder.forward, Decoder.logits = failing_forward, corrupt_logits  # type: ignore[method-assign]
    os.pwritev = full_disk
    process.main()


if __name__ == "__main__":
    if sys.argv[1].startswith("ipc:"):
        engine()
    else:
        api()
