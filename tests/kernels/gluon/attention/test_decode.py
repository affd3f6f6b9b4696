"""Decode attention of many sequences in Gluon, on torch tensors: `tests.support.gluon_on_tensors`."""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels import AttentionArgs, QuantizedRows, reference
from kernels.cuda import attention
from kernels.data.plan import DecodePlan, SharedPrefix
from kernels.gluon.attention import decode as attention_decode
from kernels.gluon.attention import loads as attention_loads
from kernels.triton import attention_decode as triton_decode
from tests.oracles.attention import Paged
from tests.support.attention_calls import spread
from tests.support.gluon_on_tensors import Barriers, Descriptor, Pointers, Shared, Stages, run_on_tensors

BF16, CPU = torch.bfloat16, torch.device("cpu")
HELPERS = (
    "_piece_of_pair", "_following", "_skipped", "_next_pair", "_ask_tile", "_bring", "_masked", "_merged", "_joined",
    "_load_partial",
    "_store_partial", "_store_heads", "_arrive", "_attend", "ask_boxes", "blocks_of_boxes",
)  # fmt: skip
KV_HEADS = 2
LENS = [1, 700, 0, 64, 193, 1, 65, 0]


class Box:
    """Some rows of a panel."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def store(self, value: Tensor) -> None:
        self.memory.copy_(value.view(self.memory.shape))


class Tile(Shared):
    """A part of shared memory [rows, channels] whose channels lie in panels of 64."""

    def __init__(self, panels: Tensor) -> None:
        super().__init__(panels.dtype, [panels.shape[1], panels.shape[0] * 64], None)
        self.panels = panels

    @property
    def value(self) -> Tensor:  # type: ignore[override]
        return self.panels.transpose(0, 1).flatten(1)

    def store(self, value: Tensor) -> None:
        self.panels.copy_(value.unflatten(1, (-1, 64)).transpose(0, 1))

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return self.value.permute(order)


class Tiles:
    """Several of them; NaN until they are written."""

    def __init__(self, dtype: torch.dtype, shape: list[int]) -> None:
        self.dtype, self.shape = dtype, shape
        self.memory = torch.full((shape[0], shape[2] // 64, shape[1], 64), math.nan, dtype=dtype)

    def index(self, i: Any) -> Tile:
        return Tile(self.memory[int(i)])

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        boxes = self.memory.view(shape)
        return SimpleNamespace(index=lambda i: Box(boxes[int(i)]))


def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Any:
    if dtype == torch.int64:
        return Stages(dtype, shape, layout)
    return Tiles(dtype, shape) if len(shape) == 3 else Tiles(dtype, [1, *shape]).index(0)


class Memory(Pointers):
    def __add__(self, offsets: Any) -> Pointers:
        return Memory(self.tensor, self.offsets + offsets)


def load(pointers: Pointers, mask: Tensor | None = None, other: float = 0.0, **options: str) -> Tensor:
    return pointers.load(mask, other)


def store(pointers: Pointers, value: Any, mask: Tensor | None = None) -> None:
    value = torch.tensor(value, dtype=pointers.tensor.dtype) if isinstance(value, int) else value
    pointers.store(value, torch.tensor(True) if mask is None else mask)


def atomic_add(pointers: Pointers, value: int, **options: str) -> Tensor:
    before = pointers.load()
    store(pointers, before + value)
    return before


class Launcher:
    def __init__(self, launch: Callable[[tuple[int, ...]], Any]) -> None:
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch(grid)


@pytest.fixture(params=["first programs first", "last programs first"])
def on_tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Run the kernel's programs in this order. Gives the grids of its launches."""
    run_on_tensors(monkeypatch, attention_decode, "_hopper_decode_kernel", HELPERS, shared=attention_loads)
    kernel: Any = attention_decode._hopper_decode_kernel
    gluon, barriers, grids = kernel.gluon, Barriers(), []

    def copy(boxes: Descriptor, at: list[Any], barrier: Any, target: Any, pred: bool = True) -> None:
        boxes.copy(at, target)
        barriers.copied(barrier, boxes.block_type.nbytes)

    def expect(barrier: Any, num_bytes: int, pred: bool = True) -> None:
        Barriers.expect(barriers, barrier, num_bytes)

    def launch(grid: tuple[int, ...]) -> Any:
        def run(*args: object, num_warps: int, maxnreg: int | None = None, **constants: object) -> None:
            grids.append(grid)
            arguments = [Memory(a) if isinstance(a, Tensor) else a for a in args]
            order = range(grid[0]) if request.param == "first programs first" else reversed(range(grid[0]))
            for program in order:
                gluon.program_id = lambda axis, program=program: torch.tensor(program)
                gluon.num_programs = lambda axis: torch.tensor(grid[0])
                kernel.body(*arguments, **constants)

        return run

    def side_by_side(partitions: list[tuple[Any, tuple[Any, ...]]], *_: object) -> None:
        """Each with numbers of its own, which it changes in place."""
        own = [(body, tuple(a.clone() if isinstance(a, Tensor) else a for a in args)) for body, args in partitions]
        run_side_by_side(own)

    run_side_by_side, gluon.warp_specialize = gluon.warp_specialize, side_by_side
    gluon.allocate_shared_memory, gluon.load, gluon.store, gluon.atomic_add = allocate, load, store, atomic_add
    gluon.int8, gluon.abs, gluon.expand_dims = torch.int8, torch.abs, torch.unsqueeze
    gluon.fma = lambda a, b, c: a * b + c
    mbarrier = SimpleNamespace(
        MBarrierLayout=barriers.MBarrierLayout,
        init=barriers.init,
        expect=expect,
        arrive=barriers.arrive,
        wait=barriers.wait,
    )
    for module in (attention_decode, attention_loads):
        monkeypatch.setattr(module, "mbarrier", mbarrier)
        monkeypatch.setattr(module, "tma", SimpleNamespace(async_copy_global_to_shared=copy))
    monkeypatch.setattr(attention_decode, "_hopper_decode_kernel", Launcher(launch))
    monkeypatch.setattr(attention_decode, "LOG2E", attention_decode.LOG2E.value)
    monkeypatch.setattr(attention_decode, "pdl_options", lambda device: {"PDL": True})
    monkeypatch.setattr(attention_decode, "wait_for_inputs", lambda: None)
    monkeypatch.setattr(attention_decode, "launch_dependents", lambda: None)
    monkeypatch.setattr("kernels.data.plan._on_hopper", lambda: True)
    return grids


