"""The time that decoding takes at least: what its steps must move, at the speed at which the GPU copies memory."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from benchmarks.workloads import Workload
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.errors import ModelError
from engine.setup.gpu_specs import known_gpu
from engine.setup.plan import Plan, make_plan


def decode_seconds(folder: Path, settings: dict[str, Any], work: Workload, machine: dict[str, Any]) -> float | None:
    """Seconds of the steps without drafts that make the answers: weights and the KV cache are read, recurrent states
    are read and written. None: the GPU is not known, or requests differ, so that steps do.

    settings: of Quire. machine: see `benchmarks.processes.describe_machine`.
    """
    lengths = {(len(request.prompt), request.output_len) for request in work.requests}
    terabytes, gpu = machine.get("copy_TB_per_s"), machine.get("gpu")
    if terabytes is None or gpu is None or len(lengths) > 1:
        return None
    plan = _plan(str(folder), json.dumps(settings), gpu)
    if plan is None:
        return None
    ((prompt, output),), num = lengths, len(work.requests)
    moved = plan.bytes_read(num, prompt + output // 2) + num * plan.layout.state_bytes
    return float((output - 1) * moved / (1e12 * terabytes))  # the prompts' step makes the first tokens


@functools.cache
def _plan(folder: str, settings: str, gpu_name: str) -> Plan | None:
    gpu = known_gpu(gpu_name)
    if gpu is None:
        return None
    try:
        return make_plan(EngineConfig(model=folder, **json.loads(settings)), gpu, offline=True)
    except (ConfigError, ModelError):
        return None
