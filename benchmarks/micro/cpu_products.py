"""The CPU's own products by instruction set, format and number of tokens: GFLOP/s of one thread, and their errors.

python -m benchmarks.micro.cpu_products                               # the CPU's own set
python -m benchmarks.micro.cpu_products --sets x86-64-v3 x86-64-v4    # interleaved

Each set runs in a process of its own, several rounds in turn. Time is the thread's CPU time, the best of all
repetitions, so a busy machine does little to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

import kernels
from benchmarks.result_files import save
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, check, flag, load, run_command
from kernels.data.quantized_weight import QuantizedWeight

FORMATS = ("float32", "bfloat16", "int8", "int4")
GROUP = 128  # channels of int4 that share a scale
WORKER = "QUIRE_CPU_PRODUCTS_WORKER"  # set in the process of one set
# Largest error over the size of the terms: x is rounded to eight bits for int8 and int4, and bfloat16 in the result.
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-2, "int4": 1e-2}


@dataclass(frozen=True)
class Flags:
    """Products."""

    sets: tuple[str, ...] = flag((), "instruction sets (see QUIRE_CPU_ISA); none: the CPU's own")
    formats: tuple[str, ...] = flag(FORMATS, f"of {', '.join(FORMATS)}")
    tokens: tuple[str, ...] = flag(("1", "4", "16", "64", "256"), "numbers of tokens that are multiplied at once")
    rows: int = flag(1280, "of the matrix", at_least=1)
    channels: int = flag(768, "of the matrix, a multiple of 128", at_least=128)
    copies: int = flag(1, "of the matrix, read in turn: many of them come from memory, one from the caches", at_least=1)
    rounds: int = flag(2, "processes of each set", at_least=1)
    seconds: float = flag(0.15, "of each row in each round", above=0)
    output_json: str | None = flag(None, "where to save the rows", metavar="FILE")

    def __post_init__(self) -> None:
        check(self)
        if unknown := [name for name in self.formats if name not in FORMATS]:
            raise ConfigError(f"formats must be of {', '.join(FORMATS)}, got {unknown[0]!r}")
        if not all(text.isdigit() and int(text) for text in self.tokens):
            raise ConfigError(f"tokens must be positive numbers, got {' '.join(self.tokens)!r}")
        if self.channels % GROUP:
            raise ConfigError(f"channels must be a multiple of {GROUP}, got {self.channels}")

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(map(int, self.tokens))


def weights(name: str, flags: Flags) -> tuple[list[Any], torch.Tensor]:
    """Return copies of a packed matrix, and the matrix in float64."""
    n, k = flags.rows, flags.channels
    if name in ("float32", "bfloat16"):
        plain: Any = torch.randn(n, k).to(getattr(torch, name))
        exact = plain.double()
    elif name == "int8":
        codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        plain = QuantizedWeight("int8", codes, torch.rand(n, 1) / 100, k)
        exact = codes.double() * plain.scale.double()
    else:
        values = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        plain = QuantizedWeight("int4", kernels.pack_nibbles(values), torch.rand(n, k // GROUP) / 100, GROUP)
        exact = (values.double() - 8) * plain.scale.double().repeat_interleave(GROUP, 1)
    return [kernels.pack_weight(plain) for _ in range(flags.copies)], exact


def measure(flags: Flags) -> list[dict[str, Any]]:
    """Return a row for each format and number of tokens, by this process's instruction set."""
    torch.manual_seed(0)
    rows = []
    for name in flags.formats:
        matrices, exact = weights(name, flags)
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        for tokens in flags.numbers:
            x = torch.randn(tokens, flags.channels).to(dtype)
            best, end = float("inf"), time.perf_counter() + flags.seconds
            while best == float("inf") or time.perf_counter() < end:
                start = time.thread_time()
                for matrix in matrices:
                    out = kernels.linear(x, matrix)
                best = min(best, (time.thread_time() - start) / len(matrices))
            wanted, size = x.double() @ exact.T, x.double().abs() @ exact.abs().T
            error = float(((out.double() - wanted).abs() / size).max())
            work = 2 * tokens * flags.rows * flags.channels
            row = {"format": name, "tokens": tokens, "gflops": work / best / 1e9, "error": error}
            rows.append(row | {"gbps": matrices[0].nbytes / best / 1e9, "right": error <= LIMITS[name]})
    return rows


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m benchmarks.micro.cpu_products", description=__doc__.split("\n")[0])
    add_flags(parser, Flags)
    (flags,) = load(parser.parse_args(argv), Flags)
    if WORKER in os.environ:
        print(json.dumps(measure(flags)))
        return 0
    flags = replace(flags, sets=flags.sets or (kernels.cpu_instruction_set(),))
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for number in range(flags.rounds):
        for name in flags.sets[:: -1 if number % 2 else 1]:
            environment = {WORKER: "1", "QUIRE_CPU_ISA": name, "QUIRE_CPU_KERNELS": "native", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.micro.cpu_products", *argv]
            shown = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
            if shown.returncode:
                raise ConfigError(f"{name} failed: see above")
            for row in json.loads(shown.stdout.splitlines()[-1]):
                key = name, row["format"], row["tokens"]
                if key not in found or found[key]["gflops"] < row["gflops"]:
                    found[key] = {"set": name, **row, "right": row["right"] and found.get(key, row)["right"]}
    print(table(flags, found))
    if flags.output_json:
        save(list(found.values()), flags.output_json)
    return 0 if all(row["right"] for row in found.values()) else 1


def table(flags: Flags, found: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    shape = f"{flags.rows} x {flags.channels}, {flags.copies} of them"
    lines = [
        f"GFLOP/s of one thread for {'/'.join(flags.tokens)} tokens ({shape}); GB/s of weights for the "
        "first; the largest error beside float64",
        "",
        "| | " + " | ".join(flags.formats) + " |",
        "|---|" + "---:|" * len(flags.formats),
    ]
    for name in flags.sets:
        cells = []
        for precision in flags.formats:
            rows = [found[name, precision, tokens] for tokens in flags.numbers]
            mark = "" if all(row["right"] for row in rows) else " **WRONG**"
            speeds = " / ".join(f"{row['gflops']:.0f}" for row in rows)
            cells.append(f"{speeds}; {rows[0]['gbps']:.1f}; {max(row['error'] for row in rows):.0e}{mark}")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
