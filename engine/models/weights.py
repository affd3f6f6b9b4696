"""Checkpoints into decoders. Knows safetensors files and Hugging Face's tensor names; never knows what layers compute.

A tensor goes from the file straight to its place on the device, cast on the way. Before the first one moves, the names
and shapes of all files are held against the decoder: every place is filled exactly once and nothing is left over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from engine.models.decoder import Decoder, DecoderLayer
from engine.models.errors import ModelError
from engine.models.files import listing, read_json
from engine.models.layers import Linear
from engine.models.spec import ModelSpec

INDEX = "model.safetensors.index.json"
BODY = "model."  # how names of all but the output head begin
EMBEDDING, LM_HEAD = BODY + "embed_tokens.weight", "lm_head.weight"
IGNORED = ".rotary_emb.inv_freq"  # a table that old checkpoints store with the weights
# Scales of an fp8 cache, under the names that AutoFP8, ModelOpt and llm-compressor give them. Queries and probabilities,
# which they may scale too, are not quantised here.
KV_SCALE = re.compile(
    r"(?:model\.)?layers\.(?P<layer>\d+)\.self_attn\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?(?P<what>q|k|v|kv|prob)_scale"
)
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # safetensors' names → bytes


def load_model(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
    max_model_len: int | None = None,
) -> Decoder:
    """The decoder of `spec` on `device` in `dtype`, with the weights in `folder`; "dummy": random ones, by `seed`.

    `max_model_len` limits the rotary table. ModelError, one line, when the weights are missing, damaged or do not fit
    the specification, or when the device is too small for them.
    """
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ModelError(f"load_format must be auto, safetensors or dummy, got {load_format!r}")
    device = torch.device(device)
    stored = {} if load_format == "dummy" else _stored_tensors(folder)
    try:
        model = Decoder(spec, dtype=dtype, device=device, max_model_len=max_model_len)
        with torch.no_grad():
            if load_format == "dummy":
                _fill_randomly(model, seed)
            else:
                _fill(model, folder, stored, progress)
    except torch.OutOfMemoryError as error:
        need = sum(
            p.nbytes for p in Decoder(spec, dtype=dtype, device=torch.device("meta"), max_model_len=1).parameters()
        )
        name = str(dtype).removeprefix("torch.")
        raise ModelError(f"{folder}: {need / 2**30:.1f} GiB of {name} weights do not fit on {device}") from error
    return model


# Places


def places(model: Decoder) -> dict[str, Tensor]:
    """Every tensor that a checkpoint of this decoder holds, by its name there → the memory that it fills."""
    found: dict[str, Tensor] = {
        EMBEDDING: model.embed_tokens.weight,
        "model.norm.weight": model.norm.weight,
        LM_HEAD: model.lm_head.weight,
    }
    for number, layer in enumerate(cast(Iterable[DecoderLayer], model.layers)):
        prefix, attention = f"model.layers.{number}.", layer.attention
        found |= {
            prefix + "input_layernorm.weight": layer.input_norm.weight,
            prefix + "post_attention_layernorm.weight": layer.post_attention_norm.weight,
            **_places(attention.qkv, prefix + "self_attn.", "q_proj", "k_proj", "v_proj"),
            **_places(attention.o, prefix + "self_attn.", "o_proj"),
            **_places(layer.mlp.gate_up, prefix + "mlp.", "gate_proj", "up_proj"),
            **_places(layer.mlp.down, prefix + "mlp.", "down_proj"),
        }
        for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
            if norm is not None:
                found[f"{prefix}self_attn.{name}.weight"] = norm.weight
    return found


def _places(linear: Linear, prefix: str, *names: str) -> dict[str, Tensor]:
    found = {}
    for name, (weight, bias) in zip(names, linear.projections(), strict=True):
        found[f"{prefix}{name}.weight"] = weight
        if bias is not None:
            found[f"{prefix}{name}.bias"] = bias
    return found


# Files


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a checkpoint keeps one tensor."""

    file: Path
    shape: list[int]
    dtype: str  # safetensors' name

    @property
    def num_bytes(self) -> int:
        return FLOATS[self.dtype] * torch.Size(self.shape).numel()


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    """Every tensor in the checkpoint's files, from their headers. ModelError: no file, a damaged one, a name twice."""
    stored: dict[str, _Stored] = {}
    for file in _files(folder):
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if name in stored:
                    raise ModelError(f"{file}: tensor {name!r} is also in {stored[name].file.name}; remove one file")
                header = opened.get_slice(name)
                stored[name] = _Stored(file, header.get_shape(), header.get_dtype())
    return stored


