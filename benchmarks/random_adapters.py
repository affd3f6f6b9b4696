"""Random LoRA adapters of a model's folder, as PEFT saves them: of all linear layers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.adapters import AdapterLayout
from engine.models.families import read_spec
from engine.models.lora import CONFIG, PREFIX, WEIGHTS
from engine.models.weights import decoder_of_shapes


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> None:
    """Write an adapter whose changes are small enough to leave the model's numbers finite."""
    spec = read_spec(model)
    layout = AdapterLayout(decoder_of_shapes(spec, torch.bfloat16, model), spec, rank, torch.bfloat16)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    pool = (torch.randn(1 << 22, generator=generator) * 0.01).bfloat16()  # drawing each number takes seconds
    for module, (target, *_) in layout.targets.items():
        channels, rows = layout.layers[target.layer].linear.columns.total, target.part.rows.total
        shapes = {"A": (rank, channels), "B": (rows, rank)}
        for half, shape in shapes.items():
            first = int(torch.randint(len(pool) - shape[0] * shape[1] + 1, (1,), generator=generator))
            values: Tensor = pool[first : first + shape[0] * shape[1]].view(shape)
            tensors[f"{PREFIX}{module}.lora_{half}.weight"] = values.clone()
    targets = sorted({module.rpartition(".")[2] for module in layout.targets})
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)


def adapters_of(model: Path, rank: int, count: int) -> list[Path]:
    """Return the folders of so many adapters beside a model's config.json. Those that are missing are written."""
    folders = [model / "adapters" / f"rank-{rank}-{index}" for index in range(count)]
    for index, folder in enumerate(folders):
        if not folder.is_dir():
            write_adapter(folder, model, rank, index)
    return folders
