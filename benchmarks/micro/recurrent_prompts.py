"""Time the kernels of recurrent layers' prompts, or of decodes (one token each), each alone, in several forms.

    python -m benchmarks.micro.recurrent_prompts --tokens 1x2048 4x2048
    python -m benchmarks.micro.recurrent_prompts --forms STAGES=2 STATES.num_warps=8,STATES_V=64

A form sets constants of `kernels.triton.scans`, or entries of its tables. Times are microseconds a launch, by the
profiler; `error` compares the outputs and the kept states with the form before all of them.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu import need_gpus
from kernels.data.state import DeltaStates, StateContext, StateSpace

LAYERS = {  # key heads (groups), value heads, channels of keys and values; whether it is a delta net
    "Qwen3.5-27B": (16, 48, 128, 128, True),
    "Qwen3.5-35B-A3B": (16, 32, 128, 128, True),
    "Nemotron 3 Nano": (8, 64, 128, 64, False),
    "Granite 4 H": (1, 128, 128, 64, False),
}
BLOCK, CALLS = 16, 20
DECODED = 1000  # tokens of a sequence that decodes, up to the newest: in the middle of a block
Call = Callable[[], tuple[Tensor, Tensor]]


@contextmanager
def form(text: str) -> Iterator[None]:
    """Set what a form names: constants, or `TABLE.entry`."""
    from kernels.triton import scans

    constants: dict[str, Any] = {}
    for name, _, value in (setting.partition("=") for setting in text.split(",") if setting):
        table, _, entry = name.partition(".")
        known = constants.get(table, getattr(scans, table))
        constants[table] = {**known, entry: ast.literal_eval(value)} if entry else ast.literal_eval(value)
    with ExitStack() as stack:
        for name, constant in constants.items():
            stack.enter_context(mock.patch.object(scans, name, constant))
        yield


def step(layer: tuple[int, int, int, int, bool], num_seqs: int, num_tokens: int) -> Call:
    """A call that computes prompts and returns the outputs and the states before held blocks: the last of each prompt
    and one in its middle.
    """
    from kernels.triton import scans

    num_keys, num_values, key_dim, value_dim, is_delta = layer
    torch.manual_seed(0)
    new = partial(torch.randn, device="cuda")
    decodes, length = num_tokens == 1, DECODED if num_tokens == 1 else num_tokens
    tables = torch.full((num_seqs + 1, -(-length // BLOCK)), -1, dtype=torch.int32, device="cuda")
    order = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
    tables[:, -1], tables[:, length // BLOCK // 2] = order, order + num_seqs + 1
    context = StateContext.of_step(
        tables, order[:-1], order * num_tokens, torch.full_like(order[:-1], length), num_seqs * num_tokens, BLOCK,
        only_decodes=decodes,
    )  # fmt: skip
    count, total = 2 * (num_seqs + 1), num_seqs * num_tokens
    inputs = new(total, 2 * num_keys * key_dim + num_values * value_dim).bfloat16()
    gates = new(total, num_values * (1 + is_delta)).bfloat16()
    rate, bias, skip = new(num_values).abs(), new(num_values), new(num_values)
    states = DeltaStates(
        torch.zeros(count, num_values, key_dim, value_dim, device="cuda"),
        torch.zeros(count, BLOCK, num_keys, key_dim, device="cuda", dtype=torch.bfloat16),
        torch.zeros(count, BLOCK, num_values, value_dim, device="cuda"),
        torch.zeros(count, BLOCK, num_values, device="cuda"),
    )
    if decodes:
        states.before.normal_()
        states.updates.normal_()
        states.keys.normal_()
    if is_delta:
        call = partial(scans.delta_rule, inputs, gates, rate, bias, states, context)
    else:
        call = partial(scans.mamba2, inputs, gates, StateSpace(rate / 8, bias, skip, (0.0, 10.0)), states, context)
    return lambda: (call(), states.before.clone())


def kernel_times(call: Call) -> dict[str, float]:
    """Microseconds a call of each kernel, most first; their sum by the name "all"."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    times = {e.key: e.device_time_total / CALLS for e in profile.key_averages() if e.key.endswith("_kernel")}
    return {"all": sum(times.values())} | dict(sorted(times.items(), key=lambda item: -item[1]))


def difference(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """The largest relative error of tensors, by norms."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=["Qwen3.5-27B"], choices=LAYERS)
    parser.add_argument("--tokens", nargs="+", default=["1x2048"], help="prompts x tokens of each")
    parser.add_argument("--forms", nargs="*", default=[], help="constants, with commas between: STAGES=2,STATES_V=64")
    args = parser.parse_args()
    need_gpus("recurrent_prompts")
    for name in args.layers:
        for shape in args.tokens:
            call = step(LAYERS[name], *map(int, shape.split("x")))
            wanted = call()
            for text in ("", *args.forms):
                try:
                    with form(text):
                        error, times = difference(call(), wanted), kernel_times(call)
                except Exception as failure:  # a form that does not fit the device
                    print(f"{name} {shape} {text}: {type(failure).__name__} {str(failure)[:100]}")
                    continue
                shown = "  ".join(f"{kernel.removesuffix('_kernel')} {us:.0f}" for kernel, us in times.items())
                print(f"{name} {shape} {text or 'as it is'}: {shown}  error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
