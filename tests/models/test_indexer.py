"""Choice of the tokens that a token attends to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.indexer import TokenChoice, best_positions
from engine.models.shard import Stage
from engine.models.spec import LatentSpec
from tests.oracles.families import make_checkpoint, make_prompts, transformers_logits
from tests.oracles.paged_runner import decode
from tests.support.loaded import load

pytest.importorskip("transformers")
CASES = ["deepseek_v32", "glm_moe_dsa"]
INF = float("inf")


def test_best_positions() -> None:
    """The first of equal scores are chosen; there may be fewer scores than wanted, or none."""
    scores = torch.tensor([[1, 3, 2, 3, 3], [0, 0, 0, 0, 0], [5, -INF, 4, -INF, -INF], [-INF] * 5])
    assert best_positions(scores, 2).tolist() == [[1, 3], [0, 1], [0, 2], [5, 5]]
    assert best_positions(scores, 4).tolist() == [[1, 2, 3, 4], [0, 1, 2, 3], [0, 2, 5, 5], [5, 5, 5, 5]]


def test_tokens_of_prefills() -> None:
    """After a decode: a chunk, a whole prompt, and padding tokens of no sequence."""
    rows, starts = torch.tensor([3, 1, 0]).int(), torch.tensor([0, 1, 3, 6]).int()
    choice = TokenChoice.of_prefills(1, 8, rows, starts, torch.tensor([50, 9, 3]).int(), torch.zeros(4, 9), 130)
    assert (choice.start, choice.stop, choice.max_len) == (1, 8, 256)
    assert choice.rows.tolist()[:5] == [1, 1, 0, 0, 0]
    assert choice.lens.tolist() == [8, 9, 1, 2, 3, 0, 0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [10**9, 17, 5, 1])
def test_chunks_equal_transformers(name: str, chunk: int, tmp_path: Path) -> None:
    """64 greedy tokens; prompts are longer and shorter than the tokens that may be chosen."""
    oracle = make_checkpoint(name, tmp_path)
    model = load(tmp_path, read_spec(tmp_path), dtype=torch.float32, device="cpu", max_model_len=256)
    prompts = make_prompts()
    for prompt, got in zip(prompts, decode(model, prompts, 64, chunk=chunk), strict=True):
        want = transformers_logits(oracle, prompt, got.token_ids)
        torch.testing.assert_close(got.logits, want, rtol=1e-4, atol=1e-4)
        assert want[-64:].argmax(-1).tolist() == got.token_ids


def test_few_tokens_choose_all(tmp_path: Path) -> None:
    """Up to as many tokens as may be chosen, attention is that over all of them."""
    make_checkpoint("deepseek_v32", tmp_path, {"index_topk": 200})
    model = load(tmp_path, read_spec(tmp_path), dtype=torch.float32, device="cpu", max_model_len=256)
    chosen = decode(model, make_prompts(), 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.oracles.paged_runner.PagedRunner._with_choices", lambda _, metadata, __: metadata)
        patch.setattr("engine.models.indexer.Indexer.run", lambda *_: None)
        dense = decode(model, make_prompts(), 8)
    for one, other in zip(chosen, dense, strict=True):
        torch.testing.assert_close(one.logits, other.logits, rtol=0, atol=1e-5)


def test_layers_that_share_a_choice(tmp_path: Path) -> None:
    """By a list, a pattern or a frequency; never in another stage than the layer that chooses."""
    make_checkpoint("glm_moe_dsa", tmp_path, {"num_hidden_layers": 6, "indexer_types": None})

    def shared(**changes: object) -> list[bool]:
        spec = read_spec(tmp_path, {"indexer_types": None, **changes})
        mixers = [layer.mixer for layer in spec.layers]
        assert len({mixer.cached for mixer in mixers if isinstance(mixer, LatentSpec)}) == 1
        return [isinstance(mixer, LatentSpec) and mixer.index is not None and mixer.index.is_shared for mixer in mixers]

    assert not any(shared())
    assert shared(index_topk_freq=3) == [False, False, True, True, False, True]
    assert shared(index_topk_pattern="FFSSFS") == [False, False, True, True, False, True]
    assert shared(indexer_types=["full", "shared"] * 3) == [False, True] * 3
    with pytest.raises(ModelError, match="full first"):
        shared(indexer_types=["shared"] * 6)
    spec = read_spec(tmp_path, {"indexer_types": ["full", "full", "full", "shared", "full", "shared"]})
    with pytest.raises(ModelError, match="layer 3 attends to the tokens that the one before it chooses"):
        load(tmp_path, spec, device="cpu", max_model_len=256, stage=Stage(1, 2))
