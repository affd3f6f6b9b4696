"""The checks themselves, run on the CPU, where reference implementations stand in for the kernels: they must be
right.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernels
from benchmarks.micro.experts import Shape
from engine.worker.block_store.block_copier import BlockCopier
from kernels import Router
from tests.gpu import attention
from tests.gpu.__main__ import main
from tests.gpu.checks import Checks
from tests.gpu.formats import check_formats
from tests.gpu.gguf import check_block_layers
from tests.gpu.lora import check_lora_kernels
from tests.gpu.moe import SHAPES, check_expert_products, check_routers
from tests.gpu.prefill import check_codes, check_prefill
from tests.gpu.products import check_products

SMALL = {"contexts": (1, 300, 17, 64), "queries": (1, 130, 17, 5)}


def failed(checks: Checks) -> list[str]:
    return [result.name for result in checks.results if not result.passed]


def test_the_checks_pass_on_the_reference_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    checks = Checks("cpu")
    attention.check_attention(checks, **SMALL)
    assert len({result.name for result in checks.results}) == len(checks.results) > 140
    attention.check_rounding(checks, **SMALL)
    check_codes(checks)
    check_prefill(checks)
    check_products(checks, [(1, 1000, 1000), (7, 1024, 3072), (11, 1000, 192)])
    check_formats(checks, (1, 7), {"qkv": (384, 256), "gate_up": (512, 256), "down": (256, 512)})
    check_block_layers(
        checks, (1, 7), {"qkv": ("norm", ((48, "Q4_K"), (16, "Q6_K")), 512), "o": ("add", ((8, "Q8_0"),), 128)}
    )
    check_lora_kernels(checks, (1, 20), {"qkv": ((96, 32, 32), 128)}, (16,))
    monkeypatch.setitem(SHAPES, "small", Shape(64, 128, 6, Router(2), ("bfloat16", "mxfp4")))
    for name in SHAPES.keys() - {"small"}:
        monkeypatch.delitem(SHAPES, name)
    check_routers(checks, (1, 20))
    check_expert_products(checks, (1, 20))
    assert failed(checks) == []


def test_copied_blocks_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["blocks", "--device", "cpu"]) == 0
    monkeypatch.setattr(BlockCopier, "_indices", lambda self, block_ids: torch.tensor(sorted(block_ids)))
    assert main(["blocks", "--device", "cpu"]) == 1


def test_the_checks_fail_where_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong scales, a key too few, and a kernel that does not even run."""
    right = kernels.paged_attention_decode

    def unscaled(query: Any, context: Any, args: Any, **options: Any) -> Any:
        scale = args.kv_scale
        return right(query, context, replace(args, kv_scale=None if scale is None else 2 * scale), **options)

    def short(query: Any, context: Any, args: Any, **options: Any) -> Any:
        return right(query, replace(context, lens=context.lens - 1), args, **options)

    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of resource")

    for wrong, kinds in ((unscaled, {"fp8"}), (short, {"fp8", "bf16"}), (broken, {"fp8", "bf16"})):
        monkeypatch.setattr(kernels, "paged_attention_decode", wrong)
        checks = Checks("cpu")
        attention.check_attention(checks, **SMALL)
        assert {"fp8" if "fp8" in name else "bf16" for name in failed(checks)} == kinds
        assert not [name for name in failed(checks) if name.startswith("prefill")]


@pytest.mark.slow
def test_processes_may_be_lost() -> None:
    assert main(["faults", "--device", "cpu"]) == 0


def test_what_is_seen_and_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    checks = Checks("cpu", match="rank")
    checks.took("rank: named", 3.25, 10)
    checks.took("rank: answers again", math.inf, 60)
    checks.saw("rank: /health", True, "503")
    checks.saw("rank: no process is left", False, "pid 7")
    checks.saw("start: one line", False, "two")
    assert failed(checks) == ["rank: answers again", "rank: no process is left"]
    first, *_ = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == "ok rank: named 3.25 s, at most 10 s"


def test_nan_is_no_small_error() -> None:
    checks = Checks("cpu")
    checks.add("a kernel", math.nan, 1.0)
    assert failed(checks) == ["a kernel"]


def test_parts_and_names_select(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["products", "--device", "cpu", "--match", "norm_linear 11 x"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed"
    assert main(["products", "--device", "cpu", "--match", "no such check"]) == 1
    with pytest.raises(SystemExit):
        main(["atention", "--device", "cpu"])
    assert "there are attention, prefill, products" in capsys.readouterr().err


def test_each_check_falls_into_one_shard() -> None:
    names = [f"decode head_dim {dim} group {group}" for dim in (64, 128) for group in range(8)]
    shards = [Checks("cpu", shard=(this, 3)) for this in (1, 2, 3)]
    wanted = [[name for name in names if shard.wants(name)] for shard in shards]
    assert all(wanted)
    assert sorted(name for shard in wanted for name in shard) == sorted(names)
    assert {len([shard for shard in shards if shard.wants(f"fp8: qkv, {n} tokens")]) for n in (1, 8, 256)} == {1}
