"""Times sampling by batch and filters, in CUDA graphs: what a step spends between its logits and its tokens.

    python -m benchmarks.micro.sampling
    python -m benchmarks.micro.sampling --batch 1 64 --vocab-size 128256 --output-json sampling.json

Two kinds of logits: peaked ones, as of a model that knows what to say (a few hundred tokens far above the rest), and
normal ones with a standard deviation of 3, which leave nucleus sampling thousands of tokens.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor

import kernels
from benchmarks.gpu import microseconds
from benchmarks.result_files import save
from engine.setup.machine import environment
from kernels import Part

FILTERS: dict[str, tuple[float, int, float, float]] = {  # temperature, top_k, top_p, min_p
    "none": (0.6, 0, 1.0, 0.0),
    "top_k 20, top_p 0.95": (0.6, 20, 0.95, 0.0),
    "top_p 0.9": (0.6, 0, 0.9, 0.0),
    "top_p 0.95, temperature 1": (1.0, 0, 0.95, 0.0),
    "top_k 1000": (1.0, 1000, 1.0, 0.0),
    "min_p 0.05": (1.0, 0, 1.0, 0.05),
}
NUM_LIKELY = 300


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256], help="rows of logits")
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output-json", metavar="FILE", help="where to save the results")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    rows: list[dict[str, Any]] = []
    print(f"{'rows':>5}  {'logits':8} {'filters':26} {'µs':>8} {'in the step':>12}")
    for batch in args.batch:
        for kind in ("peaked", "normal"):
            logits = made_up(kind, batch, args.vocab_size, device)
            for name, filters in FILTERS.items():
                row = {"rows": batch, "logits": kind, "filters": name, **measure(logits, filters)}
                rows.append(row)
                print(f"{batch:5}  {kind:8} {name:26} {row['us']:8.1f} {row['plain_us']:12.1f}", flush=True)
    if args.output_json:
        result = {"benchmark": "sampling", "vocab_size": args.vocab_size, "rows": rows, "environment": environment()}
        save(result, args.output_json)
    return 0


def made_up(kind: str, batch: int, vocab_size: int, device: torch.device) -> Tensor:
    """Logits [batch, vocab_size] bfloat16."""
    generator = torch.Generator(device).manual_seed(batch)
    logits = torch.randn(batch, vocab_size, device=device, generator=generator) * (2.2 if kind == "peaked" else 3)
    if kind == "peaked":
        ranks = torch.arange(1, min(NUM_LIKELY, vocab_size) + 1, device=device)
        likely = torch.randint(vocab_size, (batch, len(ranks)), device=device, generator=generator)
        noise = torch.rand(likely.shape, device=device, generator=generator)
        logits.scatter_(1, likely, 18 - 3 * ranks.log() + noise)
    return logits.bfloat16()


def measure(logits: Tensor, filters: tuple[float, int, float, float]) -> dict[str, float]:
    """Microseconds of sampling all rows, and of the part of it that stands in every step's graph."""
    batch, device = len(logits), logits.device
    dtypes = torch.float32, torch.int32, torch.float32, torch.float32
    temperature, top_k, top_p, min_p = (
        torch.full((batch,), x, dtype=dtype, device=device) for x, dtype in zip(filters, dtypes, strict=True)
    )
    numbers = torch.arange(batch, device=device)
    rows = kernels.SamplingRows(temperature, top_k, top_p, min_p, numbers, numbers)
    unmasked = torch.full((batch,), -1, dtype=torch.int32, device=device)
    tokens = torch.zeros(batch, dtype=torch.int64, device=device)

    def plain() -> None:
        kernels.sample(logits, rows, Part.PLAIN, out=tokens)

    def both() -> None:
        plain()
        kernels.sample(logits, rows, Part.REST, unmasked, tokens)

    first = microseconds(plain, device)
    return {"us": first if filters[1:] == (0, 1.0, 0.0) else microseconds(both, device), "plain_us": first}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
