"""Times the attention kernels over paged KV, beside the device's limits and FlashAttention 3 where it is installed.

    quire bench kernels                      the standard cases
    quire bench kernels --sweep decode       context lengths, head sizes, batch sizes, dtypes and page sizes
    quire bench kernels --sweep experts      a layer's mixture of experts instead, beside its floor; also on a CPU
    quire bench kernels --kv-cache-dtype fp8 the same over an fp8 cache, as the engine does it, beside a wide one

A decode case is bound by bytes (K and V read once, queries and outputs beside them), a prefill case by arithmetic (4 ·
head_dim per visible query-key pair and head). Times are medians of `triton.testing.do_bench` (L2 flushed between runs),
blocks in random order.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels
from benchmarks.gpu import need_gpus
from benchmarks.micro import experts
from benchmarks.result_files import save
from engine.models.wide_pages import WidePages
from engine.setup.machine import environment
from kernels.data.widening import can_gain, seconds_saved


@dataclass(frozen=True, slots=True)
class Case:
    """One attention call: the sequences' context and query lengths, and the model's shape."""

    name: str
    context_lens: list[int]
    query_lens: list[int]  # all 1: decode
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = ""  # float8_e4m3fn, or empty: as `dtype`
    window: int = 0  # keys that a query sees; 0: all
    plan_counts_window: bool = True  # False: the decode plan counts the whole context, as if there were no window
    soft_cap: float = 0.0
    sinks: bool = False
    sparse: kernels.BlockSparse | None = None

    @property
    def decode(self) -> bool:
        return all(n == 1 for n in self.query_lens)

    @property
    def widens(self) -> bool:
        """Does the engine compute the case over upcast copies of an fp8 cache's pages?"""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return (
            bool(self.kv_dtype)
            and not self.decode
            and self.sparse is None
            and can_gain(torch.cuda.get_device_capability(), *heads, getattr(torch, self.dtype))
            and seconds_saved(self.query_lens, self.context_lens, self.window, *heads) > 0
        )

    @property
    def bytes(self) -> int:
        """Bytes of a decode case: K and V that the queries see, once; queries in, outputs out."""
        size, kv_size = (int(getattr(torch, name).itemsize) for name in (self.dtype, self.kv_dtype or self.dtype))
        kv = 2 * sum(min(n, self.window or n) for n in self.context_lens) * self.num_kv_heads
        return self.head_dim * (kv_size * kv + size * 2 * sum(self.query_lens) * self.num_heads)

    @property
    def flops(self) -> int:
        window = self.window or max(self.context_lens)
        pairs = 0
        if self.sparse is not None:
            every = (range(c - q, c) for q, c in zip(self.query_lens, self.context_lens, strict=True))
            visible = sum(self.sparse.num_keys(p) for positions in every for p in positions)
            return 4 * visible * self.head_dim * self.num_heads
        for queries, context in zip(self.query_lens, self.context_lens, strict=True):
            growing = range(context - queries + 1, min(context, window) + 1)  # seen by queries nearer to the start
            pairs += sum(growing) + window * (queries - len(growing))
        return 4 * pairs * self.head_dim * self.num_heads


def decode(name: str, context_lens: list[int], **shape: Any) -> Case:
    return Case(name, context_lens, [1] * len(context_lens), **shape)


def standard_cases() -> list[Case]:
    k = 1024
    return [
        decode("decode 1 x 1k", [k]),
        decode("decode 1 x 32k", [32 * k]),
        decode("decode 32 x 4k", [4 * k] * 32),
        decode("decode 32 x 8k", [8 * k] * 32),
        decode("decode 256 x 1k", [k] * 256),
        decode("decode 1 x 128k + 31 x 4k", [128 * k] + [4 * k] * 31),
        decode("decode 16 heads 256 x 1k", [k] * 256, num_heads=16),
        decode("decode head 64 128 x 1k", [k] * 128, head_dim=64),
        decode("decode 8 x 32k window 4k", [32 * k] * 8, window=4 * k),
        decode("decode 8 x 32k window 4k, whole plan", [32 * k] * 8, window=4 * k, plan_counts_window=False),
        Case("prefill 8 x 1k", [k] * 8, [k] * 8),
        Case("prefill 1 x 8k", [8 * k], [8 * k]),
        Case("prefill 1 x 32k", [32 * k], [32 * k]),
        Case("prefill 4 x 2k on 16k", [16 * k] * 4, [2 * k] * 4),
        Case("prefill 16 heads 8 x 2k", [2 * k] * 8, [2 * k] * 8, num_heads=16),
        *family_cases(),
    ]


