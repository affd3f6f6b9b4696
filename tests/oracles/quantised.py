"""Checkpoints in every published layout of low-bit weights, written plainly, and what they stand for in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracles.families import make_checkpoint

Written = tuple[dict[str, Tensor], Tensor]  # tensors by the end of their names, and the matrix
Writer = Callable[[Tensor], Written]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def each(scale: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """The scale of every element, where blocks of rows × columns share one."""
    wide = scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]


def groups(weight: Tensor, group: int) -> Tensor:
    """[N, G, group]; 0: all channels."""
    return weight.unflatten(1, (-1, group or weight.shape[1]))


def plain(rows: int = 1, group: int = 0, kind: str = "e4m3", name: str = "weight_scale", flat: bool = False) -> Writer:
    """e4m3 or int8 with a scale for each block of rows × group; rows 0: for all."""
    dtype, largest = (torch.float8_e4m3fn, 448.0) if kind == "e4m3" else (torch.int8, 127.0)

    def write(weight: Tensor) -> Written:
        height, width = rows or weight.shape[0], group or weight.shape[1]
        padded = torch.zeros(-(-weight.shape[0] // height) * height, -(-weight.shape[1] // width) * width)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))
        scale = blocks.abs().amax((1, 3)) / largest
        wide = each(scale, height, width, weight.shape)
        scaled = weight.double() / wide
        codes = (scaled.round() if kind == "int8" else scaled.float()).to(dtype)
        stored = scale.reshape(()) if not rows else scale[:, 0] if flat else scale
        return {"weight": codes, name: stored}, codes.double() * wide

    return write


def _integers(weight: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes [N, K], scales [N, G] float16, zero points [N, G]; weight = (code - zero) · scale."""
    grouped, top = groups(weight, group), 2**bits - 1
    low, high = grouped.amin(2), grouped.amax(2)
    if symmetric:
        scale = (torch.maximum(-low, high) / (top // 2)).half()
        zero = torch.full_like(scale, 2 ** (bits - 1)).int()
    else:
        scale = ((high - low) / top).half()
        zero = (-low / scale.float()).round().clamp(1, top).int()  # GPTQ stores it less 1
    codes = (grouped / scale.float()[..., None]).round() + zero[..., None]
    return codes.clamp(0, top).int().flatten(1), scale, zero


def _values(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> Tensor:
    width = group or codes.shape[1]
    return (codes.double() - each(zero, 1, width, codes.shape)) * each(scale, 1, width, codes.shape)


def _words(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Codes of each row → int32 words; the code at order[i] of a word's codes lies at its i-th bits."""
    if bits == 3:
        return _stream(codes)
    per_word = 32 // bits
    words = torch.zeros(len(codes), codes.shape[1] // per_word, dtype=torch.int64)
    for i, at in enumerate(order or range(per_word)):
        words |= codes[:, at::per_word].long() << bits * i
    return (words - (words >= 2**31).long() * 2**32).int()


def _stream(codes: Tensor) -> Tensor:
    """Codes of three bits of each row → int32 words: a stream of bits, the lowest first."""
    bits = (codes.unsqueeze(2) >> torch.arange(3) & 1).flatten(1).unflatten(1, (-1, 32)).long()
    words = (bits << torch.arange(32)).sum(2)
    return (words - (words >= 2**31).long() * 2**32).int()


def packed(group: int, symmetric: bool, bits: int = 4) -> Writer:
    """compressed-tensors' pack-quantized."""

    def write(weight: Tensor) -> Written:
        codes, scale, zero = _integers(weight, group, bits, symmetric)
        stored = {
            "weight_packed": _words(codes, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = _words(zero.T, bits).T
        return stored, _values(codes, scale, zero, group)

    return write


def gptq(group: int, symmetric: bool, *, bits: int = 4, version: int = 1, reordered: bool = False) -> Writer:
    def write(weight: Tensor) -> Written:
        k = weight.shape[1]
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if reordered else torch.arange(k)
        codes, scale, zero = _integers(weight[:, order], group, bits, symmetric)
        values = torch.empty(weight.shape, dtype=torch.float64)
        values[:, order] = _values(codes, scale, zero, group)
        in_file = torch.empty_like(codes)
        in_file[:, order] = codes
        g_idx = torch.empty(k, dtype=torch.int32)
        g_idx[order] = (torch.arange(k) // (group or k)).int()
        return {
            "qweight": _words(in_file, bits).T,
            "qzeros": _words(zero.T - int(version == 1), bits),
            "scales": scale.T,
            "g_idx": g_idx,
        }, values

    return write


def awq(group: int) -> Writer:
    def write(weight: Tensor) -> Written:
        codes, scale, zero = _integers(weight, group, 4, symmetric=False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return {
            "qweight": _words(codes.T, 4, order),
            "qzeros": _words(zero.T, 4, order),
            "scales": scale.T,
        }, _values(codes, scale, zero, group)

    return write


def gemv(group: int) -> Writer:
    """AWQ's gemv: channels in order, zero points and scales padded to a multiple of 8 · 128 / group groups."""

    def write(weight: Tensor) -> Written:
        codes, scale, zero = _integers(weight, group, 4, symmetric=False)
        unused = -scale.shape[1] % (8 * 128 // group)
        wide = torch.nn.functional.pad(scale, (0, unused))
        zeros = _words(torch.nn.functional.pad(zero, (0, unused)), 4)
        return {"qweight": _words(codes, 4), "qzeros": zeros, "scales": wide}, _values(codes, scale, zero, group)

    return write


def _tiles(codes: Tensor) -> Tensor:
    """Codes [N, K] as PyTorch's kernel for GPUs packs them, word by word."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 1024)).long()
    n, k = codes.shape
    words = torch.zeros(n // 8, k // 128, 32, 4, dtype=torch.int64)
    shifts = (0, 16, 4, 20, 8, 24, 12, 28)
    for lane in range(32):
        for word in range(4):
            first = word * 32 + lane % 4 * 2
            channels = (first, first + 1, first + 8, first + 9, first + 16, first + 17, first + 24, first + 25)
            for channel, shift in zip(channels, shifts, strict=True):
                words[:, :, lane, word] |= codes[lane // 4 :: 8, channel::128] << shift
    return (words - (words >= 2**31).long() * 2**32).int()


def torchao(kind: str, *, rows: int = 1, group: int = 0, tiles: bool = False) -> Writer:
    """torchao's Int8Tensor, Float8Tensor, and Int4Tensor."""

    def write(weight: Tensor) -> Written:
        if kind != "int4":
            stored, values = plain(rows, group, kind)(weight)
            scale = stored["weight_scale"].reshape(1, 1) if not rows else stored["weight_scale"]
            found = {"_weight_qdata": stored["weight"], "_weight_scale": scale}
            return found | ({"_weight_zero_point": torch.zeros_like(scale).char()} if kind == "int8" else {}), values
        grouped = groups(weight, group)
        low, high = grouped.amin(2), grouped.amax(2)
        scale = ((high - low) / 15).bfloat16()
        zero = (low + scale.float() * 8).bfloat16()
        codes = ((grouped - zero.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7).flatten(1)
        if tiles:
            values = codes.double() * each(scale, 1, group, codes.shape) + each(zero, 1, group, codes.shape)
            unused = -codes.shape[1] % 1024 // group
            both = torch.nn.functional.pad(torch.stack([scale, zero], 2), (0, 0, 0, unused))
            return {"_weight_qdata": _tiles(codes.int() + 8), "_weight_scale_and_zero": both.transpose(0, 1)}, values
        pairs = codes.int() & 15
        packed = (pairs[:, ::2] | pairs[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
        values = codes.double() * each(scale, 1, group, codes.shape) + each(zero, 1, group, codes.shape)
        return {"_weight_qdata": packed, "_weight_scale": scale.T, "_weight_zero_point": zero.T}, values

    return write


def fp4(group: int, global_scale: str = "", divided: bool = True) -> Writer:
    """nvfp4 (with a global scale) or mxfp4."""

    def write(weight: Tensor) -> Written:
        grouped = groups(weight, group)
        ideal = grouped.abs().amax(2) / 6
        if global_scale:
            one = (448 / ideal.max()).reshape(1)
            stored = (ideal * one).to(torch.float8_e4m3fn)
            scale = stored.double() / one.double()
        else:
            one, stored = torch.ones(1), (ideal.log2().ceil() + 127).to(torch.uint8)
            scale = torch.exp2(stored.double() - 127)
        codes = ((grouped.double() / scale[..., None])[..., None] - E2M1).abs().argmin(-1).flatten(1)
        tensors = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), "weight_scale": stored}
        if global_scale:
            tensors[global_scale] = one if divided else 1 / one
            scale = stored.double() / one.double() if divided else stored.double() * (1 / one).double()
        return tensors, E2M1[codes].double() * each(scale, 1, group, codes.shape)

    return write


def mxfp4_blocks(weight: Tensor) -> Written:
    """gpt-oss': stacked experts [E, K, N] as [E, N, K / 32, 16]."""
    matrices = [fp4(32)(matrix) for matrix in weight.mT]
    codes, scales = (
        torch.stack([matrix[name] for matrix, _ in matrices]) for name in ("weight_packed", "weight_scale")
    )
    values = torch.stack([value for _, value in matrices])
    return {"blocks": codes.unflatten(2, (-1, 16)), "scales": scales}, values.mT


def compressed(file_format: str, weights: dict[str, Any], activations: bool = False) -> dict[str, Any]:
    inputs = {"num_bits": 8, "type": weights["type"], "dynamic": True, "strategy": "token"} if activations else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*layers\.1\.mlp.*"],
    }


def _float(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}


def _int(bits: int, group: int, symmetric: bool = True) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group or None, "symmetric": symmetric}


EXCLUDED = "layers.1.mlp"
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}


def of_torchao(kind: str, **data: Any) -> dict[str, Any]:
    """The configuration of one of torchao's classes."""
    default = {"_type": f"{kind}Config", "_version": 2, "_data": {"set_inductor_config": True, **data}}
    return {"quant_method": "torchao", "quant_type": {"default": default}, "modules_to_not_convert": None}


PER_TENSOR = {"_type": "PerTensor", "_version": 1, "_data": {}}
PER_GROUP = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 64}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
# name → (quantization_config, its writer)
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "fp8-tensor": (compressed("float-quantized", _float("tensor"), True), plain(rows=0)),
    "fp8-channel": (compressed("float-quantized", _float("channel"), True), plain()),
    "fp8-weights-only": (compressed("float-quantized", _float("channel")), plain()),
    "fp8-block": (
        compressed("float-quantized", _float("block", block_structure=[128, 128]), True),
        plain(128, 128),
    ),
    "fp8-deepseek": (DEEPSEEK | {"modules_to_not_convert": [EXCLUDED]}, plain(128, 128, name="weight_scale_inv")),
    "fp8-static": (STATIC | {"modules_to_not_convert": [EXCLUDED]}, plain(rows=0, name="weight_scale_inv")),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": [EXCLUDED]}, plain(flat=True)),
    "modelopt-fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.1.mlp*"]},
        plain(rows=0),
    ),
    "int8": (compressed("int-quantized", _int(8, 0), True), plain(kind="int8")),
    "int8-groups": (compressed("pack-quantized", _int(8, 64)), packed(64, True, bits=8)),
    "int8-weights-only": (compressed("pack-quantized", _int(8, 0)), packed(0, True, bits=8)),
    "int4": (compressed("pack-quantized", _int(4, 64)), packed(64, True)),
    "int4-asymmetric": (compressed("pack-quantized", _int(4, 32, symmetric=False)), packed(32, False)),
    "int4-channel": (compressed("pack-quantized", _int(4, 0)), packed(0, True)),
    "gptq": (GPTQ | {"dynamic": {"-:.*layers\\.1\\.mlp.*": {}}}, gptq(64, True)),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, gptq(64, False, version=2)),
    "gptq-desc-act": (GPTQ | {"desc_act": True}, gptq(64, True, reordered=True)),
    "gptq-channel": (GPTQ | {"group_size": -1}, gptq(0, True)),
    "gptq-int8": (GPTQ | {"bits": 8}, gptq(64, False, bits=8)),
    "gptq-int3": (GPTQ | {"bits": 3}, gptq(64, False, bits=3)),
    "awq": (AWQ | {"modules_to_not_convert": [EXCLUDED]}, awq(64)),
    "awq-gemv": (AWQ | {"version": "gemv"}, gemv(64)),
    "torchao-int8": (of_torchao("Int8WeightOnly", granularity=None), torchao("int8")),
    "torchao-int8-groups": (of_torchao("Int8WeightOnly", granularity=PER_GROUP), torchao("int8", group=64)),
    "torchao-fp8": (of_torchao("Float8WeightOnly"), torchao("e4m3")),
    "torchao-fp8-tensor": (
        of_torchao("Float8DynamicActivationFloat8Weight", granularity=[PER_TENSOR, PER_TENSOR]),
        torchao("e4m3", rows=0),
    ),
    "torchao-int4": (
        of_torchao(
            "Int4WeightOnly", group_size=64, int4_packing_format={"_type": "Int4PackingFormat", "_data": "PLAIN"}
        ),
        torchao("int4", group=64),
    ),
    "torchao-int4-tiles": (
        of_torchao("Int4WeightOnly", group_size=64, int4_packing_format="tile_packed_to_4d"),
        torchao("int4", group=64, tiles=True),
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", NVFP4), fp4(16, "weight_global_scale")),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        fp4(16, "weight_scale_2", divided=False),
    ),
    "mxfp4": (compressed("mxfp4-pack-quantized", MXFP4), fp4(32)),
}
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
# Of mixtures of experts: name → (family, what it adds to the family's configuration, quantization_config, its writer)
EXPERTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Writer]] = {
    "gpt-oss": ("gpt_oss", {"intermediate_size": 160}, GPT_OSS, mxfp4_blocks),
} | {
    f"{family} {name}": (family, {"moe_intermediate_size": 128}, *FORMATS[name])
    for family, name in [
        ("qwen3_moe", "fp8-channel"),
        ("qwen3_moe", "fp8-deepseek"),
        ("qwen3_moe", "int4"),
        ("qwen3_moe", "awq"),
        ("qwen3_moe", "gptq-desc-act"),
        ("glm4_moe", "fp8-block"),
        ("glm4_moe", "mxfp4"),
        ("qwen2_moe", "nvfp4"),
        ("deepseek_v3", "fp8-deepseek"),
        ("deepseek_v32", "fp8-deepseek"),
    ]
}


