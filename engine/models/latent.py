"""Multi-head latent attention (DeepSeek): attention over cached latents."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

import kernels
from engine.models.attention import AttentionMetadata
from engine.models.expansion import LatentExpansion
from engine.models.formats.floats import FloatFormat
from engine.models.indexer import Indexer
from engine.models.layers import Linear
from engine.models.matrix import Scope
from engine.models.norms import RMSNorm
from engine.models.residual import ResidualEpilogue, ResidualStream, SublayerInput
from engine.models.spec import LatentSpec


class LatentAttention(nn.Module):
    """Latent attention, see `kernels.reference.latent`. Heads are divided among ranks; each rank caches all latents."""

    cos_sin: Tensor

    def __init__(self, spec: LatentSpec, hidden_size: int, cos_sin: Tensor, scope: Scope) -> None:
        """cos_sin: `rope_table` of the layer's RoPE."""
        super().__init__()
        self.spec = spec.for_rank(scope.shard)
        heads, query_dim = spec.num_heads, spec.plain_dim + spec.rope.rotary_dim
        short = {"kv_a_proj_with_mqa": spec.head_dim}
        if spec.query_rank:
            short = {"q_a_proj": spec.query_rank} | short
        self.short = Linear(scope, hidden_size, short, bias=spec.bias)
        self.query_norm = RMSNorm(scope / "q_a_layernorm", spec.query_rank, spec.norm_eps) if spec.query_rank else None
        name = "q_b_proj" if spec.query_rank else "q_proj"
        self.query = Linear(
            scope, spec.query_rank or hidden_size, {name: heads * query_dim}, shard="column", width=query_dim
        )
        self.latent_norm = RMSNorm(scope / "kv_a_layernorm", spec.latent_dim, spec.norm_eps)
        self.up = HeadProjections(
            scope, spec.latent_dim, {"kv_b_proj": heads * (spec.plain_dim + spec.value_dim)}, shard="column",
            width=spec.plain_dim + spec.value_dim,
        )  # fmt: skip
        self.o = Linear(scope, heads * spec.value_dim, {"o_proj": hidden_size}, bias=spec.bias, shard="row")
        self.indexer: Indexer | None = None
        if spec.index is not None and not spec.index.is_shared:
            self.indexer = Indexer(spec.index, hidden_size, spec.query_rank, scope / "indexer")
        self.register_buffer("cos_sin", cos_sin, persistent=False)  # [max_model_len, R] float32

    def forward(
        self,
        x: SublayerInput,
        epilogue: ResidualEpilogue,
        positions: Tensor,
        kv: Tensor,
        metadata: AttentionMetadata,
    ) -> ResidualStream:
        """Store the latents of x [T, hidden] in `kv`, and add the attention to the residual stream in place.

        With `metadata.logits_indices`, the resulting stream has only these rows [N, hidden], otherwise [T, hidden].
        """
        spec, cache = self.spec, kv[0][..., : self.spec.head_dim]
        if self.indexer is not None:
            x = x.with_normed(x.value)
        short = self.short.run(x)  # [T, query_rank + L + R]
        query_input, latent = short.split((spec.query_rank, spec.head_dim), 1)
        query_short = x
        if self.query_norm is not None:
            query_short = SublayerInput(query_input, self.query_norm, context=x.context)
        if self.indexer is not None:
            query_short = query_short.with_normed(query_short.value)
        query = self.query.run(query_short)
        if spec.scales_queries and (scales := x.context.query_scales) is not None:
            query.mul_(scales[:, None])
        query = query.unflatten(1, (spec.num_heads, -1))
        key_up, value_up = self.up.of_heads(spec)
        new = kernels.NewLatents(
            latent,
            self.latent_norm.weight,
            spec.norm_eps,
            positions,
            self.cos_sin,
            cache,
            metadata.slot_mapping,
            spec.rope.interleaved,
        )
        if self.indexer is not None:
            self.indexer.run(x, query_short, replace(new, cache=kv[0]), metadata.choices)
        if metadata.prefill_kv is None:
            query = kernels.absorb_and_store(query, key_up, new)  # [T, H, L + R]
            out = kernels.head_linear(attend(query, cache, metadata, spec), value_up)  # [T, H, value_dim]
        else:
            kernels.rotate_and_store(query, new)
            out = attend_expanded(query, cache, key_up, value_up, metadata, spec)
        return self.o.run(metadata.select(out.flatten(1)), epilogue.select(metadata.logits_indices))

    def next_norm(self, norm: RMSNorm, hidden: Tensor) -> kernels.NextNorm | None:
        """See `Linear.next_norm`. With an indexer, several projections read the norm."""
        if self.indexer is not None:
            apart = kernels.norms_apart(hidden, self.short.weight, None)
            return kernels.NextNorm(norm.weight, norm.eps) if apart else None
        return self.short.next_norm(norm, hidden)


