"""PEFT folders that are no use: each is refused in one line, before much work, and no other adapter suffers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from engine.models import download
from engine.models.adapters import AdapterLayout, LayerLayout, LoadedAdapter
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.lora import CONFIG, WEIGHTS, adapter_version, read_adapter_config
from engine.models.shard import Shard
from engine.processing.adapters import find_adapter
from tests.oracles.random_adapters import random_adapter, write_adapter
from tests.support.loaded import load as load_model

MODULE = "model.layers.1.self_attn.q_proj"
SHAPES = {MODULE: (64, 64), "model.layers.0.mlp.down_proj": (64, 128)}


@pytest.fixture
def layout(tiny_model: Path) -> AdapterLayout:
    model = load_model(tiny_model, read_spec(tiny_model))
    return AdapterLayout(model, read_spec(tiny_model), 16, torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = random_adapter(SHAPES, 8, torch.Generator().manual_seed(0))
    return write_adapter(tmp_path / "adapter", {"base_model_name_or_path": "someone/their-model"}, tensors)


def read(layout: AdapterLayout, folder: Path) -> LoadedAdapter:
    into = LoadedAdapter(torch.full((layout.num_values,), torch.nan), torch.full((layout.num_floats,), torch.nan))
    layout.read(folder, into)
    return into


def changed(folder: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> None:
    """Rewrite an adapter; tensors: by names with __ for dots, None: without it."""
    all_tensors: dict[str, Any] = random_adapter(SHAPES, 8, torch.Generator().manual_seed(0))
    for name, tensor in tensors.items():
        all_tensors[name.replace("__", ".")] = tensor
    before = json.loads((folder / CONFIG).read_text())
    kept = {name: tensor for name, tensor in all_tensors.items() if tensor is not None}
    write_adapter(folder, before | (config or {}), kept)


A, B = (MODULE.replace(".", "__") + f"__lora_{half}__weight" for half in "AB")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "'peft_type' is 'IA3': only LoRA adapters are served"),
        ({"peft_type": None}, "'peft_type' is None"),
        ({"r": 0}, "'r' must be from 1 to 512, got 0"),
        ({"r": "8"}, "'r' must be from 1 to 512, got '8'"),
        ({"r": 10**9}, "'r' must be from 1 to 512"),
        ({"lora_alpha": float("nan")}, "'lora_alpha' must be a number"),
        ({"rank_pattern": {"q_proj": -1}}, "'rank_pattern' must be from 1"),
        ({"rank_pattern": ["q_proj"]}, "'rank_pattern' must be an object"),
        ({"alpha_pattern": {"(a+)+": 1}}, "a pattern that is too complex"),
        ({"alpha_pattern": {".*" * 9: 1}}, "a pattern that is too complex"),
        ({"alpha_pattern": {"[": 1}}, "no regular expression"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changed the base model, too"),
        ({"init_lora_weights": ["olora"]}, "which changed the base model, too"),
        ({"use_qalora": True}, "'use_qalora' is set: a QA-LoRA"),
        ({"alora_invocation_tokens": [1]}, "an aLoRA"),
        ({"layer_replication": [[0, 2]]}, "replicated layers"),
        ({"trainable_token_indices": [-5]}, "must be lists of tokens, got [-5]"),
        ({"trainable_token_indices": {"lm_head": []}}, "must be lists of tokens"),
        ({"trainable_token_indices": {"lm_head": [2.0]}}, "must be lists of tokens"),
    ],
)
def test_other_adapters_are_refused_by_name(folder: Path, config: dict[str, Any], reason: str) -> None:
    changed(folder, config)
    with pytest.raises(ModelError) as error:
        find_adapter("a", str(folder))
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({A: torch.ones(8, 128)}, "has shape [8, 128], it must be [8, 64]: the adapter is for another base model"),
        ({B: torch.ones(64, 4)}, "has shape [64, 4], it must be [64, 8]"),
        ({A: torch.full((8, 64), torch.nan)}, "holds NaN or infinity"),
        ({B: torch.full((64, 8), torch.inf)}, "holds NaN or infinity"),
        ({A: torch.ones(8, 64, dtype=torch.int32)}, "is stored as I32, adapters are floats"),
        ({A: None}, f"lacks lora_A of '{MODULE}'"),
        ({B: None}, f"lacks lora_B of '{MODULE}'"),
        ({"model__layers__9__self_attn__q_proj__lora_A__weight": torch.ones(8, 64)}, "no linear layer of a mixer"),
        ({"lm_head__lora_A__weight": torch.ones(8, 64)}, "an output head: start with lora_embeddings"),
        ({"lm_head__weight": torch.ones(300, 64)}, "of an embedding or an output head: start with lora_embeddings"),
        ({"model__embed_tokens__lora_embedding_A": torch.ones(8, 300)}, "output head: start with lora_embeddings"),
        ({"model__layers__0__mlp__experts__1__up_proj__lora_A__weight": torch.ones(8, 64)}, "changes experts"),
        ({"model__layers__0__mlp__up_proj__ia3_l": torch.ones(64)}, "a tensor of another kind"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    layout: AdapterLayout, folder: Path, tensors: dict[str, Any], reason: str
) -> None:
    changed(folder, **tensors)
    with pytest.raises(ModelError) as error:
        read(layout, folder)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


EMBED = "model__embed_tokens"


@pytest.mark.parametrize(
    ("config", "tensors", "reason"),
    [
        ({}, {"lm_head__lora_A__weight": torch.ones(8, 64)}, "lacks lora_B of 'lm_head'"),
        ({}, {EMBED + "__lora_embedding_A": torch.ones(8, 300)}, "lacks lora_B of 'model.embed_tokens'"),
        ({}, {EMBED + "__lora_embedding_B": torch.ones(8, 64)}, "has shape [8, 64], it must be [64, 8]"),
        ({}, {"lm_head__weight": torch.ones(301, 64)}, "has shape [301, 64], it must be [300, 64]: the adapter is for"),
        ({}, {"lm_head__weight": torch.ones(300, 64)}, "of lm_head retrains 300 rows, above lora_tokens=4; start with"),
        ({}, {EMBED + "__weight": torch.full((300, 64), torch.inf)}, "holds NaN or infinity"),
        ({}, {EMBED + "__lora_magnitude_vector": torch.ones(64)}, "or an output head: this is not served; merge it"),
        (
            {"trainable_token_indices": [300]},
            {EMBED + "__token_adapter__trainable_tokens_delta": torch.ones(1, 64)},
            "retrains token 300 of 300",
        ),
        (
            {"trainable_token_indices": [3]},
            {EMBED + "__token_adapter__trainable_tokens_delta": torch.ones(2, 64)},
            "has shape [2, 64], it must be [1, 64]",
        ),
        (
            {"trainable_token_indices": {"lm_head": [3]}},
            {
                "lm_head__token_adapter__trainable_tokens_delta": torch.ones(1, 64),
                "lm_head__lora_A__weight": torch.ones(8, 64),
                "lm_head__lora_B__weight": torch.ones(300, 8),
                "lm_head__lora_magnitude_vector": torch.ones(300),
            },
            "has DoRA of an output head with retrained rows",
        ),
    ],
)
def test_embeddings_and_heads_that_do_not_fit_are_refused(
    tiny_model: Path, folder: Path, config: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    spec = read_spec(tiny_model)
    layout = AdapterLayout(load_model(tiny_model, spec), spec, 16, torch.float32, max_tokens=4)
    changed(folder, config, **tensors)
    with pytest.raises(ModelError) as error:
        read(layout, folder)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_the_base_that_the_adapter_names_is_shown(layout: AdapterLayout, folder: Path) -> None:
    changed(folder, None, **{A: torch.ones(8, 128)})
    with pytest.raises(ModelError, match=r"another base model .adapter_config\.json names someone/their-model"):
        read(layout, folder)


def test_a_rank_above_the_limit_is_refused(layout: AdapterLayout, folder: Path) -> None:
    changed(folder, {"r": 8, "rank_pattern": {"k_proj": 17}})
    with pytest.raises(ModelError, match="rank 17, above max_lora_rank=16"):
        read(layout, folder)


def _fifo(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def _linked(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
    (folder / WEIGHTS).symlink_to(folder.parent / WEIGHTS)


def _large(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 20 << 30)


def _no_json(folder: Path) -> None:
    (folder / CONFIG).write_text("{")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), f"holds no {WEIGHTS} .it holds {CONFIG}."),
        (lambda folder: (folder / CONFIG).unlink(), f"holds no {CONFIG}"),
        (_fifo, "no regular file"),
        (_linked, "outside the model's folder"),
        (_large, "too large"),
        (_no_json, "not valid JSON"),
    ],
)
def test_files_that_mean_harm_are_refused_at_once(folder: Path, harm: Callable[[Path], object], reason: str) -> None:
    harm(folder)
    start = time.process_time()
    with pytest.raises(ModelError, match=reason):
        find_adapter("a", str(folder))
    assert time.process_time() - start < 5


def test_no_folder() -> None:
    with pytest.raises(ModelError, match=f"nowhere: is no folder; give the folder that holds {CONFIG}"):
        find_adapter("a", "nowhere")


def test_ten_gigabytes_are_refused_unread(layout: AdapterLayout, folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 10 << 30)  # a hole: takes no room
    start = time.process_time()
    with pytest.raises(ModelError, match="corrupt or truncated"):
        read(layout, folder)
    assert time.process_time() - start < 5


def test_a_truncated_file_is_refused(layout: AdapterLayout, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])
    with pytest.raises(ModelError, match="corrupt or truncated"):
        read(layout, folder)


def test_memory_of_another_adapter_leaves_no_trace(layout: AdapterLayout, folder: Path, tmp_path: Path) -> None:
    other = write_adapter(
        tmp_path / "other", {}, random_adapter({MODULE: (64, 64)}, 3, torch.Generator().manual_seed(1))
        | {"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(8, 64)}
        | {"model.layers.0.mlp.up_proj.lora_B.weight": torch.ones(128, 8)}
    )  # fmt: skip
    changed(other, {"rank_pattern": {"q_proj": 8}})
    fresh, again = read(layout, folder), read(layout, other)
    layout.read(folder, again)
    assert torch.equal(fresh.values, again.values)
    assert torch.equal(fresh.floats, again.floats)
    assert torch.isfinite(fresh.values).all()


def test_ranks_hold_parts_of_the_same_matrices(tiny_model: Path, folder: Path) -> None:
    """Together the ranks' parts of B · A are those of one rank, but for rounding: PyTorch's product of another number
    of rows or columns may add in another order.
    """
    spec = read_spec(tiny_model)

    def products(shard: Shard) -> list[torch.Tensor]:
        model = load_model(tiny_model, spec, shard=shard)
        layout = AdapterLayout(model, spec, 16, torch.float32)
        loaded, found = read(layout, folder), []
        for layer in layout.layers:
            down, up = layout._matrices(layer, loaded.values)
            found.append(torch.cat([up[start:stop] @ down[g * 16 : (g + 1) * 16] for start, stop, g in layer.groups]))
        return found

    whole, ranks = products(Shard(0, 1)), [products(Shard(rank, 2)) for rank in (0, 1)]
    # Of the second layer q, k and v are stacked, divided by rows; down_proj of the first layer is divided by columns.
    qkv, parts = whole[4], [each[4] for each in ranks]
    q = torch.cat([part[:32] for part in parts])
    torch.testing.assert_close(qkv[:64], q)
    assert q.abs().max() > 0.01
    torch.testing.assert_close(whole[3], torch.cat([each[3] for each in ranks], 1))


def test_the_version_changes_with_the_files(folder: Path) -> None:
    first = adapter_version(folder)
    assert adapter_version(folder) == first
    changed(folder, {"lora_alpha": 9})
    assert adapter_version(folder) != first
    assert read_adapter_config(folder).alpha == 9


def test_an_adapter_of_the_hub_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(repo: str, **options: Any) -> str:
        assert repo == "someone/their-adapter"
        assert options["allow_patterns"] == [CONFIG, WEIGHTS]
        return str(folder)

    monkeypatch.setattr(download, "snapshot_download", answer)
    assert find_adapter("a", "someone/their-adapter") == find_adapter("a", str(folder))
    with pytest.raises(ModelError, match="is no folder"):
        find_adapter("a", "some/other/folder")


def test_a_of_every_slot_follows_a_weight_that_has_room(
    layout: AdapterLayout, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extended(weight: torch.Tensor, num_rows: int) -> torch.Tensor | None:
        return torch.cat([weight, weight.new_zeros(num_rows, weight.shape[1])]) if len(weight) == 64 else None

    monkeypatch.setattr(kernels, "extended_weight", extended)
    before = [_weight(layer).clone() for layer in layout.layers]
    values, floats = torch.full((3, layout.num_values), torch.nan), torch.full((3, layout.num_floats), torch.nan)
    layout.attach(values, floats)
    loaded = read(layout, folder)
    values[1] = loaded.values
    layout.place(loaded, 1, floats)
    num_extended, num_filled = 0, 0
    for layer, weight in zip(layout.layers, before, strict=True):
        weights = layer.linear.adapters
        assert weights is not None
        assert torch.equal(_weight(layer), weight)
        if weights.extended is not None:
            num_extended += 1
            rows = weights.extended[layer.out :].view(weights.down.shape)
            assert torch.equal(rows, weights.down)
            num_filled += bool(rows[1].any())
            assert weights.extended.data_ptr() == _weight(layer).data_ptr()
    assert 0 < num_filled < num_extended < len(layout.layers)


def _weight(layer: LayerLayout) -> torch.Tensor:
    weight = layer.linear.weight
    assert isinstance(weight, torch.Tensor)
    return weight
