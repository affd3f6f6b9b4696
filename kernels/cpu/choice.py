"""The faster of the C++ kernels and PyTorch, for GEMMs, attention and norms by data type and number of tokens.

Measured at the first start of an instruction set and kept beside its library, unless the machine was too busy.
`QUIRE_CPU_KERNELS` decides without measuring: `native` for the C++ kernels, `pytorch` for PyTorch.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path

import torch

SIZES = (1, 16, 256)  # tokens that are measured; each stands for all numbers up to the next
# Where PyTorch computes, a request's log probabilities depend on the requests beside it: so it must be much faster.
MARGIN = 1.25
MODES = ("auto", "native", "pytorch")


def mode() -> str:
    """Return `QUIRE_CPU_KERNELS`; ValueError: it is not valid."""
    name = os.environ.get("QUIRE_CPU_KERNELS", "") or "auto"
    if name not in MODES:
        raise ValueError(f"QUIRE_CPU_KERNELS must be one of {', '.join(MODES)}, got {name!r}")
    return name


class Choices:
    """Time of PyTorch over that of the C++ kernels, by operation ("float32 products") and by the sizes in SIZES."""

    def __init__(self, times: Mapping[str, tuple[float, ...]] | None = None) -> None:
        self.times = dict(times or {})
        self._pytorch = {
            name: tuple(ratio * MARGIN < 1 for ratio in ratios)
            for name, ratios in self.times.items()
            if min(ratios) * MARGIN < 1
        }

    def takes_pytorch(self, operation: str, kind: torch.dtype | str, num_tokens: int) -> bool:
        """Return whether PyTorch computes an operation: "products" of weights of a kind, "attention" or "norms"."""
        if not self._pytorch:
            return False
        sizes = self._pytorch.get(f"{str(kind).removeprefix('torch.')} {operation}")
        return sizes is not None and sizes[max(bisect_right(SIZES, num_tokens) - 1, 0)]

    def describe(self) -> str:
        """Return one line for display."""
        shown = ", ".join(
            f"{name} {'/'.join(f'{ratio:.1f}' + ('*' if ratio * MARGIN < 1 else '') for ratio in ratios)}"
            for name, ratios in self.times.items()
        )
        sizes = "/".join(map(str, SIZES))
        return f"times PyTorch's speed for {sizes} tokens (*: PyTorch computes): {shown}"

    @classmethod
    def read(cls, path: Path) -> Choices | None:
        """Return what `write` has kept; None: nothing that can be used."""
        try:
            times = {str(name): tuple(map(float, ratios)) for name, ratios in json.loads(path.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        if all(len(ratios) == len(SIZES) and all(map(math.isfinite, ratios)) for ratios in times.values()):
            return cls(times)
        return None

    def write(self, path: Path) -> None:
        """Keep the measured times; OSError when that fails."""
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(self.times, indent=1) + "\n")
        part.replace(path)
