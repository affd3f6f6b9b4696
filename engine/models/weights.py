"""Loads safetensors checkpoints into decoders.

A decoder's modules declare their tensors. Each tensor is copied from the file to its memory on the device, with a cast if
needed. One GPU reads whole tensors, see `reading`; a rank of several reads only its own part. Before that, the names and
shapes in all files are compared with the declarations: every tensor is used exactly once, and none is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models import classifier
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.files import Progress, listing, read_json, silent
from engine.models.formats import weight_formats
from engine.models.layers import Embedding, Linear
from engine.models.matrix import FLOAT_DTYPES, CheckpointModule, CheckpointTensor, Matrix, Scope
from engine.models.norms import Norm
from engine.models.reading import DTYPES, is_readable, read_tensors, tensor_ranges
from engine.models.shard import SINGLE, WHOLE, Communicator, Shard, SingleRank, Stage
from engine.models.spec import ModelSpec
from kernels import QuantizedWeight

INDEX = "model.safetensors.index.json"
BODY = "model."  # prefix of all names except those of the output head
EMBEDDING, LM_HEAD = BODY + "embed_tokens.weight", "lm_head.weight"
IGNORED = ".rotary_emb.inv_freq"  # a table in old checkpoints
# By safetensors' names; 1 for all others.
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}


def load_model(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress = silent,
    max_model_len: int | None = None,
    shard: Shard = SINGLE,
    stage: Stage = WHOLE,
    communicator: Communicator | None = None,
) -> Decoder:
    """Load the decoder of `spec` on `device` in `dtype` with the weights in `folder`; "dummy": random weights by `seed`.

    `max_model_len` limits the RoPE tables. With several ranks, loads the part of rank `shard` of `stage`, which uses
    `communicator`. Raises `ModelError` with a message of one line if the weights are missing, damaged or do not match the
    specification, or if they do not fit on the device.
    """
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ModelError(f"load_format must be auto, safetensors or dummy, got {load_format!r}")
    stored = {} if load_format == "dummy" else _stored_tensors(folder)
    scope = Scope(
        dtype=dtype,
        device=torch.device(device),
        weight_formats=weight_formats(spec.quantization),
        shard=shard,
        stage=stage,
        communicator=communicator or SingleRank(),
    )
    if load_format != "dummy":
        _matched(_without_memory(spec, scope, folder), stored, folder)
    try:
        model = Decoder(spec, scope, max_model_len=max_model_len)
        with torch.no_grad():
            if load_format == "dummy":
                _fill_randomly(model, scope.device, seed)
            else:
                _fill(model, folder, stored, progress, scope.device if _reads_whole(scope) else None)
    except torch.OutOfMemoryError as error:
        need = sum(bytes_of_parts(_without_memory(spec, scope, folder)).values())
        raise ModelError(f"{folder}: {need / 2**30:.1f} GiB of weights do not fit on {device}") from error
    return model


def _without_memory(spec: ModelSpec, scope: Scope, folder: Path) -> Decoder:
    """Create a decoder without memory for its weights. Raises `ModelError` if the shapes exceed any memory."""
    try:
        return Decoder(spec, replace(scope, device=torch.device("meta")), max_model_len=1)
    except RuntimeError as error:  # the number of bytes exceeds 64 bits
        raise ModelError(f"{folder / 'config.json'}: its tensors are too large ({error})") from None


def decoder_of_shapes(spec: ModelSpec, dtype: torch.dtype, folder: Path, shard: Shard = SINGLE) -> Decoder:
    """Create one rank's decoder on the "meta" device, without memory. Raises `ModelError` like `load_model`."""
    formats = weight_formats(spec.quantization)
    return _without_memory(spec, Scope(dtype, torch.device("meta"), formats, shard=shard), folder)


def bytes_of_parts(model: Decoder) -> dict[str, int]:
    """Return the bytes of the loaded weights: embedding, tables (of which a step reads only its tokens' rows), attention,
    mlp, experts, norms, head (0 if tied to the embedding).
    """
    found = dict.fromkeys(("embedding", "tables", "attention", "mlp", "experts", "norms", "head"), 0)
    for name, module in model.named_modules():
        if isinstance(module, CheckpointModule):
            num_bytes = sum(tensor.memory.nbytes for tensor in module.tensors())
            weight = getattr(module, "weight", None)
            if isinstance(weight, QuantizedWeight):  # quantised at load time: filling it also computes the scales
                num_bytes += weight.scale.nbytes
            found[_part_of(name, module)] += num_bytes
    if model.spec.tie_word_embeddings:
        found["head"] = 0
    return found


def _part_of(name: str, module: CheckpointModule) -> str:
    if isinstance(module, Norm):
        return "norms"
    if isinstance(module, Matrix) and not isinstance(module, Linear):
        return "experts"
    if isinstance(module, Embedding) and "per_layer" in name:
        return "tables"
    names = {"embed_tokens": "embedding", "lm_head": "head", "attention": "attention"}
    names |= {"mlp": "mlp", "per_layer": "mlp"}
    return next(names[each] for each in name.split(".") if each in names)


