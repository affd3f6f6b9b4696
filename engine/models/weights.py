"""Loads checkpoints into decoders.

A decoder's modules declare their tensors. Each tensor is copied from the checkpoint to its memory on the device, with a
cast if needed. One GPU reads whole tensors; a rank of several reads only its own part. Before that, the names and
shapes in the checkpoint are compared with the declarations: every tensor is used exactly once, and none is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.models import classifier
from engine.models.checkpoints import Checkpoint, RandomWeights, SafetensorsFolder, StoredTensor
from engine.models.checkpoints.adapted import AdaptedCheckpoint
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.files import Progress, silent
from engine.models.formats import weight_formats
from engine.models.layers import Embedding, Linear
from engine.models.matrix import FLOAT_DTYPES, CheckpointModule, CheckpointTensor, Matrix, Scope
from engine.models.norms import Norm
from engine.models.pooling_head import HeadLayer
from engine.models.quantization import renamed
from engine.models.shard import SINGLE, Shard
from engine.models.spec import ModelSpec
from kernels import QuantizedWeight, compute_capability

BODY = "model."  # prefix of all names except those of the output head
EMBEDDING, LM_HEAD = BODY + "embed_tokens.weight", "lm_head.weight"
# Tables and masks that old checkpoints hold although they are computed, and heads of training: skipped if the model has
# no such weights.
COMPUTED = (
    *(".inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".embed_positions"),
    *(".masked_bias", ".attn.bias", ".attention.bias"),
)
HEADS = ("score.", "v_head.", "value_head.", "reward_head.", "classifier.")

logger = logging.getLogger(__name__)


def load_model(
    checkpoint: Checkpoint | RandomWeights,
    spec: ModelSpec,
    scope: Scope,
    *,
    progress: Progress = silent,
    max_model_len: int | None = None,
    own_rows: int = 0,
) -> Decoder:
    """Load the decoder of `spec`: one rank's part, as `scope` says, on its device and in its dtype.

    `max_model_len` limits the RoPE tables, which have `own_rows` more, see `Decoder`. Raises `ModelError` with a
    message of one line if the weights are missing, damaged or do not match the specification, or if they do not fit on
    the device.
    """
    stored: dict[str, StoredTensor] = {}
    if spec.adaptations is not None and isinstance(checkpoint, Checkpoint):
        checkpoint = AdaptedCheckpoint(checkpoint, spec.adaptations)
    if isinstance(checkpoint, Checkpoint):
        stored = checkpoint.tensors()
        matched = _matched(_without_memory(spec, scope, checkpoint.origin), stored, checkpoint.origin)
        if not scope.shard.rank:
            _log_skipped(matched, checkpoint.origin)
    try:
        model = Decoder(spec, scope, max_model_len=max_model_len, own_rows=own_rows)
        with torch.no_grad():
            if isinstance(checkpoint, Checkpoint):
                _fill(model, checkpoint, stored, progress, scope.device if _reads_whole(scope) else None)
                _fill_modules(model, Path(checkpoint.origin))
            else:
                fill_randomly(model, scope.device, checkpoint.seed)
    except torch.OutOfMemoryError as error:
        own = compute_capability(scope.device) if scope.device.type == "cuda" else None
        need = sum(bytes_of_parts(_without_memory(spec, scope, checkpoint.origin), own).values())
        raise ModelError(
            f"{checkpoint.origin}: {need / 2**30:.1f} GiB of weights do not fit on {scope.device}"
        ) from error
    return model


def _without_memory(spec: ModelSpec, scope: Scope, origin: str) -> Decoder:
    """Create a decoder without memory for its weights. Raises `ModelError` if the shapes exceed any memory."""
    try:
        return Decoder(spec, replace(scope, device=torch.device("meta")), max_model_len=1)
    except RuntimeError as error:  # the number of bytes exceeds 64 bits
        raise ModelError(f"{origin}/config.json: its tensors are too large ({error})") from None


def decoder_of_shapes(spec: ModelSpec, dtype: torch.dtype, folder: Path, shard: Shard = SINGLE) -> Decoder:
    """Create one rank's decoder on the "meta" device, without memory. Raises `ModelError` like `load_model`."""
    formats = weight_formats(spec.quantization)
    return _without_memory(spec, Scope(dtype, torch.device("meta"), formats, shard=shard), str(folder))


