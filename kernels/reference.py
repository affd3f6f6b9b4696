"""Every operation in plain PyTorch: the CPU path, and the oracle that the GPU kernels are tested against.

Knows tensors in, tensors out; never knows requests, models or schedulers. Values are computed in float32 (float64 for
float64 inputs) and rounded where Hugging Face's models round. A layer's KV cache is one tensor
[2, num_blocks, num_kv_heads, block_size, head_dim]; its two halves are `key_cache` and `value_cache`. A slot is
block_id * block_size + offset; slot -1 means "do not write". Slots that were never written may hold anything, NaN too.

A cache of torch.float8_e4m3fn holds K / kv_scale[0] and V / kv_scale[1], saturated at ±448, with a scale for each KV head:
kv_scale [2, Hkv] float32, which is None for caches of other dtypes.
"""

from __future__ import annotations

import enum
import math
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.plan import DecodePlan
from kernels.step import RowState, StepTensors

_onednn = torch.ops.mkldnn
MASK_ELEMENTS = 1 << 22  # the largest attention mask (or score matrix) made at once
E4M3_MAX = 448.0  # the largest number of torch.float8_e4m3fn
GATHER_ELEMENTS = 1 << 18  # the most keys' elements copied out of the cache at once: they should stay in a core's cache
PACKED_FOR = 16  # tokens that weights are packed for: about the best blocks for fewer, and for many more


def _wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums over x are made in."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


# Norms and activation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n], weight [n] -> [..., n]: x / sqrt(mean(x²) + eps) rounded to x's dtype, then times weight."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., n], weight [n] -> (rms_norm(residual + x), residual + x), the sum rounded to x's dtype."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2n] -> [..., n]: silu of the first half, rounded to x's dtype, times the second half."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


# Matrix products


def pack_weight(weight: Tensor) -> Tensor:
    """weight [N, K] -> the same in the blocks that oneDNN's products read best, where that pays; else itself.

    On x86 CPUs: an eighth faster than PyTorch's products for one token, twice as fast for 16. For `linear` and the three
    operations after it, and for nothing else.
    """
    supported = weight.device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    if not supported or not torch.backends.mkldnn.is_available():
        return weight
    if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _onednn._is_mkldnn_bf16_supported()):
        return _onednn._reorder_linear_weight(weight, PACKED_FOR)
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K] (it may be packed), bias [N] -> x weightᵀ + bias [T, N]."""
    if weight.is_mkldnn:
        return _onednn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear_add(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """residual [T, N] += linear(x [T, K], weight [N, K], bias [N]), in place; the sum is rounded once."""
    if weight.is_mkldnn:
        return residual.copy_(_onednn._linear_pointwise.binary(x, residual, weight, bias, "add"))
    residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """linear(rms_norm(x [T, K], norm_weight [K], eps), weight [N, K], bias [N]) -> [T, N], in `out` where that is given."""
    result = linear(rms_norm(x, norm_weight, eps), weight, bias)
    return result if out is None else out.copy_(result)


def norm_swiglu(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up [T, N]; gate and up are the halves of norm_linear(x [T, K], weight [2N, K], bias [2N])."""
    return silu_and_mul(norm_linear(x, norm_weight, eps, weight, bias))


# Rotary embedding and the KV cache