def plan_of(paged: Paged, num_heads: int, head_dim: int, programs: int, window: int = 0) -> DecodePlan:
    plan = DecodePlan.allocate(
        max(len(paged.rows), 17), num_heads, KV_HEADS, head_dim, CPU, programs, kv_dtype=BF16, window=window
    )
    assert plan.streams
    plan = dataclasses.replace(plan, fan_in=2)
    plan.partial_out.fill_(math.nan)
    plan.partial_stats.fill_(math.nan)
    triton_decode.plan_decode(paged.context_lens, paged.rows, plan)
    return plan


def decode(query: Tensor, paged: Paged, plan: DecodePlan, out: Tensor | QuantizedRows, **options: Any) -> Tensor:
    here = paged.kv[0], paged.kv[1], paged.block_tables, paged.rows, paged.context_lens
    return spread(attention.paged_attention_decode)(query, *here, scale=0.1, plan=plan, out=out, **options)


def exact(query: Tensor, paged: Paged, **options: Any) -> Tensor:
    here = paged.block_tables, paged.rows, paged.context_lens
    keys, values = paged.kv.double()
    return spread(reference.paged_attention_decode)(query.double(), keys, values, *here, scale=0.1, **options)


CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {  # head_dim, group, page, programs
    "whole": (128, 4, 16, 1, {}),
    "cut": (128, 8, 16, 5, {}),
    "in many parts": (64, 3, 32, 16, {}),
    "in boxes of a page": (128, 1, 128, 4, {}),
    "in small pages": (80, 16, 8, 3, {}),
    "window": (64, 8, 16, 5, {"window": 100}),
    "all else": (64, 7, 64, 5, {"window": 70, "soft_cap": 3.0, "sinks": True, "alibi_slopes": True}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(case: tuple[int, int, int, int, dict[str, Any]], on_tensors: list[tuple[int, ...]]) -> None:
    """Contexts are whole, cut among programs, or empty; unused slots are NaN, and so is scratch memory."""
    torch.manual_seed(0)
    head_dim, group, page, programs, options = case
    paged = Paged.make(LENS, page, head_dim, BF16, "cpu", num_kv_heads=KV_HEADS)
    heads = group * KV_HEADS
    by_head: dict[str, Any] = {name: torch.rand(heads) for name in ("sinks", "alibi_slopes") if name in options}
    options = {**options, **by_head}
    query = torch.randn(len(LENS), heads, head_dim).bfloat16()
    windows, want = {0, options.get("window", 0)}, exact(query, paged, **options)
    for row, n in zip(paged.rows.tolist(), LENS, strict=True):  # an entry before the window is a hole
        paged.block_tables[row, : max(n - options.get("window", n), 0) // page] = -1
    for window in windows:
        plan = plan_of(paged, heads, head_dim, programs, window)
        out = torch.full_like(query, math.nan)
        got = decode(query, paged, plan, out, **options)
        assert got.data_ptr() == out.data_ptr()
        assert (got.double() - want).norm() < 6e-3 * want.norm()
        assert not got[[2, 7]].any()
        assert not plan.arrivals.any()
        assert not plan.group_arrivals.any()
    assert on_tensors == [(programs,)] * len(windows)


@pytest.mark.parametrize(("group", "page", "programs"), [(4, 16, 1), (8, 32, 5), (3, 64, 16)])
def test_sums_of_common_prefixes(
    group: int, page: int, programs: int, on_tensors: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are added to those of what follows, whatever programs have of it."""
    monkeypatch.setattr("kernels.reference.step.MIN_SHARED", 64)
    torch.manual_seed(0)
    lens, long = [300, 0, 129, 1, 193, 30, 700], [0, 2, 4, 6]
    paged, heads = Paged.make(lens, page, 64, BF16, "cpu", num_kv_heads=KV_HEADS), group * KV_HEADS
    paged.share(long, 128 // page)
    query = torch.randn(len(lens), heads, 64).bfloat16()
    plan = plan_of(paged, heads, 64, programs)
    prefix = SharedPrefix.allocate(plan.max_seqs, heads, KV_HEADS, 64, CPU, programs)
    plan = dataclasses.replace(plan, prefix=prefix)
    reference.plan_prefix(paged.context_lens, paged.rows, paged.block_tables, page, plan)
    reference.plan_decode(paged.context_lens, paged.rows, plan)
    assert prefix.starts[long].tolist() == [128] * 4
    for i in long:
        keys, values = (each[:, :128].repeat_interleave(group, 0) for each in paged.context(i))
        scores = torch.einsum("hd,hkd->hk", query[i].double(), keys) * (0.1 / math.log(2))
        prefix.stats[i, 0] = scores.amax(1)
        weights = torch.exp2(scores - scores.amax(1, keepdim=True))
        prefix.stats[i, 1], prefix.out[i] = weights.sum(1), torch.einsum("hk,hkd->hd", weights, values)
    monkeypatch.setattr("kernels.triton.shared_prefix.attend_prefix", lambda *_: None)
    got = decode(query, paged, plan, torch.full_like(query, math.nan))
    want = exact(query, paged)
    assert (got.double() - want).norm() < 6e-3 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes(dtype: torch.dtype, on_tensors: list[tuple[int, ...]]) -> None:
    """Those of the result in bfloat16, with a scale for each head."""
    torch.manual_seed(0)
    paged = Paged.make(LENS, 16, 128, BF16, "cpu", num_kv_heads=KV_HEADS)
    query = torch.randn(len(LENS), 4 * KV_HEADS, 128).bfloat16()
    whole = decode(query, paged, plan_of(paged, 4 * KV_HEADS, 128, 3), torch.empty_like(query))
    into = QuantizedRows.empty(query.flatten(1), dtype, 128)
    decode(query, paged, plan_of(paged, 4 * KV_HEADS, 128, 3), into)
    codes, scale = reference.quantize_rows(whole.flatten(0, 1), dtype)
    assert into.codes.view(codes.shape).equal(codes)
    torch.testing.assert_close(into.scale.flatten(), scale.flatten())
    assert len(on_tensors) == 2


def test_which_calls_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose plan was made for it, which is for many sequences over caches of 16-bit numbers, on Hopper."""
    monkeypatch.setattr("kernels.data.plan._on_hopper", lambda: True)

    def plan(seqs: int = 17, group: int = 8, head_dim: int = 128, **options: Any) -> DecodePlan:
        return DecodePlan.allocate(seqs, 2 * group, 2, head_dim, CPU, 4, **options)

    assert plan().streams
    assert not plan(seqs=16).streams
    assert not plan(group=17).streams
    assert not plan(head_dim=256).streams
    assert not plan(kv_dtype=torch.float8_e4m3fn).streams
    assert not plan(kv_dtype=torch.float32).streams
    query, cache = torch.zeros(17, 16, 128, dtype=BF16), torch.zeros(3, 2, 8, 128, dtype=BF16)
    args = AttentionArgs(0.1, 5, 3.0, torch.ones(16), torch.ones(16))
    assert attention_decode.supports(query, cache, args, plan())
    assert not attention_decode.supports(query, cache, dataclasses.replace(args, kv_scale=torch.ones(2, 2)), plan())
    assert not attention_decode.supports(query, cache, args, plan(seqs=16))
    assert not attention_decode.supports(query.half(), cache, args, plan())
    assert not attention_decode.supports(query, cache[:, :, :4], args, plan())
    monkeypatch.setattr("kernels.data.plan._on_hopper", lambda: False)
    assert not plan().streams
