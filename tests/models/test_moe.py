"""Mixtures of experts: where each expert's weights lie, on which rank, and configurations that cannot be."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kernels
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.formats import log_compression
from engine.models.shard import Shard
from engine.models.spec import MoESpec
from engine.models.weights import checkpoint_tensors
from kernels.data.compressed_weight import compress, decompress
from tests.oracles.families import make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode
from tests.support.loaded import load as load_model


def load(folder: Path, **options: Any) -> Any:
    options = {"dtype": torch.float32, "device": "cpu", "max_model_len": 256, **options}
    return load_model(folder, read_spec(folder), **options)


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_each_experts_gate_then_up(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    stored, moe = load_file(tmp_path / "model.safetensors"), load(tmp_path).layers[2].mlp
    for i in range(8):
        gate, up, down = (stored[f"model.layers.2.mlp.experts.{i}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        assert torch.equal(moe.gate_up.weight[i], torch.cat([gate, up]))
        assert torch.equal(moe.down.weight[i], down)


@pytest.mark.parametrize("can", [True, False])
def test_compressed_experts(
    can: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without loss; experts of a kind for which there are no kernels stay as they are."""
    shape = {"moe_intermediate_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    make_checkpoint("qwen3_moe", tmp_path, {**shape, "mlp_only_layers": [], "decoder_sparse_step": 1})
    plain, experts, added = load(tmp_path, dtype=torch.bfloat16), kernels.experts, kernels.experts_add_norm

    def compressed(gate_up: Tensor, down: Tensor) -> Any:
        both = compress(gate_up, True), compress(down, False)
        return both if can and None not in both else None

    def as_it_was(stack: kernels.Experts) -> kernels.Experts:
        gate_up, down = stack.gate_up, stack.down
        assert isinstance(gate_up, kernels.CompressedWeight) == isinstance(down, kernels.CompressedWeight) == can
        if isinstance(gate_up, kernels.CompressedWeight) and isinstance(down, kernels.CompressedWeight):
            return replace(stack, gate_up=decompress(gate_up), down=decompress(down))
        return stack

    monkeypatch.setattr(kernels, "pack_weight", lambda weight: weight)
    plain.pack_weights()
    expected = decode(plain, make_prompts(), 3)
    monkeypatch.setattr(kernels, "compress_experts", compressed)
    monkeypatch.setattr(
        kernels, "experts", lambda x, ids, weights, stack, *more: experts(x, ids, weights, as_it_was(stack), *more)
    )
    monkeypatch.setattr(
        kernels,
        "experts_add_norm",
        lambda sum_, norm, x, *chosen: added(sum_, norm, x, chosen[0], chosen[1], as_it_was(chosen[2])),
    )
    model = load(tmp_path, dtype=torch.bfloat16, compress_experts=True)
    model.pack_weights()
    with caplog.at_level(logging.INFO):
        log_compression(model)
    said = "Compressed the experts of 2 of 2 layers to 12 bits a weight" if can else "compress_experts has no effect"
    assert said in caplog.text
    for ours, theirs in zip(decode(model, make_prompts(), 3), expected, strict=True):
        assert torch.equal(ours.logits, theirs.logits)


def test_stacked_experts_are_turned_and_sorted(tmp_path: Path) -> None:
    """gpt-oss keeps [in, out], and gate and up channel by channel."""
    make_checkpoint("gpt_oss", tmp_path)
    stored, moe = load_file(tmp_path / "model.safetensors"), load(tmp_path).layers[1].mlp
    experts = "model.layers.1.mlp.experts."
    gate_up, bias = stored[f"{experts}gate_up_proj"].mT, stored[f"{experts}gate_up_proj_bias"]
    assert torch.equal(moe.gate_up.weight, torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1))
    assert torch.equal(moe.gate_up.bias, torch.cat([bias[:, ::2], bias[:, 1::2]], 1))
    assert torch.equal(moe.down.weight, stored[f"{experts}down_proj"].mT)
    assert torch.equal(moe.down.bias, stored[f"{experts}down_proj_bias"])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_ranks_hold_whole_experts(tmp_path: Path, name: str) -> None:
    make_checkpoint(name, tmp_path)
    whole, half = load(tmp_path).layers[0].mlp, load(tmp_path, shard=Shard(1, 2))
    moe = half.layers[0].mlp
    count = len(whole.gate_up.weight) // 2
    assert moe.first == count
    assert torch.equal(moe.gate_up.weight, whole.gate_up.weight[count:])
    assert torch.equal(moe.down.weight, whole.down.weight[count:])
    assert torch.equal(moe.router.weight, whole.router.weight)
    assert set(checkpoint_tensors(half)) == set(load_file(tmp_path / "model.safetensors"))
    assert half.spec.layers[0].mlp.num_experts == count


def test_ranks_that_cannot_divide_the_experts(tmp_path: Path) -> None:
    make_checkpoint("qwen2_moe", tmp_path, {"num_attention_heads": 4, "num_key_value_heads": 4})
    with pytest.raises(ModelError, match=r"'num_experts' \(6\) cannot be divided among 4 ranks"):
        load(tmp_path, shard=Shard(0, 4))


def logits(model: Any) -> Tensor:
    return torch.cat([decoded.logits for decoded in decode(model, make_prompts(), 1)])


def test_layers_that_draft_tokens_are_not_loaded(tmp_path: Path) -> None:
    """GLM and DeepSeek keep them after the last layer."""
    make_checkpoint("glm4_moe", tmp_path)
    expected = logits(load(tmp_path))
    file = tmp_path / "model.safetensors"
    drafts = {
        f"model.layers.3.{name}": torch.randn(4, 4) for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")
    }
    save_file(load_file(file) | drafts, file)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert torch.equal(logits(load(tmp_path)), expected)
    change(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match="no place for"):
        load(tmp_path)


def test_dummy_experts(tmp_path: Path) -> None:
    make_checkpoint("glm4_moe", tmp_path)
    model = load(tmp_path, load_format="dummy", dtype=torch.bfloat16)
    moe = model.layers[1].mlp
    assert 0.018 < moe.gate_up.weight.float().std() < 0.022
    assert (moe.router.weight.dtype, moe.router.correction.dtype) == (torch.float32, torch.float32)
    assert logits(model).isfinite().all()


def test_the_published_spelling_of_the_number_of_experts(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["num_local_experts"]
    path.write_text(json.dumps(config | {"num_experts": 8}))
    mlp = read_spec(tmp_path).layers[0].mlp
    assert isinstance(mlp, MoESpec)
    assert mlp.num_experts == 8


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "'num_experts_per_tok' must be at most 8"),
        ("qwen3_moe", {"num_local_experts": 10**6}, "'num_local_experts' must be at most"),
        ("qwen3_moe", {"mlp_only_layers": "none"}, "'mlp_only_layers' must be a list of layers"),
        ("qwen3_moe", {"hidden_act": "relu"}, "'hidden_act' 'relu' is not supported"),
        ("glm4_moe", {"n_group": 3}, r"'n_group' \(3\) must divide 8 experts"),
        ("glm4_moe", {"n_group": 8}, r"'n_group' \(8\) must divide 8 experts in groups of two or more"),
        ("glm4_moe", {"topk_group": 1}, r"'topk_group' \(1\) groups hold fewer than 3 experts"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "'swiglu_limit' 5 is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, "'clip_qkv' is not supported"),
    ],
)
def test_configurations_that_cannot_be(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    make_checkpoint(name, tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        read_spec(tmp_path)
