"""Block drafters: their guesses are those of the reference, texts stay, and what cannot be used is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from engine import LLM, ConfigError, SamplingParams
from engine.models.errors import ModelError
from tests.oracles.block_drafters import KINDS, make_block_drafter
from tests.oracles.families import make_checkpoint
from tests.support.drafters import SETTINGS, Drafted

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("target")
    return folder, make_checkpoint("qwen3", folder)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_reference_and_texts_stay(kind: str, target: tuple[Path, Any], tmp_path: Path) -> None:
    """Prompts are computed in chunks, and most drafts are rejected."""
    folder, model = target
    reference = make_block_drafter(kind, tmp_path, model)
    drafted = Drafted(folder, "dflash", tmp_path, num=4)
    drafted.check(GREEDY, reference.propose, every=3)
    sampled = GREEDY.clone(temperature=0.8, seed=5, top_k=9)
    assert drafted.answers(sampled) == drafted.answers(sampled, drafts=False), "of a cached prefix, too"
    drafted.llm.close()


def test_tokens_of_blocks_as_sequences_of_their_own(target: tuple[Path, Any], tmp_path: Path) -> None:
    """Each token of a block attends by the kernels of decode steps, which is how GPUs run it."""
    reference = make_block_drafter("dflash", tmp_path, target[1])
    drafted = Drafted(target[0], "dflash", tmp_path, num=4)
    runner: Any = drafted.llm._engine.runner
    runner.proposer._most_split = 15  # blocks of three requests, of five tokens each
    drafted.check(GREEDY, reference.propose, every=3)
    drafted.llm.close()


def test_preempted_requests_and_few_blocks(target: tuple[Path, Any], tmp_path: Path) -> None:
    many, params = [[7 * i + j for j in range(20)] for i in range(4)], GREEDY.clone(max_tokens=40)
    reference = make_block_drafter("dflash", tmp_path, target[1])
    few = Drafted(target[0], "dflash", tmp_path, num=3, num_gpu_blocks_override=14, max_model_len=96)
    expected = few.answers(params, drafts=False, prompts=many)
    few.llm.reset_prefix_cache()
    assert few.answers(params, prompts=many) == expected
    assert few.llm._engine.scheduler.stats().num_preemptions > 0
    for known, proposed in few.proposed[::7]:
        assert proposed in ([], reference.propose(known, 3))
    few.llm.close()


def test_a_cache_of_eight_bits(target: tuple[Path, Any], tmp_path: Path) -> None:
    reference = make_block_drafter("dflash", tmp_path, target[1])
    drafted = Drafted(target[0], "dflash", tmp_path, num=4, kv_cache_dtype="fp8")
    expected = drafted.answers(GREEDY, drafts=False)
    drafted.llm.reset_prefix_cache()
    assert drafted.answers(GREEDY) == expected
    first = [proposed[:1] == reference.propose(known, 1) for known, proposed in drafted.proposed[::3] if proposed]
    assert sum(first) > len(first) / 4, "of 384 tokens; rounding changes the others"
    drafted.llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash2", "own head"])
def test_drafts_on_two_ranks(kind: str, target: tuple[Path, Any], tmp_path: Path) -> None:
    reference = make_block_drafter(kind, tmp_path, target[1])
    drafted = Drafted(target[0], "dflash", tmp_path, num=4, tensor_parallel_size=2)
    expected = drafted.answers(GREEDY, drafts=False)
    drafted.llm.reset_prefix_cache()
    assert drafted.answers(GREEDY) == expected
    for known, proposed in drafted.proposed[::5]:
        assert proposed in ([], reference.propose(known, 4))
    drafted.llm.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "'architectures' must name a block drafter"),
        ({"vocab_size": 99}, "'vocab_size' must be that of the target, 384, got 99"),
        ({"hidden_size": 64}, "'hidden_size' must be that of the target, 128, got 64"),
        ({"block_size": 4}, "'block_size' is 4, so num_speculative_tokens must be at most 3, got 4"),
        ({"dflash_config": {"target_layer_ids": [0, 9], "mask_token_id": 3}}, "must be layers from 0 to 2"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "'mask_token_id'"),
        ({"intermediate_size": 99}, "config.json says"),
    ],
)
def test_what_cannot_be_used_is_refused(
    changes: dict[str, Any], message: str, target: tuple[Path, Any], tmp_path: Path
) -> None:
    make_block_drafter("dflash", tmp_path, target[1], **changes)
    if "intermediate_size" not in changes:
        assert json.loads((tmp_path / "config.json").read_text()).items() >= changes.items()
    given = {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 4}
    with pytest.raises((ModelError, ConfigError), match=message):
        LLM(str(target[0]), **SETTINGS, speculative_config=given)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_tokens_that_nothing_has_written(kind: str, target: tuple[Path, Any], tmp_path: Path) -> None:
    """While a GPU's kernels are only compiled, the token before may be any number."""
    make_block_drafter(kind, tmp_path, target[1])
    drafted = Drafted(target[0], "dflash", tmp_path, num=4)
    runner: Any = drafted.llm._engine.runner
    drafter, spec = runner.proposer._drafter, runner.spec
    logits, hidden = torch.randn(3, spec.vocab_size), torch.randn(3, spec.hidden_size)
    last = spec.vocab_size - 1
    found, expected = (
        drafter.following(logits, hidden, torch.tensor(before)) for before in ([2**62, -9, 5], [last, 0, 5])
    )
    assert torch.equal(found, expected)
    drafted.llm.close()
