"""Phi-3-small against a plain decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.shard import Shard
from tests.models.test_shard import on_ranks
from tests.oracles.paged_runner import decode
from tests.oracles.phi3_small import CONFIG, SIZE, VOCAB, make, plain_decoder, sees
from tests.support.loaded import load as load_model

LONG = {
    "type": "su",
    "long_mscale": 1.19,
    "short_mscale": 1.19,
    "long_factor": [1.0 + i for i in range(SIZE // 2)],
    "short_factor": [1.0] * (SIZE // 2),
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"blocksparse_homo_head_pattern": True, "mup_use_scaling": False}, {"rope_scaling": LONG}],
    ids=["published", "one pattern", "long"],
)
def test_logits_and_tokens_are_those_of_the_plain_decoder(changes: Any, tmp_path: Path) -> None:
    """Ragged and in chunks; contexts of up to seven blocks, of which a query sees about half."""
    config = make(tmp_path, **changes)
    assert sees(config, 420)[:, -1].float().mean() < 0.6
    model = load_model(tmp_path, read_spec(tmp_path), max_model_len=512)
    prompts = [torch.randint(VOCAB, (n,)).tolist() for n in (400, 3, 150)]
    for chunk in (10**9, 90):
        for prompt, got in zip(prompts, decode(model, prompts, 20, chunk=chunk), strict=True):
            want = plain_decoder(tmp_path, prompt + got.token_ids[:-1])
            assert (got.logits - want).abs().max() <= 1e-4 * want.abs().max()
            assert got.token_ids == want[len(prompt) - 1 :].argmax(-1).tolist()


def test_two_ranks(tmp_path: Path) -> None:
    make(tmp_path)
    prompts = [torch.randint(VOCAB, (n,)).tolist() for n in (300, 7)]
    spec = read_spec(tmp_path)
    one = decode(load_model(tmp_path, spec, max_model_len=512), prompts, 8)

    def on_rank(shard: Shard, communicator: Any) -> list[Any]:
        model = load_model(tmp_path, spec, shard=shard, communicator=communicator, max_model_len=512)
        return decode(model, prompts, 8)

    for found in on_ranks(2, on_rank):
        for got, want in zip(found, one, strict=True):
            assert got.token_ids == want.token_ids
            torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)


def test_a_published_configuration(tmp_path: Path) -> None:
    changes = {"vocab_size": 100352, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {"blocksparse_num_local_blocks": 16, "blocksparse_vert_stride": 8, "ff_intermediate_size": 14336}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes | sizes | {"num_hidden_layers": 32}))
    spec = read_spec(tmp_path)
    assert [layer.mixer.sparse is None for layer in spec.layers] == [False, True] * 16  # type: ignore[union-attr]
    assert (spec.tie_word_embeddings, spec.logits_multiplier, spec.embedding_multiplier) == (True, 0.25, 10)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_act": "silu"}, "'hidden_act' must be gegelu"),
        ({"rope_position_scale": 2.0}, "'rope_position_scale' must be 1"),
        ({"blocksparse_block_size": 48}, "'blocksparse_block_size' must be a power of two"),
        ({"rope_scaling": LONG | {"short_mscale": 1.0}}, "'long_mscale' must be 'short_mscale'"),
    ],
)
def test_what_is_refused(changes: Any, field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ModelError, match=field):
        read_spec(tmp_path)