def family_cases() -> Iterator[Case]:
    """Layers of Gemma 3 12B and gpt-oss, with the window and without it, and other head sizes."""
    k = 1024
    gemma: dict[str, Any] = {"num_heads": 16, "head_dim": 256}
    oss: dict[str, Any] = {"num_heads": 64, "head_dim": 64, "sinks": True}
    for name, shape, window in (("gemma", gemma, k), ("gpt-oss", oss, 128)):
        for kind, keys in (("", 0), (f" window {window}", window)):
            yield decode(f"decode {name}{kind} 64 x 2k", [2 * k] * 64, window=keys, **shape)
            yield decode(f"decode {name}{kind} 8 x 16k", [16 * k] * 8, window=keys, **shape)
            yield Case(f"prefill {name}{kind} 1 x 8k", [8 * k], [8 * k], window=keys, **shape)
    yield Case("prefill gemma soft cap 1 x 8k", [8 * k], [8 * k], **gemma, soft_cap=50.0)
    for head_dim in (64, 80, 96, 192, 256):
        yield Case(f"prefill head {head_dim} 1 x 8k", [8 * k], [8 * k], head_dim=head_dim)


def sweep_cases(kind: str) -> Iterator[Case]:
    for length, head_dim, (heads, kv_heads), batch, dtype, block_size in itertools.product(
        (1024, 4096, 8192, 32768),
        (64, 128, 256),
        ((8, 8), (32, 8), (64, 8)),
        (1, 8, 64),
        ("bfloat16", "float16"),
        (16, 64),
    ):
        if length * batch > (1 << 20 if kind == "decode" else 1 << 16):
            continue
        name = f"{kind} {batch} x {length} heads {heads}/{kv_heads} head_dim {head_dim} page {block_size} {dtype}"
        queries = [1 if kind == "decode" else length] * batch
        yield Case(name, [length] * batch, queries, heads, kv_heads, head_dim, block_size, dtype)