def excludes(config: dict[str, Any]) -> bool:
    """Return whether the configuration leaves the second layer's MLP out."""
    return EXCLUDED in json.dumps(config).replace("\\", "")


def make_quantised(
    name: str,
    folder: Path,
    exact: Path | None = None,
    shape: dict[str, Any] | None = None,
    family: str = "llama-biases",
) -> None:
    """Write a random checkpoint in a format in `folder`; in `exact`, what it stands for in float32.

    `family`: of a format that is not one of `EXPERTS`.
    """
    family, changes, config, writer = EXPERTS[name] if name in EXPERTS else (family, {}, *FORMATS[name])
    stacked = writer is mxfp4_blocks
    make_checkpoint(family, folder, changes | (shape or {}))
    path = folder / "config.json"
    plain_config = json.loads(path.read_text())
    tensors = load_file(folder / "model.safetensors")
    stored, rounded = dict(tensors), dict(tensors)
    is_excluding, excluded = excludes(config), EXCLUDED
    if any("feed_forward" in full for full in tensors):  # that family's name of an MLP
        excluded, config = (
            EXCLUDED.replace("mlp", "feed_forward"),
            json.loads(json.dumps(config).replace("mlp", "feed_forward")),
        )
    for full, weight in tensors.items():
        prefix = full.removesuffix(".weight")
        if (
            not prefix.endswith(("_proj", "_mqa", ".w1", ".w2", ".w3", ".wk", ".wq_b"))
            or prefix.endswith("weights_proj")
            or (weight.dim() == 3) != stacked
            or (is_excluding and excluded in prefix)
        ):
            continue
        del stored[full]
        written, rounded[full] = writer(weight)
        stored |= {f"{prefix}{'_' if stacked else '.'}{end}": tensor.contiguous() for end, tensor in written.items()}
        if "activation_scheme" in config:
            stored[f"{prefix}.input_scale"] = torch.tensor(0.5)
    save_file(stored, folder / "model.safetensors")
    path.write_text(json.dumps(plain_config | {"quantization_config": config}))
    if exact is not None:
        exact.mkdir()
        (exact / "config.json").write_text(json.dumps(plain_config))
        save_file({full: tensor.float().contiguous() for full, tensor in rounded.items()}, exact / "model.safetensors")
