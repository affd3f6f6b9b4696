"""Loads drafters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.models.checkpoints import Checkpoint, NamedTensors, RandomWeights, StoredTensor, open_checkpoint
from engine.models.decoder import Decoder, pack_weights
from engine.models.drafters.dflash import CONFIDENCE, BlockDrafter
from engine.models.drafters.draft_head import CutHead, check_head, of_head
from engine.models.drafters.eagle3 import Eagle3Head
from engine.models.drafters.mtp import MTPHead, cos_sin_of, mtp_names
from engine.models.drafters.spec import DraftSpec
from engine.models.errors import ModelError
from engine.models.files import Progress, silent
from engine.models.formats import weight_formats
from engine.models.matrix import FLOAT_DTYPES, Scope
from engine.models.quantization import renamed
from engine.models.shard import SINGLE, Shard
from engine.models.spec import LayerSpec, ModelSpec, MoESpec
from engine.models.weights import bytes_of_parts, decoder_of_shapes, fill_part, fill_randomly, load_model, num_bytes

STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
BIN = "pytorch_model.bin"
MIDLAYER = ("layers.0.", "midlayer.")  # of heads whose layer has the other name

Drafter = Decoder | MTPHead | Eagle3Head | BlockDrafter


def load_drafter(
    spec: DraftSpec,
    target: Decoder,
    target_spec: ModelSpec,
    scope: Scope,
    *,
    max_model_len: int,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress = silent,
) -> Drafter:
    """Load one rank's part of a drafter, ready to run. `target`: of this rank; `target_spec`: the whole one.

    `scope`: of the target. Raises `ModelError` with a message of one line if the weights do not match.
    """
    checkpoint = _open(spec, load_format, seed)
    if spec.method == "draft_model":
        own = replace(scope, weight_formats=weight_formats(spec.model.quantization))
        model = load_model(checkpoint, spec.model, own, progress=progress, max_model_len=max_model_len)
        model.pack_weights()
        return model
    stored = {} if isinstance(checkpoint, RandomWeights) else _renamed(checkpoint, spec)
    drafter = _head(spec, target, target_spec, scope, stored, max_model_len)
    with torch.no_grad():
        if isinstance(checkpoint, RandomWeights):
            fill_randomly(drafter, scope.device, checkpoint.seed)
        else:
            fill_part(drafter, checkpoint, stored)
    pack_weights(drafter)
    return drafter


def holds_mtp(folder: Path, spec: ModelSpec, load_format: str = "auto") -> bool:
    """Return whether the checkpoint in `folder` holds prediction layers that method mtp can use. config.json may
    announce layers that it lacks.
    """
    names = mtp_names(spec)
    if names is None or load_format == "dummy":
        return names is not None
    if not list(folder.glob("*.safetensors")):
        return False
    checkpoint = open_checkpoint(folder, load_format, 0, spec.quantization)
    assert not isinstance(checkpoint, RandomWeights)
    return any(renamed(name, spec.names).startswith(names.root + ".") for name in checkpoint.tensors())


def drafter_bytes(
    spec: DraftSpec,
    target: Decoder,
    target_spec: ModelSpec,
    dtype: torch.dtype,
    shard: Shard = SINGLE,
    capability: tuple[int, int] | None = None,
) -> int:
    """Return the bytes of one rank's part of a drafter. `target`: without memory, as `decoder_of_shapes` returns it.
    `capability`: see `bytes_of_parts`.
    """
    if spec.method == "draft_model":
        return sum(bytes_of_parts(decoder_of_shapes(spec.model, dtype, spec.folder, shard), capability).values())
    scope = Scope(dtype, torch.device("meta"), weight_formats(spec.model.quantization), shard)
    return num_bytes(_head(spec, target, target_spec, scope, {}, num_positions=1), capability)


def _head(
    spec: DraftSpec,
    target: Decoder,
    target_spec: ModelSpec,
    scope: Scope,
    stored: dict[str, StoredTensor],
    num_positions: int,
) -> MTPHead | Eagle3Head | BlockDrafter:
    """Create a drafter that uses the target's embedding and, with `mtp`, its output head."""
    if spec.method == "mtp":
        return _mtp(spec, target, target_spec, scope, stored)
    floats = replace(scope, weight_formats=weight_formats(None))
    if spec.block is not None:
        has_embedding, has_head = (f"{name}.weight" in stored for name in ("embed_tokens", "lm_head"))
        block = replace(spec.block, has_embedding=has_embedding, has_head=has_head)
        return BlockDrafter(spec.model, block, num_positions, floats, of_head(floats, spec))
    assert spec.eagle3 is not None
    eagle3 = replace(spec.eagle3, has_embedding="embed_tokens.weight" in stored)
    return Eagle3Head(spec.model, eagle3, num_positions, floats, of_head(floats, spec))


def _mtp(
    draft: DraftSpec, target: Decoder, target_spec: ModelSpec, scope: Scope, stored: dict[str, StoredTensor]
) -> MTPHead:
    spec, origin, names = draft.model, str(draft.folder), mtp_names(target_spec)
    assert names is not None, "a model without prediction layers is refused"
    own = {name: tensor for name, tensor in stored.items() if name.startswith(names.root + ".")}
    if stored and not own:
        raise ModelError(f"{origin}: holds no prediction layer, {names.root!r}: method mtp needs it")
    head = None
    if draft.has_own_head:
        check_head(target_spec, stored, origin)
        head = CutHead(of_head(scope, draft), draft.token_ids or range(target_spec.vocab_size), target_spec)
    if all(tensor.dtype in FLOAT_DTYPES for tensor in own.values()):  # though others may be quantised
        scope = replace(scope, weight_formats=weight_formats(None))
    if any(name.endswith(STACKED[0]) for name in own):
        spec = replace(spec, layers=tuple(map(_stacked, spec.layers)))
    found = MTPHead(spec, names, cos_sin_of(target, spec), scope)
    found.lm_head = head
    return found


def _stacked(layer: LayerSpec) -> LayerSpec:
    """Return a layer whose experts are stored in stacked tensors."""
    assert isinstance(layer.mlp, MoESpec)
    return replace(layer, mlp=replace(layer.mlp, names=replace(layer.mlp.names, stacked=STACKED, suffix="_")))


def _open(spec: DraftSpec, load_format: str, seed: int) -> Checkpoint | RandomWeights:
    file = spec.folder / BIN
    if load_format == "dummy" or not file.is_file() or list(spec.folder.glob("*.safetensors")):
        return open_checkpoint(spec.folder, load_format, seed, spec.model.quantization)
    return NamedTensors(_read_bin(file), str(spec.folder))


def _read_bin(file: Path) -> dict[str, torch.Tensor]:
    """Read a file of PyTorch's, without running code that it may hold."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # zip, pickle and others
        raise ModelError(f"{file}: cannot be read ({type(error).__name__})") from None
    if not isinstance(tensors, dict):
        raise ModelError(f"{file}: must hold tensors by name")
    return {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor) and each.dtype != torch.bool}


def _renamed(checkpoint: Checkpoint, spec: DraftSpec) -> dict[str, StoredTensor]:
    """Return the stored tensors under Quire's names."""
    stored = checkpoint.tensors()
    if spec.method == "dflash":
        return {name: each for name, each in stored.items() if not name.startswith(CONFIDENCE)}
    if spec.method == "eagle3":
        old, new = MIDLAYER
        return {new + name.removeprefix(old) if name.startswith(old) else name: each for name, each in stored.items()}
    return {renamed(name, spec.model.names): tensor for name, tensor in stored.items()}