def bytes_of_parts(model: Decoder, capability: tuple[int, int] | None) -> dict[str, int]:
    """Return the bytes of the loaded weights by part, on a GPU of this compute capability; None: no GPU.

    Parts: embedding, tables (a step reads only its tokens' rows of these), attention, mlp, experts, norms, head (0 if
    tied to the embedding), vision (the encoder of images).
    """
    found = dict.fromkeys(("embedding", "tables", "attention", "mlp", "experts", "norms", "head", "vision"), 0)
    for name, module in model.named_modules():
        if isinstance(module, CheckpointModule):
            found[_part_of(name, module)] += _own_bytes(module, capability)
    if model.spec.tie_word_embeddings:
        found["head"] = 0
    return found


def num_bytes(part: nn.Module, capability: tuple[int, int] | None) -> int:
    """Return the bytes of the loaded weights of a part of a model."""
    return sum(_own_bytes(module, capability) for module in part.modules() if isinstance(module, CheckpointModule))


def _own_bytes(module: CheckpointModule, capability: tuple[int, int] | None) -> int:
    """Return the bytes of a module's loaded weights, without those of its submodules."""
    found = sum(tensor.memory.nbytes for tensor in module.tensors())
    weight = getattr(module, "weight", None)
    if isinstance(weight, QuantizedWeight):  # quantised at load time: filling it also computes the scales
        found += weight.scale.nbytes
    return found + module.format.growth(module, capability) if isinstance(module, Matrix) else found


def _part_of(name: str, module: CheckpointModule) -> str:
    if name.startswith("vision."):
        return "vision"
    if isinstance(module, Norm):
        return "norms"
    if isinstance(module, Matrix) and not isinstance(module, Linear):
        return "experts"
    if isinstance(module, Embedding) and "per_layer" in name:
        return "tables"
    names = {"embed_tokens": "embedding", "lm_head": "head", "attention": "attention"}
    names |= {"mlp": "mlp", "per_layer": "mlp", "positions": "tables", "token_types": "tables"}
    names |= {"embedding_projection": "mlp", "altup": "mlp", "streams": "mlp"}
    if "lm_head" not in name and "head" in name.split("."):  # after pooling
        return "mlp"
    return next(names[each] for each in name.split(".") if each in names)


def checkpoint_tensors(model: nn.Module) -> dict[str, CheckpointTensor]:
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


def _optional_tensors(model: nn.Module) -> dict[str, Callable[[Tensor], None]]:
    """Return the optional tensors by name, with and without the prefix `BODY`."""
    found = {}
    for module in model.modules():
        if isinstance(module, CheckpointModule):
            for name, take in module.optional_tensors():
                found[name] = found[name.removeprefix(BODY)] = take
    return found


# Filling


class _Matched(NamedTuple):
    """Declared and stored tensors under the same names."""

    declared: dict[str, CheckpointTensor]
    stored: dict[str, StoredTensor]
    extras: dict[str, StoredTensor]  # optional tensors
    optional: dict[str, Callable[[Tensor], None]]
    needless: list[str]  # stored tensors that are not loaded: computed tables, heads of training
    other_input: list[str]  # those that are not loaded since they read images or sound


