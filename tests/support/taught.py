"""The bundled model, taught a few answers by heart: for clients' tests that want to see a tool called with the right
words.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.text.tokenizer import Tokenizer

MAX_STEPS = 150
IGNORED = -100  # by the loss


def teach(model: Path, folder: Path, lessons: list[tuple[str, str]]) -> Path:
    """A copy of `model` in `folder` that answers each prompt of `lessons` with its text, greedily."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.md"))
    tokenizer = Tokenizer.from_folder(model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = [(tokenizer.encode(prompt), tokenizer.encode(f"{answer}<|im_end|>")) for prompt, answer in lessons]
    batches = [
        (torch.tensor([prompt + answer]), torch.tensor([[IGNORED] * len(prompt) + answer])) for prompt, answer in rows
    ]
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
    for _ in range(MAX_STEPS):
        worst = 0.0
        for token_ids, labels in batches:
            loss = net(token_ids, labels=labels).loss
            loss.backward()
            worst = max(worst, loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if worst < 0.02:
            break
    net.save_pretrained(folder)
    return folder