def _rotate(heads: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """heads [T, N, D] -> [T, N, D]: NeoX rotation of the first cos_sin.shape[1] channels by each token's position."""
    rotary_dim = cos_sin.shape[1]
    table = cos_sin[positions].unsqueeze(1)  # [T, 1, rotary_dim]
    wide = _wide(heads)
    if wide.dtype != table.dtype:
        table = table.to(wide.dtype)
    cos, sin = table.chunk(2, -1)
    first, second = wide[..., :rotary_dim].chunk(2, -1)
    out = torch.empty_like(wide)
    rotated = out[..., :rotary_dim].chunk(2, -1)
    torch.mul(first, cos, out=rotated[0]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[1]).addcmul_(first, sin)
    if rotary_dim < heads.shape[-1]:
        out[..., rotary_dim:] = wide[..., rotary_dim:]
    return out.to(heads.dtype)


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, Hkv, D] -> (q, k): RMSNorm of each head where a weight [D] is given, then rotation.

    positions [T] int32 or int64; cos_sin [max_position, rotary_dim] float32, its first half cosines and its second half
    sines, or None for no rotation. Only the first rotary_dim channels of a head rotate.
    """
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    if cos_sin is not None:
        q, k = _rotate(q, positions, cos_sin), _rotate(k, positions, cos_sin)
    return q, k


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    kv_scale: Tensor | None = None,
) -> Tensor:
    """qkv [T, (H + 2 * Hkv) * D] -> query [T, H, D], normed and rotated as `rope` does; K and V go to their slots.

    positions [T] int32 or int64, slot_mapping [T] int64. The other arguments are those of `rope` and `store_kv`.
    """
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
    query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if q_norm is None and k_norm is None and cos_sin is not None:  # one rotation serves queries and keys
        rotated = _rotate(heads[:, : num_heads + num_kv_heads], positions, cos_sin)
        query, key = rotated.split((num_heads, num_kv_heads), 1)
    else:
        query, key = rope(query, key, positions, cos_sin, q_norm, k_norm, eps)
    store_kv(key, value, key_cache, value_cache, slot_mapping, kv_scale)
    return query


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x [..., Hkv, D], scale [Hkv] float32 -> x / scale as float8_e4m3fn, saturated at ±448; what is not finite is NaN."""
    scaled = (x.float() / scale.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
    return scaled.masked_fill_(~x.isfinite(), math.nan).to(torch.float8_e4m3fn)


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
) -> None:
    """Write key, value [T, Hkv, D] to the slots slot_mapping [T] int64 of the caches [num_blocks, Hkv, block_size, D]."""
    assert (kv_scale is not None) == (key_cache.dtype == torch.float8_e4m3fn)
    if kv_scale is not None:  # bytes, since PyTorch indexes no float8
        key, value = to_e4m3(key, kv_scale[0]).view(torch.uint8), to_e4m3(value, kv_scale[1]).view(torch.uint8)
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    if len(slot_mapping) and int(slot_mapping.min()) < 0:
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block_size = key_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    key_cache[blocks, :, offsets] = key
    value_cache[blocks, :, offsets] = value


# Attention


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, soft_cap: float) -> Tensor:
    """softmax(cap(query keyᵀ scale) + mask) value.

    query [A, B, M, D]; key, value [A, B, N, D]; mask bool (True: attend) or additive, broadcast to [A, B, M, N].
    """
    if not soft_cap and (mask is None or mask.dtype in (torch.bool, query.dtype)):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = (_wide(query) @ _wide(key).transpose(-1, -2)).mul_(scale)
    if soft_cap:
        scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    return (scores.softmax(-1) @ _wide(value)).to(query.dtype)