def _matched(model: Decoder, stored: dict[str, StoredTensor], origin: str) -> _Matched:
    """Match declared and stored tensors. Raises `ModelError`, which names a mismatch."""
    declared = checkpoint_tensors(model)
    spec = model.spec
    drafts = tuple(f"layers.{spec.num_layers + i}." for i in range(spec.num_draft_layers))
    stored = {renamed(name, spec.names): tensor for name, tensor in stored.items()}
    skipped = {name for name in stored if name.removeprefix(BODY).startswith((*drafts, *spec.unused))}
    other_input = {name for name in stored if name.removeprefix(BODY).startswith(spec.other_input)}
    stored = {name: tensor for name, tensor in stored.items() if name not in skipped | other_input}
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
    needless = [name for name in stored.keys() - declared.keys() if _is_needless(name)]
    stored = {name: tensor for name, tensor in stored.items() if name not in needless}
    _check_encoder(model, stored, origin)
    _check(declared, stored, origin, tied=spec.tie_word_embeddings)
    return _Matched(declared, stored, extras, optional, sorted(needless), sorted(other_input))


def _is_needless(name: str) -> bool:
    return name.endswith(COMPUTED) or name.startswith(HEADS)


def _log_skipped(matched: _Matched, origin: str) -> None:
    """Log tensors that are not loaded, in one line for each reason."""
    if names := matched.other_input:
        logger.info("%s: text only: %d tensors for images or sound are not loaded", origin, len(names))
    if names := matched.needless:
        logger.info("%s: %d tensors that are not needed are skipped: %s", origin, len(names), _names(set(names)))


def _fill(
    model: Decoder,
    checkpoint: Checkpoint,
    stored: dict[str, StoredTensor],
    progress: Progress,
    device: torch.device | None,
) -> None:
    """Copy every stored tensor to its memory. Raises `ModelError`, which names a mismatch.

    `device`: read whole tensors to it first; None: copy this rank's slices.
    """
    matched = _matched(model, stored, checkpoint.origin)
    declared, stored, extras, optional = matched.declared, matched.stored, matched.extras, matched.optional
    ours = {tensor.name: name for name, tensor in extras.items()}
    for stored_name, extra in checkpoint.read(ours):
        name = ours[stored_name]
        _take(name, extra, optional[name], extras[name].source)
    stored = {name: tensor for name, tensor in stored.items() if not declared[name].memory.is_meta}
    tied = model.spec.tie_word_embeddings
    twice = stored.pop(LM_HEAD) if tied and EMBEDDING in stored and LM_HEAD in stored else None
    total, done = sum(tensor.num_bytes for tensor in stored.values()), 0
    num_bytes = {tensor.name: tensor.num_bytes for tensor in stored.values()}
    wanted = {tensor.name: declared[name] for name, tensor in stored.items()}
    for name, value in checkpoint.read_for(wanted) if device is None else checkpoint.read_to(device, wanted):
        progress("loading", done, total)
        if value is not None:
            wanted[name].fill(value)
        done += num_bytes[name]
    progress("loading", done, total)
    if twice is not None:
        _check_tied(declared[LM_HEAD], checkpoint, twice)


def fill_part(part: nn.Module, checkpoint: Checkpoint, stored: dict[str, StoredTensor]) -> None:
    """Fill a part of a model from those tensors that it declares. `stored`: all of the checkpoint, by declared names.

    Raises `ModelError`, which names a mismatch.
    """
    declared, optional = checkpoint_tensors(part), _optional_tensors(part)
    stored = _by_declared_names(declared, stored)
    own = {name: tensor for name, tensor in stored.items() if name in declared}
    _check(declared, own, checkpoint.origin, tied=False)
    ours = {stored[name].name: name for name in optional if name in stored}
    for stored_name, extra in checkpoint.read(ours):
        name = ours[stored_name]
        _take(name, extra, optional[name], stored[name].source)
    wanted = {tensor.name: declared[name] for name, tensor in own.items()}
    for name, value in checkpoint.read(wanted):
        wanted[name].fill(value)


