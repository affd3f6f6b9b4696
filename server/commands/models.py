"""`quire models`: which models can be served."""

from __future__ import annotations

import argparse
from typing import Any

EPILOG = """The architecture of a model is in its config.json, and so is the quant_method of a quantised one.

What is listed is compared in the tests: each family, unquantised, with transformers, logits and greedy tokens; each format, as a
Llama, with its weights in float64. Families and formats know nothing of each other: any two should work together, untested.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "models",
        help="list the model families and formats of weights that can be served",
        description="List the model families and formats of weights that can be served.",
        epilog=EPILOG,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from engine.supported import families, quantizations

    known, formats = families(), quantizations()
    width = max(map(len, (*known, *formats))) + 2
    print("Model families (architectures in config.json)")
    _print(known, width)
    print("\nQuantised weights (quant_method in config.json's quantization_config)")
    _print(formats, width)
    print("\nFloat weights, rounded while they are loaded")
    _print(
        {
            "fp8": "--quantization fp8: e4m3, a scale for each row",
            "int8": "--quantization int8: the same in int8; on a CPU the output head, too",
            "int4": "--quantization int4: a scale for 32 channels of a row; on a CPU the output head is int8",
        },
        width,
    )
    return 0


def _print(rows: dict[str, str], width: int) -> None:
    for name, about in rows.items():
        print(f"  {name:{width}}{about}")
