"""Attention of a step's tokens over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from engine.models.expansion import LatentExpansion
from engine.models.indexer import TokenChoice
from engine.models.layers import Linear, RowsLinear
from engine.models.matrix import CheckpointModule, CheckpointTensor, Part, Scope, empty
from engine.models.norms import HeadNorms, MakeNorm, Norm, RMSNorm, unweighted
from engine.models.relative import RelativeBias
from engine.models.residual import ImageSpan, ResidualEpilogue, ResidualStream, SublayerInput, TokenContext
from engine.models.shard import Span
from engine.models.spec import AttentionSpec
from engine.models.wide_pages import WidePages

# Names of the scales of an fp8 cache in checkpoints of AutoFP8, ModelOpt and llm-compressor, and the rows of kv_scale
# that they fill. Scales of queries and probabilities are ignored, since these are not quantised here.
SCALE_OWNERS = ("", "attn.", "k_proj.", "v_proj.", "qkv_proj.")
# The arguments of attention that a layer's spec holds under their names.
SPEC_ARGS = {each.name for each in fields(kernels.AttentionArgs)} & {each.name for each in fields(AttentionSpec)}
KNOWN_OF_IMAGES = kernels.KnownArgs("window", "kv_scale")
SCALE_ROWS = {"k": slice(0, 1), "v": slice(1, 2), "kv": slice(0, 2), "q": None, "prob": None}


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A step's attention tensors for the layers of one cache group: B sequences, T tokens.

    The first `num_decodes` sequences have exactly one query token each: token i belongs to sequence i for
    i < num_decodes.
    """

    num_decodes: int
    rows: Tensor  # [B] int32: sequence i's block table is block_tables[rows[i]]
    block_tables: Tensor  # [R, max_blocks] int32
    query_start: Tensor  # [B + 1] int32: sequence i has the tokens [query_start[i], query_start[i + 1])
    context_lens: Tensor  # [B] int32: context length including this step's tokens; 0: a padding row
    slot_mapping: Tensor  # [T] int64: slot of each token's K and V; -1: not stored
    plan: kernels.DecodePlan | None = None  # the decode kernel's work map, computed once per step; None on a CPU
    # [N, 2] int32 (sequence, first query): the prefill kernel's grid; None on a CPU
    tiles: Tensor | None = None
    # In a graph of steps with prefill, [num_decodes] int32: context lengths of the sequences that decode, 0 for others.
    # All sequences may have tiles then, and `context_lens` are at least 1.
    decode_lens: Tensor | None = None
    # Keys and values that the sequences that do not decode attend to; None: those in the cache.
    prefill_kv: LatentExpansion | WidePages | None = None
    # Choices of the sequences that decode and of those that do not; None: their tokens attend to all that they see.
    decode_choice: TokenChoice | None = None
    prefill_choice: TokenChoice | None = None
    # [N] integer, for the last layer: the tokens whose hidden states it computes; None: all. It stores the keys and
    # values of all tokens.
    logits_indices: Tensor | None = None

    @property
    def first_prefill(self) -> int:
        """Index of the first sequence that may have prefill tiles."""
        return self.num_decodes if self.decode_lens is None else 0

    @property
    def choices(self) -> list[TokenChoice]:
        return [choice for choice in (self.decode_choice, self.prefill_choice) if choice is not None]

    def select(self, x: Tensor) -> Tensor:
        """Return the rows of x [T, ...] at `logits_indices`: [N, ...]."""
        return x if self.logits_indices is None else x[self.logits_indices]


