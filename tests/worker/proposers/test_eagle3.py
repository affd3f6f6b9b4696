"""EAGLE-3 heads: their guesses are those of the reference, texts stay, and what cannot be used is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file

from engine import LLM, SamplingParams
from engine.models.errors import ModelError
from tests.oracles.drafters import FILE, make_eagle3
from tests.oracles.families import make_checkpoint
from tests.support.drafters import SETTINGS, Drafted

KINDS: dict[str, dict[str, Any]] = {
    "few tokens": {"vocab": 90},
    "all tokens": {},
    "norms": {"vocab": 90, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("target")
    return folder, make_checkpoint("qwen3", folder)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_reference_and_texts_stay(kind: str, target: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = target
    reference = make_eagle3(tmp_path, model, **KINDS[kind])
    drafted = Drafted(folder, "eagle3", tmp_path)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    drafted.check(params, reference.propose, every=4)
    drafted.llm.close()


def test_files_of_pytorch_and_other_names_are_read(target: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = target
    reference = make_eagle3(tmp_path, model, vocab=90)
    tensors = load_file(tmp_path / FILE)
    tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().flip(0)
    reference._tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"]
    torch.save(
        {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()},
        tmp_path / "pytorch_model.bin",
    )
    (tmp_path / FILE).unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    own = {name: config.pop(name) for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    apart = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": config,
    }
    (tmp_path / "config.json").write_text(json.dumps(apart | own))
    drafted = Drafted(folder, "eagle3", tmp_path)
    drafted.answers(SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False))
    for known, proposed in drafted.proposed[::5]:
        assert proposed == reference.propose(known, 3)
    drafted.llm.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'architectures' must name an EAGLE-3 head"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "'architectures' must name an EAGLE-3 head"),
        ({"fc_norm": True}, "'fc_norm' must be false"),
        ({"num_hidden_layers": 2}, "'num_hidden_layers' must be 1"),
        ({"vocab_size": 99}, "'vocab_size' must be that of the target, 384, got 99"),
        ({"hidden_size": 64}, "'hidden_size' must be that of the target, 128, got 64"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "must be 3 layers from 1 to 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "'use_aux_hidden_state' must be true"),
        ({"intermediate_size": 99}, "config.json says"),
    ],
)
def test_what_cannot_be_used_is_refused(
    changes: dict[str, Any], message: str, target: tuple[Path, Any], tmp_path: Path
) -> None:
    make_eagle3(tmp_path, target[1])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=message):
        LLM(str(target[0]), **SETTINGS, speculative_config={"method": "eagle3", "model": str(tmp_path)})
