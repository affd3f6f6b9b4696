"""LoRA adapters of a decoder: which layers may have them, where they lie in a slot, and how PEFT's tensors fill it.

A slot is one piece of memory for each dtype, so that loading an adapter into it takes two copies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import kernels
from engine.models.attention import Attention
from engine.models.checkpoints.safetensors import open_safetensors
from engine.models.classifier import MAX_LABELS
from engine.models.decoder import Decoder
from engine.models.errors import ModelError
from engine.models.expert_adapters import UNIT, ExpertAdapters, ExpertTarget
from engine.models.formats.floats import FloatFormat
from engine.models.kda import KimiDeltaAttention
from engine.models.latent import LatentAttention
from engine.models.layers import Linear, LMHead, RowsLinear
from engine.models.lora import ADAPTER_HEADS, ADVICE, PREFIX, WEIGHTS, AdapterConfig, read_adapter_config
from engine.models.mamba2 import Mamba2
from engine.models.matrix import FLOAT_DTYPES, Part
from engine.models.mlp import MLP
from engine.models.moe import MoE
from engine.models.per_layer import PerLayerInput
from engine.models.recurrent import GatedDeltaNet, ShortConv
from engine.models.shard import Span
from engine.models.spec import ModelSpec
from engine.models.vocab_adapters import ROW_KINDS, VocabAdapters, VocabTensor, name_of, plain_weight

OWNERS = (
    Attention,
    LatentAttention,
    GatedDeltaNet,
    Mamba2,
    KimiDeltaAttention,
    ShortConv,
    MLP,
    PerLayerInput,
)  # of layers that are adapted
ALIGNMENT = UNIT  # values: addresses of a matrix in a slot
RANKS = 16  # a slot's ranks are padded to a multiple
EYE_ROWS = 256  # rows of the identity that a packed matrix is multiplied by at a time
# The end of a tensor's name → what it is. PEFT writes an adapter's name only while it has several.
KINDS = re.compile(
    r"(?P<module>.+?)\.(?:(?P<kind>lora_A|lora_B|lora_magnitude_vector)(?:\.(?:weight|default|default\.weight))?"
    r"|lora_B\.(?P<lora_bias>bias)|(?:base_layer\.)?(?P<bias>bias))"
)
CLASSIFIERS = re.compile(r"(score|classifier)\b")  # names of heads
WHOLE_MODULE = re.compile(r"(embed|wte|lm_head|lora_embedding_)")


class Target(NamedTuple):
    """One projection of a linear layer: a matrix of the checkpoint that an adapter may change."""

    layer: int  # index in `AdapterLayout.layers`
    group: int  # of A
    part: Part
    first_row: int  # of the part, in the layer's result


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """A linear layer, and where its adapter lies in a slot."""

    linear: Linear
    groups: tuple[kernels.RowGroup, ...]
    num_ranks: int  # rows of A of all groups
    down: int  # offset in the slot's values: [num_ranks, in]
    up: int  # [out, R]
    factor: int  # offset in the slot's floats: [out]
    shift: int  # [out]
    is_own: bool  # otherwise another pipeline stage has it, and there is nothing of it in a slot

    @property
    def out(self) -> int:
        return self.linear.num_rows

    @property
    def channels(self) -> int:
        return len(self.linear.columns)

    @property
    def adds_shift(self) -> bool:
        """True if this rank adds the bias: ranks that compute partial sums of one result add it only once."""
        return len(self.linear.columns) == self.linear.columns.total or self.linear.shard.rank == 0


@dataclass(slots=True)
class LoadedAdapter:
    """One rank's part of an adapter in host memory, as a slot holds it. DoRA's factors need the base weights."""

    values: Tensor  # [V], in the model's dtype
    floats: Tensor  # [F] float32; with DoRA, magnitudes instead of factors
    dora: dict[int, list[slice]] = field(default_factory=dict)  # layer → its rows with DoRA
    biases: dict[int, list[slice]] = field(default_factory=dict)  # layer → rows whose bias replaces the base's


class AdapterLayout:
    """The layers of a decoder that may have adapters: those of mixers and of dense MLPs, and experts."""

    def __init__(
        self,
        model: Decoder,
        spec: ModelSpec,
        max_rank: int,
        dtype: torch.dtype,
        experts: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        """`model`: may be on the "meta" device. `max_rank`: the most that an adapter's rank may be. `experts`: a slot
        has room for adapters of experts. `max_tokens`: and for those of the embedding and the head, with so many
        retrained rows; None: for none.
        """
        self.spec, self.max_rank, self.dtype = spec, max_rank, dtype
        self.rank = -(-max_rank // RANKS) * RANKS
        self.layers: list[LayerLayout] = []
        self.targets: dict[str, list[Target]] = {}  # a matrix's name in the checkpoint → where it is computed
        self.num_values = self.num_floats = 0
        self._head = -1  # index in `layers`
        others = _of_other_stages(model)
        for linear in _adaptable(model):
            self._add(linear, linear not in others)
        if max_tokens is not None and not spec.head_normed:
            self._head = len(self.layers)
            self._add(model.lm_head, model.stage.is_last)
        self.own_layers = [layer for layer in self.layers if layer.is_own]
        self.experts = ExpertAdapters(self.rank)
        for module in model.modules() if experts else ():
            if isinstance(module, MoE):
                self.num_values = self.experts.add(module, module not in others, self.num_values)
        self.vocab: VocabAdapters | None = None
        if max_tokens is not None:
            self.vocab = VocabAdapters(model, self.rank, max_tokens)
            self.num_values, self.num_floats = self.vocab.reserve(self.num_values, self.num_floats, ALIGNMENT)
        self._norms: dict[int, Tensor] = {}  # layer → squared norms of this rank's part of each row [out] float32

    def _add(self, linear: Linear, is_own: bool) -> None:
        names = list(dict.fromkeys(part.name for part in linear.parts))
        groups: list[kernels.RowGroup] = []
        start = 0
        for part in linear.parts:
            group = names.index(part.name)
            self.targets.setdefault(part.name, []).append(Target(len(self.layers), group, part, start))
            stop = start + len(part.rows)
            if groups and groups[-1].number == group:
                groups[-1] = groups[-1]._replace(stop=stop)
            else:
                groups.append(kernels.RowGroup(start, stop, group))
            start = stop
        num_ranks, out = len(names) * self.rank, linear.num_rows
        down = self.num_values
        up = _aligned(down + num_ranks * len(linear.columns))
        factor = self.num_floats
        shift = _aligned(factor + out)
        if is_own:
            self.num_values, self.num_floats = _aligned(up + out * self.rank), _aligned(shift + out)
        self.layers.append(LayerLayout(linear, tuple(groups), num_ranks, down, up, factor, shift, is_own))

    @property
    def slot_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize + self.num_floats * 4

    def attach(self, values: Tensor, floats: Tensor) -> None:
        """Let the layers read adapters from slots: values [S, V], floats [S, F] float32, which become empty slots."""
        values.zero_()
        self.experts.attach(values)
        if self.vocab is not None:
            self.vocab.attach(values, floats)
        for layer in self.own_layers:
            if not layer.out:
                continue  # of a vocabulary's last rank
            down, up = self._matrices(layer, values)
            factor, shift = self._vectors(layer, floats)
            factor.fill_(1.0)
            shift.zero_()
            blocks = kernels.LoraWeights.blocks_of(layer.groups, values.device)
            extended = None
            if layer.linear.split is None and not isinstance(layer.linear, LMHead):
                extended = kernels.extended_weight(layer.linear.uncompressed, len(values) * layer.num_ranks)
            if extended is not None:
                layer.linear.set_weight(extended[: layer.out])
            layer.linear.adapters = kernels.LoraWeights(down, up, factor, shift, layer.groups, *blocks, extended)

    def _matrices(self, layer: LayerLayout, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the views A [..., G · R, in] and B [..., out, R] of values [..., V]."""
        sizes = layer.num_ranks * layer.channels, layer.out * self.rank
        down, up = (values.narrow(-1, at, size) for at, size in zip((layer.down, layer.up), sizes, strict=True))
        return down.unflatten(-1, (layer.num_ranks, layer.channels)), up.unflatten(-1, (layer.out, self.rank))

    @staticmethod
    def _vectors(layer: LayerLayout, floats: Tensor) -> tuple[Tensor, Tensor]:
        return floats.narrow(-1, layer.factor, layer.out), floats.narrow(-1, layer.shift, layer.out)

    def read(self, folder: Path, into: LoadedAdapter) -> None:
        """Read this rank's part of the adapter in `folder`, whose memory may hold an older one.

        Raises `ModelError` with a message of one line for an adapter that does not fit this model or is damaged.
        """
        config = read_adapter_config(folder)
        if config.most_rank > self.max_rank:
            raise ModelError(
                f"{config.path}: rank {config.most_rank}, above max_lora_rank={self.max_rank}; start with more"
            )
        into.values.zero_()
        into.floats.zero_()  # also what lies between the layers' numbers: all is checked below
        for layer in self.own_layers:
            factor, shift = self._vectors(layer, into.floats)
            factor.fill_(1.0)
            shift.zero_()
        into.dora, into.biases = {}, {}
        path = folder / WEIGHTS
        with open_safetensors(path, folder) as opened:
            found = self._checked(config, opened)
            for name, tensor in found.items():
                value = opened.get_tensor(name)
                if not _is_finite(value):
                    raise ModelError(f"{path}: {name!r} holds NaN or infinity")
                if tensor.vocab is None and tensor.kind != "score":
                    self._fill(config, tensor, value, into)
            if self.vocab is not None:
                own = {name: tensor.vocab for name, tensor in found.items() if tensor.vocab is not None}
                if problem := self.vocab.fill(config, own, opened.get_tensor, into.values, into.floats):
                    raise ModelError(f"{path}: {problem}")
                if self._head in into.dora and self.vocab.retrains_head(into.floats):
                    raise ModelError(f"{path}: has DoRA of an output head with retrained rows: not served; {ADVICE}")
        if not (_is_finite(into.values) and _is_finite(into.floats)):
            raise ModelError(f"{path}: holds values beyond the range of {_name(self.dtype)}")

    def _checked(self, config: AdapterConfig, opened: Any) -> dict[str, _PeftTensor]:
        """Return what each tensor is, before any is read. Raises `ModelError` if one does not fit."""
        path, found = config.path.parent / WEIGHTS, {}
        halves: dict[str, set[str]] = {}
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            tensor = self._tensor(config, name)
            header = opened.get_slice(name)
            if header.get_dtype() not in FLOAT_DTYPES:
                raise ModelError(f"{path}: {name!r} is stored as {header.get_dtype()}, adapters are floats")
            has = header.get_shape()
            if tensor.kind == "score":  # read by the API process, see `read_adapter_classifier`
                if len(has) != 2 or not 1 <= has[0] <= MAX_LABELS or has[1] != self.spec.hidden_size:
                    wanted = f"[1 to {MAX_LABELS}, {self.spec.hidden_size}]"
                    raise ModelError(f"{path}: {name!r} has shape {has}, it must be {wanted}{_other_base(config)}")
            elif tensor.vocab is not None:
                assert self.vocab is not None
                if problem := self.vocab.problem(config, tensor.vocab, has):
                    raise ModelError(f"{path}: {name!r} {problem}{_other_base(config)}")
            elif tensor.experts is not None:
                rank = config.rank_of(tensor.module)
                if problem := self.experts.problem(tensor.experts, tensor.kind, has, rank):
                    raise ModelError(f"{path}: holds {name!r}, {problem}{_other_base(config)}")
            elif has != (want := self._shape(config, tensor)):
                raise ModelError(f"{path}: {name!r} has shape {has}, it must be {want}{_other_base(config)}")
            found[name] = tensor
            if tensor.kind not in (*ROW_KINDS, "score"):
                halves.setdefault(tensor.module, set()).add(tensor.kind)
        for module, kinds in halves.items():
            if (lacking := {"lora_A", "lora_B"} - kinds) and kinds != {"bias"}:
                raise ModelError(f"{path}: lacks {', '.join(sorted(lacking))} of {module!r}; download it again")
        if not found:
            raise ModelError(f"{path}: holds no tensors")
        return found

    def _tensor(self, config: AdapterConfig, name: str) -> _PeftTensor:
        path = config.path.parent / WEIGHTS
        if name in ADAPTER_HEADS:
            return _PeftTensor("score", "score", "")
        if CLASSIFIERS.match(name.removeprefix(PREFIX)):
            reason = "a classifier's head must be one matrix, trained whole (modules_to_save), without a bias"
            raise ModelError(f"{path}: holds {name!r}: {reason}; {ADVICE}")
        if self.vocab is not None and (found := self.vocab.match(name.removeprefix(PREFIX), self.spec)) is not None:
            return _PeftTensor(found.kind, found.module, "", vocab=found)
        match = KINDS.fullmatch(name.removeprefix(PREFIX))
        if match is None or "lora_embedding" in name:
            if WHOLE_MODULE.search(name):
                raise ModelError(f"{path}: holds {name!r}, of an embedding or an output head: {self._no_vocab()}")
            raise ModelError(f"{path}: holds {name!r}, a tensor of another kind, which is not served; {ADVICE}")
        module = match["module"]
        kind = match["kind"] or ("lora_bias" if match["lora_bias"] else "bias")
        for candidate in (module, "model." + module):
            ours = name_of(candidate, self.spec)
            if ours in self.targets:
                return _PeftTensor(kind, module, ours)
            if (experts := self.experts.find(ours)) is not None:
                return _PeftTensor(kind, module, ours, experts)
        if ".experts" in module:
            advice = f"which is not served; {ADVICE}" if self.experts.layers else "start with lora_experts"
            raise ModelError(f"{path}: changes experts ({module}): {advice}")
        if WHOLE_MODULE.search(module):
            raise ModelError(f"{path}: changes {module}, an embedding or an output head: {self._no_vocab()}")
        raise ModelError(
            f"{path}: changes {module}, which is no linear layer of a mixer or of a dense MLP here{_other_base(config)}"
        )

    def _no_vocab(self) -> str:
        return "start with lora_embeddings" if self.vocab is None else f"this is not served; {ADVICE}"

    def _shape(self, config: AdapterConfig, tensor: _PeftTensor) -> list[int]:
        """Return the shape that a tensor must have: that of the whole matrix, over all ranks."""
        target = self.targets[tensor.target][0]
        out, rank = target.part.rows.total, config.rank_of(tensor.module)
        if tensor.kind == "lora_A":
            return [rank, self.layers[target.layer].linear.columns.total]
        return [out, rank] if tensor.kind == "lora_B" else [out]

    def _fill(self, config: AdapterConfig, tensor: _PeftTensor, value: Tensor, into: LoadedAdapter) -> None:
        """Write this rank's part of a tensor."""
        scale = config.scale_of(tensor.module)
        if tensor.experts is not None:
            rank = config.rank_of(tensor.module)
            self.experts.fill(tensor.experts, tensor.kind, value, rank, scale, into.values)
            return
        for target in self.targets[tensor.target]:
            layer = self.layers[target.layer]
            if not layer.is_own:
                continue
            down, up = self._matrices(layer, into.values)
            factor, shift = self._vectors(layer, into.floats)
            rows = slice(target.first_row, target.first_row + len(target.part.rows))
            if tensor.kind == "lora_A":
                first = target.group * self.rank
                down[first : first + len(value)] = value[:, _index(layer.linear.columns)]
                continue
            own = value[_index(target.part.rows)]
            if tensor.kind == "lora_B":
                up[rows, : own.shape[1]] = (own.float() * scale).to(self.dtype)
            elif tensor.kind == "lora_magnitude_vector":
                factor[rows] = own
                into.dora.setdefault(target.layer, []).append(rows)
                continue
            if tensor.kind == "bias":
                into.biases.setdefault(target.layer, []).append(rows)
            if layer.adds_shift and tensor.kind != "lora_B":
                shift[rows] += own.float() * (scale if tensor.kind == "lora_bias" else 1)

    def place(self, adapter: LoadedAdapter, slot: int, floats: Tensor) -> None:
        """Copy the rest of an adapter whose values are in their slot already: to floats [S, F], and what DoRA changes.

        All ranks of a model do so together. Nothing here waits for the device.
        """
        floats[slot].copy_(adapter.floats, non_blocking=True)
        self._extend(slot)
        for index, rows in adapter.dora.items():
            self._apply_dora(index, slot, rows)
        for index, layer in enumerate(self.layers):
            bias = layer.linear.bias
            if bias is None or not layer.adds_shift or (index not in adapter.dora and index not in adapter.biases):
                continue
            weights = layer.linear.adapters
            assert weights is not None
            kept = bias.float().clone()
            for replaced in adapter.biases.get(index, []):
                kept[replaced] = 0
            weights.shift[slot] += kept - weights.factor[slot] * bias.float()

    def _extend(self, slot: int) -> None:
        """Copy A of a slot to the rows after the weights that have such."""
        into, values = [], []
        for layer in self.own_layers:
            weights = layer.linear.adapters
            if weights is not None and weights.extended is not None:
                first = layer.out + slot * layer.num_ranks
                into.append(weights.extended[first : first + layer.num_ranks])
                values.append(weights.down[slot])
        if into:
            torch._foreach_copy_(into, values)

    def _apply_dora(self, index: int, slot: int, rows: list[slice]) -> None:
        """Scale these rows of W + B · A to the lengths that are in their factors' place."""
        layer = self.layers[index]
        weights, linear = layer.linear.adapters, layer.linear
        assert weights is not None
        if index not in self._norms:
            self._norms[index] = _squared_norms(linear)
        down, up = weights.down[slot], weights.up[slot].float()
        crossed = _products(linear, down)  # A · Wᵀ [G · R, out]
        squared = self._norms[index].clone()
        for start, stop, group in layer.groups:
            own = slice(group * self.rank, (group + 1) * self.rank)
            a, b = down[own].float(), up[start:stop]
            squared[start:stop] += 2 * (crossed[own, start:stop].T * b).sum(1) + (b @ (a @ a.T) * b).sum(1)
        if len(linear.columns) < linear.columns.total:  # each rank has some channels of all rows
            squared = linear.communicator.all_reduce(squared.unsqueeze(0)).squeeze(0)
        scaled = weights.factor[slot] / squared.clamp(min=1e-30).sqrt()
        factor = torch.ones_like(scaled)
        for each in rows:
            factor[each] = scaled[each]
        weights.factor[slot] = factor
        weights.up[slot] = (up * factor.unsqueeze(1)).to(self.dtype)


