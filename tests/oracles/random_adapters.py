"""Random adapters: of one layer in slots, and whole PEFT folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.models.adapters import AdapterLayout
from engine.models.families import read_spec
from engine.models.lora import PREFIX, WEIGHTS
from engine.models.weights import decoder_of_shapes
from kernels.data.lora import ExpertLora, LoraWeights, RowGroup


def random_slots(
    num_slots: int,
    rank: int,
    channels: int,
    group_rows: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoraWeights:
    """Return adapters in every slot of a layer with stacked projections of `group_rows` rows each."""
    out, count = sum(group_rows), len(group_rows)
    ends = torch.tensor(group_rows).cumsum(0).tolist()
    groups = tuple(
        RowGroup(end - rows, end, index) for index, (end, rows) in enumerate(zip(ends, group_rows, strict=True))
    )

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    # Slots that lie apart, as in a runner.
    down = (random(num_slots, 2 * count * rank, channels) / channels**0.5).to(dtype)[:, : count * rank]
    up = (random(num_slots, 2 * out, rank) / rank**0.5).to(dtype)[:, :out]
    factor, shift = (1 + 0.1 * random(num_slots, 3 * out))[:, :out], random(num_slots, 3 * out)[:, :out]
    blocks = LoraWeights.blocks_of(groups, torch.device(device))
    return LoraWeights(down, up, factor, shift, groups, *blocks)


def random_expert_slots(
    num_slots: int,
    num_experts: int,
    rank: int,
    hidden: int,
    group_rows: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ExpertLora:
    """Return adapters of a rank's experts in every slot. `group_rows`: of gate and up."""
    count = num_slots * num_experts
    gate_up = random_slots(2 * count, rank, hidden, group_rows, dtype=dtype, device=device)
    down = random_slots(2 * count, rank, group_rows[0], (hidden,), dtype=dtype, device=device)
    return ExpertLora(gate_up, down, 2 * torch.arange(count, dtype=torch.int32, device=device))


def merged(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor) -> Tensor:
    """Return a layer's result y [T, out] for x [T, in] with each token's adapter, in float64, by merged matrices."""
    rank, result = weights.rank, y.double().clone()
    for slot in set(slots.tolist()) - {-1}:
        at = slots == slot
        matrix = torch.cat(
            [
                weights.up[slot, start:stop].double() @ weights.down[slot, g * rank : (g + 1) * rank].double()
                for start, stop, g in weights.groups
            ]
        )
        result[at] = result[at] * weights.factor[slot] + x[at].double() @ matrix.T + weights.shift[slot]
    return result


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8} | config))
    save_file({PREFIX + name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def random_adapter(
    shapes: dict[str, tuple[int, int]], rank: int, generator: torch.Generator, *, dora: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of an adapter. `shapes`: module → [out, in]."""
    tensors: dict[str, Tensor] = {}
    for module, (out, channels) in shapes.items():
        tensors[module + ".lora_A.weight"] = torch.randn(rank, channels, generator=generator) / channels**0.5
        tensors[module + ".lora_B.weight"] = torch.randn(out, rank, generator=generator) / rank**0.5
        if dora:
            tensors[module + ".lora_magnitude_vector"] = torch.rand(out, generator=generator) * 2 + 1
    return tensors


def merge(stored: dict[str, Tensor], adapter: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return a model's tensors with those of an adapter merged. `scale`: of B · A."""
    result = dict(stored)
    for module in {name.rpartition(".lora_")[0] for name in adapter}:
        matrix = stored[module + ".weight"].double()
        matrix = (
            matrix + scale * adapter[module + ".lora_B.weight"].double() @ adapter[module + ".lora_A.weight"].double()
        )
        if (magnitude := adapter.get(module + ".lora_magnitude_vector")) is not None:
            matrix = matrix * (magnitude / matrix.norm(dim=1)).unsqueeze(1)
        result[module + ".weight"] = matrix.to(stored[module + ".weight"].dtype)
    return result


def write_random_adapter(
    folder: Path,
    model: Path,
    rank: int,
    seed: int,
    size: float = 0.5,
    *,
    experts: bool = False,
    embeddings: bool = False,
) -> Path:
    """Write an adapter of all layers of a model's folder that may have one. `size`: of its changes. `experts`,
    `embeddings`: and of all experts, and of the embedding and the head, with two retrained tokens.
    """
    spec = read_spec(model)
    decoder = decoder_of_shapes(spec, torch.float32, model)
    layout = AdapterLayout(decoder, spec, rank, torch.float32, experts, 2 if embeddings else None)
    shapes = {
        name: (target.part.rows.total, layout.layers[target.layer].linear.columns.total)
        for name, (target, *_) in layout.targets.items()
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = random_adapter(shapes, rank, generator)
    config: dict[str, Any] = {"r": rank, "lora_alpha": rank * size}
    if experts:
        tensors |= _of_experts(layout, rank, generator)
    if embeddings:
        vocab, hidden = decoder.embed_tokens.rows.total, spec.hidden_size
        name = decoder.embed_tokens.name.removesuffix(".weight")
        tensors[name + ".lora_embedding_A"] = torch.randn(rank, vocab, generator=generator) / rank**0.5
        tensors[name + ".lora_embedding_B"] = torch.randn(hidden, rank, generator=generator)
        rows = torch.randn(2, hidden, generator=generator) / hidden**0.5
        tensors["lm_head.token_adapter.trainable_tokens_delta"] = rows
        config["trainable_token_indices"] = {"lm_head": [seed % vocab, (seed + 9) % vocab]}
    return write_adapter(folder, config, tensors)


def _of_experts(layout: AdapterLayout, rank: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return tensors of all experts together, [E, r, in] and [E, out, r], of every MoE."""
    tensors = {}
    for name, target in layout.experts._targets.items():
        layer = layout.experts.layers[target.layer]
        if target.expert is None and name.endswith((".w2", *(".w1", ".w3")[2 - len(layer.halves) :])):
            sizes = (layer.inner, layer.hidden) if name.endswith(".w2") else (layer.hidden, layer.inner)
            count = layer.moe.spec.num_experts
            tensors[name + ".lora_A.weight"] = torch.randn(count, rank, sizes[0], generator=generator) / sizes[0] ** 0.5
            tensors[name + ".lora_B.weight"] = torch.randn(count, sizes[1], rank, generator=generator) / rank**0.5
    return tensors