def _gather(
    key_cache: Tensor, value_cache: Tensor, blocks: Tensor, heads: range, kv_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Copies of some KV heads of blocks [B, n] of the caches -> keys, values [len(heads), B, n * block_size, D].

    Those of an e4m3 cache are made `dtype`, times their scales.
    """
    assert (kv_scale is not None) == (key_cache.dtype == torch.float8_e4m3fn)
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    head_ids = torch.arange(heads.start, heads.stop, dtype=blocks.dtype).unsqueeze(1)
    pieces = (blocks.flatten() * num_kv_heads + head_ids).flatten()  # (block, head) pairs, head-major
    shape = (len(heads), len(blocks), -1, head_dim)
    if kv_scale is not None:
        key, value = (
            cache.view(torch.uint8).view(-1, block_size * head_dim).index_select(0, pieces).view(shape)
            .view(torch.float8_e4m3fn).float().mul_(scale[heads.start : heads.stop].view(-1, 1, 1, 1)).to(dtype)
            for cache, scale in zip((key_cache, value_cache), kv_scale, strict=True)
        )  # fmt: skip
        return key, value
    key = key_cache.view(-1, block_size * head_dim).index_select(0, pieces).view(shape)
    value = value_cache.view(-1, block_size * head_dim).index_select(0, pieces).view(shape)
    return key, value


def _decode_one(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    table: Tensor,
    context_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    slopes: Tensor | None,
    kv_scale: Tensor | None,
) -> Tensor:
    """`paged_attention_decode` for one sequence: query [H, D], table [max_blocks] -> [H, D]."""
    num_kv_heads, block_size, head_dim = key_cache.shape[1:]
    oldest = max(context_len - window, 0) if window else 0
    first_block = oldest // block_size
    blocks = table[first_block : -(-context_len // block_size)].unsqueeze(0)
    seen = slice(oldest - first_block * block_size, context_len - first_block * block_size)
    query = query.view(num_kv_heads, 1, -1, head_dim)
    bias = None
    if slopes is not None:
        bias = slopes.view(num_kv_heads, 1, -1, 1) * torch.arange(oldest - context_len + 1, 1)
    step = max(GATHER_ELEMENTS // (blocks.shape[1] * block_size * head_dim), 1)
    out = []
    for start in range(0, num_kv_heads, step):
        heads = range(start, min(start + step, num_kv_heads))
        key, value = _gather(key_cache, value_cache, blocks, heads, kv_scale, query.dtype)
        mask = None if bias is None else bias[heads.start : heads.stop]
        q = query[heads.start : heads.stop]
        out.append(_attend(q, key[:, :, seen], value[:, :, seen], mask, scale, soft_cap))
    return (out[0] if len(out) == 1 else torch.cat(out)).view(-1, head_dim)


def _decode_groups(num_blocks: list[int], most: int) -> list[list[int]]:
    """The sequences in groups that pad to less than twice their size, and to at most `most` blocks if more than one."""
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(num_blocks)), key=num_blocks.__getitem__, reverse=True):
        if num_blocks[i] == 0:
            break
        if not groups or 2 * num_blocks[i] <= longest or (len(groups[-1]) + 1) * longest > most:
            groups.append([])
            longest = num_blocks[i]
        groups[-1].append(i)
    return groups


def paged_attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: object = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query token per sequence over its paged context -> [B, H, D], written to `out` when given.

    query [B, H, D]; key_cache, value_cache [num_blocks, Hkv, block_size, D]; block_tables [R, max_blocks] int32, of
    which sequence i owns row rows[i] (rows [B] int32); context_lens [B] int32 count the query's own token, whose K and V
    are stored already. context_len 0 gives 0. window w > 0: only keys at distance < w. soft_cap c > 0: scores become
    c * tanh(score / c). alibi_slopes [H] float32: slope * -distance is added. `plan` is the GPU kernel's work map; the
    twin makes its own.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1:3]
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype)
    slopes = None if alibi_slopes is None else alibi_slopes.to(_wide_dtype(query))
    lens = context_lens.tolist()
    first_blocks = [max(n - window, 0) // block_size if window else 0 for n in lens]
    num_blocks = [-(-n // block_size) - first for n, first in zip(lens, first_blocks, strict=True)]
    for group in _decode_groups(num_blocks, GATHER_ELEMENTS // (num_kv_heads * block_size * head_dim)):
        if len(group) == 1:
            i = group[0]
            table = block_tables[int(rows[i])]
            out[i] = _decode_one(
                query[i], key_cache, value_cache, table, lens[i], scale, window, soft_cap, slopes, kv_scale
            )
            continue
        members = torch.tensor(group)
        first, count = (torch.tensor([x[i] for i in group]).unsqueeze(1) for x in (first_blocks, num_blocks))
        columns = torch.minimum(torch.arange(num_blocks[group[0]]), count - 1) + first  # padding repeats the last block
        blocks = block_tables[rows[members].unsqueeze(1), columns]
        heads = range(num_kv_heads)
        key, value = _gather(key_cache, value_cache, blocks, heads, kv_scale, query.dtype)  # [Hkv, b, S, D]
        distance = context_lens[members].unsqueeze(1) - 1 - first * block_size - torch.arange(key.shape[2])  # [b, S]
        unused = (distance < 0).nonzero(as_tuple=True)
        if len(unused[0]):  # never-written slots must not reach a product, whatever its other factor
            key[:, unused[0], unused[1]] = 0
            value[:, unused[0], unused[1]] = 0
        mask = ((distance >= 0) & (distance < window) if window else distance >= 0)[None, :, None]  # [1, b, 1, S]
        if slopes is not None:
            bias = slopes.view(num_kv_heads, 1, -1, 1) * -distance[None, :, None]  # [Hkv, b, G, S]
            mask = bias.masked_fill_(~mask, -math.inf)
        q = query[members].view(len(group), num_kv_heads, -1, head_dim).transpose(0, 1)  # [Hkv, b, G, D]
        attended = _attend(q, key, value, mask, scale, soft_cap)
        out[members] = attended.transpose(0, 1).reshape(len(group), num_heads, head_dim)
    if 0 in lens:
        out[context_lens == 0] = 0
    return out


def paged_attention_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    kv_scale: Tensor | None = None,
    tiles: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over its paged context -> [T, H, D], in `out` when given.

    query [T, H, D], of which sequence i's tokens are query[query_start[i]:query_start[i + 1]], the last ones of its
    context_lens[i] tokens, K and V of all of which are stored. Rows of `out` that belong to no sequence are left alone.
    query_start [B + 1] int32; the other arguments are those of `paged_attention_decode`. `tiles` is the GPU kernel's
    grid; the twin needs none.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1:3]
    group_size = num_heads // num_kv_heads
    if out is None:
        out = torch.zeros(query.shape, dtype=query.dtype)
    starts = query_start.tolist()
    slopes = None if alibi_slopes is None else alibi_slopes.to(_wide_dtype(query)).view(num_kv_heads, group_size, 1, 1)
    for row, start, end, context in zip(rows.tolist(), starts[:-1], starts[1:], context_lens.tolist(), strict=True):
        if start == end:
            continue
        if context == 0:
            out[start:end] = 0
            continue
        computed = context - (end - start)  # the context before the first query
        first_block = max(computed + 1 - window, 0) // block_size if window else 0
        origin = first_block * block_size
        blocks = block_tables[row : row + 1, first_block : -(-context // block_size)]
        kv = _gather(key_cache, value_cache, blocks, range(num_kv_heads), kv_scale, query.dtype)
        key, value = (x[:, :, : context - origin].expand(-1, group_size, -1, -1) for x in kv)  # [Hkv, G, N, D]
        q = query[start:end].view(end - start, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
        windowed = 0 < window < context
        if computed == 0 and not windowed and not soft_cap and slopes is None:
            attended = F.scaled_dot_product_attention(q, key, value, is_causal=True, scale=scale)
            out[start:end] = attended.permute(2, 0, 1, 3).reshape(end - start, num_heads, head_dim)
            continue
        score_rows = num_heads if soft_cap or slopes is not None else 1
        step = min(max(MASK_ELEMENTS // (score_rows * len(key[0, 0])), 16), 256)
        for low in range(0, end - start, step):
            high = min(low + step, end - start)
            newest = torch.arange(computed + low, computed + high).unsqueeze(1)  # the queries' positions
            oldest = max(computed + low + 1 - window, 0) if windowed else 0
            distance = newest - torch.arange(oldest, computed + high)
            seen = distance >= 0
            if windowed:
                seen &= distance < window
            mask: Tensor | None = seen
            if slopes is not None:
                mask = (slopes * -distance).masked_fill_(~seen, -math.inf)
            elif high - low == 1:
                mask = None
            keys = slice(oldest - origin, computed + high - origin)
            attended = _attend(q[:, :, low:high], key[:, :, keys], value[:, :, keys], mask, scale, soft_cap)
            out[start + low : start + high] = attended.permute(2, 0, 1, 3).reshape(high - low, num_heads, head_dim)
    return out


# Sampling

MIX_A, MIX_B = 0x7FEB352D, 0x846CA68B  # odd multipliers of a 32-bit finaliser


def _int32(x: int) -> int:
    """The 32-bit pattern x as a signed integer."""
    return (x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)


def _fold(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) of int32 seen as unsigned, a new tensor."""
    folded = x >> bits
    folded &= 0xFFFFFFFF >> bits
    folded ^= x
    return folded


def _mix(x: Tensor, inject: Tensor | int = 0) -> Tensor:
    """A bijection of 32-bit integers whose output bits each depend on every input bit. Products wrap."""
    x = _fold(x, 16)
    x *= MIX_A
    x ^= inject
    x = _fold(x, 15)
    x *= _int32(MIX_B)
    return _fold(x, 16)


def random_bits(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The counter RNG: int64 seeds, positions and token ids, whose shapes broadcast -> int32, all 32 bits random.

    A pure function of (seed, position, token id), so a request's noise is the same whatever else is in the batch. Seed
    and position become two 32-bit keys; a token id is mixed with both.
    """
    low, high = (((x << 32) >> 32).to(torch.int32) for x in (seeds, seeds >> 32))
    a = _mix(low ^ _int32(0x9E3779B9))
    b = _mix(high ^ a)
    first = _mix(positions.to(torch.int32) ^ b)
    second = _mix(first ^ a)
    return _mix(token_ids.to(torch.int32) ^ first, second)


def gumbel(bits: Tensor) -> Tensor:
    """Random bits int32 -> Gumbel noise float32: -log(-log(1 - w)), w uniform in (0, 1), finest near 0."""
    w = bits.float().add_(bits < 0, alpha=2.0**32)  # seen as unsigned
    w = w.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return w.neg_().log1p_().neg_().log_().neg_()


def sampling_thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest logit that each row may sample -> [B]; -inf where nothing filters.

    logits [B, V] float32 or float64 without NaN, temperature [B] > 0, the rest as in `sample`. min_p acts first, then
    top_k among its survivors, then top_p on their mass; tokens that tie with the lowest logit all stay.
    """
    vocab_size = logits.shape[1]
    temperature, top_k, top_p, min_p = (x.unsqueeze(1) for x in (temperature, top_k, top_p, min_p))
    finite = torch.finfo(logits.dtype)
    peak = logits.amax(-1, keepdim=True).clamp_(finite.min, finite.max)
    floor = torch.where(min_p > 0, peak + temperature * min_p.log(), -math.inf)
    # All tokens below `tail` together weigh at most 1 - top_p of the likeliest token alone: top_p's threshold is above.
    tail = torch.where(top_p < 1, peak + temperature * ((1 - top_p) / vocab_size).log(), -math.inf)
    limited = (top_k > 0) & (top_k < vocab_size)
    above = (logits >= torch.maximum(floor, tail)).sum(-1, keepdim=True)
    needed = torch.where(limited, top_k, above).clamp_(min=1)
    ordered = logits.topk(int(needed.max())).values
    floor = torch.maximum(floor, torch.where(limited, ordered.gather(1, needed.long() - 1), floor))

    def weigh(x: Tensor) -> Tensor:
        return ((x - peak) / temperature).exp_().masked_fill_(x < floor, 0)

    if (top_p < 1).any():
        reached = weigh(ordered).cumsum(-1, dtype=torch.float64)
        wanted = top_p * weigh(logits).sum(-1, keepdim=True, dtype=torch.float64)
        last = (reached < wanted).sum(-1, keepdim=True).clamp_(max=ordered.shape[1] - 1)  # the first to reach the mass
        nucleus = torch.where(top_p < 1, ordered.gather(1, last), -math.inf)
        floor = torch.maximum(floor, nucleus)
    return floor.squeeze(1)


def mask_logits(logits: Tensor, masks: Tensor, mask_of: Tensor) -> None:
    """Set logits [B, V] to -inf, in place, but for the tokens that their row's mask allows.

    masks [n, (V + 31) // 32] int32, on the logits' device or in pinned memory of the CPU: a bit for each token that stays,
    the lowest bit first. mask_of [B] int32: which of the masks is the row's; -1: it has none, and stays as it is.
    """
    rows = (mask_of >= 0).nonzero().squeeze(1)
    masks = masks.to(logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = ((masks[mask_of[rows]].unsqueeze(2) >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(~allowed, -math.inf)


class Part(enum.Enum):
    """Which rows are sampled."""

    ALL = 0
    PLAIN = 1  # those that nothing filters
    REST = 2  # those that something filters, or that have a mask


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    part: Part = Part.ALL,
    mask_of: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One token per row of logits [B, V] -> token ids [B] int64, in `out` where that is given.

    temperature [B] float32 (0: the likeliest token, lowest id on ties), top_k [B] int32 (<= 0: all), top_p, min_p [B]
    float32, seeds [B] int64, positions [B] int32 or int64. The order is temperature, min_p, top_k, top_p; tokens that
    tie at a threshold all stay. The choice is argmax(logit / temperature + Gumbel noise of (seed, position, token id)).
    NaN logits are never chosen while another token can be.

    part: of the rows. Those that are not `PLAIN` get token 0 for now. Those that are not of the `REST` keep what `out`
    holds; mask_of [B] int32 says which rows have a mask (that is put on the logits already): not those where it is -1.
    """
    filtered = (temperature > 0) & (((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1) | (min_p > 0))
    rows = torch.ones_like(filtered)
    if part is Part.PLAIN:
        rows = ~filtered
    elif part is Part.REST:
        assert mask_of is not None
        assert out is not None
        rows = filtered | (mask_of >= 0)
    if out is None:
        out = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    elif part is Part.PLAIN:
        out.zero_()
    arguments = temperature, top_k, top_p, min_p, seeds, positions
    if rows.all():
        return out.copy_(_sample(logits, *arguments))
    out[rows] = _sample(logits[rows], *(x[rows] for x in arguments))
    return out


def _sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    wide = _wide(logits)
    if wide.isnan().any():
        wide = torch.where(wide.isnan(), -math.inf, wide)
    filtered = ((top_k > 0) & (top_k < wide.shape[1])) | (top_p < 1) | (min_p > 0)
    random = temperature > 0
    chosen = torch.empty(len(wide), dtype=torch.int64, device=wide.device)
    for kind, rows in enumerate((~random, random & ~filtered, random & filtered)):
        if not rows.any():
            continue
        x, t, seed, position = (y[rows] for y in (wide, temperature.unsqueeze(1), seeds, positions))
        if kind == 1:
            x /= t
            x += gumbel(
                random_bits(seed.unsqueeze(1), position.unsqueeze(1), torch.arange(x.shape[1], device=x.device))
            )
        elif kind == 2:  # noise for the few tokens left
            thresholds = sampling_thresholds(x, temperature[rows], top_k[rows], top_p[rows], min_p[rows])
            row, token = (x >= thresholds.unsqueeze(1)).nonzero(as_tuple=True)
            perturbed = x[row, token] / t[row, 0] + gumbel(random_bits(seed[row], position[row], token))
            x = torch.full_like(x, -math.inf).index_put_((row, token), perturbed)
        chosen[rows] = x.argmax(-1)
    return chosen


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Raw logits [B, V] -> (logprob [B], rank [B], top_ids [B, num_top], top_logprobs [B, num_top]).

    token_ids [B] int64: the tokens whose logprob and rank (1: none is likelier) are asked. The most likely come first;
    logprobs are float32, ranks and ids int64.
    """
    wide = logits.float()
    total = wide.logsumexp(-1, keepdim=True)
    chosen = wide.gather(1, token_ids.long().unsqueeze(1))
    rank = (wide > chosen).sum(-1) + 1
    top, top_ids = wide.topk(num_top)
    return (chosen - total).squeeze(1), rank, top_ids, top - total


# The step


def prepare_step(
    packed: Tensor, segment: int, num_seqs: int, num_tokens: int, block_size: int, state: RowState, out: StepTensors
) -> None:
    """Apply the block updates to `state` and fill the first `num_seqs` / `num_tokens` entries of `out`. See `kernels.step`."""
    segments = packed[: 5 * segment].view(5, segment)
    rows, context_lens, query_start, update_start, update_at = (s[: num_seqs + 1].long() for s in segments)
    rows, context_lens, update_at = rows[:-1], context_lens[:-1], update_at[:-1]
    token_ids = packed[5 * segment : 5 * segment + num_tokens].long()
    updates = packed[5 * segment + num_tokens :]

    counts = update_start.diff()
    owner = torch.repeat_interleave(counts)
    index = torch.arange(len(owner)) - update_start[owner] + update_at[owner]
    state.block_tables[rows[owner], index] = updates[: len(owner)]

    lens = query_start.diff()
    seq = torch.repeat_interleave(lens)
    positions = torch.arange(num_tokens) - query_start[seq] + (context_lens - lens)[seq]
    blocks = state.block_tables[rows[seq], positions // block_size].long()
    real = context_lens[seq] > 0
    out.input_ids[:num_tokens] = torch.where(token_ids >= 0, token_ids, state.last_token[rows[seq]])
    out.positions[:num_tokens] = positions.clamp(min=0).int()
    out.slot_mapping[:num_tokens] = torch.where(real, blocks * block_size + positions % block_size, -1)
    out.last_index[:num_seqs] = query_start[1:] - 1
    out.rows[:num_seqs] = rows
    out.next_position[:num_seqs] = context_lens
    for name in ("temperature", "top_p", "min_p", "top_k", "seed"):
        getattr(out, name)[:num_seqs] = getattr(state, name)[rows]


def plan_decode(context_lens: Tensor, rows: Tensor, plan: DecodePlan) -> None:
    """Write the work map of a step's decoding sequences into `plan`: context_lens, rows [B] int32.

    On a GPU at least one kernel that was launched without programmatic dependent launch must stand between this and the
    first attention: attention reads the map, the lengths, the rows and the block tables ahead of the kernel before it.
    """
    num_programs = len(plan.work)
    tiles = (context_lens.long() + plan.tile - 1) // plan.tile * plan.num_kv_heads
    ends = tiles.cumsum(0)
    total = int(tiles.sum())
    share = max(-(-total // num_programs), plan.min_tiles)
    first = torch.arange(num_programs) * share
    seq = torch.searchsorted(ends, first, right=True)
    last = seq.clamp(max=len(rows) - 1)
    columns = (
        (total - first).clamp(min=0, max=share), torch.full_like(first, share), last,
        first - torch.cat([ends.new_zeros(1), ends])[seq], context_lens[last], rows[last],
    )  # fmt: skip
    plan.work[:, : len(columns)] = torch.stack([c.int() for c in columns], 1)
