"""Deterministic forms of operations that PyTorch computes: each token alone, and each head where ranks share heads.

PyTorch's GEMMs choose their order of sums by the number of rows, its sums split one long row among threads,
and its functions round the last elements of a tensor otherwise than whole vectors. Alone, a token always has the same
shape, so the same bytes. The CPU's own kernels need no such form.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.cpu import attention, lora, matmul, moe, native_attention
from kernels.cpu.each_row import alone
from kernels.cpu.elementwise import gate_and_mul
from kernels.cpu.packed_weight import NativeWeight, pack_floats, pack_stack
from kernels.cpu.rotary import rms_norm
from kernels.data.activation import Activation, Gate
from kernels.data.attention import AttentionArgs, NewIndexKeys, NewLatents, PagedContext, PagedLatents
from kernels.data.lora import AdapterTokens, EmbeddingLora, ExpertLora, LoraWeights, RetrainedRows
from kernels.data.moe import Experts
from kernels.data.quantized_rows import QuantizedRows
from kernels.data.quantized_weight import QuantizedWeight, Weight
from kernels.data.sampling import Part, SamplingRows
from kernels.reference.precision import to_wide

WHOLE = 64  # elements: whole vectors of every instruction set
SPAN = 16384  # elements that PyTorch never divides among threads


def pack_weight(weight: Weight) -> Weight:
    """See `kernels.reference.pack_weight`. What the CPU's own kernels cannot read is dequantised to float32."""
    packed = matmul.pack_weight(weight)
    if isinstance(packed, NativeWeight):
        return packed
    if isinstance(weight, QuantizedWeight):
        if weight.codes.dim() == 2:
            floats = reference.dequantize(weight.codes, weight, torch.float32)
        else:
            floats = torch.stack([reference.dequantize(each.codes, each, torch.float32) for each in _matrices(weight)])
        weight = floats
    native = pack_stack(weight) if weight.dim() == 3 else pack_floats(weight)
    assert native is not None, f"no deterministic form of a weight of {weight.dtype}"
    return native


def _matrices(stack: QuantizedWeight) -> list[QuantizedWeight]:
    found = [stack[i] for i in range(len(stack.codes))]
    return [each for each in found if isinstance(each, QuantizedWeight)]


def pack_router(weight: Tensor) -> Tensor:
    """See `kernels.reference.pack_router`."""
    packed = pack_weight(to_wide(weight.detach()))
    assert isinstance(packed, Tensor)
    return packed


def activation(x: Tensor, kind: Activation) -> Tensor:
    """See `kernels.reference.activation`."""
    width = x.shape[1]
    whole = F.pad(x, (0, -width % WHOLE))  # a rank's part of a row may end within a vector
    return alone(lambda row: _in_spans(row, kind), whole)[:, :width].contiguous()


def _in_spans(row: Tensor, kind: Activation) -> Tensor:
    spans = row.split(SPAN, 1)
    return torch.cat([reference.activation(span.contiguous(), kind) for span in spans], 1)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `kernels.reference.head_linear`."""
    out = x.new_empty(*x.shape[:2], weight.shape[1])
    for token, head in itertools.product(range(len(x)), range(len(weight))):
        out[token, head] = weight[head].contiguous() @ x[token, head].clone()
    return out


def paged_attention_decode(
    query: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    plan: object = None,
    out: Tensor | QuantizedRows | None = None,
) -> Tensor:
    """See `kernels.reference.paged_attention_decode`."""
    assert not isinstance(out, QuantizedRows)
    if native_attention.is_native(query, context, args, 1):
        return native_attention.paged_attention_decode(query, context, args, out=out)
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    return paged_attention_prefill(query, starts, context, args, out=out)


def paged_attention_prefill(
    query: Tensor,
    query_start: Tensor,
    context: PagedContext,
    args: AttentionArgs,
    *,
    tiles: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.paged_attention_prefill`. A query has the shape that it has when it is decoded."""
    if native_attention.is_native(query, context, args, len(query)):
        return native_attention.paged_attention_prefill(query, query_start, context, args, out=out)
    out = torch.zeros_like(query) if out is None else out
    for token, row, length in _queries(query_start, context.rows, context.lens):
        own = replace(context, rows=row, lens=length)
        if args.sparse is not None:
            out[token] = attention.paged_attention_decode(query[token].clone(), own, args)
            continue
        for head, of_head, its in _heads(query.shape[1], own, args):
            out[token, head] = attention.paged_attention_decode(query[token, head].clone(), of_head, its)
    return out


