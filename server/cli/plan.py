"""`quire plan MODEL`: estimates what a model needs on a GPU, before downloading it."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine import EngineConfig
from engine.flags import add_flags, flag, settings_of
from engine.setup.gpu_specs import GPUS, find_gpu
from server.cli.common import load_with_model, model_argument

if TYPE_CHECKING:
    from engine.setup.gpu_specs import GPU
    from engine.setup.plan import Plan

EPILOG = """examples:
  quire plan Qwen/Qwen3-32B                          on this machine's GPU; without one, on its CPU and all known GPUs
  quire plan Qwen/Qwen3-32B --gpu h100 --tensor-parallel-size 2
  quire plan ./my-model --gpu 24GB --quantization fp8 --max-model-len 32k

Only config.json is read, and downloaded if necessary. Weights and KV cache are computed as the engine allocates them;
the memory for the activations of a step is estimated. Tokens per second are upper limits, from the GPU's data sheet
(for a CPU: measured now) and the least time that the launches of a step take.
"""
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 8192, 32768, 131072)
USUAL = 8192  # tokens of a typical request, for columns that show one length


@dataclass(frozen=True)
class PlanFlags:
    """Plan."""

    gpu: str | None = flag(
        None,
        f"cpu (this machine's), {', '.join(GPUS)}, or a memory size such as 24GB (default: this machine's GPU)",
        metavar="NAME|SIZE",
    )
    json: bool = flag(False, "print the plan as JSON")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="estimate a model's memory, context length, concurrent requests and speed on a GPU",
        description="Estimate what a model needs on a GPU. Accepts the engine flags of `quire serve`.",
        epilog=EPILOG,
    )
    model_argument(parser)
    add_flags(parser, PlanFlags, EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan. The exit code is 1 when the engine would not start."""
    flags, config = load_with_model(args, PlanFlags, EngineConfig)
    known = find_gpu(flags.gpu) if flags.gpu not in (None, "cpu") else None
    from engine.setup.plan import cpu_here, gpu_here, make_plan, on_all_devices

    gpu = cpu_here() if flags.gpu == "cpu" else known or gpu_here()
    plans = list(on_all_devices(config)) if gpu is None else [make_plan(config, gpu)]
    if flags.json:
        print(json.dumps([as_dict(config, plan) for plan in plans], indent=1))
    elif gpu is None:
        print(_overview(config, plans))
    else:
        print(_report(config, gpu, plans[0]))
    return int(not any(plan.max_model_len for plan in plans))


def as_dict(config: EngineConfig, plan: Plan) -> dict[str, Any]:
    """Return the plan as a JSON object. Bytes are per GPU."""
    return {
        "model": config.model,
        "gpu": plan.gpu.title,
        "gpu_memory": plan.gpu.memory,
        "num_gpus": 0 if plan.gpu.is_cpu else plan.options.num_ranks_per_stage,
        "parameters": plan.num_parameters,
        "active_parameters": plan.num_active,
        "weight_bytes": dict(plan.weights),
        "buffer_bytes": plan.buffers,
        "activation_bytes": plan.activations,
        "adapter_bytes": plan.adapters,
        "kv_cache_bytes": plan.kv_cache_bytes,
        "kv_cache_blocks": plan.num_blocks,
        "states": plan.num_states,  # of recurrent layers
        "state_bytes": plan.layout.state_bytes,  # of each
        "max_model_len": plan.max_model_len,  # 0: the engine would not start
        "requests_at_once": {context: int(plan.num_requests(context)) for context in _contexts(plan)},
        "tokens_per_second_at_most": {
            context: {batch: round(plan.tokens_per_second(batch, context), 1) for batch in BATCHES}
            for context in _contexts(plan)
        },
    }


def _report(config: EngineConfig, gpu: GPU, plan: Plan) -> str:
    """Return the memory, the upper limits of speed and a comparison with other flags."""
    from engine.setup.plan import alternatives

    others = list(alternatives(config, gpu))
    parts = [_title(config, plan), _memory(plan)]
    if plan.max_model_len and plan.gpu.bandwidth:
        parts.append(_speed(plan))
    parts.append(_comparison("Other flags", [("as above", plan), *others]))
    fitting = [flags for flags, other in [("", plan), *others] if other.max_model_len]
    parts.append(f"Start it:  quire serve {' '.join([shlex.quote(config.model), *_given(config), fitting[0]])}".rstrip()
                 if fitting else "It fits with none of these.")  # fmt: skip
    return "\n\n".join(parts)


def _overview(config: EngineConfig, plans: Sequence[Plan]) -> str:
    if not plans:
        return f"{config.model} does not fit on 8 of any known GPU."
    rows = [(_devices(plan), plan) for plan in plans]
    return f"{_title(config, plans[0])}\n\n{_comparison('On each device', rows)}\n\nDetails for one:  --gpu NAME"


def _devices(plan: Plan) -> str:
    return plan.gpu.title if plan.gpu.is_cpu else f"{plan.options.num_ranks_per_stage} × {plan.gpu.title}"


