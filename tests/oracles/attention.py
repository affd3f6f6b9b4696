"""Attention in float64 over a paged cache of random contexts: what every attention kernel is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import BlockSparse

NUM_KV_HEADS = 2
E4M3 = torch.float8_e4m3fn


@dataclass(slots=True)
class Paged:
    """Random contexts in a paged cache [2, num_blocks, num_kv_heads, block_size, head_dim] that is NaN everywhere
    else.
    """

    kv: Tensor
    kv_scale: Tensor | None
    block_tables: Tensor
    rows: Tensor
    context_lens: Tensor

    @classmethod
    def make(
        cls, lens: Sequence[int], block_size: int, head_dim: int, dtype: torch.dtype, device: str, skip: int = 0,
        num_kv_heads: int = NUM_KV_HEADS,
    ) -> Paged:  # fmt: skip
        """`skip`: blocks of the cache that stay unused before the first one in use."""
        counts = [-(-n // block_size) for n in lens]
        shape = (2, skip + sum(counts), num_kv_heads, block_size, head_dim)
        kv_scale = None
        if dtype == E4M3:
            kv = torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)  # its NaN
            kv_scale = torch.rand(2, num_kv_heads, device=device) + 0.02
        else:
            kv = torch.full(shape, float("nan"), dtype=dtype, device=device)
        order = (torch.randperm(sum(counts)) + skip).tolist()
        tables = torch.full((len(lens), max(counts)), skip + sum(counts) + 7, dtype=torch.int32)
        for i, (n, count) in enumerate(zip(lens, counts, strict=True)):
            mine = [order.pop() for _ in range(count)]
            tables[i, :count] = torch.tensor(mine)
            new = torch.randn(2, count, *shape[2:], device=device)
            if kv_scale is not None:
                new /= kv_scale.view(2, 1, -1, 1, 1)
            if unused := count * block_size - n:
                new[:, -1, :, -unused:] = float("nan")
            _bits(kv)[:, torch.tensor(mine, dtype=torch.long, device=device)] = _bits(new.to(dtype))
        rows = torch.randperm(len(lens))
        shuffled = torch.empty_like(tables)
        shuffled[rows] = tables
        context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        return cls(kv, kv_scale, shuffled.to(device), rows.int().to(device), context_lens)

    def context(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, n, D] of one sequence in float64, times their scales."""
        n, block_size = int(self.context_lens[sequence]), self.kv.shape[3]
        blocks = self.block_tables[int(self.rows[sequence]), : -(-n // block_size)].long()
        mine = _bits(self.kv)[:, blocks].view(self.kv.dtype).float().double().transpose(1, 2).flatten(2, 3)[:, :, :n]
        if self.kv_scale is not None:
            mine *= self.kv_scale.double().view(2, -1, 1, 1)
        return mine[0], mine[1]

    def share(self, sequences: Sequence[int], num_blocks: int) -> None:
        """Let sequences begin with the blocks of the first of them."""
        rows = self.rows[list(sequences)].long()
        self.block_tables[rows, :num_blocks] = self.block_tables[rows[0], :num_blocks].clone()

    def newest(self, query_lens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [T, Hkv, D] in float64 of each sequence's newest tokens, as `context` returns them, and the
        tokens' slots [T] int64.
        """
        keys, values, slots = [], [], []
        block_size = self.kv.shape[3]
        for i, count in enumerate(query_lens):
            n = int(self.context_lens[i])
            key, value = self.context(i)
            keys.append(key[:, n - count :].transpose(0, 1))
            values.append(value[:, n - count :].transpose(0, 1))
            positions = torch.arange(n - count, n, device=self.kv.device)
            blocks = self.block_tables[int(self.rows[i])].long()[positions // block_size]
            slots.append(blocks * block_size + positions % block_size)
        return torch.cat(keys), torch.cat(values), torch.cat(slots)


def _bits(x: Tensor) -> Tensor:
    """Float8, of which PyTorch indexes none, as bytes; anything else as it is."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


def exact_attention(
    query: Tensor,
    paged: Paged,
    query_lens: Sequence[int],
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    sparse: BlockSparse | None = None,
) -> Tensor:
    """[T, H, D] float64: the newest `query_lens` tokens of each sequence over its context, all scores at once."""
    out, num_kv_heads = [], paged.kv.shape[2]
    for i, q in enumerate(query.double().split(list(query_lens))):
        key, value = paged.context(i)
        length, context = len(q), key.shape[1]
        q = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
        scores = q @ key.unsqueeze(1).mT * scale
        if soft_cap:
            scores = soft_cap * (scores / soft_cap).tanh()
        ages = torch.arange(context - length, context, device=q.device).unsqueeze(1) - torch.arange(
            context, device=q.device
        )
        seen = (ages >= 0) & (ages < window) if window else ages >= 0
        if sparse is not None:
            at, heads = torch.arange(context, device=q.device), torch.arange(query.shape[1], device=q.device)
            seen = seen & sparse.seen(at[context - length :], at, heads).unflatten(0, (num_kv_heads, -1))
        scores = scores.masked_fill_(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks.double().view(num_kv_heads, -1, 1, 1).expand(-1, -1, length, 1)
            scores = torch.cat([scores, sink], -1)
        attended = scores.softmax(-1)[..., :context] @ value.unsqueeze(1)
        out.append(attended.permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(out)
