"""The kernels of a step: what is fused with each GEMM of a layer, as the backend answers; the results are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.families import read_spec
from engine.models.layers import Linear
from engine.models.residual import SublayerInput
from engine.models.shard import Shard
from tests.oracles.families import make_checkpoint
from tests.oracles.paged_runner import PagedRunner
from tests.support.loaded import load as load_model
from tests.support.recorded_kernels import Backend, recorded

pytest.importorskip("transformers")

FUSED, UNFUSED = Backend(), Backend(unfused=True, unfused_router=True)
QUANTISED = Backend(quantises=True, unfused_router=True, group=32)
ATTENTION = ["rope_and_store", "paged_attention_decode"]
QUANTISED_ATTENTION = ["rope_and_store", "paged_attention_decode q"]
# family, backend → the kernels of both layers of a step that decodes, without embedding and output head
SHARED_EXPERT = ["linear_add_norm", "route", "linear_gated", "experts", "linear", "sigmoid"]
LAYERS: dict[tuple[str, Backend], tuple[list[str], list[str]]] = {
    ("llama", FUSED): (
        ["norm_linear", *ATTENTION, "linear_add", "norm_gated", "linear_add"],
        ["norm_linear", *ATTENTION, "linear_add", "norm_gated", "linear_add"],
    ),
    ("llama", UNFUSED): (
        ["norm_linear", *ATTENTION, "linear_add_norm", "linear_gated", "linear_add_norm"],
        ["linear", *ATTENTION, "linear_add_norm", "linear_gated", "linear_add"],
    ),
    ("llama", QUANTISED): (
        ["norm_linear", *QUANTISED_ATTENTION, "linear_add_norm q", "linear_gated", "linear_add_norm q"],
        ["linear", *QUANTISED_ATTENTION, "linear_add_norm q", "linear_gated", "linear_add"],
    ),
    ("gemma2", FUSED): (  # norms after the sublayers, too
        ["norm_linear", *ATTENTION, "linear", "rms_norm_add", "norm_gated", "linear", "rms_norm_add"],
        ["norm_linear", *ATTENTION, "linear", "rms_norm_add", "norm_gated", "linear", "rms_norm_add"],
    ),
    ("gemma2", UNFUSED): (
        ["norm_linear", *ATTENTION, "linear", "add_rms_norm", "linear_gated", "linear", "add_rms_norm"],
        ["linear", *ATTENTION, "linear", "add_rms_norm", "linear_gated", "linear", "rms_norm_add"],
    ),
    ("granite", UNFUSED): (  # outputs times a factor
        ["norm_linear", *ATTENTION, "linear", "add_rms_norm", "linear_gated", "linear", "add_rms_norm"],
        ["linear", *ATTENTION, "linear", "add_rms_norm", "linear_gated", "linear", "add_scaled"],
    ),
    ("mixtral", FUSED): (
        ["norm_linear", *ATTENTION, "linear_add", "norm_route", "experts"],
        ["norm_linear", *ATTENTION, "linear_add", "norm_route", "experts"],
    ),
    ("mixtral", UNFUSED): (
        ["norm_linear", *ATTENTION, "linear_add_norm", "route", "experts_add_norm"],
        ["linear", *ATTENTION, "linear_add_norm", "route", "experts"],
    ),
    ("mixtral", QUANTISED): (
        ["norm_linear", *QUANTISED_ATTENTION, "linear_add_norm", "route", "experts_add_norm q"],
        ["linear", *QUANTISED_ATTENTION, "linear_add_norm", "route", "experts"],
    ),
    ("qwen2_moe", UNFUSED): (  # a shared expert with a gate, beside the others
        ["norm_linear", *ATTENTION, *SHARED_EXPERT, "linear_add_norm"],
        ["linear", *ATTENTION, *SHARED_EXPERT, "linear_add"],
    ),
}  # fmt: skip


class EchoCommunicator:
    """Rank 0 of two; the other one computes the same. Adds products of many rows in chunks of `chunk` rows."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.chunks: list[int] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * 2

    def add_sum(self, residual: Tensor, x: Tensor, norm: Any = None) -> None:
        residual.add_(x * 2)

    def add_gemm(self, residual: Tensor, gemm: Callable[[slice], Tensor], norm: Any = None) -> None:
        for start in range(0, len(residual), self.chunk):
            rows = slice(start, start + self.chunk)
            self.chunks.append(len(residual[rows]))
            residual[rows].add_(gemm(rows) * 2)

    def all_gather(self, x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(torch.cat([x, x], 1)[:, : out.shape[1]])

    def least(self, number: int) -> int:
        return number


def load(folder: Path, name: str, **options: Any) -> Any:
    make_checkpoint(name, folder, {"num_hidden_layers": 2})
    return load_model(folder, read_spec(folder), dtype=torch.float32, device="cpu", max_model_len=64, **options)


def decoded(model: Any, backend: Backend) -> tuple[list[str], Tensor]:
    """The kernels of a step of one token after a prompt, and the logits of both steps."""
    runner = PagedRunner(model, 1, max_len=64)
    sequence = runner.start([5, 6, 7, 8])
    with recorded(backend) as calls:
        (prompt,) = runner.step([(sequence, 3)])
        calls.clear()
        (newest,) = runner.step([(sequence, 1)])
    return calls, torch.cat([prompt, newest])


@pytest.mark.parametrize("name", sorted({name for name, _ in LAYERS}))
def test_kernels_of_a_step(name: str, tmp_path: Path) -> None:
    model, found = load(tmp_path, name), []
    inner = {"embedding", "norm_linear", "scale"}  # around the layers; Gemma and Granite scale embeddings and logits
    for backend in [backend for family, backend in LAYERS if family == name]:
        first, second = LAYERS[name, backend]
        calls, logits = decoded(model, backend)
        start = 2 if calls[1] == "scale" else 1
        layers = calls[start : start + len(first) + len(second)]
        assert (layers[: len(first)], layers[len(first) :]) == (first, second), backend
        assert {*calls[:start], *calls[start + len(layers) :]} <= inner
        found.append(logits)
    for each in found:
        torch.testing.assert_close(each, found[0])


@pytest.mark.parametrize("chunk", [100, 2])
def test_linear_layers_know_their_tokens(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's input and context have the same rows: also in chunks, and where the last layer leaves out tokens."""
    communicator = EchoCommunicator(chunk)
    model = load(tmp_path, "mixtral", shard=Shard(0, 2), communicator=communicator)
    runner, seen, run = PagedRunner(model, 1, max_len=64), list[tuple[int, list[int]]](), Linear.run
    sequence = runner.start([5, 6, 7, 8, 9])

    def watched(self: Linear, x: Any, epilogue: Any = None) -> Any:
        if isinstance(x, SublayerInput) and x.context.slots is not None:
            seen.append((len(x.hidden), x.context.slots.tolist()))
        return run(self, x, epilogue)

    forward = partial(model.forward, logits_indices=torch.tensor([4, 1]))
    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr(model, "logits", lambda hidden: hidden.new_zeros(5, 1))
    monkeypatch.setattr(Linear, "run", watched)
    runner.step([(sequence, 5)])
    slots = seen[0][1]
    rows = [slice(start, start + chunk) for start in range(0, 5, chunk)]
    assert len(slots) == 5
    first = [(5, slots), *((len(slots[each]), slots[each]) for each in rows)]
    assert seen == [*first, (5, slots), (2, [slots[4], slots[1]])]


def test_ranks_add_their_products_in_chunks(tmp_path: Path) -> None:
    """A rank asks for the rows of a product in any chunks: the sums are the same."""
    results = []
    for chunk in (100, 2):
        communicator = EchoCommunicator(chunk)
        model = load(tmp_path, "llama", shard=Shard(0, 2), communicator=communicator)
        results.append(decoded(model, UNFUSED)[1])
        assert communicator.chunks == ([3, 3, 3, 3, 1, 1, 1, 1] if chunk == 100 else [2, 1] * 4 + [1] * 4)
    torch.testing.assert_close(results[0], results[1])