def checkpoint_tensors(model: Decoder) -> dict[str, CheckpointTensor]:
    """Return all tensors that a checkpoint of this decoder must contain, by name."""
    found: dict[str, CheckpointTensor] = {}
    for module in model.modules():
        if isinstance(module, CheckpointModule):
            for tensor in module.tensors():
                if (first := found.get(tensor.name)) is not None:  # another part of the same tensor
                    assert tensor.index != first.index or not tensor.spans, f"{tensor.name} is declared twice"
                    tensor = replace(first, others=(*first.others, tensor))
                found[tensor.name] = tensor
    return found


def _optional_tensors(model: Decoder) -> dict[str, Callable[[Tensor], None]]:
    """Return the optional tensors by name, with and without the prefix `BODY`."""
    found = {}
    for module in model.modules():
        if isinstance(module, CheckpointModule):
            for name, take in module.optional_tensors():
                found[name] = found[name.removeprefix(BODY)] = take
    return found


# Files


@dataclass(frozen=True, slots=True)
class _Stored:
    """The location of a stored tensor."""

    file: Path
    name: str
    shape: list[int]
    dtype: str  # safetensors' name

    @property
    def num_bytes(self) -> int:
        return BYTES.get(self.dtype, 1) * torch.Size(self.shape).numel()


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    """Read all tensors from the headers of the files. Raises `ModelError` for missing or damaged files and duplicate names."""
    stored: dict[str, _Stored] = {}
    for file in _files(folder):
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if name in stored:
                    raise ModelError(f"{file}: tensor {name!r} is also in {stored[name].file.name}; remove one file")
                header = opened.get_slice(name)
                stored[name] = _Stored(file, name, header.get_shape(), header.get_dtype())
    return stored


def _files(folder: Path) -> list[Path]:
    """Return model.safetensors, the shards listed in the index, or else all .safetensors files except Mistral's own format."""
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: 'weight_map' must map tensors to files; download it again")
        for name in weight_map.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelError(f"{index}: {name!r} is not a file name; download it again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ModelError(f"{index}: names {', '.join(missing)}, which {folder} does not hold; download the rest")
        return files
    files = sorted(
        file for file in folder.glob("*.safetensors") if file.is_file() and not file.name.startswith("consolidated")
    )
    if not files:
        raise ModelError(
            f"{folder}: holds no .safetensors weights (it holds {listing(folder)}); "
            "convert .bin or .pt weights with transformers' save_pretrained, or choose a model that has safetensors"
        )
    return files


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """Open a safetensors file, memory-mapped. Raises `ModelError` if it is invalid."""
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: corrupt or truncated safetensors file ({error}); download it again") from error


# Filling


class _Matched(NamedTuple):
    """Declared and stored tensors under the same names."""

    declared: dict[str, CheckpointTensor]
    stored: dict[str, _Stored]
    extras: dict[str, _Stored]  # optional tensors
    optional: dict[str, Callable[[Tensor], None]]


def _matched(model: Decoder, stored: dict[str, _Stored], folder: Path) -> _Matched:
    """Match declared and stored tensors. Raises `ModelError`, which names a mismatch."""
    declared = checkpoint_tensors(model)
    spec = model.spec
    drafts = tuple(f"layers.{spec.num_layers + i}." for i in range(spec.num_draft_layers))
    stored = {
        name: tensor
        for name, tensor in ((_renamed(name, spec), tensor) for name, tensor in stored.items())
        if not name.endswith(IGNORED) and not name.removeprefix(BODY).startswith((*drafts, *spec.unused))
    }
    if not spec.has_head:
        del declared[LM_HEAD]
        stored.pop(LM_HEAD, None)
    if spec.architecture.endswith(classifier.SUFFIX):
        stored.pop(classifier.HEAD, None)  # read by the API process
    if EMBEDDING.removeprefix(BODY) in stored:  # the model was saved without its head and prefix
        declared = {name.removeprefix(BODY): tensor for name, tensor in declared.items()}
    stored = _by_declared_names(declared, stored)
    optional = _optional_tensors(model)
    extras = {name: stored.pop(name) for name in list(stored) if name in optional}
    _check(declared, stored, folder, tied=spec.tie_word_embeddings)
    return _Matched(declared, stored, extras, optional)


def _renamed(name: str, spec: ModelSpec) -> str:
    for theirs, ours in spec.names:
        name = name.replace(theirs, ours)
    return name


def _fill(
    model: Decoder, folder: Path, stored: dict[str, _Stored], progress: Progress, device: torch.device | None
) -> None:
    """Copy every stored tensor to its memory. Raises `ModelError`, which names a mismatch.

    `device`: read whole tensors to it first; None: copy slices of mapped files.
    """
    declared, stored, extras, optional = _matched(model, stored, folder)
    stored = {name: tensor for name, tensor in stored.items() if not declared[name].memory.is_meta}
    tied = model.spec.tie_word_embeddings
    twice = stored.pop(LM_HEAD) if tied and EMBEDDING in stored and LM_HEAD in stored else None
    total = sum(tensor.num_bytes for tensor in stored.values())
    done, by_file = 0, defaultdict[Path, dict[str, CheckpointTensor]](dict)
    num_bytes = {(tensor.file, tensor.name): tensor.num_bytes for tensor in stored.values()}
    for name, tensor in stored.items():
        by_file[tensor.file][tensor.name] = declared[name]
    for file in {tensor.file for tensor in extras.values()}:
        with _open(file) as opened:
            for name, tensor in extras.items():
                if tensor.file == file:
                    _take(name, opened.get_tensor(tensor.name), optional[name], file)
    for file, tensors in by_file.items():
        for name, value in _values(file, tensors, device):
            progress("loading", done, total)
            if value is not None:
                tensors[name].fill(value)
            done += num_bytes[file, name]
    progress("loading", done, total)
    if twice is not None:
        _check_tied(declared[LM_HEAD], twice.file)


def _reads_whole(scope: Scope) -> bool:
    """Whether tensors are read whole, by threads; a rank of several reads its slices."""
    return scope.device.type == "cuda" and scope.shard.size == 1


def _values(
    file: Path, tensors: dict[str, CheckpointTensor], device: torch.device | None
) -> Iterator[tuple[str, Tensor | None]]:
    """Return the name and the value of each of a file's tensors; None for one that is in its memory already."""
    if device is not None:
        ranges = {name: each for name, each in tensor_ranges(file).items() if name in tensors}
        into = {
            name: tensors[name].memory
            for name, each in ranges.items()
            if not is_readable(each) and each.dtype in DTYPES and tensors[name].is_stored_so(DTYPES[each.dtype])
        }
        together = [each for name, each in ranges.items() if name in into or is_readable(each)]
        for name, value in read_tensors(file, together, device, into):
            yield name, None if name in into else value
        read = {each.name for each in together}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in read}
    if tensors:
        with _open(file) as opened:
            for name in tensors:
                yield name, opened.get_tensor(name)