@dataclass(slots=True)
class Inputs:
    """Random tensors of a case, its blocks in random order."""

    case: Case
    query: Tensor
    kv: Tensor  # [2, num_blocks, num_kv_heads, block_size, head_dim]
    block_tables: Tensor
    rows: Tensor
    query_start: Tensor
    context_lens: Tensor
    kv_scale: Tensor | None  # [2, num_kv_heads] of an e4m3 cache

    @classmethod
    def make(cls, case: Case, device: str = "cuda") -> Inputs:
        dtype, kv_dtype = getattr(torch, case.dtype), getattr(torch, case.kv_dtype or case.dtype)
        counts = [-(-n // case.block_size) for n in case.context_lens]
        ids = list(range(sum(counts)))
        random.Random(0).shuffle(ids)
        tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for i, n in enumerate(counts):
            tables[i, :n] = torch.tensor([ids.pop() for _ in range(n)])
        starts = torch.tensor([0, *itertools.accumulate(case.query_lens)], dtype=torch.int32)
        shape = (2, sum(counts), case.num_kv_heads, case.block_size, case.head_dim)
        return cls(
            case,
            torch.randn(sum(case.query_lens), case.num_heads, case.head_dim, dtype=dtype, device=device),
            torch.randn(shape, dtype=dtype, device=device).to(kv_dtype),
            tables.to(device),
            torch.arange(len(counts), dtype=torch.int32, device=device),
            starts.to(device),
            torch.tensor(case.context_lens, dtype=torch.int32, device=device),
            torch.ones(2, case.num_kv_heads, device=device) if case.kv_dtype else None,
        )

    def quire(self) -> Callable[[], Tensor]:
        """Our kernel on these inputs; the work map is made beforehand, as in a step, where all layers share it."""
        case, out = self.case, torch.empty_like(self.query)
        sinks = torch.randn(case.num_heads, device=self.query.device) if case.sinks else None
        args = kernels.AttentionArgs(
            case.head_dim**-0.5, case.window, case.soft_cap, None, sinks, case.sparse, self.kv_scale
        )
        key, value = self.kv[0], self.kv[1]
        if case.decode:
            plan = kernels.DecodePlan.allocate(
                len(self.rows), case.num_heads, case.num_kv_heads, case.head_dim, self.query.device, kv_dtype=key.dtype,
                window=case.window if case.plan_counts_window else 0, sparse=case.sparse,
            )  # fmt: skip
            kernels.plan_decode(self.context_lens, self.rows, plan)
            context = kernels.PagedContext(key, value, self.block_tables, self.rows, self.context_lens)
            return lambda: kernels.paged_attention_decode(self.query, context, args, plan=plan, out=out)
        packed = case.num_heads if case.sparse else case.num_kv_heads
        step = kernels.prefill_tile_queries(case.num_heads, packed, case.head_dim, self.query.dtype)
        grid = kernels.make_prefill_tiles(case.query_lens, case.context_lens, step)
        tiles = torch.tensor(grid, dtype=torch.int32, device=self.query.device)
        if case.widens:
            return self._widening(args, tiles, out)
        context = kernels.PagedContext(key, value, self.block_tables, self.rows, self.context_lens)
        return lambda: kernels.paged_attention_prefill(
            self.query, self.query_start, context, args, tiles=tiles, out=out
        )

    def _widening(self, args: kernels.AttentionArgs, tiles: Tensor, out: Tensor) -> Callable[[], Tensor]:
        """Prefill over wide copies of the cache's pages, with the making of these."""
        case = self.case
        device = self.query.device
        wide = WidePages.of_step(case.query_lens, case.context_lens, case.window, lambda tensor: tensor.to(device))
        query = self.query.half()  # as `rope_and_store` writes it

        def call() -> Tensor:
            key, value = made = wide.allocate(self.kv).pages
            wide.fill(made, self.kv, self.block_tables, self.rows, self.context_lens)
            context = kernels.PagedContext(key, value, wide.block_tables, wide.rows, self.context_lens)
            return kernels.paged_attention_prefill(query, self.query_start, context, args, tiles=tiles, out=out)

        return call

    def flash_attention(self) -> Callable[[], Tensor] | None:
        """FlashAttention 3 as vLLM packs it, on the same values in its own layout; None where it is not installed."""
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func
            from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata
        except ImportError:
            return None
        case = self.case
        if case.kv_dtype or case.window or case.soft_cap or case.sinks:
            return None
        key, value = (self.kv[i].transpose(1, 2).contiguous() for i in (0, 1))
        longest = max(case.query_lens), max(case.context_lens)
        metadata = get_scheduler_metadata(
            len(self.rows), *longest, case.num_heads, case.num_kv_heads, case.head_dim, self.context_lens,
            qkv_dtype=self.query.dtype, cu_seqlens_q=self.query_start, page_size=case.block_size, causal=True,
        )  # fmt: skip
        out = torch.empty_like(self.query)
        return lambda: flash_attn_varlen_func(
            self.query, key, value, longest[0], self.query_start, longest[1], seqused_k=self.context_lens,
            softmax_scale=case.head_dim**-0.5, causal=True, block_table=self.block_tables, out=out,
            scheduler_metadata=metadata, fa_version=3,
        )  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    """Time of our kernel and of its peer in microseconds, and the rate that bounds the case."""
    from triton.testing import do_bench

    inputs = Inputs.make(case)
    result: dict[str, Any] = {
        **asdict(case),
        "context_lens": len(case.context_lens),
        "query_lens": sum(case.query_lens),
    }
    calls = {"quire": inputs.quire(), "flash_attention_3": inputs.flash_attention()}
    for engine, call in calls.items():
        if call is None:
            continue
        time_us = 1e3 * do_bench(call, warmup=50, rep=200, return_mode="median")
        result[engine] = {
            "us": round(time_us, 2),
            "TB_s": round(case.bytes / time_us / 1e6, 3),
            "TFLOP_s": round(case.flops / time_us / 1e6, 1),
        }
    if calls["flash_attention_3"]:
        ours, theirs = calls["quire"](), calls["flash_attention_3"]()  # type: ignore[misc]
        result["difference"] = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
    return result


def limits() -> dict[str, float]:
    """Limits of this device: TB/s of a large copy (bytes read and written), TFLOP/s of a large bfloat16 GEMM."""
    from triton.testing import do_bench

    a = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copy, product = do_bench(lambda: b.copy_(a)), do_bench(lambda: m @ m)
    return {"copy_TB_s": round(2 * a.nbytes / copy / 1e9, 2), "matmul_TFLOP_s": round(2 * 8192**3 / product / 1e9, 1)}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:2] == ["--sweep", "experts"]:
        return experts.main(argv[2:])
    parser = argparse.ArgumentParser(
        prog="quire bench kernels", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--sweep",
        choices=("decode", "prefill", "experts"),
        help="a grid of shapes instead of the standard cases; experts: see its own --help",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="fp8: an e4m3 cache, beside the wide one"
    )
    parser.add_argument("--match", default="", help="only cases whose name contains this text")
    parser.add_argument("--output-json", type=Path, help="where to save the results")
    args = parser.parse_args(argv)
    need_gpus("quire bench kernels")
    bound = limits()
    print(
        f"{torch.cuda.get_device_name()}: copy {bound['copy_TB_s']} TB/s, "
        f"bfloat16 matmul {bound['matmul_TFLOP_s']} TFLOP/s"
    )
    fp8 = args.kv_cache_dtype == "fp8"
    print(
        f"{'case':<60}{'µs':>10}{'rate':>14}{'of limit':>10}{'FA3 µs':>10}{'FA3/quire':>11}{'difference':>12}"
        + (f"{'fp8 µs':>10}{'rate':>14}{'of limit':>10}{'wide/fp8':>10}" if fp8 else "")
    )
    results = []
    for case in sweep_cases(args.sweep) if args.sweep else standard_cases():
        if args.match not in case.name:
            continue
        result = measure(case)
        results.append(result)
        ours, peer = result["quire"], result.get("flash_attention_3")
        key, unit, limit = (
            ("TB_s", "TB/s", bound["copy_TB_s"]) if case.decode else ("TFLOP_s", "TFLOP/s", bound["matmul_TFLOP_s"])
        )

        def timed(found: dict[str, float], key: str = key, unit: str = unit, limit: float = limit) -> str:
            return f"{found['us']:>10.1f}{found[key]:>7.2f} {unit:<7}{found[key] / limit:>9.0%}"

        line = f"{case.name:<60}{timed(ours)}"
        if peer:
            line += f"{peer['us']:>10.1f}{peer['us'] / ours['us']:>11.2f}{result['difference']:>12.1e}"
        if fp8:
            results.append(narrow := measure(replace(case, name=f"{case.name} fp8", kv_dtype="float8_e4m3fn")))
            line += f"{'' if peer else ' ' * 33}{timed(narrow['quire'])}{ours['us'] / narrow['quire']['us']:>10.2f}"
        print(line, flush=True)
    if args.output_json:
        save({"environment": environment(), "limits": bound, "results": results}, args.output_json)
        print(f"saved {args.output_json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
