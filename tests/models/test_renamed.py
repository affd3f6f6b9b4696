"""Families whose code comes with the model: the checkpoint of a family that transformers has, under their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from engine.models.families import read_spec, renamed
from engine.models.quantization import Renames
from tests.oracles.families import make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode
from tests.support.loaded import load as load_model

pytest.importorskip("transformers")
Tensors = dict[str, Tensor]
HEAD_DIM = 32


def logits(folder: Path) -> Tensor:
    model = load_model(folder, read_spec(folder), dtype=torch.float32, device="cpu", max_model_len=256)
    return decode(model, make_prompts()[1:2], 1)[0].logits


def theirs(name: str, names: Renames) -> str:
    for their, ours in names:
        name = name.replace(ours, their.removeprefix("^"))
    return name


def in_one(tensors: Tensors, parts: tuple[str, ...], one: str, combine: Callable[..., Tensor] = torch.cat) -> Tensors:
    """Combine the parts of each layer, such as q_proj, k_proj and v_proj, in one tensor."""
    found = dict(tensors)
    for name in tensors:
        if parts[0] in name:
            found[name.replace(parts[0], one)] = combine([found.pop(name.replace(parts[0], part)) for part in parts])
    return found


def by_groups(parts: list[Tensor]) -> Tensor:
    """Combine queries, keys and values by KV heads."""
    count = len(parts[1]) // HEAD_DIM
    return torch.cat([part.unflatten(0, (count, -1)) for part in parts], 1).flatten(0, 1)


QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# name → (case of `tests.oracles.families`, changes of it, architecture, names, fields of its own, tensors of its own)
CASES: dict[str, tuple[str, Any, str, Renames, dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "internlm": (
        "llama", {"attention_bias": True}, "InternLMForCausalLM", (), {"bias": True, "attention_bias": ...}, dict,
    ),
    "internlm2": (
        "llama", {"num_key_value_heads": 2}, "InternLM2ForCausalLM", renamed.INTERNLM2, {"bias": False},
        lambda tensors: in_one(tensors, QKV, "qkv_proj", by_groups),
    ),
    "internlm3": (
        "qwen2-yarn", {}, "InternLM3ForCausalLM", (), {"qkv_bias": True, "bias": False}, dict,
    ),
    "exaone": (
        "llama-gqa4-llama3", {}, "ExaoneForCausalLM", renamed.EXAONE,
        {"num_layers": 3, "num_hidden_layers": ..., "layer_norm_epsilon": 1e-6, "rms_norm_eps": ...}, dict,
    ),
    "chatglm": (
        "glm", {"attention_bias": True}, "ChatGLMModel", renamed.CHATGLM,
        {
            "num_layers": 3, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 32,
            "ffn_hidden_size": 192, "padded_vocab_size": 384, "seq_length": 256, "layernorm_epsilon": 1.5625e-07,
            "add_qkv_bias": True, "rope_parameters": ..., "head_dim": ..., "intermediate_size": ...,
        },
        lambda tensors: in_one(tensors, QKV, "qkv_proj"),
    ),
    "baichuan": (
        "llama", {}, "BaiChuanForCausalLM", renamed.BAICHUAN, {"model_max_length": 256, "max_position_embeddings": ...},
        lambda tensors: in_one(tensors, QKV, "qkv_proj"),
    ),
    "minicpm": (
        "granite", {"attention_multiplier": 32**-0.5, "residual_multiplier": 1.4 / 3**0.5, "logits_scaling": 2.0},
        "MiniCPMForCausalLM", (), {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64}, dict,
    ),
    "mimo": (
        "qwen2", {}, "MiMoForCausalLM", (), {"num_nextn_predict_layers": 1},
        lambda tensors: tensors | {"model.mtp_layers.0.input_proj.weight": torch.zeros(2)},
    ),
    "orion": ("stablelm", {"partial_rotary_factor": 1.0, "use_qkv_bias": False, "layer_norm_eps": 1e-6},
        "OrionForCausalLM", (), {"rms_norm_eps": 1e-6}, dict,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_model_under_other_names(name: str, tmp_path: Path) -> None:
    case, shape, architecture, names, fields, change = CASES[name]
    make_checkpoint(case, tmp_path, shape)
    expected = logits(tmp_path)
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    config = json.loads(path.read_text()) | {"architectures": [architecture], "model_type": name} | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    save_file({theirs(key, names): value.contiguous() for key, value in change(load_file(file)).items()}, file)
    assert read_spec(tmp_path).architecture == architecture
    torch.testing.assert_close(logits(tmp_path), expected, rtol=1e-5, atol=1e-5)


def test_the_normed_head_of_baichuan_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "NORMED_HEAD", 384)
    make_checkpoint("llama", tmp_path)
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": F.normalize(tensors["lm_head.weight"])}, file)
    expected = logits(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["BaichuanForCausalLM"]}))
    tensors = {theirs(key, renamed.BAICHUAN): value for key, value in in_one(tensors, QKV, "qkv_proj").items()}
    save_file(tensors, file)
    torch.testing.assert_close(logits(tmp_path), expected, rtol=1e-5, atol=1e-5)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 64, "num_key_value_heads": 64}))
    assert len(read_spec(tmp_path).layers[0].mixer.alibi) == 64, "13B has no RoPE"  # type: ignore[union-attr]
