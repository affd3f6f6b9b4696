"""Sums and gathers over the GPUs of one host: kernels that write into the peers' memory, which symmetric memory maps.

Small tensors: every 32 bits travel together with the number of the call, which tells the reader of a word whether it
has arrived. There are no barriers, and a sum takes little more than the way over NVLink, but sends twice the bytes.
Larger tensors: each program writes its blocks, then a flag with the number of its call, and waits for the peers' flags.

Calls alternate between two halves of the buffer. A rank writes to a half again only after it has received the peers'
data of the call in between, and the peers had read the half before they sent these.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import cdiv, launch_dependents, next_power_of_2, pdl_options, wait_for_inputs
from kernels.gpu.rounding import normed_row

WORDS = 512  # words of 32 bits that a program sums
BLOCK = 4096  # elements of a larger tensor that a program writes at once, unless it writes rows
MAX_ROW = 8192  # elements of a row that a program keeps in registers to normalise it
PROGRAMS = 256  # of a larger tensor
NUM_WARPS = 8  # of a program for a larger tensor


@dataclass(frozen=True, slots=True)
class Channel:
    """This rank's end of the buffers through which all ranks exchange tensors of one kind of size.

    Without flags it is for small tensors, and a buffer is 2 · size · capacity int64. With flags it is for larger ones,
    and a buffer is 2 · size · capacity bytes.
    """

    rank: int
    capacity: int  # words of 32 bits, or bytes
    buffers: Tensor  # [size] int64: addresses of the ranks' buffers, all zero at first
    calls: Tensor  # int32, zero at first: [capacity / WORDS] or [PROGRAMS]
    flags: Tensor | None = None  # [size] int64: addresses of the ranks' flags, [size, PROGRAMS] int32, zero at first


@triton.jit
def _floats(words, WIDE: tl.constexpr):
    """Words of one float32 or two bfloat16 → float32; where there is one, twice."""
    if WIDE:
        return words.to(tl.float32, bitcast=True), words.to(tl.float32, bitcast=True)
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _words(low, high, WIDE: tl.constexpr):
    if WIDE:
        return low.to(tl.int32, bitcast=True)
    first = low.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    return first | high.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32) << 16


@triton.jit
def _address(addresses, i, DTYPE: tl.constexpr):
    """The i-th address, as a pointer to DTYPE. The compiler must know its alignment to store 16 bytes at once."""
    return tl.multiple_of(tl.load(addresses + i).to(tl.pointer_type(DTYPE)), 16)


@triton.jit(do_not_specialize=["num_vectors"])
def _all_reduce_small_kernel(
    x, residual, out, buffers, calls, num_vectors, VECTOR: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = the sum of all ranks' x, plus residual with ADD. Sums are in the order of ranks, so all have the same.

    x has num_vectors · VECTOR words: with a multiple of 4 the compiler loads and stores 16 bytes at once.
    """
    num_words = num_vectors * VECTOR
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = at < num_words
    if PDL:
        launch_dependents()
        wait_for_inputs()
    call = tl.load(calls + tl.program_id(0)) + 1
    tag = call.to(tl.int64) << 32
    half = (call & 1) * (SIZE * CAPACITY)
    own = tl.load(x + at, mask=inside, other=0)
    for i in tl.static_range(1, SIZE):
        buffer = _address(buffers, (RANK + i) % SIZE, tl.int64)
        word = tag | (own.to(tl.int64) & 0xFFFFFFFF)
        tl.store(buffer + half + RANK * CAPACITY + at, word, mask=inside, cache_modifier=".wt")
    buffer = _address(buffers, RANK, tl.int64)
    low = tl.zeros([WORDS], tl.float32)
    high = tl.zeros([WORDS], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            words = own
        else:
            come = buffer + half + rank * CAPACITY + at
            tagged = tl.load(come, mask=inside, other=tag, volatile=True)
            while tl.max(((tagged >> 32) != call).to(tl.int32), 0) > 0:
                tagged = tl.load(come, mask=inside, other=tag, volatile=True)
            words = tagged.to(tl.int32)
        a, b = _floats(words, WIDE)
        low += a
        high += b
    if ADD:
        a, b = _floats(tl.load(residual + at, mask=inside, other=0), WIDE)
        low += a
        high += b
    tl.store(out + at, _words(low, high, WIDE), mask=inside)
    tl.store(calls + tl.program_id(0), call)


@triton.jit
def _wait_for_flag(flag, call):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - call < 0:  # numbers of calls may wrap around
        pass


@triton.jit
def _block(i, size, N: tl.constexpr, BLOCK: tl.constexpr):
    """Indices of the N elements of the i-th block, and a mask of the BLOCK that are any; BLOCK is a power of two."""
    offs = tl.arange(0, BLOCK)
    at = i * N + offs
    inside = at < size
    if N < BLOCK:
        inside &= offs < N
    return at, inside


@triton.jit
def _send(x, size, buffers, flags, half, call, RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr,
          N: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """Write this program's blocks of x into all peers' buffers, then the number of the call into their flags."""
    program = tl.program_id(0)
    for i in tl.static_range(1, SIZE):
        buffer = _address(buffers, (RANK + i) % SIZE, x.dtype.element_ty) + (half + RANK * CAPACITY)
        for block in range(program, tl.cdiv(size, N), PROGRAMS):
            at, inside = _block(block, size, N, BLOCK)
            tl.store(buffer + at, tl.load(x + at, mask=inside), mask=inside)
    tl.debug_barrier()  # the flags' release covers the stores of all threads
    for i in tl.static_range(1, SIZE):
        flag = tl.load(flags + (RANK + i) % SIZE).to(tl.pointer_type(tl.int32)) + RANK * PROGRAMS + program
        tl.atomic_xchg(flag, call, sem="release", scope="sys")


@triton.jit
def _wait_for_peers(flags, call, RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Wait until the blocks of all peers' same program have arrived here."""
    program = tl.program_id(0)
    for i in tl.static_range(1, SIZE):
        flag = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + (RANK + i) % SIZE * PROGRAMS + program
        _wait_for_flag(flag, call)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_vectors"])
def _all_reduce_kernel(
    x, residual, out, weight, normed, buffers, flags, calls, num_vectors, eps, VECTOR: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All-reduce num_vectors · VECTOR elements in blocks of N; CAPACITY, too, is in elements.

    See `_all_reduce_small_kernel`. With NORM, blocks are rows, and normed is the norm of out, as if it were read again.
    """
    program = tl.program_id(0)
    size = num_vectors * VECTOR
    if PDL:
        launch_dependents()
        wait_for_inputs()
    call = tl.load(calls + program) + 1
    half = (call & 1) * (SIZE * CAPACITY)
    _send(x, size, buffers, flags, half, call, RANK, SIZE, CAPACITY, N, BLOCK, PROGRAMS)
    _wait_for_peers(flags, call, RANK, SIZE, PROGRAMS)
    buffer = _address(buffers, RANK, x.dtype.element_ty) + half
    for block in range(program, tl.cdiv(size, N), PROGRAMS):
        at, inside = _block(block, size, N, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                total += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            else:
                arrived = tl.load(buffer + rank * CAPACITY + at, mask=inside, other=0.0, cache_modifier=".cg")
                total += arrived.to(tl.float32)
        if ADD:
            total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + at, rounded, mask=inside)
        if NORM:
            _store_normed(rounded, weight, normed + at, eps, N, BLOCK)
    tl.store(calls + program, call)


@triton.jit
def _store_normed(row, weight, to, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    """Store the norm of a row, which is 0 beyond its N elements, at the pointers `to`."""
    offs = tl.arange(0, BLOCK)
    w = tl.load(weight + offs, mask=offs < N, other=0.0).to(tl.float32)
    tl.store(to, normed_row(row.to(tl.float32), w, eps, N, row.dtype), mask=offs < N)


@triton.jit(do_not_specialize=["num_rows"])
def _all_gather_kernel(
    x, out, buffers, flags, calls, num_rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [T, WIDTH] = the columns x [T, COLUMNS] of all ranks, the first WIDTH of them."""
    program = tl.program_id(0)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    call = tl.load(calls + program) + 1
    half = (call & 1) * (SIZE * CAPACITY)
    size = num_rows * COLUMNS
    _send(x, size, buffers, flags, half, call, RANK, SIZE, CAPACITY, BLOCK, BLOCK, PROGRAMS)
    for block in range(program, tl.cdiv(size, BLOCK), PROGRAMS):  # while the peers' columns are on their way
        at = block * BLOCK + tl.arange(0, BLOCK)
        _store_columns(tl.load(x + at, mask=at < size), at, size, out, RANK, COLUMNS, WIDTH)
    _wait_for_peers(flags, call, RANK, SIZE, PROGRAMS)
    buffer = _address(buffers, RANK, x.dtype.element_ty) + half
    for block in range(program, tl.cdiv(size, BLOCK), PROGRAMS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        for i in tl.static_range(1, SIZE):
            come = buffer + (RANK + i) % SIZE * CAPACITY + at
            values = tl.load(come, mask=at < size, cache_modifier=".cg")
            _store_columns(values, at, size, out, (RANK + i) % SIZE, COLUMNS, WIDTH)
    tl.store(calls + program, call)


@triton.jit
def _store_columns(values, at, size, out, RANK: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Store the elements `at` of a rank's columns [T, COLUMNS] at their places in out [T, WIDTH]."""
    column = RANK * COLUMNS + at % COLUMNS
    tl.store(out + (at // COLUMNS).to(tl.int64) * WIDTH + column, values, mask=(at < size) & (column < WIDTH))


@triton.jit(do_not_specialize=["number", "num_vectors"])
def _add_arrived_kernel(
    residual, own, arrived, weight, normed, flag, number, num_vectors, eps, VECTOR: tl.constexpr, NORM: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual += own + arrived, all of num_vectors · VECTOR elements in blocks of N, once the flag has the number.

    With NORM, blocks are rows, and normed is the norm of residual, as if it were read again.
    """
    if PDL:
        launch_dependents()
        wait_for_inputs()
    size = num_vectors.to(tl.int64) * VECTOR
    at, inside = _block(tl.program_id(0).to(tl.int64), size, N, BLOCK)
    total = tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != number:
        pass
    total += tl.load(arrived + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    rounded = (total + before).to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside)
    if NORM:
        _store_normed(rounded, weight, normed + at, eps, N, BLOCK)


def _vectors(count: int, most: int) -> tuple[int, int]:
    """(number, length) of vectors that `count` elements are: of `most` elements, or single ones."""
    return (count // most, most) if count % most == 0 else (count, 1)


def num_words(x: Tensor) -> int:
    """Return the number of 32-bit words; 0 for a tensor that `all_reduce_small` does not sum."""
    fits = (
        x.dtype in (torch.bfloat16, torch.float32) and x.is_contiguous() and x.nbytes % 4 == 0 and x.data_ptr() % 4 == 0
    )
    return x.nbytes // 4 if fits else 0


def all_reduce_small(x: Tensor, channel: Channel, residual: Tensor | None = None) -> Tensor:
    """The sum of all ranks' x in x's memory, or added to `residual` there. All ranks call it with the same shapes.

    For a channel without flags that can hold x (`num_words`).
    """
    words = num_words(x)
    assert 0 < words <= channel.capacity
    out = x if residual is None else residual
    assert out.is_contiguous()
    assert out.dtype == x.dtype
    _all_reduce_small_kernel[(cdiv(words, WORDS),)](
        x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), out.view(-1).view(torch.int32), channel.buffers,
        channel.calls, *_vectors(words, 4), RANK=channel.rank, SIZE=len(channel.buffers), CAPACITY=channel.capacity,
        ADD=residual is not None, WIDE=x.dtype == torch.float32, WORDS=WORDS, num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    return out


def can_normalise(x: Tensor) -> bool:
    """Return whether `all_reduce` and `add_arrived` can compute the norm of rows as wide as those of x [T, n]."""
    return x.dim() == 2 and x.is_contiguous() and x.shape[1] <= MAX_ROW and x[:1].nbytes % 16 == 0


def _blocks(x: Tensor, normalises: bool) -> dict[str, int | bool]:
    """Return a kernel's arguments for the blocks of x: rows if it `normalises` them."""
    n = x.shape[1] if normalises else BLOCK
    return {"NORM": normalises, "N": n, "BLOCK": next_power_of_2(n), "num_warps": NUM_WARPS}


def all_reduce(
    x: Tensor, channel: Channel, residual: Tensor | None = None, norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """The sum of all ranks' contiguous x in x's memory, or added to `residual` there. All ranks call it with the same
    shapes.

    With `norm`, weight and eps, it returns the norm of that instead, in new memory (see `can_normalise`). For a channel
    with flags.
    """
    out = x if residual is None else residual
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert out.dtype == x.dtype
    assert 0 < x.nbytes <= channel.capacity
    assert channel.flags is not None
    weight, eps = norm or (x, 0.0)  # a pointer that is not read stands for None
    normed = torch.empty_like(x) if norm else out
    num_vectors, vector = _vectors(x.numel(), 8)
    _all_reduce_kernel[(PROGRAMS,)](
        x, out, out, weight, normed, channel.buffers, channel.flags, channel.calls, num_vectors, eps, VECTOR=vector,
        RANK=channel.rank, SIZE=len(channel.buffers), CAPACITY=channel.capacity // x.itemsize, ADD=residual is not None,
        PROGRAMS=PROGRAMS, **_blocks(x, norm is not None), **pdl_options(x.device),
    )  # fmt: skip
    return normed


def all_gather(x: Tensor, channel: Channel, out: Tensor) -> Tensor:
    """The columns x [T, n] of all ranks, in their order, in out [T, W]: the first W of them. For a channel with flags.

    T rows may be more than the channel holds at once, but not a single one.
    """
    num_rows, n = x.shape
    assert x.is_contiguous()
    assert out.is_contiguous()
    assert out.dtype == x.dtype
    assert channel.flags is not None
    at_once = channel.capacity // (n * x.itemsize)
    assert at_once
    for first in range(0, num_rows, at_once):
        rows = slice(first, first + at_once)
        _all_gather_kernel[(PROGRAMS,)](
            x[rows], out[rows], channel.buffers, channel.flags, channel.calls, len(x[rows]), COLUMNS=n,
            WIDTH=out.shape[1], RANK=channel.rank, SIZE=len(channel.buffers), CAPACITY=channel.capacity // x.itemsize,
            BLOCK=BLOCK, PROGRAMS=PROGRAMS, num_warps=NUM_WARPS, **pdl_options(x.device),
        )  # fmt: skip
    return out


def add_arrived(
    residual: Tensor,
    own: Tensor,
    arrived: Tensor,
    flag: Tensor,
    number: int,
    norm: tuple[Tensor, float] | None = None,
    out: Tensor | None = None,
) -> None:
    """Wait until `flag` [1] int32, which a peer writes, is `number`; then add own + arrived to residual in place.

    All are contiguous and have residual's shape and dtype; the peer has written `arrived` before the flag. With `norm`,
    weight and eps, the norm of the result goes to `out` (see `can_normalise`).
    """
    assert residual.is_contiguous()
    assert own.is_contiguous()
    assert own.dtype == arrived.dtype == residual.dtype
    weight, eps = norm or (own, 0.0)  # a pointer that is not read stands for None
    blocks, (num_vectors, vector) = _blocks(residual, norm is not None), _vectors(residual.numel(), 8)
    _add_arrived_kernel[(cdiv(residual.numel(), blocks["N"]),)](
        residual, own, arrived, weight, own if out is None else out, flag, number, num_vectors, eps, VECTOR=vector,
        **blocks, **pdl_options(residual.device),
    )  # fmt: skip
