"""Adapters of a decoder's embedding and output head: where they lie in a slot, and how PEFT's tensors fill it.

PEFT has three forms: LoRA, whose A or B has a row for each token; single retrained rows (`trainable_token_indices`);
and retrained copies of the whole matrix (`modules_to_save`), which are here the rows that differ from the base's. LoRA
of the head is that of any linear layer. With tied embeddings the head has an adapter of its own, as while PEFT trains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import kernels
from engine.models.decoder import Decoder
from engine.models.layers import Embedding, Linear, LMHead
from engine.models.lora import OF_EMBEDDING, AdapterConfig
from engine.models.quantization import renamed
from engine.models.shard import Span
from engine.models.spec import ModelSpec

ROW_KINDS = ("tokens", "whole", "copy")  # of tensors that hold rows of the matrix itself
KINDS = {
    "lora_embedding_A": "lora_A",
    "lora_embedding_B": "lora_B",
    "token_adapter.trainable_tokens_delta": "tokens",
    "base_layer.weight": "copy",  # of the base's, which PEFT saves beside LoRA of an embedding
    "weight": "whole",
}
NAME = re.compile(rf"(?P<module>.+?)\.(?P<kind>{'|'.join(map(re.escape, KINDS))})(\.default)?")


class VocabTensor(NamedTuple):
    """A tensor of the embedding, or with rows of the head."""

    kind: str  # a value of `KINDS`
    module: str  # as PEFT names it
    is_head: bool


@dataclass(frozen=True, slots=True)
class _Region:
    """Memory in a slot: of `values` if `is_float`, else of `floats`, read as int32."""

    start: int
    shape: tuple[int, ...]
    is_float: bool = True

    def of(self, memory: Tensor) -> Tensor:
        """Return the view [..., *shape] of a slot's or all slots' memory [..., M]."""
        size = 1
        for each in self.shape:
            size *= each
        found = memory.narrow(-1, self.start, size).unflatten(-1, self.shape)
        return found if self.is_float else found.view(torch.int32)


class VocabAdapters:
    """The embedding and the head of a decoder that may have adapters."""

    def __init__(self, model: Decoder, rank: int, max_rows: int) -> None:
        """`rank`: R, the most that an adapter's rank may be, padded. `max_rows`: that each may have retrained."""
        self.embedding: Embedding = model.embed_tokens
        self.head: LMHead = model.lm_head
        self.rank, self.max_rows, self.is_tied = rank, max_rows, model.spec.tie_word_embeddings
        self.has_embedding, self.has_head = model.stage.is_first, model.stage.is_last
        part = self.head.parts[0]
        self.spans = {False: self.embedding.rows, True: part.rows}
        self.names = {self.embedding.name.removesuffix(".weight"): False, part.name: True}
        self._regions: dict[str, _Region] = {}
        self._vocab = len(self.embedding.rows)

    def reserve(self, num_values: int, num_floats: int, unit: int) -> tuple[int, int]:
        """Find indices behind those of a slot that are taken. Returns their ends."""
        hidden, ends = self.embedding.weight.shape[1], [num_values, num_floats]
        shapes: dict[str, tuple[tuple[int, ...], bool]] = {}
        if self.has_embedding:
            count = min(self.max_rows, self._vocab)
            shapes |= {
                "down": ((self._vocab, self.rank), True), "up": ((hidden, self.rank), True),
                "rows": ((count, hidden), True), "indices": ((self._vocab,), False),
            }  # fmt: skip
        if self.has_head:
            count = min(self.max_rows, len(self.spans[True]))
            shapes |= {"head_rows": ((count, hidden), True), "ids": ((count,), False)}
        for name, (shape, is_float) in shapes.items():
            self._regions[name] = region = _Region(ends[not is_float], shape, is_float)
            size = torch.Size(shape).numel()
            ends[not is_float] = -(-(region.start + size) // unit) * unit
        return ends[0], ends[1]

    def attach(self, values: Tensor, floats: Tensor) -> None:
        """Let the layers read adapters from slots: values [S, V], floats [S, F] float32. Zeroes its part."""
        found = {name: region.of(values if region.is_float else floats) for name, region in self._regions.items()}
        for each in found.values():
            each.zero_()
        if self.has_embedding and self._vocab:
            self.embedding.adapters = kernels.EmbeddingLora(
                found["down"], found["up"], found["rows"], found["indices"], self.embedding.rows.start
            )
        if self.has_head and len(self.spans[True]) and self.max_rows:
            self.head.retrained = kernels.RetrainedRows(found["head_rows"], found["ids"])

    def match(self, name: str, spec: ModelSpec) -> VocabTensor | None:
        """Return what a tensor of this name is; None: another one, or it cannot be served."""
        found = NAME.fullmatch(name)
        if found is None:
            return None
        module, kind = found["module"], KINDS[found["kind"]]
        for candidate in (module, "model." + module):
            is_head = self.names.get(name_of(candidate, spec))
            if is_head is not None and not (is_head and (spec.head_normed or kind not in ROW_KINDS)):
                return VocabTensor(kind, module, is_head)
        return None

    def problem(self, config: AdapterConfig, tensor: VocabTensor, shape: list[int]) -> str:
        """Say what is wrong with a tensor; "": nothing."""
        ids, rank, hidden = _ids(config, tensor), config.rank_of(tensor.module), self.embedding.weight.shape[1]
        rows = self.spans[tensor.is_head].total
        wanted = {"lora_A": [rank, rows], "lora_B": [hidden, rank], "tokens": [len(ids), hidden]}
        want = wanted.get(tensor.kind, [rows, hidden])
        if shape != want:
            return f"has shape {shape}, it must be {want}"
        return f"retrains token {max(ids)} of {rows}" if tensor.kind == "tokens" and max(ids) >= rows else ""

    def fill(
        self,
        config: AdapterConfig,
        tensors: Mapping[str, VocabTensor],
        read: Callable[[str], Tensor],
        values: Tensor,
        floats: Tensor,
    ) -> str:
        """Write this rank's part of an adapter's tensors to a slot: values [V], floats [F]. Returns what is wrong; "":
        nothing. `read`: returns a tensor, finite.
        """
        of_head = any(tensor.is_head for tensor in tensors.values())
        for name, tensor in tensors.items():
            if tensor.kind not in ROW_KINDS:
                self._fill_lora(tensor.kind, read(name), config.scale_of(tensor.module), values)
                continue
            both = tensor.kind == "tokens" and self.is_tied and not of_head
            for is_head in (False, True) if both else (tensor.is_head,):
                ids = _ids(config, tensor)
                if problem := self._fill_rows(is_head, tensor.kind, ids, read(name), values, floats):
                    return f"of {tensor.module} {problem}"
        return ""

    def _fill_lora(self, kind: str, value: Tensor, scale: float, values: Tensor) -> None:
        """Write this rank's part of A or B of the embedding to a slot's values [V]."""
        if not self.has_embedding:
            return
        if kind == "lora_A":
            own = value[:, _index(self.spans[False])]
            self._regions["down"].of(values)[:, : len(own)] = own.T
        else:
            self._regions["up"].of(values)[:, : value.shape[1]] = (value.float() * scale).to(values.dtype)

    def _fill_rows(
        self, is_head: bool, kind: str, ids: Sequence[int], value: Tensor, values: Tensor, floats: Tensor
    ) -> str:
        """Write this rank's retrained rows to a slot's values [V] and floats [F]. `ids`: their tokens, with "tokens".
        Returns what is wrong; "": nothing.
        """
        if not (self.has_head if is_head else self.has_embedding):
            return ""
        span = self.spans[is_head]
        if kind == "tokens":
            chosen = [index for index, token in enumerate(ids) if span.start <= token < span.stop]
            own, local = value[chosen], torch.tensor([ids[index] - span.start for index in chosen], dtype=torch.int64)
        else:
            own = value[_index(span)]
            local = self._different(is_head, own.to(values.dtype), kind == "copy")
            own = own[local]
        rows = self._regions["head_rows" if is_head else "rows"].of(values)
        if len(own) > len(rows):
            return f"retrains {len(own)} rows, above lora_tokens={self.max_rows}; start with more"
        rows[: len(own)] = own.to(rows.dtype)
        count = len(local)
        if is_head:
            self._regions["ids"].of(floats)[:count] = local.int() + 1
        else:
            self._regions["indices"].of(floats)[local] = torch.arange(1, count + 1, dtype=torch.int32)
        return ""

    def retrains_head(self, floats: Tensor) -> bool:
        """Return whether an adapter has retrained rows of this rank's head. floats [F]: of its slot."""
        return self.has_head and bool(self._regions["ids"].of(floats).any())

    def _different(self, is_head: bool, own: Tensor, is_copy: bool) -> Tensor:
        """Return the indices of rows [V, hidden] that are not the base's. If the base is not kept as floats, all count
        as different, except for a copy of PEFT's.
        """
        base = self.embedding.weight
        if is_head and not self.is_tied:
            found = plain_weight(self.head)
            if found is None or isinstance(self.head.weight, kernels.QuantizedWeight):
                return torch.arange(0 if is_copy else len(own))
            base = found  # type: ignore[assignment]
        parts = [
            (own[first : first + 4096] != base[first : first + len(own[first : first + 4096])].to("cpu")).any(1)
            for first in range(0, len(own), 4096)
        ]
        return torch.cat(parts).nonzero().flatten() if parts else torch.arange(0)


def name_of(module: str, spec: ModelSpec) -> str:
    """Return a module's name in the checkpoint, as layers declare it."""
    return renamed(module + ".weight", spec.names).removesuffix(".weight")


def _ids(config: AdapterConfig, tensor: VocabTensor) -> Sequence[int]:
    """Return the retrained tokens of a tensor's module, by the end of its name as PEFT matches it."""
    given, module = config.token_ids, tensor.module
    if OF_EMBEDDING in given and not tensor.is_head:
        return given[OF_EMBEDDING]
    return next((ids for name, ids in given.items() if module == name or module.endswith("." + name)), ())


def plain_weight(linear: Linear) -> Tensor | None:
    """Return W [out, in] if it is or can be made a plain tensor."""
    weight = linear.weight
    if isinstance(weight, kernels.QuantizedWeight):
        return None if weight.is_cpu else kernels.dequantize(weight.codes, weight, linear.dtype)
    if isinstance(weight, Tensor) and weight.is_mkldnn:  # packed by PyTorch
        return weight.to_dense()
    return weight if type(weight) in (Tensor, nn.Parameter) and weight.dim() == 2 else None


def _index(span: Span) -> slice:
    return slice(span.start, span.stop, span.step)
