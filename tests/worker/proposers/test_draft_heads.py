"""Draft heads cut to some tokens, and quantised: drafts are the most likely of these tokens, and texts stay."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine import LLM, ConfigError, SamplingParams
from engine.models.drafters.token_map import most_frequent, read_token_map, write_token_map
from engine.models.errors import ModelError
from tests.oracles.drafters import FILE, MTPReference, make_eagle3, make_mtp_checkpoint
from tests.oracles.families import VOCAB, make_checkpoint
from tests.support.drafters import SETTINGS, Drafted

TOKENS = list(range(1, VOCAB, 3))
PARAMS = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, detokenize=False)


class _Cut(nn.Module):
    """A head of transformers, for some tokens only, of weights rounded to the codes of a row."""

    def __init__(self, head: nn.Linear, token_ids: list[int], codes: int = 0) -> None:
        super().__init__()
        self.weight, self.token_ids = head.weight, token_ids
        if codes:
            scale = self.weight.abs().amax(1, keepdim=True) / codes
            self.weight = nn.Parameter((self.weight / scale).round() * scale)

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.weight.T
        kept = torch.full_like(logits, -torch.inf)
        kept[..., self.token_ids] = logits[..., self.token_ids]
        return kept


def _answers(drafted: Drafted) -> None:
    """Check that texts stay, and close nothing."""
    expected = drafted.answers(PARAMS, drafts=False)
    drafted.llm.reset_prefix_cache()
    assert drafted.answers(PARAMS) == expected
    assert len(drafted.proposed) > 8


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MTPReference, nn.Linear]:
    folder = tmp_path_factory.mktemp("mtp")
    reference = make_mtp_checkpoint("glm4_moe", folder)
    write_token_map(folder / "tokens.json", TOKENS)
    return folder, reference, reference.target.lm_head


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cut_head_drafts_the_most_likely_of_its_tokens(ranks: int, mtp: tuple[Path, MTPReference, nn.Linear]) -> None:
    folder, reference, head = mtp
    reference.target.lm_head = _Cut(head, TOKENS)
    given: dict[str, Any] = {"given": {"speculative_token_map": str(folder / "tokens.json")}}
    drafted = Drafted(folder, "mtp", **given, tensor_parallel_size=ranks)
    _answers(drafted)
    for known, proposed in drafted.proposed[::4]:
        assert proposed == reference.propose(known, 3)
    sampled = PARAMS.clone(temperature=0.9, seed=3, top_k=20)
    assert drafted.answers(sampled) == drafted.answers(sampled, drafts=False)
    assert {token for _, proposed in drafted.proposed for token in proposed} <= {*TOKENS}
    drafted.llm.close()


@pytest.mark.parametrize("tokens", [{}, {"speculative_token_map": "tokens.json"}], ids=["all", "some"])
def test_a_quantised_head_drafts_as_its_rounded_weights_do(
    tokens: dict[str, Any], mtp: tuple[Path, MTPReference, nn.Linear]
) -> None:
    folder, reference, head = mtp
    given = {name: str(folder / file) for name, file in tokens.items()} | {"draft_lm_head_quantization": "int8"}
    kept = TOKENS if tokens else list(range(VOCAB))
    reference.target.lm_head = _Cut(head, kept, codes=127)
    drafted = Drafted(folder, "mtp", given=given)
    _answers(drafted)
    alike = [proposed[:1] == reference.propose(known, 1) for known, proposed in drafted.proposed[::3]]
    assert sum(alike) >= 0.8 * len(alike), "activations are rounded, too"
    drafted.llm.close()


def test_the_head_of_an_eagle3_drafter_is_quantised(tmp_path: Path) -> None:
    reference = make_eagle3(tmp_path / "head", make_checkpoint("qwen3", tmp_path), vocab=90)
    drafted = Drafted(tmp_path, "eagle3", tmp_path / "head", given={"draft_lm_head_quantization": "int4"})
    _answers(drafted)
    alike = [proposed[:1] == reference.propose(known, 1) for known, proposed in drafted.proposed[::3]]
    assert 0.3 * len(alike) < sum(alike), "of 90 tokens, with weights of 4 bits"
    drafted.llm.close()


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    make_mtp_checkpoint("glm4_moe", tmp_path)

    def start(**given: Any) -> None:
        LLM(str(tmp_path), **SETTINGS, speculative_config={"method": "mtp"} | given)

    for content, message in (
        ("[1, 2", "cannot be read as token ids"),
        ("{}", "must hold a list of token ids"),
        ("[1, true]", "must hold a list of token ids"),
        (f"[{VOCAB}]", f"token ids must be from 0 to {VOCAB - 1}"),
    ):
        (tmp_path / "tokens.json").write_text(content)
        with pytest.raises((ModelError, ConfigError), match=message):
            start(speculative_token_map=str(tmp_path / "tokens.json"))
    tensors = load_file(tmp_path / FILE)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int32)
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"needs an output head of floats|lm_head"):
        start(draft_lm_head_quantization="int8")


def test_files_of_token_ids(tmp_path: Path) -> None:
    assert most_frequent(Counter({5: 3, 7: 9, 2: 3, 1: 1}), 3) == [2, 5, 7]
    assert most_frequent(Counter({5: 3, 7: 9}), 2, always=[0]) == [0, 7]
    (tmp_path / "list.json").write_text(json.dumps([9, 3, 3]))
    assert read_token_map(tmp_path / "list.json", 10) == (3, 9)
    for saved in (torch.tensor([[4, 2]]), [4, 2]):
        torch.save(saved, tmp_path / "ids.pt")
        assert read_token_map(tmp_path / "ids.pt", 10) == (2, 4)
