"""Random low-bit matrices, in every form that formats have, on any device."""

from __future__ import annotations

import torch

from kernels import Kind, QuantizedWeight, pack_e2m1, pack_nibbles
from kernels.data.block_weight import BlockKind

# name → kind, channels in a group (0: all), rows that share a scale, and: zero points, those of fractions, e4m3 scales
# with a factor, an order
FORMS: dict[str, tuple[Kind, int, int, tuple[str, ...]]] = {
    "fp8": ("e4m3", 0, 1, ("rounds",)),
    "fp8 blocks": ("e4m3", 128, 128, ("rounds",)),
    "fp8 rows of blocks": ("e4m3", 128, 1, ("rounds",)),
    "int8": ("int8", 0, 1, ("rounds",)),
    "int8 groups": ("int8", 64, 1, ("zero",)),
    "int4": ("int4", 128, 1, ()),
    "int4 asymmetric": ("int4", 128, 1, ("zero",)),
    "int4 groups of 32": ("int4", 32, 1, ("zero",)),
    "int4 minima": ("int4", 32, 1, ("fractions",)),
    "int8 minima": ("int8", 32, 1, ("fractions",)),
    "int8 groups of 16": ("int8", 16, 1, ()),
    "int4 channels": ("int4", 0, 1, ()),
    "int4 desc_act": ("int4", 128, 1, ("order",)),
    "nvfp4": ("e2m1", 16, 1, ("e4m3",)),
    "mxfp4": ("e2m1", 32, 1, ()),
}


def random_weight(form: str, n: int, k: int, device: str = "cpu", seed: int = 0) -> QuantizedWeight:
    """[n, k] of a form in `FORMS`, of a standard deviation of about k^-0.5."""
    kind, group, rows, traits = FORMS[form]
    generator = torch.Generator(device).manual_seed(seed)
    group = group or k
    if kind == "e4m3":
        codes = (64 * torch.randn(n, k, generator=generator, device=device)).clamp(-448, 448).to(torch.float8_e4m3fn)
    elif kind == "int8":
        codes = torch.randint(-128, 128, (n, k), generator=generator, device=device, dtype=torch.int8)
    else:
        codes = torch.randint(16, (n, k), generator=generator, device=device)
        codes = pack_e2m1(codes) if kind == "e2m1" else pack_nibbles(codes)
    deviation = {"e4m3": 64.0, "int8": 74.0, "int4": 4.6, "e2m1": 2.9}[kind]
    shape = (-(-n // rows), -(-k // group))
    scale = (0.5 + torch.rand(shape, generator=generator, device=device)) * k**-0.5 / deviation
    zero = factor = order = None
    if "e4m3" in traits:
        factor = scale[:, 0].contiguous()
        scale = (0.5 + torch.rand(shape, generator=generator, device=device)).to(torch.float8_e4m3fn)
    elif group < k and rows == 1:
        scale = scale.half()
    if "zero" in traits:
        top = 4 if kind == "int4" else 40
        zero = torch.randint(-top, top, (n, shape[1]), generator=generator, device=device, dtype=torch.int8)
    if "fractions" in traits:
        zero = (6 * torch.randn(n, shape[1], generator=generator, device=device)).half()
    if "order" in traits:
        order = torch.randperm(k, generator=generator, device=device)
    return QuantizedWeight(
        kind=kind, codes=codes, scale=scale, group=group, rows=rows, zero=zero, factor=factor, order=order,
        rounds_activations="rounds" in traits,
    )  # fmt: skip


def random_experts(form: str, count: int, n: int, k: int, device: str = "cpu") -> QuantizedWeight:
    """A stack [count, n, k] of a form in `FORMS`."""
    return QuantizedWeight.stack([random_weight(form, n, k, device, seed) for seed in range(count)])


# Of GGUF's types: bytes of a block, its channels, where its float16 factors are, and the deviation of its codes, scaled
BLOCKS: dict[BlockKind, tuple[int, int, tuple[int, ...], float]] = {
    "q4_k": (144, 256, (0, 2), 260.0),
    "q5_k": (176, 256, (0, 2), 530.0),
    "q6_k": (210, 256, (208,), 1365.0),
    "q8_0": (34, 32, (0,), 73.9),
}


def random_blocks(kind: BlockKind, n: int, k: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """Blocks of [n, k] as in a GGUF file, [n, blocks, bytes] uint8, of a standard deviation of about k^-0.5."""
    num_bytes, channels, factors, deviation = BLOCKS[kind]
    generator = torch.Generator(device).manual_seed(seed)
    shape = n, k // channels
    blocks = torch.randint(256, (*shape, num_bytes), generator=generator, device=device, dtype=torch.uint8)
    for at in factors:
        values = (0.5 + torch.rand(shape, generator=generator, device=device)) * k**-0.5 / deviation
        if at == 2:
            values *= 7.5 if kind == "q4_k" else 15.5  # the minima's: so the mean is about 0
        blocks[..., at : at + 2] = values.half().unsqueeze(2).view(torch.uint8)
    return blocks
