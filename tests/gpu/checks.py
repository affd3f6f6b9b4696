"""Collects checks: each has a name, an error and the most that it may be. On a GPU many are timed, too."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from triton.testing import do_bench

from tests.support.unwritten import unwritten_is_unknown

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LIMITS = {BF16: 6e-3, F16: 1e-3, F32: 1e-5}  # relative errors of sums of many products, by the dtype of the result
ELEMENTWISE_LIMITS = {BF16: 6e-3, F16: 1e-3, F32: 3e-6}
BANDWIDTH = 4.3e12  # bytes a second that an H200 copies


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative error of two tensors of one shape, by their norms in float64."""
    difference = torch.linalg.vector_norm(got.double() - want.double())
    return float(difference / torch.linalg.vector_norm(want.double()).clamp(min=1e-30))


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The call in a CUDA graph, after a call without."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@dataclass(frozen=True, slots=True)
class Result:
    """One check. `microseconds`: what the call took, where it was timed."""

    name: str
    error: float
    limit: float
    microseconds: float | None = None

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # False for NaN


@dataclass(slots=True)
class Checks:
    """Prints each result as it comes. Only checks whose names contain `match` and fall into the shard count."""

    device: str
    match: str = ""
    shard: tuple[int, int] = (1, 1)  # this one, from 1, and how many there are
    results: list[Result] = field(default_factory=list)

    def wants(self, name: str) -> bool:
        """Return whether a check counts. Those whose names agree up to a comma or a colon are in the same shard."""
        name, (this, count) = name.replace("torch.", ""), self.shard
        group = name.split(",")[0].split(":")[0]
        return self.match in name and zlib.crc32(group.encode()) % count == this - 1

    def add(
        self, name: str, error: float, limit: float, call: Callable[[], object] | None = None, num_bytes: int = 0,
        num_flops: int = 0, graph: bool = False,
    ) -> None:  # fmt: skip
        """`call` is timed on a GPU, beside the time in which the device could move `num_bytes`, or with its rate.

        `graph`: in a CUDA graph, so that the time in which the CPU launches kernels does not count.
        """
        name = name.replace("torch.", "")
        if not self.wants(name):
            return
        us = None
        if call and self.device != "cpu":
            with unwritten_is_unknown():
                us = 1e3 * do_bench(captured(call) if graph else call, return_mode="median")
        result = Result(name, error, limit, us)
        self.results.append(result)
        line = f"{'ok  ' if result.passed else 'FAIL'} {result.name:58} error {error:.1e}"
        if us is not None and num_flops:
            line += f" {us:9.1f} us, {num_flops / us / 1e6:4.0f} TFLOP/s"
        elif us is not None:
            floor = 1e6 * num_bytes / BANDWIDTH
            line += f" {us:9.1f} us, floor {floor:8.1f} us ({100 * floor / us:3.0f} %)"
        print(line, flush=True)

    def took(self, name: str, seconds: float, limit: float) -> None:
        """Add a duration."""
        self._observe(Result(name, seconds, limit), f"{seconds:.2f} s, at most {limit:.0f} s")

    def saw(self, name: str, holds: bool, what: str) -> None:
        """Add something that either holds or not. `what`: what was seen."""
        self._observe(Result(name, float(not holds), 0.0), what)

    def _observe(self, result: Result, what: str) -> None:
        if self.wants(result.name):
            self.results.append(result)
            print(f"{'ok  ' if result.passed else 'FAIL'} {result.name:58} {what}", flush=True)

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self.device)
