"""The attention kernels' work maps, grids and workspaces, prepared once per step. Needs no Triton."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.data.block_sparse import BlockSparse
from kernels.data.capability import compute_capability, shared_memory

FEW_SEQS = (2, 16)  # decode steps of up to so many sequences have plans of their own
# Tokens that a prefix has at least for its keys to be read once for all its sequences: with 512, 256 sequences took
# longer than apart on an H200, whose L2 cache keeps what one of them has read for the next.
MIN_SHARED = 1024
MIN_MEMBERS = 4  # sequences that have a prefix in common at least
SHARED_ROWS = 64  # (query, head) pairs in a tile of queries over a common prefix


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The prefixes that sequences of a decode step have in common, and the attention over them: workspace of a step.

    Sequences whose block tables agree in the first `MIN_SHARED` tokens are a group. Its longest common prefix is read
    once. `Q` members of a group share a tile of queries.
    """

    keys: Tensor  # [3, B] int32: what members of a group agree in, how many they are, and the first of them
    shared: Tensor  # [B] int32: tokens of the group's common prefix, at the first of its members
    starts: Tensor  # [B] int32: tokens of its prefix that a sequence leaves to the group, whole tiles of keys; or 0
    members: Tensor  # [N, Q] int32: the sequences of each tile of queries; -1: none
    out: Tensor  # [B, H, D] float32: sums of weighted values over the prefix
    stats: Tensor  # [B, 2, H] float32: their maximum (base 2) and sum of weights
    partial_out: Tensor  # [P, 2, Q * G, D] float32: see `DecodePlan`, of P programs
    partial_stats: Tensor  # [P, 2, 2, Q * G] float32
    arrivals: Tensor  # [N * num_kv_heads] int32; 0 between calls

    @classmethod
    def allocate(
        cls,
        max_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_programs: int = 0,
    ) -> SharedPrefix:
        """0 programs: two for each multiprocessor."""
        num_programs = num_programs or 2 * torch.cuda.get_device_properties(device).multi_processor_count
        group = num_heads // num_kv_heads
        queries = max(SHARED_ROWS // group, 1)
        num_tiles = -(-max_seqs // queries) + max_seqs // MIN_MEMBERS
        int32 = partial(torch.zeros, dtype=torch.int32, device=device)
        float32 = partial(torch.empty, dtype=torch.float32, device=device)
        return cls(
            keys=int32(3, max_seqs), shared=int32(max_seqs), starts=int32(max_seqs), members=int32(num_tiles, queries),
            out=float32(max_seqs, num_heads, head_dim), stats=float32(max_seqs, 2, num_heads),
            partial_out=float32(num_programs, 2, SHARED_ROWS, head_dim),
            partial_stats=float32(num_programs, 2, 2, SHARED_ROWS), arrivals=int32(num_tiles * num_kv_heads),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work map of a step and the workspace of its layers. `P` programs, `G` query heads for each KV head.

    The work is a line of tiles of `tile` keys: for each sequence, for each KV head, those that the context or, with a
    window, its newest `window` keys touch. A layer without that window, or of another sparsity, must not use the plan.
    """

    tile: int  # keys in a tile
    window: int  # keys that a query sees, its own included; 0: all
    num_warps: int
    num_stages: int
    num_kv_heads: int
    # [P, 8] int32, for each program: its tiles, the most tiles of any program, the sequence it starts in, where in that
    # sequence's part of the line, that sequence's context length, its row, its entry in `spans`; one unused
    work: Tensor
    # [max_seqs] int32, if there are several queries: how many successive sequences, from this one on, share a tile of
    # queries; 0: this one is in that of an earlier one, or has no context.
    spans: Tensor
    partial_out: (
        Tensor  # [P, 2, queries * G, D] float32: results not yet merged; slot 0: the program's first pair, 1: its last
    )
    partial_stats: Tensor  # [P, 2, 2, queries * G] float32: their running maximum (base 2) and sum
    arrivals: Tensor  # [max_seqs * num_kv_heads] int32: programs that have left a partial result; 0 between calls
    # [2 * P] int32: of neighbouring programs that have left one, counted at the first of them; 0 between calls.
    group_arrivals: Tensor
    min_tiles: int = 2  # of a program: fewer cost more in merging than they gain
    # Neighbours that merge among themselves first, where a pair has more than twice as many parts; 0: none.
    fan_in: int = 8
    sparse: BlockSparse | None = None  # only the tiles that its heads see are counted
    queries: int = 1  # the most successive tokens of a row that share a tile of queries
    streams: bool = False  # whether it is cut up for `kernels.gluon.attention.decode`
    prefix: SharedPrefix | None = None  # None: each sequence reads all of its keys

    @property
    def group(self) -> int:
        return self.partial_out.shape[2] // self.queries

    @property
    def max_seqs(self) -> int:
        return len(self.arrivals) // self.num_kv_heads

    @classmethod
    def allocate(
        cls,
        max_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        num_programs: int = 0,
        kv_dtype: torch.dtype = torch.bfloat16,
        window: int = 0,
        sparse: BlockSparse | None = None,
        queries: int = 1,
    ) -> DecodePlan:
        """Workspace for up to `max_seqs` sequences; 0 programs: as many as keep the device's memory busy. `queries`: 1
        if the layer is sparse.

        For one or two sequences latency counts, so tiles are small and one warp needs no barrier; for more, bandwidth,
        and with many sequences tiles of e4m3 hold twice the keys, so that as many bytes are on their way.
        """
        fp8 = kv_dtype.itemsize == 1
        tile, num_warps, num_stages, min_tiles = 64, 2, 2, 2
        if head_dim * kv_dtype.itemsize > 256:  # twice the tile would not fit into the shared memory of smaller GPUs
            tile = 32
        elif max_seqs <= FEW_SEQS[0] and not fp8:
            tile, num_warps, min_tiles = 32, 1, 1
        elif max_seqs > FEW_SEQS[1] and fp8 and head_dim <= 128:
            tile = 128
        if sparse is not None:
            tile = min(tile, sparse.block)
        group = num_heads // num_kv_heads
        streams = (
            max_seqs > FEW_SEQS[1] and sparse is None and queries == 1 and kv_dtype.itemsize == 2 and head_dim <= 128
            and group <= 16 and head_dim % 8 == 0 and _on_hopper()
        )  # fmt: skip
        if not num_programs:
            num_programs = (2 if streams else 4) * torch.cuda.get_device_properties(device).multi_processor_count

        def int32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def float32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(
            tile=tile,
            window=window,
            num_warps=num_warps,
            num_stages=num_stages,
            min_tiles=min_tiles,
            num_kv_heads=num_kv_heads,
            work=int32(num_programs, 8),
            spans=int32(max_seqs if queries > 1 else 1),
            partial_out=float32(num_programs, 2, queries * group, head_dim),
            partial_stats=float32(num_programs, 2, 2, queries * group),
            arrivals=int32(max_seqs * num_kv_heads),
            group_arrivals=int32(2 * num_programs),
            sparse=sparse,
            queries=queries,
            streams=streams,
        )


def shared_queries(num_heads: int, num_kv_heads: int) -> int:
    """Return how many queries of a row find room in a decode kernel's tile, whose 16 rows a KV head's group rarely
    fills.
    """
    return max(16 // (num_heads // num_kv_heads), 1)


def prefill_tile_queries(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Queries of one sequence in a tile: the step between the second entries of `tiles`."""
    return prefill_block_m(head_dim, dtype) // prefill_query_rows(num_heads // num_kv_heads)


@functools.cache
def prefill_query_rows(group: int) -> int:
    """A query's rows in a tile: its heads, on Hopper padded."""
    return padded_query_rows(group) if _on_hopper() else group


def padded_query_rows(group: int) -> int:
    """The number of heads padded to 2^n, which Hopper's kernel needs, if that adds at most a third; else the number
    itself.
    """
    filled = 1 << (group - 1).bit_length()
    return filled if 4 * group >= 3 * filled else group


def prefill_block_m(head_dim: int, dtype: torch.dtype) -> int:
    """Rows of a tile."""
    if head_dim > 256:  # as many as shared memory has room for beside keys and values
        return 32
    return 64 if dtype == torch.float32 or (head_dim > 128 and not _on_hopper()) else 128


@functools.cache
def _on_hopper() -> bool:
    return torch.cuda.is_available() and compute_capability()[0] == 9


def latent_tile_rows(dtype: torch.dtype) -> int:
    """(query, head) pairs in a tile of latent attention: as many as shared memory has room for."""
    if dtype == torch.float32:
        return 16
    return 64 if shared_memory() >= 128 << 10 else 32


def latent_decode_plan(
    max_seqs: int, num_heads: int, size: int, device: torch.device, num_programs: int = 0
) -> DecodePlan:
    """Workspace of `latent_attention_decode`; `size`: a latent's channels without those that carry the position.

    0 programs: two for each multiprocessor. Heads in equal groups of at most 32 take the place of KV heads: a program
    has room for the sums of so many.
    """
    groups = next(n for n in range(1, num_heads + 1) if num_heads % n == 0 and num_heads // n <= 32)
    num_programs = num_programs or 2 * torch.cuda.get_device_properties(device).multi_processor_count
    plan = DecodePlan.allocate(max_seqs, num_heads, groups, size, device, num_programs)
    return dataclasses.replace(plan, tile=64)


def latent_tile_queries(num_heads: int, dtype: torch.dtype) -> int:
    """Return the queries of one sequence in a tile of latent attention; see `prefill_tile_queries`."""
    return max(latent_tile_rows(dtype) // num_heads, 1)


def make_prefill_tiles(query_lens: list[int], context_lens: list[int], tile_queries: int) -> list[tuple[int, int]]:
    """The prefill kernel's grid: (sequence, first query of the tile), the tiles with the most keys first."""
    tiles = [
        (context - length + start, sequence, start)
        for sequence, (length, context) in enumerate(zip(query_lens, context_lens, strict=True))
        for start in range(0, length, tile_queries)
    ]
    tiles.sort(reverse=True)
    return [(sequence, start) for _, sequence, start in tiles]