class _PeftTensor(NamedTuple):
    kind: str  # lora_A, lora_B, lora_bias, lora_magnitude_vector; bias: the base layer's own, retrained; score: a head
    module: str  # its name in the base model, as PEFT knows it
    target: str  # in `AdapterLayout.targets`
    experts: ExpertTarget | None = None  # if it changes experts
    vocab: VocabTensor | None = None  # if it changes the embedding, or has rows of the head


def _adaptable(model: Decoder) -> Iterator[Linear]:
    for owner in model.modules():
        if isinstance(owner, OWNERS):
            for linear in owner.children():
                if type(linear) in (Linear, RowsLinear):  # not those whose matrices are read by other kernels
                    yield linear  # type: ignore[misc]


def _of_other_stages(model: Decoder) -> set[nn.Module]:
    """Return the modules of layers that other pipeline stages have."""
    others = (layer for index, layer in enumerate(model.layers) if index not in model.own_layers)
    return {module for layer in others for module in layer.modules()}


def _aligned(offset: int) -> int:
    return math.ceil(offset / ALIGNMENT) * ALIGNMENT


def _index(span: Span) -> slice:
    return slice(span.start, span.stop, span.step)


def _is_finite(values: Tensor) -> bool:
    """Return whether all values are finite, by their sum: one pass. Only a sum that is not needs a second look."""
    return math.isfinite(values.sum(dtype=torch.float32).item()) or bool(torch.isfinite(values).all())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _other_base(config: AdapterConfig) -> str:
    named = f" ({config.path.name} names {config.base})" if config.base else ""
    return f": the adapter is for another base model{named}"


