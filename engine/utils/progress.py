"""Progress of the start on the terminal: a bar for each long phase."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

BARS = {"loading": ("Loading weights", "B"), "capturing": ("Capturing CUDA graphs", "size")}  # phase → title, unit


class TerminalProgress:
    """A progress callback that draws bars on stderr; see `engine.models.files`."""

    def __init__(self) -> None:
        self._phase = ""
        self._bar: tqdm[Any] | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self.close()
            self._phase = phase
            if phase in BARS and done < total:
                title, unit = BARS[phase]
                self._bar = tqdm(total=total, desc=title, unit=unit, unit_scale=unit == "B", leave=unit == "B")
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done >= total:
                self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