def _fill_modules(model: Decoder, folder: Path) -> None:
    """Fill the layers after pooling that sentence-transformers stores in folders of their own."""
    for layer in model.head.layers if model.head is not None else ():
        assert isinstance(layer, HeadLayer)
        if layer.spec.folder:
            own = SafetensorsFolder(folder / layer.spec.folder)
            declared, stored = {tensor.name: tensor for tensor in layer.own_tensors()}, own.tensors()
            _check(declared, stored, own.origin, tied=False)
            for name, value in own.read(declared):
                declared[name].fill(value)


def _reads_whole(scope: Scope) -> bool:
    """Return True if tensors are read whole; a rank of several reads its slices."""
    return scope.device.type == "cuda" and scope.shard.size == 1


def _by_declared_names(
    declared: dict[str, CheckpointTensor], stored: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the stored tensors with aliases replaced by declared names."""
    names = {alias: name for name, tensor in declared.items() for alias in tensor.aliases if name not in stored}
    return {names.get(name, name): tensor for name, tensor in stored.items()}


def _take(name: str, value: Tensor, take: Callable[[Tensor], None], source: str) -> None:
    try:
        take(value)
    except ValueError as error:
        raise ModelError(f"{source}: {name!r} {error}") from None


def _check_tied(head: CheckpointTensor, checkpoint: Checkpoint, stored: StoredTensor) -> None:
    """Check that a stored head equals the embedding that it is tied to."""
    for _, value in checkpoint.read([stored.name]):
        if not torch.equal(value[head.index].to(head.memory), head.memory):
            raise ModelError(
                f"{stored.source}: {LM_HEAD!r} differs from {EMBEDDING!r} although config.json ties them; "
                "set 'tie_word_embeddings' to false in config.json"
            )


def _check_encoder(model: Decoder, stored: dict[str, StoredTensor], origin: str) -> None:
    """Check that a model that reads images was saved with its encoder: fine-tunes of the text often are not."""
    encoder = () if model.vision is None else checkpoint_tensors(model.vision)
    names = {name.removeprefix(BODY) for name in encoder}
    if names and names.isdisjoint(name.removeprefix(BODY) for name in stored):
        raise ModelError(f"{origin}: holds no encoder of images; --language-model-only serves the text model")


def _check(declared: dict[str, CheckpointTensor], stored: dict[str, StoredTensor], origin: str, *, tied: bool) -> None:
    """Check that declared and stored tensors are the same, with equal shapes and allowed dtypes."""
    missing, extra = declared.keys() - stored.keys(), stored.keys() - declared.keys()
    if tied and len(missing & {EMBEDDING, LM_HEAD}) == 1:
        missing -= {EMBEDDING, LM_HEAD}
    advice = "are the weights and config.json of the same model?"
    if missing:
        raise ModelError(f"{origin}: the weights lack {_names(missing)}; {advice}")
    if extra:
        raise ModelError(
            f"{stored[min(extra)].source}: holds {_names(extra)}, which config.json has no place for; {advice}"
        )
    for name, tensor in stored.items():
        want = declared[name]
        is_turned = want.turns and tensor.shape == [*want.shape[:-2], *want.shape[:-3:-1]]
        if not is_turned and _significant(want.shape) != _significant(tensor.shape):
            raise ModelError(
                f"{tensor.source}: {name!r} has shape {tensor.shape}, config.json says {want.shape}; {advice}"
            )
        if tensor.dtype not in want.dtypes:
            said = "floats" if want.dtypes == FLOAT_DTYPES else ", ".join(sorted(want.dtypes))
            raise ModelError(
                f"{tensor.source}: {name!r} is stored as {tensor.dtype}, "
                f"config.json ('quantization_config') says {said}; {advice}"
            )


def _significant(shape: list[int]) -> list[int]:
    """Return a shape without dimensions of 1: checkpoints store scales as [], [1], [N] or [N, 1]."""
    return [n for n in shape if n != 1]


def _names(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(map(repr, first)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def fill_randomly(model: nn.Module, device: torch.device, seed: int) -> None:
    """Fill with random weights on the device: norms 1, integers uniform, others normal with standard deviation 0.02."""
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
