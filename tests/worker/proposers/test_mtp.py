"""Prediction layers: their guesses are the reference's, the first also that of transformers'; texts stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from engine import LLM, EngineConfig, SamplingParams
from engine.models.families import read_spec
from engine.setup import speculative
from engine.setup.options import drafts_of
from engine.setup.speculative import ON_CPUS, parse
from engine.worker.device import CpuDevice
from tests.oracles.drafters import FILE, make_mtp_checkpoint
from tests.support.drafters import SETTINGS, Drafted

FAMILIES = ["glm4_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5", "qwen3_5_moe"]


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_are_those_of_the_reference_and_texts_stay(name: str, tmp_path: Path) -> None:
    reference = make_mtp_checkpoint(name, tmp_path)
    drafted = Drafted(tmp_path, "mtp")
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    drafted.check(params, reference.propose, every=5)
    drafted.llm.close()


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_the_first_guess_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    reference = make_mtp_checkpoint(name, tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    # It finds the layer by the number that published checkpoints have.
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{target.config.num_hidden_layers}.*"]
    drafter = MtpModel.from_pretrained(target).eval()
    for length in (2, 7, 30):
        ids = torch.randint(300, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            last = target.config.num_hidden_layers - 1
            hidden = target(ids[:, :-1], output_hidden_states=[last]).hidden_states[-1]
            positions = torch.arange(1, length).unsqueeze(0)
            cache = MtpCache(config=target.config.get_mtp_config())
            guess, _, _ = drafter(ids[:, 1:], hidden, torch.ones_like(positions), positions, cache)
        assert reference.propose(ids[0].tolist(), 1) == guess[0].tolist()


def test_prediction_layers_draft_without_a_setting_where_drafts_are_on(tmp_path: Path) -> None:
    """They are by default on CPUs. config.json may announce a layer that the checkpoint lacks."""
    make_mtp_checkpoint("glm4_moe", tmp_path)
    spec, config = read_spec(tmp_path), EngineConfig(str(tmp_path), device="cpu")
    assert ON_CPUS
    assert drafts_of(config, spec, CpuDevice()) == parse({"method": "mtp"})
    stages = replace(config, pipeline_parallel_size=2)
    assert drafts_of(stages, spec, CpuDevice()) == parse({}), "stages cannot have a drafter"
    llm = LLM(str(tmp_path), **SETTINGS)
    assert llm._engine.options.drafter is not None
    llm.close()
    tensors = {name: t for name, t in load_file(tmp_path / FILE).items() if "layers.3." not in name}
    assert len(tensors) < len(load_file(tmp_path / FILE))
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    assert drafts_of(config, spec, CpuDevice()) == parse({})


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_prediction_layers_draft_by_default_wherever_drafts_are_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs and for models with recurrent states, too, once the constants say so."""
    make_mtp_checkpoint(name, tmp_path)
    spec, config = read_spec(tmp_path), EngineConfig(str(tmp_path), device="cpu")
    gpu: Any = SimpleNamespace(is_accelerator=True)
    for on_gpus, with_states in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr(speculative, "ON_ACCELERATORS", on_gpus)
        monkeypatch.setattr(speculative, "WITH_STATES", with_states)
        is_on = on_gpus and (with_states or not spec.has_states)
        assert drafts_of(config, spec, gpu) == (parse({"method": "mtp"}) if is_on else None)
        assert (drafts_of(config, spec, CpuDevice()) is not None) == (with_states or not spec.has_states)
    off = replace(config, speculative_config={"num_speculative_tokens": 0})
    assert drafts_of(off, spec, gpu) is None


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"quantization": "int8"}, {"kv_cache_dtype": "fp8"}])
def test_texts_stay_on_ranks_and_where_the_target_is_rounded(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_mtp_checkpoint("glm4_moe", tmp_path)
    drafted = Drafted(tmp_path, "mtp", **changes)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    expected = drafted.answers(params, drafts=False)
    drafted.llm.reset_prefix_cache()
    assert drafted.answers(params) == expected
    if "tensor_parallel_size" in changes:
        for known, proposed in drafted.proposed[::5]:
            assert proposed == reference.propose(known, 3)
    drafted.llm.close()
