"""Multi-head latent attention (DeepSeek): attention over cached latents."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import kernels
from engine.models.attention import AttentionMetadata
from engine.models.expansion import LatentExpansion
from engine.models.formats.floats import FloatFormat
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
        spec, cache = self.spec, kv[0]
        short = self.short.run(x)  # [T, query_rank + L + R]
        query_input, latent = short.split((spec.query_rank, spec.head_dim), 1)
        if self.query_norm is None:
            query = self.query.run(x)
        else:
            query = self.query.run(SublayerInput(query_input, self.query_norm, context=x.context))
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
        if metadata.prefill_kv is None:
            query = kernels.absorb_and_store(query, key_up, new)  # [T, H, L + R]
            out = kernels.head_linear(attend(query, cache, metadata, spec), value_up)  # [T, H, value_dim]
        else:
            kernels.rotate_and_store(query, new)
            out = attend_expanded(query, cache, key_up, value_up, metadata, spec)
        return self.o.run(metadata.select(out.flatten(1)), epilogue.select(metadata.logits_indices))

    def next_norm(self, norm: RMSNorm, hidden: Tensor) -> kernels.NextNorm | None:
        """See `Linear.next_norm`."""
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
        latents = kernels.PagedLatents(cache, m.block_tables, m.rows[:n], m.context_lens[:n])
        kernels.latent_attention_decode(query[:n], latents, scale=spec.scale, out=out[:n], plan=m.plan)
    if first < len(m.rows):
        latents = kernels.PagedLatents(cache, m.block_tables, m.rows[first:], m.context_lens[first:])
        kernels.latent_attention_prefill(
            query, m.query_start[first:], latents, scale=spec.scale, out=out, tiles=m.tiles
        )
    return out


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
        latents = kernels.PagedLatents(cache, m.block_tables, m.rows[:n], m.context_lens[:n])
        kernels.latent_attention_decode(absorbed, latents, scale=spec.scale, out=sums, plan=m.plan)
        out[:n] = kernels.head_linear(sums, value_up)
    return out