def _squared_norms(linear: Linear) -> Tensor:
    """Return the squared norm of each row of this rank's part of W: [out] float32."""
    if (weight := plain_weight(linear)) is not None:
        return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square_()
    norms = torch.zeros(linear.num_rows, device=_device(linear))
    for rows in _columns_of(linear):
        norms += rows.float().square().sum(0)
    return norms


def _products(linear: Linear, x: Tensor) -> Tensor:
    """Return x [n, in] · Wᵀ as [n, out] float32, without rounding x where GEMMs of the weight do so."""
    if (weight := plain_weight(linear)) is not None:
        return nn.functional.linear(x, weight).float()
    if isinstance(linear.format, FloatFormat):
        return linear.product(x.contiguous()).float()
    found, at = torch.zeros(len(x), linear.num_rows, device=x.device), 0
    for rows in _columns_of(linear):
        found += x[:, at : at + len(rows)].float() @ rows.float()
        at += len(rows)
    return found


def _columns_of(linear: Linear) -> Iterator[Tensor]:
    """Yield the columns of W in order, as rows [n, out]: a packed matrix is read by multiplying by it."""
    channels, device = len(linear.columns), _device(linear)
    for first in range(0, channels, EYE_ROWS):
        count = min(EYE_ROWS, channels - first)
        eye = torch.zeros(count, channels, dtype=linear.dtype, device=device)
        eye[:, first:].fill_diagonal_(1)
        yield linear.product(eye)


def _device(linear: Linear) -> torch.device:
    return linear.weight.device
