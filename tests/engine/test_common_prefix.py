"""Decodes of requests with a prefix in common, as a GPU computes them, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kernels
from engine.core.params.sampling import SamplingParams
from engine.models.spec import AttentionSpec
from engine.worker.attention.group_attention import _finds_room
from engine.worker.cuda_graphs import DecodeGraphs
from engine.worker.executor import Computed, StepRequest
from engine.worker.input_batch import PackedStep

pytest.importorskip("triton")

from tests.support.interpreted_gpu import REQUESTS, answers, interpret

PREFIX = [i % 50 + 3 for i in range(72)]
COUNT = 6
SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "num_gpu_blocks_override": 120, "max_model_len": 128}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests of which all but one begin with the same 72 tokens, and end one after the other."""
    for i in range(COUNT):
        sampling = SamplingParams(temperature=0 if i % 2 else 0.8, seed=i, max_tokens=4 + i)
        monkeypatch.setitem(REQUESTS, f"prefix {i}", ([*PREFIX, 7 * i + 1, i], sampling))
    for module in ("kernels", "kernels.triton.shared_prefix"):
        monkeypatch.setattr(f"{module}.MIN_SHARED", 64)
    return [*(f"prefix {i}" for i in range(COUNT)), "greedy"]


def test_tokens_are_those_of_the_cpu(
    shallow_model: Path, names: list[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:

    expected = answers(shallow_model, names, **SETTINGS)
    interpret(monkeypatch)
    plan_prefix, lengths, run, sizes = kernels.plan_prefix, list[int](), DecodeGraphs.run, list[int]()

    def planned(*args: Any) -> None:
        plan_prefix(*args)
        lengths.append(int(args[-1].prefix.starts.max()))

    def noted(self: DecodeGraphs, step: StepRequest, packed: PackedStep) -> Computed:
        if self._has_common_prefix:
            sizes.append(len(step.batch))
        return run(self, step, packed)

    monkeypatch.setattr(kernels, "plan_prefix", planned)
    monkeypatch.setattr(DecodeGraphs, "run", noted)
    assert answers(shallow_model, names, **SETTINGS) == expected
    assert max(lengths) == 64, "a prefix was read once"
    assert {kernels.MIN_MEMBERS, COUNT} <= set(sizes) | {size - 1 for size in sizes}
    assert min(sizes) >= kernels.MIN_MEMBERS, "fewer requests read it each"


def test_deterministic_requests_read_it_each(
    shallow_model: Path, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret(monkeypatch)
    monkeypatch.setattr(kernels, "plan_prefix", lambda *_: pytest.fail("sums must not depend on other requests"))
    answers(shallow_model, names[:5], **SETTINGS, deterministic=True)


@pytest.mark.parametrize(("num_heads", "finds_room"), [(64, True), (71, False)])
def test_heads_beyond_a_tile_read_it_each(num_heads: int, finds_room: bool) -> None:
    """Falcon-7B has 71 heads for its KV head, more than the kernel's tile has rows."""
    mixer = AttentionSpec(num_heads=num_heads, num_kv_heads=1, head_dim=64, scale=0.125, rope=None)
    assert _finds_room(mixer) == finds_room


def test_encoders_read_it_each() -> None:
    """Their texts see tokens on both sides, which the kernel does not know."""
    mixer = AttentionSpec(num_heads=16, num_kv_heads=16, head_dim=64, scale=0.125, rope=None, causal=False)
    assert not _finds_room(mixer)
