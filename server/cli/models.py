"""`quire models`: lists the supported model families and weight formats."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

EPILOG = """A model's config.json names its architecture and, for quantised weights, the quant_method.

The tests compare the logits and greedy tokens of each family, unquantised, with transformers, and each format, in a
Llama, with its weights in float64. Families and formats are independent: other combinations should work, but are not
tested.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "models",
        help="list the supported model families and weight formats",
        description="List the supported model families and weight formats.",
        epilog=EPILOG,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from engine.models.catalog import families, gguf_architectures, quantizations

    known, formats = families(), quantizations()
    width = max(map(len, (*known, *formats))) + 2
    print("Model families (architectures in config.json)")
    _print(known, width)
    print("\nQuantised weights (quant_method in config.json's quantization_config)")
    _print(formats, width)
    print("\nGGUF files (general.architecture)")
    print(textwrap.fill(", ".join(gguf_architectures()), 100, initial_indent="  ", subsequent_indent="  "))
    print("\nFloat weights, quantised at load time")
    _print(
        {
            "fp8": "--quantization fp8: e4m3, one scale per row",
            "int8": "--quantization int8: int8, one scale per row; on a CPU also the output head",
            "int4": "--quantization int4: one scale per 32 channels of a row; on a CPU the output head is int8",
        },
        width,
    )
    return 0


def _print(rows: dict[str, str], width: int) -> None:
    for name, about in rows.items():
        print(f"  {name:{width}}{about}")