class Attention(CheckpointModule):
    """Grouped-query attention over the paged KV cache. Heads are divided among ranks."""

    cos_sin: Tensor | None
    kv_scale: Tensor
    alibi_slopes: Tensor | None
    v_norm: Tensor | None
    unit: Tensor | None

    def __init__(
        self, spec: AttentionSpec, hidden_size: int, cos_sin: Tensor | None, make_norm: MakeNorm, scope: Scope
    ) -> None:
        """cos_sin: `rope_table` of the layer's RoPE; None: no RoPE."""
        super().__init__()
        self.spec = spec.for_rank(scope.shard)
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        gate = spec.gate
        parts = {"q_proj": query_size} if gate is None or gate.name else {}
        if spec.kv_of is None:
            parts |= {"k_proj": kv_size} if spec.key_is_value else {"k_proj": kv_size, "v_proj": kv_size}
        fused = "qkv_proj" if spec.fused else ""
        self.gate: Linear | None = None
        if gate is not None and not gate.name:
            query, gates = _gated_parts(spec, scope)
            kv = [
                Part(
                    name=scope.name(name),
                    rows=scope.shard.span(name, rows // spec.head_dim, width=spec.head_dim, replicate=True),
                )
                for name, rows in parts.items()
            ]
            self.qkv: Linear = RowsLinear(scope, hidden_size, [*query, *kv], bias=spec.qkv_bias)
            self.gate = RowsLinear(scope, hidden_size, gates, bias=spec.qkv_bias)
        else:
            self.qkv = Linear(
                scope,
                hidden_size,
                parts,
                bias=spec.qkv_bias,
                shard="column",
                width=spec.head_dim,
                fused=fused,
                grouped=spec.grouped,
            )
        if gate is not None and gate.name:
            width = 1 if gate.of_heads else spec.head_dim
            self.gate = Linear(scope, hidden_size, {gate.name: spec.num_heads * width}, shard="column", width=width)
        self._add_norms(spec, make_norm, scope)
        self.o = Linear(scope, query_size, {"o_proj": hidden_size}, bias=spec.o_bias, shard="row")
        self.register_buffer("cos_sin", cos_sin, persistent=False)  # [max_model_len, rotary_dim] float32
        # Divisors of keys and values per head before they are stored as e4m3: [2, Hkv].
        scale = torch.ones(2, self.spec.num_kv_heads, dtype=torch.float32, device=scope.device)
        self.register_buffer("kv_scale", scale, persistent=False)
        self._rule: dict[str, Any] = {name: getattr(self.spec, name) for name in SPEC_ARGS}
        self._rule["sparse"] = block_sparse(self.spec)
        for name in spec.learnt:
            setattr(self, name, empty(self.spec.num_heads, dtype=torch.float32, device=scope.device))
        self.relative: RelativeBias | None = None  # the decoder's
        ones = torch.ones(spec.head_dim, dtype=scope.dtype, device=scope.device) if spec.v_norm else None
        self.register_buffer("v_norm", ones, persistent=False)  # [D]
        unit = torch.ones(spec.head_dim, dtype=scope.dtype, device=scope.device) if spec.rotates_first else None
        self.register_buffer("unit", unit, persistent=False)  # [D]
        slopes = torch.tensor(self.spec.alibi, dtype=torch.float32, device=scope.device) if spec.alibi else None
        self.register_buffer("alibi_slopes", slopes, persistent=False)  # [H]
        self._heads = scope.shard.span("num_attention_heads", spec.num_heads)
        self._scope, self._num_kv_heads = scope, spec.num_kv_heads

    def _add_norms(self, spec: AttentionSpec, make_norm: MakeNorm, scope: Scope) -> None:
        """Create the norms of queries and keys: over a head, over all heads together, or one for each head."""
        over: tuple[int | Span, int | Span] = spec.head_dim, spec.head_dim
        if spec.qk_norm_over_heads:
            over = (
                scope.shard.span("num_attention_heads", spec.num_heads, width=spec.head_dim),
                scope.shard.span("num_key_value_heads", spec.num_kv_heads, width=spec.head_dim, replicate=True),
            )
        if not spec.qk_norm_weights:
            make_norm = unweighted(make_norm)
        self.q_norm = make_norm(scope / "q_norm", over[0]) if spec.qk_norm else None
        self.k_norm = make_norm(scope / "k_norm", over[1]) if spec.qk_norm and spec.kv_of is None else None
        if spec.qk_norm_of_each:
            eps, is_separate = make_norm(scope, 1).eps, spec.qk_norm_of_each == "separate"
            for name, count in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)):
                counted = "num_attention_heads" if name == "q_norm" else "num_key_value_heads"
                heads = scope.shard.span(counted, count, replicate=name == "k_norm")
                setattr(self, name, HeadNorms(scope / name, heads, spec.head_dim, eps, separate=is_separate))

    def forward(
        self,
        x: SublayerInput,
        epilogue: ResidualEpilogue,
        positions: Tensor,
        kv: Tensor,
        metadata: AttentionMetadata,
    ) -> ResidualStream:
        """Store the keys and values of x [T, hidden] in `kv`, and add the attention to the residual stream in place.

        With `metadata.logits_indices`, the resulting stream has only these rows [N, hidden], otherwise [T, hidden].
        """
        spec = self.spec
        kv_scale = self.kv_scale if kv.dtype == torch.float8_e4m3fn else None
        if self.gate is not None:
            x = x.with_normed(x.value)
        qkv, q_norm, k_norm = self.qkv.run(x), self.q_norm, self.k_norm  # [T, (H + 2 Hkv) D]
        if spec.clip:
            qkv.clamp_(-spec.clip, spec.clip)
        if q_norm is not None and k_norm is not None and (spec.qk_norm_over_heads or spec.qk_norm_of_each):
            (self._norm_each if spec.qk_norm_of_each else self._norm_over_heads)(qkv, q_norm, k_norm)
            q_norm = k_norm = None
        slots = metadata.slot_mapping
        if spec.kv_of is not None:
            qkv, slots = F.pad(qkv, (0, 2 * spec.num_kv_heads * spec.head_dim)), torch.full_like(slots, -1)
        elif self.v_norm is not None and k_norm is not None:
            qkv = self._with_normed_values(qkv, self.v_norm, k_norm.eps)
        pages = metadata.prefill_kv if isinstance(metadata.prefill_kv, WidePages) else None
        # While scales are calibrated the cache is not e4m3 yet, and is read itself.
        wide = pages.allocate(kv) if pages is not None and spec.widens and kv_scale is not None else None
        args = kernels.RopeArgs(
            spec.num_heads,
            spec.num_kv_heads,
            self.cos_sin,
            q_norm.weight if q_norm and self.unit is None else self.unit,
            k_norm.weight if k_norm and self.unit is None else self.unit,
            q_norm.eps if q_norm else 0.0,
            spec.rope is not None and spec.rope.interleaved,
        )
        into = kernels.KVSlots(kv[0], kv[1], slots, kv_scale, wide if spec.kv_of is None else None)
        query = kernels.rope_and_store(qkv, positions, args, into)  # [T, H, D]
        self._scale(query, x.context)
        adapts = epilogue.stream.context.adapters is not None
        out = qkv.new_empty(len(qkv), spec.num_heads, spec.head_dim) if adapts else self._memory(qkv, metadata)
        wide_pages = None if wide is None else wide.pages
        attend(query, kv, metadata, self._args(kv_scale), stores=spec.kv_of is None, wide=wide_pages, out=out)
        for span in x.context.image_spans:
            if span.only_windows and not spec.window:
                continue
            assert isinstance(out, Tensor)
            see_both_ways(query, kv, metadata, self._args(kv_scale), span, out)
        if self.gate is not None:
            assert isinstance(out, Tensor)
            out = self._gated(out, self.gate.run(x))
        if isinstance(out, kernels.QuantizedRows):
            return self.o.run(out, epilogue)
        return self.o.run(metadata.select(out.flatten(1)), epilogue.select(metadata.logits_indices))

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Multiply out [T, H, D] by its gates [T, H D] or [T, H], before their activation; may be in place."""
        spec = self.spec.gate
        assert spec is not None
        if spec.activation == "sigmoid" and not spec.of_heads:
            return kernels.gated(out.flatten(1), gate, "sigmoid", rounded=True).view(out.shape)
        gate = F.softplus(gate.float()).to(out.dtype) if spec.activation == "softplus" else gate.sigmoid()
        return out.mul_(gate.unflatten(1, (out.shape[1], -1)))

    def _args(self, kv_scale: Tensor | None) -> kernels.AttentionArgs:
        """Return the kernels' arguments; kv_scale: None, or the layer's if its cache is e4m3."""
        learnt = {name: getattr(self, name) for name in self.spec.learnt}
        if self.relative is not None:
            learnt["distance_bias"] = self.relative()
        return kernels.AttentionArgs(**self._rule, **learnt, alibi_slopes=self.alibi_slopes, kv_scale=kv_scale)

    def _scale(self, query: Tensor, context: TokenContext) -> None:
        """Scale rotated queries [T, H, D] in place."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.unit is not None and q_norm is not None and k_norm is not None:
            # Weights after RoPE: those of cached keys act upon the query of a score as well.
            query.mul_((q_norm.weight.float() * k_norm.weight.float()).to(query.dtype))
        if self.spec.scales_queries and (scales := context.query_scales) is not None:
            query.mul_(scales[:, None, None])

    def _memory(self, qkv: Tensor, metadata: AttentionMetadata) -> Tensor | kernels.QuantizedRows:
        """Allocate the attention's output [T, H, D].

        It is quantised with one scale per head if all tokens decode and `o` reads it in this form.
        """
        num_heads, head_dim = self.spec.num_heads, self.spec.head_dim
        all_decode = metadata.first_prefill >= len(metadata.rows) and metadata.logits_indices is None
        if all_decode and self.gate is None and head_dim & (head_dim - 1) == 0:
            quantized = self.o.quantized_input(qkv[:, : num_heads * head_dim])
            if quantized is not None and quantized.group == head_dim:
                return quantized
        return qkv.new_empty(len(qkv), num_heads, head_dim)

    def next_norm(self, norm: RMSNorm, hidden: Tensor) -> kernels.NextNorm | None:
        """See `Linear.next_norm`. With gates, two projections read the norm."""
        if self.gate is not None:
            apart = kernels.norms_apart(hidden, self.qkv.weight, None)
            return kernels.NextNorm(norm.weight, norm.eps) if apart else None
        return self.qkv.next_norm(norm, hidden)

    def _norm_over_heads(self, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> None:
        """Normalise queries and keys over the heads of all ranks, in place."""
        query, key = qkv.split((len(q_norm.weight), len(k_norm.weight), len(k_norm.weight)), 1)[:2]
        num_ranks, communicator = self._scope.shard.size, self._scope.communicator
        if num_ranks == 1:
            query.copy_(q_norm(query))
            key.copy_(k_norm(key))
            return
        # All parts have the same length, and replicated key heads count equally often.
        means = torch.stack([mean_square(query), mean_square(key)], 1)
        scales = (communicator.all_reduce(means) / num_ranks).add_(q_norm.eps).rsqrt_()
        query.mul_(scales[:, :1]).mul_(q_norm.weight)
        key.mul_(scales[:, 1:]).mul_(k_norm.weight)

    def _norm_each(self, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> None:
        """Normalise each head of queries and keys with its own weights, in place."""
        heads = qkv.unflatten(1, (-1, self.spec.head_dim))
        query, key = heads.split((self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads), 1)[:2]
        query.copy_(q_norm(query))
        key.copy_(k_norm(key))

    def _with_normed_values(self, qkv: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the values. Returns [T, (H + 2 Hkv) D], also from [T, (H + Hkv) D] if values are the keys."""
        spec = self.spec
        before = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        values = qkv[:, -spec.num_kv_heads * spec.head_dim :]
        normed = kernels.rms_norm(values.reshape(-1, spec.head_dim), weight, eps)
        return torch.cat((qkv[:, :before], normed.view(values.shape)), 1)

    def tensors(self) -> Iterator[CheckpointTensor]:
        for name in self.spec.learnt:
            yield CheckpointTensor(self._scope.name(name), (self._heads,), getattr(self, name))

    def optional_tensors(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        for owner in SCALE_OWNERS:
            for what, rows in SCALE_ROWS.items():
                yield self._scope.name(f"{owner}{what}_scale"), partial(self._set_kv_scale, rows)

    def _set_kv_scale(self, rows: slice | None, scale: Tensor) -> None:
        """Set scales: one positive number for all KV heads of the layer, or one per head. `rows` None: ignored."""
        if rows is None:
            return
        scale, num_kv_heads, (least, most) = scale.float().flatten(), self._num_kv_heads, kernels.KV_SCALES
        if len(scale) not in (1, num_kv_heads) or not ((scale >= least) & (scale <= most)).all():
            raise ValueError(
                f"must be a positive number, or one for each of {num_kv_heads} KV heads, from {least} to {most}, "
                f"got {scale.tolist()[:9]}"
            )
        heads = self._scope.shard.span("num_key_value_heads", num_kv_heads, replicate=True)
        own = scale.expand(num_kv_heads)[heads.start : heads.stop]
        self.kv_scale[rows] = own.to(self.kv_scale.device)


def block_sparse(spec: AttentionSpec) -> kernels.BlockSparse | None:
    """Return the blocks that the heads see; None: all."""
    sparse = spec.sparse
    if sparse is None:
        return None
    return kernels.BlockSparse(sparse.block, sparse.local, sparse.stride, sparse.head_step, sparse.first_head)


def _gated_parts(spec: AttentionSpec, scope: Scope) -> tuple[list[Part], list[Part]]:
    """Return the rows of this rank's queries, and those of their gates: they alternate in `q_proj`, head by head."""
    heads, size = scope.shard.span("num_attention_heads", spec.num_heads), spec.head_dim
    query, gate = (
        [
            Part(
                name=scope.name("q_proj"),
                rows=Span(2 * spec.num_heads * size, (2 * head + i) * size, (2 * head + i + 1) * size),
            )
            for head in range(heads.start, heads.stop)
        ]
        for i in range(2)
    )
    return query, gate


def mean_square(x: Tensor) -> Tensor:
    """Return the mean squares of x [T, n]: [T], at least float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square_().div_(x.shape[1])


def attend(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    args: kernels.AttentionArgs,
    *,
    stores: bool = True,
    wide: Tensor | None = None,
    out: Tensor | kernels.QuantizedRows,
) -> None:
    """Compute the attention of the step's tokens over their paged contexts, whose K and V are already stored.

    query [T, H, D], kv_cache [2, num_blocks, num_kv_heads, block_size, D] -> out [T, H, D]; quantised only if all
    tokens decode. `stores`: the layer has stored this step's K and V itself. `wide`: the pages of
    `metadata.prefill_kv`, which hold the K and V that the layer has stored.
    """
    m, n, first = metadata, metadata.num_decodes, metadata.first_prefill
    if n:
        lens = m.context_lens[:n] if m.decode_lens is None else m.decode_lens
        into = out if isinstance(out, kernels.QuantizedRows) else out[:n]
        context = kernels.PagedContext(kv_cache[0], kv_cache[1], m.block_tables, m.rows[:n], lens)
        kernels.paged_attention_decode(query[:n], context, args, plan=m.plan, out=into)
    if first < len(m.rows):
        assert isinstance(out, Tensor)
        tables, rows, lens, pages = m.block_tables, m.rows[first:], m.context_lens[first:], kv_cache
        if isinstance(m.prefill_kv, WidePages) and wide is not None:
            m.prefill_kv.fill(wide, kv_cache, tables, rows, None if stores else lens)
            tables, rows, pages = m.prefill_kv.block_tables, m.prefill_kv.rows, wide
        context = kernels.PagedContext(pages[0], pages[1], tables, rows, lens)
        kernels.paged_attention_prefill(query, m.query_start[first:], context, args, tiles=m.tiles, out=out)


def see_both_ways(
    query: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    args: kernels.AttentionArgs,
    span: ImageSpan,
    out: Tensor,
) -> None:
    """Compute the attention of an image's tokens: each sees all the others within its window.

    query [T, H, D] and kv_cache as in `attend` -> the span's rows of out [T, H, D].
    """
    assert KNOWN_OF_IMAGES.cover(args)
    block_size, window = kv_cache.shape[3], args.window
    start = max(span.start + 1 - window, 0) if window else 0  # of the keys that the first token sees
    table = metadata.block_tables[metadata.rows[span.sequence]]
    blocks = table[start // block_size : -(-span.stop // block_size)].long()
    skipped = start % block_size
    found = kv_cache[:, blocks].transpose(1, 2).flatten(2, 3)[:, :, skipped : skipped + span.stop - start]
    if args.kv_scale is not None:
        found = (found.float() * args.kv_scale[:, :, None, None]).to(query.dtype)
    keys, values = found  # [Hkv, n, D] each
    into, own = out[span.first :][: span.stop - span.start], query[span.first :][: span.stop - span.start]
    mask = None
    if window:
        at, of_keys = (torch.arange(low, span.stop, device=query.device) for low in (span.start, start))
        mask = of_keys > at[:, None] - window
    length = 1 if kernels.FORMS.deterministic else len(own)  # alone, no token's sum depends on the others
    for low in range(0, len(own), length):
        rows = slice(low, low + length)
        some = None if mask is None else mask[rows][None]
        mixed = F.scaled_dot_product_attention(
            own[rows].transpose(0, 1)[None], keys[None], values[None], some, scale=args.scale, enable_gqa=True
        )
        into[rows] = mixed[0].transpose(0, 1)