def _by_declared_names(declared: dict[str, CheckpointTensor], stored: dict[str, _Stored]) -> dict[str, _Stored]:
    """Return the stored tensors with aliases replaced by declared names."""
    names = {alias: name for name, tensor in declared.items() for alias in tensor.aliases if name not in stored}
    return {names.get(name, name): tensor for name, tensor in stored.items()}


def _take(name: str, value: Tensor, take: Callable[[Tensor], None], file: Path) -> None:
    try:
        take(value)
    except ValueError as error:
        raise ModelError(f"{file}: {name!r} {error}") from None


def _check_tied(head: CheckpointTensor, file: Path) -> None:
    """Check that a stored head equals the embedding that it is tied to."""
    with _open(file) as opened:
        if not torch.equal(opened.get_tensor(LM_HEAD)[head.index].to(head.memory), head.memory):
            raise ModelError(
                f"{file}: {LM_HEAD!r} differs from {EMBEDDING!r} although config.json ties them; "
                "set 'tie_word_embeddings' to false in config.json"
            )


def _check(declared: dict[str, CheckpointTensor], stored: dict[str, _Stored], folder: Path, *, tied: bool) -> None:
    """Check that declared and stored tensors are the same, with equal shapes and allowed dtypes."""
    missing, extra = declared.keys() - stored.keys(), stored.keys() - declared.keys()
    if tied and len(missing & {EMBEDDING, LM_HEAD}) == 1:
        missing -= {EMBEDDING, LM_HEAD}
    advice = "are the weights and config.json of the same model?"
    if missing:
        raise ModelError(f"{folder}: the weights lack {_names(missing)}; {advice}")
    if extra:
        file = stored[min(extra)].file
        raise ModelError(f"{file}: holds {_names(extra)}, which config.json has no place for; {advice}")
    for name, tensor in stored.items():
        want = declared[name]
        if _significant(want.shape) != _significant(tensor.shape):
            raise ModelError(
                f"{tensor.file}: {name!r} has shape {tensor.shape}, config.json says {want.shape}; {advice}"
            )
        if tensor.dtype not in want.dtypes:
            said = "floats" if want.dtypes == FLOAT_DTYPES else ", ".join(sorted(want.dtypes))
            raise ModelError(
                f"{tensor.file}: {name!r} is stored as {tensor.dtype}, config.json ('quantization_config') says {said}; {advice}"
            )


def _significant(shape: list[int]) -> list[int]:
    """Return a shape without dimensions of 1: checkpoints store scales as [], [1], [N] or [N, 1]."""
    return [n for n in shape if n != 1]


def _names(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(map(repr, first)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _fill_randomly(model: Decoder, device: torch.device, seed: int) -> None:
    """Fill with random weights on the device: norms 1, integers arbitrary, all others normal with standard deviation 0.02."""
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Matrix) and module.is_here:
            module.format.fill_randomly(module, generator)
    norms = {id(module.weight) for module in model.modules() if isinstance(module, Norm)}
    for parameter in model.parameters():
        if id(parameter) in norms:
            parameter.fill_(1.0)
        elif parameter.is_floating_point():
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.random_(generator=generator)
