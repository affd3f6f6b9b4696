"""Times the decode attention kernel under many work plans on the GPU at hand, beside the plan that is shipped.

    python -m benchmarks.micro.tune_decode                        prints the five fastest plans of each case
    python -m benchmarks.micro.tune_decode --kv-cache-dtype fp8 --match "32 x"

Each time is that of a layer inside a CUDA graph of several layers with caches of their own, as in a decode step: single
launches with a flushed L2 favour other plans. A plan whose result differs from the shipped plan's is named and left out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

import kernels
from benchmarks.gpu import need_gpus
from benchmarks.micro.kernels import Case, Inputs, decode

CACHE_BYTES = 1 << 28  # that the layers of a graph hold at least: several times the L2
MAX_LAYERS, REPLAYS = 16, 15


@dataclass(frozen=True, slots=True)
class Knobs:
    """What of a plan is tried; `programs` on each multiprocessor."""

    tile: int
    num_warps: int
    num_stages: int
    programs: int
    fan_in: int
    min_tiles: int

    def plan(self, shipped: kernels.DecodePlan, case: Case, device: torch.device) -> kernels.DecodePlan:
        num_programs = self.programs * torch.cuda.get_device_properties(device).multi_processor_count
        shape = (shipped.max_seqs, case.num_heads, case.num_kv_heads, case.head_dim, device, num_programs)
        return replace(
            kernels.DecodePlan.allocate(*shape),
            tile=self.tile, num_warps=self.num_warps, num_stages=self.num_stages,
            fan_in=self.fan_in, min_tiles=self.min_tiles,
        )  # fmt: skip

    @classmethod
    def all(cls) -> Iterator[Knobs]:
        for tile, warps, *more in itertools.product((32, 64, 128), (1, 2, 4), (2, 3), (2, 4), (0, 8), (1, 2)):
            if 16 * warps <= tile:  # below, warps have no keys of their own
                yield cls(tile, warps, *more)


def cases() -> list[Case]:
    k = 1024
    return [
        decode("1 x 128", [128]),
        decode("1 x 1k", [k]),
        decode("1 x 8k", [8 * k]),
        decode("1 x 32k", [32 * k]),
        decode("8 x 1k", [k] * 8),
        decode("32 x 8k", [8 * k] * 32),
        decode("256 x 800", [800] * 256),
        decode("1 x 128k + 31 x 4k", [128 * k] + [4 * k] * 31),
        decode("16 heads, 256 x 1k", [k] * 256, num_heads=16),
        decode("head 64, 128 x 1k", [k] * 128, head_dim=64),
    ]


class Layers:
    """Several layers' caches under one block table."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.inputs = Inputs.make(case, device)
        num_layers = max(2, min(MAX_LAYERS, -(-CACHE_BYTES // self.inputs.kv.nbytes)))
        self.caches = [self.inputs.kv, *(self.inputs.kv.clone() for _ in range(num_layers - 1))]
        self.out = torch.empty_like(self.inputs.query)

    def step(self, plan: kernels.DecodePlan) -> None:
        inputs = self.inputs
        kernels.plan_decode(inputs.context_lens, inputs.rows, plan)
        for kv in self.caches:
            kernels.paged_attention_decode(
                inputs.query, kv[0], kv[1], inputs.block_tables, inputs.rows, inputs.context_lens,
                scale=inputs.case.head_dim**-0.5, kv_scale=inputs.kv_scale, plan=plan, out=self.out,
            )  # fmt: skip

    def time(self, plan: kernels.DecodePlan) -> tuple[float, Tensor]:
        """Microseconds of a layer, and its result."""
        self.step(plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(plan)
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / len(self.caches))
        return median(times), self.out.clone()


def tried(layers: Layers, plan: kernels.DecodePlan, want: Tensor, name: str) -> float:
    """Microseconds; infinity where the plan does not fit the device or gives something else."""
    try:
        us, got = layers.time(plan)
    except Exception as failure:  # out of registers or shared memory: one plan less
        print(f"  {name}: {type(failure).__name__}: {str(failure)[:90]}", file=sys.stderr)
        return float("inf")
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error < 1e-2:
        print(f"  {name}: WRONG, differs by {error:.1e}")
        return float("inf")
    return us


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of the caches")
    parser.add_argument("--match", default="", help="only cases whose name contains this text")
    args = parser.parse_args(argv)
    need_gpus("benchmarks.micro.tune_decode")
    kv_dtype = "float8_e4m3fn" if args.kv_cache_dtype == "fp8" else ""
    for case in cases():
        if args.match not in case.name:
            continue
        layers = Layers(replace(case, kv_dtype=kv_dtype))
        device, key = layers.out.device, layers.caches[0]
        shape = (len(case.context_lens), case.num_heads, case.num_kv_heads, case.head_dim)
        shipped = kernels.DecodePlan.allocate(*shape, device, kv_dtype=key.dtype)
        plans = {knobs: knobs.plan(shipped, case, device) for knobs in Knobs.all()}
        with kernels.compiling_only():
            for plan in (shipped, *plans.values()):
                layers.step(plan)
        us, want = layers.time(shipped)
        rate = layers.inputs.case.bytes / 1e6
        print(f"{case.name}: shipped {us:.1f} us, {rate / us:.2f} TB/s", flush=True)
        times = sorted((tried(layers, plan, want, str(knobs)), str(knobs)) for knobs, plan in plans.items())
        for time_us, name in times[:5]:
            print(f"  {time_us:8.1f} us, {rate / time_us:.2f} TB/s, {us / time_us:.2f} times: {name}")
        del layers, plans
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
