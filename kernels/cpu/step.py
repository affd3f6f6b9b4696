"""Operations before and after a step's layers, by the CPU's own kernels where these exist; and whole steps,
captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import reference
from kernels.cpu.library import Recording, library
from kernels.data.layout import RowState, StepTensors
from kernels.data.recorded import Recorded
from kernels.data.sampling import NOT_FINITE, NOTHING_ALLOWED

R = TypeVar("R")

# What PyTorch may do in a recorded step: it computes nothing (of MAY_COPY, where nothing is copied).
VIEWS = frozenset(
    {
        "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "flatten", "new_empty",
        "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
        "unflatten", "unsqueeze", "view", "_reshape_alias", "_unsafe_view",
    }
)  # fmt: skip

MAY_COPY = frozenset({"flatten", "reshape"})  # where they cannot give a view
MEMORY = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})


class _Step(ctypes.Structure):
    """`Step` in step.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("packed", "records", "input_ids", "slot_mapping", "token_index", "rows")
        ),
        *((name, ctypes.c_void_p) for name in ("seed", "next_position", "tables", "positions", "context_lens")),
        *((name, ctypes.c_void_p) for name in ("top_k", "temperature", "top_p", "min_p")),
        *((name, ctypes.c_int64) for name in ("segment", "seqs", "tokens", "block_size")),
        *((name, ctypes.c_int64) for name in ("groups", "num_rows", "max_blocks", "slot_stride")),
    )


class _Embedding(ctypes.Structure):
    """`Embedding` in step.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "table", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "row_bytes", "first", "rows")),
    )


class _GreedySample(ctypes.Structure):
    """`GreedySample` in step.cpp."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "n", "stride")),
        *((name, ctypes.c_int32) for name in ("is_bf16", "not_finite", "nothing_allowed")),
    )


class _TokenStore(ctypes.Structure):
    """`TokenStore` in step.cpp."""

    _fields_ = (
        ("newest", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("n", ctypes.c_int64),
    )


def prepare_step(
    packed: Tensor,
    segment: int,
    num_seqs: int,
    num_tokens: int,
    block_size: int,
    state: RowState,
    out: StepTensors,
    repeats: bool = False,
) -> None:
    """See `kernels.reference.prepare_step`."""
    native = library()
    if native is None or repeats:  # on a CPU, drafts are tokens of their request's sequence
        reference.prepare_step(packed, segment, num_seqs, num_tokens, block_size, state, out, repeats)
        return
    tables = state.block_tables
    assert tables.is_contiguous()
    assert state.records.is_contiguous()
    s = out.samples
    tensors = (
        packed, state.records, out.input_ids, out.slot_mapping, s.token_index, s.rows, s.seed, s.next_position,
        tables, out.positions, out.context_lens, s.top_k, s.temperature, s.top_p, s.min_p,
    )  # fmt: skip
    numbers = (segment, num_seqs, num_tokens, block_size, *tables.shape, out.slot_mapping.stride(0))
    struct = _Step(*(tensor.data_ptr() for tensor in tensors), *numbers)
    native.call("quire_prepare_step", struct, tensors)


def embedding(table: Tensor, ids: Tensor, first: int = 0) -> Tensor:
    """See `kernels.reference.embedding`."""
    native = library()
    if native is None or not table.is_contiguous() or ids.dtype != torch.int64:
        return reference.embedding(table, ids, first)
    out, size = table.new_empty(ids.shape[0], table.shape[1]), table.shape[1] * table.itemsize
    struct = _Embedding(ids.data_ptr(), table.data_ptr(), out.data_ptr(), ids.shape[0], size, first, len(table))
    native.call("quire_embedding", struct, (ids, table, out))
    return out


def greedy_sample(logits: Tensor) -> Tensor:
    """See `kernels.reference.greedy_sample`."""
    native = library()
    if native is None or logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
        return reference.greedy_sample(logits)
    out = logits.new_empty(logits.shape[0], dtype=torch.int64)
    struct = _GreedySample(
        logits.data_ptr(), out.data_ptr(), *logits.shape, logits.stride(0), logits.dtype == torch.bfloat16, NOT_FINITE,
        NOTHING_ALLOWED,
    )  # fmt: skip
    native.call("quire_greedy_sample", struct, (logits, out))
    return out


def store_tokens(newest: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """See `kernels.reference.store_tokens`."""
    native = library()
    if native is None:
        reference.store_tokens(newest, rows, tokens)
        return
    assert newest.dtype == rows.dtype == tokens.dtype == torch.int64
    assert rows.is_contiguous()
    assert tokens.is_contiguous()
    assert len(rows) == len(tokens)
    struct = _TokenStore(newest.data_ptr(), newest.stride(0), rows.data_ptr(), tokens.data_ptr(), len(rows))
    native.call("quire_store_tokens", struct, (newest, rows, tokens))


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


class Watch(TorchDispatchMode):
    """Sees each of PyTorch's operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else the first operation imports PyTorch's compiler, for more than a second
        return False


class _Notes(Watch):
    """Notes whether PyTorch computes anything itself, and how much memory is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.computed, self.num_bytes = False, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name not in VIEWS or (name in MAY_COPY and not _share_memory(result, args[0])):
            self.computed = True
        elif name in MEMORY:
            self.num_bytes += result.nbytes
        return result


def record(work: Callable[[], R]) -> Recorded[R]:
    """Do some work, and return what does it again. All that `work` reads must stay where it is."""
    native = library()
    if native is None:
        return Recorded(work(), None)
    native.recording = recording = Recording()
    try:
        with _Notes() as watch:
            result = work()
    finally:
        native.recording = None
    return Recorded(result, None if watch.computed else recording.replayed_by(native), watch.num_bytes)
