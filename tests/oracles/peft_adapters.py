"""Adapters by PEFT: made, saved, and merged into transformers' model, whose answers are the oracle."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracles.families import make_checkpoint, transformers_decode

PROMPTS = [[7 * i % 380 + 1 for i in range(length)] for length in (30, 3)]


def make_adapter(model: Any, folder: Path, seed: int, *, merges: bool = True, **config: Any) -> Any:
    """Save a random adapter of a transformers model in `folder`, and return the model with it merged, or beside it.

    `config`: fields of PEFT's LoraConfig. The model itself is changed: give a copy. PEFT merges the LoRA of a tied
    embedding into the head, too, but trains without.
    """
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on tied embeddings
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            elif "lora" not in name:
                parameter.add_(0.5 * parameter.std() * noise)  # retrained
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bias of B has one dimension, as it must
        adapted.save_pretrained(str(folder))
    return (adapted.merge_and_unload() if merges else adapted).eval()


def answers(model: Any, num_tokens: int, prompts: list[list[int]] = PROMPTS) -> list[tuple[list[int], Tensor]]:
    """Return greedy tokens of each prompt and the log-probabilities of its tokens and the answer's, by transformers."""
    found = []
    for prompt in prompts:
        decoded = transformers_decode(model, prompt, num_tokens)
        ids = torch.tensor(prompt + decoded.token_ids)
        with torch.inference_mode():
            logits = model(ids.unsqueeze(0)).logits[0].float()
        scores = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        found.append((decoded.token_ids, scores))
    return found


def base_model(name: str, folder: Path, shape: dict[str, Any] | None = None) -> Any:
    """The random model of a case of `tests.oracles.families`, saved in `folder`."""
    return make_checkpoint(name, folder, shape)