class HeadProjections(Linear):
    """Projections from latents to each head's keys and values. Packed as floats: attention reads the matrices."""

    def pack(self) -> None:
        if isinstance(self.format, FloatFormat):
            return
        self.format.pack(self)
        assert isinstance(self.weight, kernels.QuantizedWeight)
        floats = kernels.dequantize(self.weight.codes, self.weight, self.dtype)
        self.weight = nn.Parameter(floats, requires_grad=False)

    def of_heads(self, spec: LatentSpec) -> tuple[Tensor, Tensor]:
        """Return the projections of keys [H, plain_dim, L] and values [H, value_dim, L]."""
        assert isinstance(self.weight, Tensor)
        both = self.weight.unflatten(0, (spec.num_heads, -1))
        return both[:, : spec.plain_dim], both[:, spec.plain_dim :]


def attend(query: Tensor, cache: Tensor, metadata: AttentionMetadata, spec: LatentSpec) -> Tensor:
    """Compute the attention of the step's tokens over their latents, which are already stored.

    query [T, H, L + R], cache [num_blocks, 1, block_size, L + R] -> [T, H, L].
    """
    m, n, first = metadata, metadata.num_decodes, metadata.first_prefill
    out = query.new_empty(*query.shape[:2], spec.latent_dim)
    if n:
        attend_decodes(query[:n], cache, m, spec, out[:n])
    if m.prefill_choice is not None:
        m.prefill_choice.attend(query, cache, spec.scale, out)
    elif first < len(m.rows):
        latents = kernels.PagedLatents(cache, m.block_tables, m.rows[first:], m.context_lens[first:])
        kernels.latent_attention_prefill(
            query, m.query_start[first:], latents, scale=spec.scale, out=out, tiles=m.tiles
        )
    return out


def attend_decodes(query: Tensor, cache: Tensor, metadata: AttentionMetadata, spec: LatentSpec, out: Tensor) -> None:
    """Compute the attention of the n sequences that decode: query [n, H, L + R] -> out [n, H, L]. See `attend`."""
    m, n = metadata, metadata.num_decodes
    if m.decode_choice is not None:
        m.decode_choice.attend(query, cache, spec.scale, out)
        return
    latents = kernels.PagedLatents(cache, m.block_tables, m.rows[:n], m.context_lens[:n])
    kernels.latent_attention_decode(query, latents, scale=spec.scale, out=out, plan=m.plan)


def attend_expanded(
    query: Tensor, cache: Tensor, key_up: Tensor, value_up: Tensor, metadata: AttentionMetadata, spec: LatentSpec
) -> Tensor:
    """Compute the attention of a step with an expansion over its latents, which are already stored.

    query [T, H, plain_dim + R], its last R channels rotated; key_up and value_up by `of_heads` -> [T, H, value_dim].
    """
    m, n, e = metadata, metadata.num_decodes, metadata.prefill_kv
    assert isinstance(e, LatentExpansion)
    starts, lens = m.query_start[n : n + e.num_seqs + 1], m.context_lens[n : n + e.num_seqs]
    out = e.attend(query, cache, key_up, value_up, starts, lens, spec.scale)[..., : spec.value_dim]
    if n:  # one query of each sequence: absorbed
        absorbed = torch.cat(
            [kernels.head_linear(query[:n, :, : spec.plain_dim], key_up.mT), query[:n, :, spec.plain_dim :]], 2
        )
        sums = query.new_empty(n, spec.num_heads, spec.latent_dim)
        attend_decodes(absorbed, cache, m, spec, sums)
        out[:n] = kernels.head_linear(sums, value_up)
    return out