def _title(config: EngineConfig, plan: Plan) -> str:
    spec = plan.spec
    weights = spec.quantization.method if spec.quantization else str(plan.options.dtype).removeprefix("torch.")
    active = f", {_count(plan.num_active)} active per token" if plan.parameters["experts"] else ""
    return f"{config.model} · {_count(plan.num_parameters)} parameters{active} · {spec.num_layers} layers · {weights}"


def _memory(plan: Plan) -> str:
    options, context = plan.options, plan.max_model_len
    used = (
        f"{options.device.memory().free / plan.gpu.memory if plan.gpu.is_cpu else options.gpu_memory_utilization:.0%}"
    )
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in plan.weights.items() if size)
    kept = "" if context == options.max_model_len else f"; the model's own is {options.max_model_len:,}"
    held = ", ".join(f"{int(plan.num_requests(each)):,} × {each:,} tokens" for each in _contexts(plan))
    fits = f"tokens{kept}" if context else "no room: the engine would not start"
    step_tokens = options.max_num_batched_tokens
    cache_bytes = plan.num_blocks * plan.layout.memory_of_block
    rows = [
        ("memory", _gib(plan.gpu.memory), f"{_devices(plan)}: {used} is {'free' if plan.gpu.is_cpu else 'used'}"),
        ("weights", _gib(plan.weight_bytes), parts),
        ("largest step", _gib(plan.activations + plan.buffers), f"{step_tokens:,} tokens; an estimate"),
        ("KV cache", _gib(cache_bytes), f"{plan.kv_bytes(1) / 1024:,.0f} KiB per token"),
        *_states(plan),
        *_adapters(plan),
        *_drafter(plan),
        ("context", f"{context:,}" if context else "none", fits),
        ("requests", f"{options.max_num_seqs:,}", f"at once at most; the KV cache holds {held or 'none'}"),
    ]  # fmt: skip
    return "\n".join(f"  {name:<13}{value:>11}   {about}" for name, value, about in rows)


def _states(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the row of the states of recurrent layers, if there are any."""
    num_bytes = plan.layout.state_bytes
    if not plan.num_states:
        return []
    about = f"{plan.num_states:,} × {num_bytes / 2**20:,.1f} MiB: enough for {plan.most_by_states:,} requests at once"
    return [("states", _gib(plan.num_states * num_bytes), about)]


def _adapters(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the row of the slots of LoRA adapters, if there are any."""
    if (slots := plan.options.adapters) is None:
        return []
    about = f"{slots.num_slots} × {_gib(plan.adapters / slots.num_slots)}: up to rank {slots.max_rank}"
    return [("adapters", _gib(plan.adapters), about)]


def _drafter(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the row of a drafter's weights, if there is one."""
    drafts = plan.layout.drafts
    if drafts is None:
        return []
    each = drafts.block_bytes / drafts.block_size / 1024
    return [("drafter", _gib(plan.drafter), f"its weights; it keeps {each:,.0f} KiB per token of the KV cache")]


def _speed(plan: Plan) -> str:
    """Return the table of speed limits, with a dash where the KV cache does not hold so many requests."""
    batches = [batch for batch in BATCHES if batch <= plan.options.max_num_seqs]
    rows = [["Maximum tokens per second", *(f"{batch} request{'s'[: batch > 1]}" for batch in batches)]]
    for context in _contexts(plan):
        fits = plan.num_requests(context)
        rates = [f"{plan.tokens_per_second(n, context):,.0f}" if n <= fits else "–" for n in batches]
        rows.append([f"  context {context:,}", *rates])
    return _table(rows)


def _comparison(title: str, plans: Sequence[tuple[str, Plan]]) -> str:
    rows = [[title, "weights", "KV cache", "context", "requests at once", "max tokens/s for one"]]
    for name, plan in plans:
        rows.append([f"  {name}", _gib(plan.weight_bytes)])
        if not (context := plan.max_model_len):
            rows[-1] += ["does not fit", "–", "–", "–"]
            continue
        usual = min(USUAL, context)
        at_once = min(int(plan.num_requests(usual)), plan.options.max_num_seqs)
        rate = f"{plan.tokens_per_second(1, usual):,.0f}" if plan.gpu.bandwidth else "–"
        rows[-1] += [_gib(plan.kv_cache_bytes), f"{context:,}", f"{at_once:,} of {usual:,} tokens", rate]
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text, the first column aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "   ".join([row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)])
        for row in rows
    )  # fmt: skip


def _contexts(plan: Plan) -> list[int]:
    """Return typical context lengths and the longest one."""
    most = plan.max_model_len
    return [*(each for each in CONTEXTS if each < most), most] if most else []


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e8 else f"{number / 1e6:,.1f} million"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"


def _given(config: EngineConfig) -> list[str]:
    """Return the non-default flags of the configuration, for a command line."""
    words = []
    for name, setting in settings_of(EngineConfig).items():
        value = getattr(config, name)
        if name in ("model", "served_model_name") or value == setting.default:
            continue
        if isinstance(value, bool):
            words.append(setting.option if value else setting.option.replace("--", "--no-", 1))
        else:
            words += [setting.option, shlex.quote(json.dumps(value) if isinstance(value, dict) else str(value))]
    return words
