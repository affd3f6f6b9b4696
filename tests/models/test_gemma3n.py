"""Gemma 3n beside transformers: settings that the case of all families has not, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, ConfigError
from engine.models.errors import ModelError
from engine.models.families import read_spec
from tests.models.test_shard import load
from tests.oracles.families import make_checkpoint, make_prompts, transformers_decode
from tests.oracles.paged_runner import decode

pytest.importorskip("transformers")

CHANGES: tuple[dict[str, Any], ...] = (
    {"altup_num_inputs": 2, "altup_active_idx": 0, "num_kv_shared_layers": 0},
    {"activation_sparsity_pattern": [0.95] * 6, "intermediate_size": 192},
)


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("chunk", [1, 7])
def test_logits_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any], chunk: int) -> None:
    model, prompts = make_checkpoint("gemma3n", tmp_path, changes), make_prompts()[:3]
    want = [transformers_decode(model, prompt, 4) for prompt in prompts]
    found = decode(load(tmp_path), prompts, 4, chunk=chunk)
    assert [each.token_ids for each in found] == [each.token_ids for each in want]
    for ours, theirs in zip(found, want, strict=True):
        assert (ours.logits - theirs.logits).abs().max() <= 1e-4 * theirs.logits.abs().max()


def test_tokens_without_vectors_of_layers_have_those_of_the_first(tmp_path: Path) -> None:
    """The published model has tokens of images and sound after those of texts."""
    model = make_checkpoint("gemma3n", tmp_path, {"vocab_size_per_layer_input": 300})
    assert read_spec(tmp_path).per_layer.is_partial  # type: ignore[union-attr]
    ids = torch.tensor([[5, 299, 300, 383]])
    embedded = model.model.embed_tokens(ids)
    vectors = model.model.get_per_layer_inputs(ids.where(ids < 300, 0))
    with torch.inference_mode():
        want = model(inputs_embeds=embedded, per_layer_inputs=vectors).logits[0]
    (found,) = decode(load(tmp_path), ids.tolist(), 1)
    assert (found.logits - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_sparsity_pattern": [1.0] * 6}, "must be numbers from 0 to below 1"),
        ({"intermediate_size": [192, 192]}, "'intermediate_size' must be one value or 6"),
        ({"num_kv_shared_layers": 5}, "leaves no full_attention to share"),
        ({"altup_active_idx": 4}, "'altup_active_idx' must be at most 3"),
    ],
)
def test_configurations_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_checkpoint("gemma3n", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        read_spec(tmp_path)


def test_drafters_that_read_the_target_are_refused(tmp_path: Path) -> None:
    make_checkpoint("gemma3n", tmp_path)
    settings: dict[str, Any] = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="several residual streams, which eagle3 does not read"):
        LLM(str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True, speculative_config=settings)
