"""Random models with sliding windows in all layers or some, and transformers' greedy answers to a few prompts."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen3Config

from tests.oracles.families import transformers_tokens

WINDOW, LENGTH = 24, 60
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 200,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, PreTrainedConfig] = {
    "every layer": MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=WINDOW),
    "every other layer": Qwen3Config(
        **SIZES,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "three of four layers": Qwen3Config(
        **SIZES,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    ),
}


def make_windowed(name: str, folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Save the model of that name in `MODELS`; prompts, of which two begin alike, and their answers of `LENGTH`
    tokens.
    """
    torch.manual_seed(0)
    oracle = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="eager").eval()
    oracle.save_pretrained(folder)
    rng = random.Random(1)
    prompts = [[rng.randrange(200) for _ in range(n)] for n in (3, 30, 77, 100)]
    prompts.append([*prompts[3][:70], 7, 8, 9])
    return prompts, transformers_tokens(oracle, folder, prompts, LENGTH)
