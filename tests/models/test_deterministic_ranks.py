"""In deterministic mode, logits are the same bytes whatever the number of ranks: 1, 2, 4 or 8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.formats.floats import FLOATS
from engine.models.layers import Linear
from engine.models.matrix import Scope
from engine.models.quantization import choose_quantization
from engine.models.shard import Shard
from kernels.cpu.library import library
from tests.models.test_shard import load, logits, on_ranks
from tests.oracles.families import make_checkpoint, make_prompts
from tests.oracles.paged_runner import decode

BF16, F32 = torch.bfloat16, torch.float32
# Sizes that eight ranks divide, with groups of channels of which a rank has several, one, and a part.
WIDE: dict[str, Any] = {"num_attention_heads": 8, "intermediate_size": 512, "hidden_size": 256}
EXPERTS = WIDE | {"moe_intermediate_size": 64, "num_experts": 16}
CASES: dict[str, tuple[str, torch.dtype, str, dict[str, Any]]] = {
    "float32": ("llama-biases", F32, "", WIDE),
    "bfloat16": ("qwen3", BF16, "", WIDE),
    "int8": ("gemma2", BF16, "int8", WIDE),
    "int4": ("qwen3", BF16, "int4", WIDE),
    "fp8": ("qwen3", F32, "fp8", WIDE),
    "experts": ("qwen3_moe", BF16, "", EXPERTS),
    "experts int8": ("qwen3_moe", F32, "int8", EXPERTS),
}


pytestmark = pytest.mark.usefixtures("deterministic")


def degrees_agree(
    folder: Path, family: str, dtype: torch.dtype, quantization: str, shape: dict[str, Any], degrees: tuple[int, ...]
) -> None:
    make_checkpoint(family, folder, shape)
    spec = read_spec(folder)
    if quantization:
        spec = replace(spec, quantization=choose_quantization(None, quantization))
    prompts = make_prompts()[:2]

    def run(forced: Any = None, **rank: Any) -> Any:
        model = load(folder, spec=spec, dtype=dtype, **rank)
        model.pack_weights()
        return decode(model, prompts, 3, chunk=11, forced=forced)

    one = run()
    forced, want = [each.token_ids for each in one], logits(one)
    assert want.isfinite().all()

    def work(shard: Shard, communicator: Any) -> Tensor:
        return logits(run(forced, shard=shard, communicator=communicator))

    for size in degrees:
        for rank, got in enumerate(on_ranks(size, work)):
            assert torch.equal(got, want), f"rank {rank} of {size}: {(got - want).abs().max()}"


@pytest.mark.parametrize("case", CASES)
def test_logits_do_not_depend_on_the_number_of_ranks(case: str, tmp_path: Path) -> None:
    degrees_agree(tmp_path, *CASES[case], (2, 8) if case == "bfloat16" else (2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("instructions", ["", "x86-64-v3"])
def test_eight_ranks(case: str, instructions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.cache_clear()
    if instructions:
        monkeypatch.setenv("QUIRE_CPU_ISA", instructions)
    try:
        degrees_agree(tmp_path, *CASES[case], (2, 4, 8))
    finally:
        library.cache_clear()


MORE: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "shared expert": ("qwen2_moe", BF16, {"num_experts": 12}),
    "dense beside experts": ("gemma4", BF16, {}),
    "sinks": ("gpt_oss", BF16, {"num_local_experts": 8}),
    "alibi": ("mpt", F32, {}),
    "no gate": ("starcoder2", BF16, {}),
    "odd heads": ("qwen3-window", BF16, {"head_dim": 20}),
    "latent attention": ("deepseek_v3", F32, {"n_routed_experts": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_more_families(case: str, tmp_path: Path) -> None:
    family, dtype, shape = MORE[case]
    degrees_agree(tmp_path, family, dtype, "", shape, (2, 4))


def test_a_sum_is_divided_at_the_same_channels_on_every_rank() -> None:
    whole = Shard().eighths(44)
    for size in (2, 4):
        found = []
        for rank in range(size):
            first = rank * 44 // size
            own = Shard(rank, size).eighths(44)
            found += [slice(part.start + first, part.stop + first) for part in own]
        assert tuple(found) == whole
    assert [len(range(part.start, part.stop)) for part in Shard(1, 2).eighths(4)] == [0, 1, 0, 1]


def test_layers_with_too_few_channels_are_refused() -> None:
    scope = Scope(F32, torch.device("cpu"), FLOATS)
    with pytest.raises(ModelError, match="sums of 6 channels cannot be divided in eighths"):
        Linear(scope, 6, {"down": 16}, shard="row")


def test_scales_that_ranks_would_choose_otherwise_are_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, {"intermediate_size": 180})
    spec = replace(read_spec(tmp_path), quantization=choose_quantization(None, "int8"))
    load(tmp_path, spec=spec)
    with pytest.raises(ModelError, match="deterministic ranks need a multiple of 8 input channels, got 180"):
        load(tmp_path, spec=spec, shard=Shard(0, 2))
