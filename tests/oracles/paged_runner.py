"""Runs a decoder over a toy paged KV cache: no scheduler, no sampler, every slot NaN until it is written."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engine.core.kv.cache_groups import kept_blocks
from engine.models.attention import AttentionMetadata
from engine.models.decoder import Decoder
from engine.models.expansion import LatentExpansion
from engine.models.indexer import TokenChoice
from engine.models.recurrent import StateMetadata
from engine.models.recurrent_spec import RecurrentSpec, StateTensor
from engine.models.spec import LatentSpec
from kernels import StateContext


@dataclass
class _Sequence:
    row: int
    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class PagedRunner:
    """Runs ragged token sequences through a Decoder, over a paged KV cache that is made to find mistakes.

    Block ids and block-table rows are shuffled; slots that were never written, and the block that stands in the unused
    part of block tables, are NaN.

    `expands`: steps of latent attention that prefill have an expansion.
    """

    def __init__(
        self, model: Decoder, num_sequences: int, *, block_size: int = 16, max_len: int = 256, expands: bool = False
    ) -> None:
        spec, weight = model.spec, model.embed_tokens.weight
        self.model, self.device, self.block_size = model, weight.device, block_size
        self.expands = expands and isinstance(spec.layers[0].mixer, LatentSpec)
        max_blocks = -(-max_len // block_size)
        num_blocks = num_sequences * max_blocks + 1
        self.kv_cache: list[Any] = []
        for layer in spec.layers:
            if isinstance(layer.mixer, RecurrentSpec):
                parts = layer.mixer.state(block_size)
                self.kv_cache.append([self._unwritten(_dtype(part, weight), num_blocks, *part.shape) for part in parts])
            else:
                num_parts, num_heads, size = layer.mixer.cached
                self.kv_cache.append(self._unwritten(weight.dtype, num_parts, num_blocks, num_heads, block_size, size))
        for i, layer in enumerate(spec.layers):
            if (source := layer.mixer.kv_of) is not None:
                self.kv_cache[i] = self.kv_cache[source]
        shuffle = random.Random(0)
        self.free = shuffle.sample(range(num_blocks), num_blocks)
        self.rows = shuffle.sample(range(num_sequences + 1), num_sequences)  # the last row is for padding
        self.block_tables = torch.full((num_sequences + 2, max_blocks), self.free.pop(), dtype=torch.int32)

    def _unwritten(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)

    def start(self, token_ids: list[int]) -> _Sequence:
        return _Sequence(self.rows.pop(), list(token_ids))

    def step(self, scheduled: list[tuple[_Sequence, int]]) -> list[Tensor]:
        """Compute the next n tokens of each sequence, in one batch -> logits [n, vocab] of each."""
        scheduled = [item for item in scheduled if item[1]]
        order = sorted(range(len(scheduled)), key=lambda i: scheduled[i][1] > 1)  # single tokens first
        tokens, positions, slots, starts, lengths, rows = [], [], [], [0], [], []
        for sequence, count in (scheduled[i] for i in order):
            end = sequence.num_computed + count
            while len(sequence.blocks) * self.block_size < end:
                self.block_tables[sequence.row, len(sequence.blocks)] = self.free[-1]
                sequence.blocks.append(self.free.pop())
            for position in range(sequence.num_computed, end):
                block, offset = divmod(position, self.block_size)
                tokens.append(sequence.token_ids[position])
                positions.append(position)
                slots.append(sequence.blocks[block] * self.block_size + offset)
            sequence.num_computed = end
            starts.append(len(tokens))
            lengths.append(end)
            rows.append(sequence.row)
        metadata = AttentionMetadata(
            num_decodes=sum(count == 1 for _, count in scheduled),
            rows=self._tensor(rows),
            block_tables=self.block_tables.to(self.device),
            query_start=self._tensor(starts),
            context_lens=self._tensor(lengths),
            slot_mapping=self._tensor(slots, torch.int64),
        )
        if self.expands and (lens := [count for _, count in scheduled if count > 1]):
            n = metadata.num_decodes
            expansion = LatentExpansion.of_step(
                lens, lengths[n:], metadata.rows[n:], metadata.block_tables, self.block_size, self._upload
            )
            metadata = replace(metadata, prefill_kv=expansion)
        metadata = self._with_choices(metadata, len(tokens))
        with torch.inference_mode():
            attention = self._of_layers(metadata, len(tokens))
            hidden = self.model(self._tensor(tokens), self._tensor(positions), self.kv_cache, attention)
            logits = self.model.logits(hidden).split([scheduled[i][1] for i in order])
        return [logits[order.index(i)] for i in range(len(scheduled))]

    def _with_choices(self, metadata: AttentionMetadata, num_tokens: int) -> AttentionMetadata:
        """Return the metadata with the choices of layers with indexers, of all tokens."""
        m, n, mixer = metadata, metadata.num_decodes, self.model.spec.layers[0].mixer
        if not isinstance(mixer, LatentSpec) or mixer.index is None:
            return m
        longest = m.block_tables.shape[1] * self.block_size
        decodes = TokenChoice.of_decodes(n, m.rows, m.context_lens, m.block_tables, longest) if n else None
        prefills = None
        if n < len(m.rows):
            of_step = (m.rows, m.query_start, m.context_lens, m.block_tables, longest)
            prefills = TokenChoice.of_prefills(n, num_tokens, *of_step)
        return replace(m, prefill_kv=None, decode_choice=decodes, prefill_choice=prefills)

    def _of_layers(self, metadata: AttentionMetadata, num_tokens: int) -> list[AttentionMetadata]:
        """Each layer's metadata. A state is stored in the blocks that a scheduler would hold, and in no other."""
        m, size = metadata, self.block_size
        if not self.model.spec.has_states:
            return [metadata] * len(self.kv_cache)
        tables = torch.full_like(m.block_tables, -1)
        queries = m.query_start.diff().tolist()
        for row, context_len, count in zip(m.rows.tolist(), m.context_lens.tolist(), queries, strict=True):
            kept = kept_blocks(context_len - count, context_len, size, caches=True) | {
                (context_len - count - 1) // size
            }
            for index in kept:
                if index >= 0:
                    tables[row, index] = m.block_tables[row, index]
        states = StateContext.of_step(
            tables, m.rows, m.query_start, m.context_lens, num_tokens, size, only_decodes=num_tokens == len(m.rows)
        )
        of_states = StateMetadata(
            m.num_decodes, m.rows, tables, m.query_start, m.context_lens, m.slot_mapping, states=states
        )
        recurrent = [isinstance(layer.mixer, RecurrentSpec) for layer in self.model.spec.layers]
        return [of_states if each else metadata for each in recurrent]

    def _upload(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _dtype(part: StateTensor, weight: Tensor) -> torch.dtype:
    return weight.dtype if part.dtype == "model" else torch.float32


@dataclass
class Decoded:
    """One prompt continued: the generated tokens, and the logits [len(prompt) + num_tokens - 1, vocab] on the way."""

    token_ids: list[int]
    logits: Tensor


def decode(
    model: Decoder,
    prompts: list[list[int]],
    num_tokens: int,
    *,
    chunk: int = 10**9,
    forced: list[list[int]] | None = None,
    block_size: int = 16,
    expands: bool = False,
) -> list[Decoded]:
    """All prompts in one batch, at most `chunk` tokens of each in a step, continued greedily or by `forced` tokens."""
    longest = max(map(len, prompts)) + num_tokens
    runner = PagedRunner(model, len(prompts), block_size=block_size, max_len=longest, expands=expands)
    sequences = [runner.start(prompt) for prompt in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    while active := [i for i, s in enumerate(sequences) if len(s.token_ids) < len(prompts[i]) + num_tokens]:
        scheduled = [(s, min(chunk, len(s.token_ids) - s.num_computed)) for s in (sequences[i] for i in active)]
        for i, logits in zip(active, runner.step(scheduled), strict=True):
            sequence, generated = sequences[i], len(sequences[i].token_ids) - len(prompts[i])
            rows[i].append(logits)
            if sequence.num_computed == len(sequence.token_ids):
                sequence.token_ids.append(forced[i][generated] if forced else int(logits[-1].argmax()))
    tokens = [s.token_ids[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]
    return [Decoded(token_ids, torch.cat(logits)) for token_ids, logits in zip(tokens, rows, strict=True)]