def _heads(
    count: int, context: PagedContext, args: AttentionArgs
) -> Iterator[tuple[slice, PagedContext, AttentionArgs]]:
    """Yield each of `count` query heads, the cache of its key and value head, and its arguments."""
    each = count // context.key_cache.shape[1]
    for i in range(count):
        head, kv = slice(i, i + 1), slice(i // each, i // each + 1)
        key, value = context.key_cache[:, kv], context.value_cache[:, kv]
        slopes, sinks = (None if x is None else x[head] for x in (args.alibi_slopes, args.sinks))
        scale = None if args.kv_scale is None else args.kv_scale[:, kv]
        of_head = replace(context, key_cache=key, value_cache=value)
        yield head, of_head, replace(args, alibi_slopes=slopes, sinks=sinks, kv_scale=scale)


def _queries(query_start: Tensor, rows: Tensor, lens: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each token of a step: its place, its sequence's row [1], and the length of the context up to it [1]."""
    starts = query_start.tolist()
    for i, length in enumerate(lens.tolist()):
        for token in range(starts[i], starts[i + 1]):
            seen = length - (starts[i + 1] - 1 - token) if length else 0
            yield slice(token, token + 1), rows[i : i + 1], torch.tensor([seen], dtype=lens.dtype)


def absorb_and_store(query: Tensor, key_up: Tensor, new: NewLatents) -> Tensor:
    """See `kernels.reference.absorb_and_store`."""
    plain = key_up.shape[1]
    rotated = query.clone()
    rotate_and_store(rotated, new)
    return torch.cat([head_linear(query[..., :plain], key_up.mT), rotated[..., plain:]], 2)


def rotate_and_store(query: Tensor, new: NewLatents) -> None:
    """See `kernels.reference.rotate_and_store`."""
    for i in range(len(query)):
        own = slice(i, i + 1)
        latent, positions, slots = new.latent[own].clone(), new.positions[own], new.slot_mapping[own]
        one = replace(new, latent=latent, positions=positions, slot_mapping=slots)
        reference.rotate_and_store(query[own], one)


def latent_attention_decode(
    query: Tensor, latents: PagedLatents, *, scale: float, out: Tensor, plan: object = None
) -> Tensor:
    """See `kernels.reference.latent_attention_decode`."""
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    return latent_attention_prefill(query, starts, latents, scale=scale, out=out)


def latent_attention_prefill(
    query: Tensor,
    query_start: Tensor,
    latents: PagedLatents,
    *,
    scale: float,
    out: Tensor,
    tiles: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.latent_attention_prefill`."""
    cache, size, num_heads = latents.cache, latents.cache.shape[2], query.shape[1]
    for token, row, length in _queries(query_start, latents.rows, latents.lens):
        count = int(length)
        if not count:
            out[token] = 0
            continue
        blocks = latents.block_tables[int(row), : -(-count // size)].long()
        keys = to_wide(cache[blocks, 0].flatten(0, 1)[:count])
        values = keys[:, : out.shape[2]].contiguous().T
        for head in range(num_heads):
            weights = (keys @ to_wide(query[token, head].clone())[0] * scale).softmax(-1)
            out[token, head] = (values @ weights).to(out.dtype)
    return out


def store_index_keys(query: Tensor, new: NewIndexKeys) -> None:
    """See `kernels.reference.store_index_keys`."""
    for i in range(len(query)):
        own = slice(i, i + 1)
        key, positions, slots = new.key[own].clone(), new.positions[own], new.slot_mapping[own]
        reference.store_index_keys(query[own], replace(new, key=key, positions=positions, slot_mapping=slots))


def index_scores(query: Tensor, weights: Tensor, keys: PagedLatents, max_len: int) -> Tensor:
    """See `kernels.reference.index_scores`."""
    scores = []
    for i in range(len(query)):
        own = slice(i, i + 1)
        seen = replace(keys, rows=keys.rows[own], lens=keys.lens[own])
        scores.append(reference.index_scores(query[own].clone(), weights[own].clone(), seen, max_len))
    return torch.cat(scores)


def lora_add(y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> Tensor:
    """See `kernels.reference.lora_add`."""
    for i in range(len(y)):
        own = slice(i, i + 1)
        y[own] = lora.lora_add(y[own].clone(), x[own].clone(), weights, tokens[own])
    return y


def adapt_embedding(y: Tensor, ids: Tensor, weights: EmbeddingLora, tokens: AdapterTokens) -> Tensor:
    """See `kernels.reference.adapt_embedding`."""
    for i in range(len(y)):
        own = slice(i, i + 1)
        y[own] = reference.adapt_embedding(y[own].clone(), ids[own], weights, tokens[own])
    return y


def retrained_logits(y: Tensor, x: Tensor, weights: RetrainedRows, tokens: AdapterTokens) -> Tensor:
    """See `kernels.reference.retrained_logits`."""
    for i in range(len(y)):
        own = slice(i, i + 1)
        y[own] = reference.retrained_logits(y[own].clone(), x[own].clone(), weights, tokens[own])
    return y


def adapted_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    weights: LoraWeights,
    tokens: AdapterTokens,
    *,
    norm: tuple[Tensor, float] | None = None,
    gate: Gate | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.adapted_linear`."""
    value = x if norm is None else rms_norm(x, *norm)
    y = lora_add(matmul.linear(value, weight, bias), value, weights, tokens)
    if gate is not None:
        y = gate_and_mul(y, gate)
    return y if residual is None else residual.add_(y)


def adapted_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stack: Experts,
    adapters: ExpertLora,
    tokens: AdapterTokens,
    add_to: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.adapted_experts`."""
    out = torch.empty_like(x) if add_to is None else add_to
    for i in range(len(x)):
        own = slice(i, i + 1)
        into = None if add_to is None else add_to[own].clone()
        out[own] = moe.adapted_experts(
            x[own].clone(), ids[own].clone(), weights[own].clone(), stack, adapters, tokens[own], into
        )
    return out


def sample(
    logits: Tensor,
    rows: SamplingRows,
    part: Part = Part.ALL,
    mask_of: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `kernels.reference.sample`."""
    out = torch.zeros(len(logits), dtype=torch.int64) if out is None else out
    for i in range(len(logits)):
        own = slice(i, i + 1)
        mask = None if mask_of is None else mask_of[own]
        reference.sample(logits[own].clone(), SamplingRows(*(each[own] for each in rows)), part, mask, out[own])
    return out


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.reference.token_logprobs`."""
    logprobs = alone(lambda row: row.float().log_softmax(-1), logits)  # its sums are never divided among threads
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1))
    top, top_ids = logprobs.topk(num_top)
    return chosen.squeeze(1), (logprobs > chosen).sum(-1) + 1, top_ids, top