def _files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that the index names, or else every .safetensors file but Mistral's own."""
    single, index = folder / "model.safetensors", folder / INDEX
    if single.exists():
        return [single]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: 'weight_map' must map tensors to files; download it again")
        files = [folder / str(name) for name in sorted({str(name) for name in weight_map.values()})]
        if missing := [file.name for file in files if not file.exists()]:
            raise ModelError(f"{index}: names {', '.join(missing)}, which {folder} does not hold; download the rest")
        return files
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        raise ModelError(
            f"{folder}: holds no .safetensors weights (it holds {listing(folder)}); "
            "convert .bin or .pt weights with transformers' save_pretrained, or choose a model that has safetensors"
        )
    return files


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """The safetensors file, memory-mapped. What is wrong with it becomes a ModelError."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: corrupt or truncated safetensors file ({error}); download it again") from error


# Filling


def _fill(model: Decoder, folder: Path, stored: dict[str, _Stored], progress: bool) -> None:
    """Stream every stored tensor to its place. ModelError names what does not fit."""
    filled = places(model)
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(IGNORED)}
    if not model.spec.has_head:
        del filled[LM_HEAD]
        stored.pop(LM_HEAD, None)
    if EMBEDDING.removeprefix(BODY) in stored:  # saved without what is around the body
        filled = {name.removeprefix(BODY): place for name, place in filled.items()}
    scales = {name: stored.pop(name) for name in list(stored) if _is_kv_scale(name, model.spec)}
    _check(filled, stored, folder, tied=model.spec.tie_word_embeddings)
    twice = model.spec.tie_word_embeddings and EMBEDDING in stored and LM_HEAD in stored
    total = sum(tensor.num_bytes for tensor in stored.values())
    with tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress) as bar:
        for file in dict.fromkeys(tensor.file for tensor in stored.values()):
            with _open(file) as opened:
                for name in (name for name, tensor in stored.items() if tensor.file == file):
                    if not (twice and name == LM_HEAD):
                        filled[name].copy_(opened.get_tensor(name))
                    bar.update(stored[name].num_bytes)
    _fill_kv_scales(model, scales)
    if twice:
        with _open(stored[LM_HEAD].file) as opened:
            if not torch.equal(opened.get_tensor(LM_HEAD).to(filled[LM_HEAD]), filled[LM_HEAD]):
                raise ModelError(
                    f"{stored[LM_HEAD].file}: {LM_HEAD!r} differs from {EMBEDDING!r} although config.json ties them; "
                    "set 'tie_word_embeddings' to false in config.json"
                )


def _is_kv_scale(name: str, spec: ModelSpec) -> bool:
    found = KV_SCALE.fullmatch(name)
    return found is not None and int(found["layer"]) < spec.num_layers


def _fill_kv_scales(model: Decoder, scales: dict[str, _Stored]) -> None:
    """One positive number for all KV heads of a layer, or one for each."""
    num_kv_heads = model.spec.num_kv_heads
    for name, tensor in scales.items():
        found = KV_SCALE.fullmatch(name)
        assert found
        if found["what"] in ("q", "prob"):
            continue
        with _open(tensor.file) as opened:
            scale = opened.get_tensor(name).float().flatten()
        if len(scale) not in (1, num_kv_heads) or not (scale.isfinite() & (scale > 0)).all():
            raise ModelError(
                f"{tensor.file}: {name!r} must be a positive number, or one for each of {num_kv_heads} KV heads, "
                f"got {scale.tolist()[:9]}"
            )
        layer = cast(DecoderLayer, model.layers[int(found["layer"])])
        places = {"k": slice(0, 1), "v": slice(1, 2), "kv": slice(0, 2)}
        layer.attention.kv_scale[places[found["what"]]] = scale.to(layer.attention.kv_scale.device)


def _check(filled: dict[str, Tensor], stored: dict[str, _Stored], folder: Path, *, tied: bool) -> None:
    """Every place has its tensor, every tensor its place, and the shapes agree."""
    missing, extra = filled.keys() - stored.keys(), stored.keys() - filled.keys()
    if tied and len(missing & {EMBEDDING, LM_HEAD}) == 1:
        missing -= {EMBEDDING, LM_HEAD}
    advice = "are the weights and config.json of the same model?"
    if missing:
        raise ModelError(f"{folder}: the weights lack {_names(missing)}; {advice}")
    if extra:
        file = stored[min(extra)].file
        raise ModelError(f"{file}: holds {_names(extra)}, which config.json has no place for; {advice}")
    for name, tensor in stored.items():
        if list(filled[name].shape) != tensor.shape:
            want = list(filled[name].shape)
            raise ModelError(f"{tensor.file}: {name!r} has shape {tensor.shape}, config.json says {want}; {advice}")
        if tensor.dtype not in FLOATS:
            raise ModelError(
                f"{tensor.file}: {name!r} is stored as {tensor.dtype}; quantised weights are not supported yet"
            )


def _names(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(map(repr, first)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _fill_randomly(model: Decoder, seed: int) -> None:
    """Norms 1, all else normal of standard deviation 0.02: one kernel for each tensor, straight on its device."""
    generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
