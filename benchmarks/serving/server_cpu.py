"""CPU time of a server's processes between two readings of its metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping

_BY_PROCESS = re.compile(r'^quire:process_cpu_seconds_total\{process="([^"]*)"\} (\S+)$', re.MULTILINE)
_WHOLE = re.compile(r"^process_cpu_seconds_total (\S+)$", re.MULTILINE)  # of the process that answers /metrics


def between(before: str, after: str, seconds: float) -> dict[str, float]:
    """Return the cores that each process has used on average. Empty without such metrics."""
    former = _read(before)
    return {name: (value - former[name]) / seconds for name, value in _read(after).items() if name in former}


def _read(text: str) -> dict[str, float]:
    found = {name: float(value) for name, value in _BY_PROCESS.findall(text)}
    if not found and (whole := _WHOLE.search(text)) is not None:
        return {"api": float(whole[1])}
    return found


def describe(cores: Mapping[str, float], tokens_per_second: float) -> str:
    """Return a line about the processes, with what a token costs those that take requests."""
    api = sum(used for name, used in cores.items() if name.startswith("api"))
    shown = ", ".join(f"{name} {used:.2f}" for name, used in cores.items())
    cost = f"; a token takes {api / tokens_per_second * 1e6:.1f} µs of the API's" if tokens_per_second else ""
    return f"Server, cores in use: {shown}{cost}."
