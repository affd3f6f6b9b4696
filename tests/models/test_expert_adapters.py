"""Adapters of experts in the layouts of PEFT and others: the same adapter fills a slot with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.adapters import AdapterLayout, LoadedAdapter
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.shard import Shard
from tests.oracles.random_adapters import write_adapter
from tests.support.loaded import load as load_model
from tests.support.tiny_model import write_model

RANK, NUM_EXPERTS = 4, 6
MODULE = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("experts"), experts=True)


def layout_of(model: Path, shard: Shard | None = None, experts: bool = True) -> AdapterLayout:
    spec = read_spec(model)
    options: dict[str, Any] = {} if shard is None else {"shard": shard}
    return AdapterLayout(load_model(model, spec, **options), spec, 16, torch.float32, experts)


def read(layout: AdapterLayout, folder: Path, tensors: dict[str, Tensor], **config: Any) -> Tensor:
    write_adapter(folder, {"r": RANK, "lora_alpha": 6, **config}, tensors)
    into = LoadedAdapter(torch.full((layout.num_values,), torch.nan), torch.full((layout.num_floats,), torch.nan))
    layout.read(folder, into)
    return into.values


@pytest.fixture
def stacked(model: Path) -> dict[str, Tensor]:
    """Return an adapter as PEFT saves it with `target_parameters`, gate and up first."""
    torch.manual_seed(0)
    expert = layout_of(model).experts.layers[1]
    hidden, inner = expert.hidden, expert.inner
    shapes = {
        f"{MODULE}.base_layer.lora_A.weight": (NUM_EXPERTS * RANK, hidden),
        f"{MODULE}.base_layer.lora_B.weight": (2 * inner, RANK * NUM_EXPERTS),
        f"{MODULE}.lora_A.weight": (NUM_EXPERTS * RANK, inner),
        f"{MODULE}.lora_B.weight": (hidden, RANK * NUM_EXPERTS),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def by_expert(stacked: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [E, r, in] and B [E, out, r] of each projection."""
    gate_a, both, down_a, down_b = stacked.values()
    a, b = gate_a.view(NUM_EXPERTS, RANK, -1), both.view(-1, RANK, NUM_EXPERTS).permute(2, 0, 1)
    gate_b, up_b = b.chunk(2, 1)
    down = down_a.view(NUM_EXPERTS, RANK, -1), down_b.view(-1, RANK, NUM_EXPERTS).permute(2, 0, 1)
    return {"gate_proj": (a, gate_b), "up_proj": (a, up_b), "down_proj": down}


def test_all_layouts_fill_a_slot_alike(model: Path, stacked: dict[str, Tensor], tmp_path: Path) -> None:
    layout = layout_of(model)
    want = read(layout, tmp_path / "stacked", stacked, target_parameters=["mlp.experts.gate_up_proj"])
    assert (
        want.count_nonzero()
        == sum(each.numel() for each in stacked.values()) + stacked[f"{MODULE}.base_layer.lora_A.weight"].numel()
    )  # gate and up have one A
    single = {
        f"{MODULE}.{expert}.{name}.lora_{half}.weight": value[expert]
        for name, pair in by_expert(stacked).items()
        for half, value in zip("AB", pair, strict=True)
        for expert in range(NUM_EXPERTS)
    }
    assert torch.equal(read(layout, tmp_path / "single", single), want)
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    whole = {
        f"{MODULE}.{names[name]}.lora_{half}.weight": value
        for name, pair in by_expert(stacked).items()
        for half, value in zip("AB", pair, strict=True)
    }
    assert torch.equal(read(layout, tmp_path / "whole", whole), want)


def test_what_all_experts_share_fills_each(model: Path, stacked: dict[str, Tensor], tmp_path: Path) -> None:
    layout, pairs = layout_of(model), by_expert(stacked)
    shared, single = {}, {}
    for name, pair in pairs.items():
        for half, value in zip("AB", pair, strict=True):
            is_shared = (name == "down_proj") == (half == "B")
            shared[f"{MODULE}.{name}.lora_{half}.weight"] = value[:1] if is_shared else value
            for expert in range(NUM_EXPERTS):
                single[f"{MODULE}.{expert}.{name}.lora_{half}.weight"] = value[0 if is_shared else expert].clone()
    assert torch.equal(read(layout, tmp_path / "shared", shared), read(layout, tmp_path / "single", single))


def test_each_rank_reads_its_experts(model: Path, stacked: dict[str, Tensor], tmp_path: Path) -> None:
    whole = layout_of(model)
    values = read(whole, tmp_path / "a", stacked)
    for rank in range(2):
        own = layout_of(model, Shard(rank, 2))
        part = read(own, tmp_path / "a", stacked)
        for which in range(4):
            for expert in range(3):
                want = whole.experts.layers[1].matrix(which, 3 * rank + expert, values)
                assert torch.equal(own.experts.layers[1].matrix(which, expert, part), want)


def test_adapters_of_experts_that_do_not_fit_are_refused(
    model: Path, stacked: dict[str, Tensor], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"changes experts \(.*experts.*\): start with lora_experts"):
        read(layout_of(model, experts=False), tmp_path / "a", stacked)
    name = f"{MODULE}.lora_B.weight"
    with pytest.raises(ModelError, match=r"which has shape \[3, 24\], it must be .* for another base model"):
        read(layout_of(model), tmp_path / "b", stacked | {name: torch.ones(3, RANK * NUM_EXPERTS)})
    magnitude = {f"{MODULE}.0.up_proj.lora_magnitude_vector": torch.ones(8)}
    with pytest.raises(ModelError, match="which experts cannot have"):
        read(layout_of(model), tmp_path / "c", stacked | magnitude)
    stacked[name][0, 0] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        read(layout_of(model), tmp_path / "d", stacked)


def test_memory_between_the_layers_numbers_is_not_looked_at(model: Path, tmp_path: Path) -> None:
    """It holds what was there before: any bits."""
    layout, name = layout_of(model), "model.layers.0.self_attn.o_proj"
    layout.num_values, layout.num_floats = layout.num_values + 8, layout.num_floats + 8
    channels = next(each.channels for each in layout.layers if each.out == layout.spec.hidden_size)
    halves = {
        f"{name}.lora_A.weight": torch.ones(RANK, channels),
        f"{name}.lora_B.weight": torch.ones(layout.spec.hidden_size, RANK),
    }
    assert read(layout, tmp_path, halves, target_modules=["o_proj"]).isfinite().all()
