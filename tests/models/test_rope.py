"""Rotary tables against transformers' own, at lengths beyond what the small models reach."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.families.llama_like import llama
from engine.models.rope import rope_table

transformers = pytest.importorskip("transformers")

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 512,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}
SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 500000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn from the context": {"rope_type": "yarn", "factor": 2.0},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn with everything": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 8,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 0.9,
    },
}


def rotary(rope_parameters: Any) -> Any:
    """Our table, and transformers' module, of the same configuration."""
    config = {**SHAPE, "rope_parameters": {"rope_theta": 10000.0, **rope_parameters}}
    spec = llama(config)
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**config))
    return rope_table(spec.layers[0].mixer.rope, 4096), module  # type: ignore[arg-type]


def transformers_table(module: Any, positions: Any) -> Tensor:
    cos, sin = module(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


@pytest.mark.heavy
@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name: str) -> None:
    table, module = rotary(SCALINGS[name])
    assert table.shape == (4096, 128)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, transformers_table(module, torch.arange(4096)), rtol=0, atol=2e-5)


def test_dynamic_is_position_wise() -> None:
    table, module = rotary({"rope_type": "dynamic", "factor": 3.0})
    plain, _ = rotary({"rope_type": "default"})
    assert torch.equal(table[:2048], plain[:2048])
    for position in (2048, 2049, 3000, 4095):  # as the last token of a sequence of position + 1
        want = transformers_table(module, torch.tensor([position]))
        torch.testing.assert_close(table[position : position + 1], want, rtol=0, atol=1e-3)


def test_dynamic_by_hand() -> None:
    table, _ = rotary({"rope_type": "dynamic", "factor": 3.0})
    base = 10000 * (3 * 4096 / 2048 - 2) ** (128 / 126)
    assert table[4095, 63].item() == pytest.approx(math.cos(4095 / base ** (126 / 128)), abs=1e-5)
