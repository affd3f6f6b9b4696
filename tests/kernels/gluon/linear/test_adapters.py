"""Products of few tokens with adapters in one launch, against merged matrices in float64: see `gluon_on_tensors`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernels.cuda.lora as fused
from kernels import AdapterTokens, reference
from kernels.cuda import linear
from kernels.cuda.choice import CHOICE, GLUON
from kernels.gluon.linear import adapters, small_batch
from tests.oracles.random_adapters import merged, random_slots
from tests.support.gluon_on_tensors import run_on_tensors

if not GLUON:
    pytest.skip("this Triton's Gluon is not known", allow_module_level=True)


@pytest.fixture
def without_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_tensors(monkeypatch, small_batch, "_few_linear_kernel", ("warps", "middle", "last", "_load_step"))
    for name in ("shrink", "load_up", "load_inner", "expand", "_sum_of_parts", "_as_sums"):
        body = getattr(adapters, name).fn
        monkeypatch.setattr(adapters, name, body)
        if hasattr(small_batch, name):
            monkeypatch.setattr(small_batch, name, body)
        monkeypatch.setitem(body.__globals__, "gl", vars(small_batch)["gl"])
    for name in ("ROWS", "BLOCK_K", "NEVER"):
        monkeypatch.setattr(adapters, name, Number(getattr(adapters, name).value))
    monkeypatch.setattr(adapters, "barrier", lambda: None)
    monkeypatch.setattr(adapters, "_wait_for", _complete)


def _complete(arrivals: Any, count: int) -> None:
    """Programs run one after the other here."""
    assert int(arrivals.load()) == count


class Number(int):
    """A constant that host and device code read."""

    @property
    def value(self) -> int:
        return int(self)


CASES: dict[str, dict[str, Any]] = {
    "norm": {"norm": True},
    "gate": {"norm": True, "gate": "silu", "bias": True},
    "sum": {"residual": True},
    "bias": {"bias": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("config", "num_tokens", "rank", "group_rows", "k"),
    [
        (small_batch.Config(16, 4), 1, 16, (64,), 576),
        (small_batch.Config(16, 2, ahead=3, x_ahead=2, chains=2), 5, 32, (64, 32, 32), 1088),
        (small_batch.Config(8, 4, ahead=2, tokens_first=True), 11, 48, (64, 64), 512),
    ],
)
def test_adapters_in_one_launch(
    config: Any,
    num_tokens: int,
    rank: int,
    group_rows: tuple[int, ...],
    k: int,
    case: str,
    without_layouts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "_small_batch_config", lambda *shape: config)
    monkeypatch.setattr(fused, "CHOICE", replace(CHOICE, adapted_tokens=16, adapted_rank=64, adapted_tokens_first=True))
    options = CASES[case]
    torch.manual_seed(num_tokens)
    rows = (64, 64) if "gate" in options else group_rows
    lora = random_slots(4, rank, k, rows, dtype=torch.bfloat16)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape)).bfloat16()

    n = sum(rows)
    x, weight, norm_weight = random(num_tokens, 2 * k)[:, :k], random(n, k, scale=k**-0.5), 1 + random(k, scale=0.1)
    bias = random(n) if "bias" in options else None
    norm = (norm_weight, 1e-6) if "norm" in options else None
    residual, gate = random(num_tokens, n) if "residual" in options else None, options.get("gate")
    slots = torch.randint(-1, 4, (num_tokens,), dtype=torch.int32)
    slots[0] = 2
    assert fused.fuses_adapters(x, weight, lora, gate)
    wide = x.double() if norm is None else reference.rms_norm(x.double(), norm_weight.double(), 1e-6)
    y = reference.linear(wide, weight.double(), None if bias is None else bias.double())
    want = merged(y, wide, lora, slots)
    want = want if gate is None else reference.gate_and_mul(want, gate)
    want = want if residual is None else want + residual.double()
    got = fused.adapted_linear(x, weight, bias, lora, AdapterTokens(slots, 4), norm=norm, gate=gate, residual=residual)
    assert got.shape == want.shape
    assert torch.linalg.vector_norm(got.double() - want) < 8e-3 * torch.linalg.vector_norm(want)
