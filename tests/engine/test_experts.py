"""Mixtures of experts, latent attention and Gemma 4 through the whole engine: the texts of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.batch import TokenLogprobs
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.params.structured import StructuredOutputs
from engine.engine import Engine
from engine.models.families import read_spec
from engine.models.moe import Router
from engine.offline.llm import LLM
from engine.stats import ExpertTokens
from kernels.cpu.library import library
from tests.oracles.families import make_checkpoint, make_prompts, transformers_tokens
from tests.support.answers import greedy_answers

LENGTH = 30


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe_lite", "gemma4_moe", "gemma4_small"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A random model, prompts (two begin alike), and transformers' greedy answers."""
    folder = tmp_path_factory.mktemp("experts")
    oracle = make_checkpoint(request.param, folder)
    prompts = make_prompts()
    prompts.append([*prompts[2][:40], 7, 8, 9])
    return folder, prompts, transformers_tokens(oracle, folder, prompts, LENGTH)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 16}, {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 15}],
    ids=["plain", "chunked", "little memory"],
)
def test_greedy_answers_are_those_of_transformers(model: Any, settings: dict[str, Any]) -> None:
    folder, prompts, answers = model
    num_groups = len({layer.mixer.window for layer in read_spec(folder).layers})
    settings = {name: value * num_groups if "blocks" in name else value for name, value in settings.items()}
    config = EngineConfig(
        model=str(folder), device="cpu", skip_tokenizer_init=True, debug_checks=True, max_model_len=110, block_size=8,
        **settings,
    )  # fmt: skip
    engine = Engine(config)
    for _ in range(2):
        assert greedy_answers(engine, prompts, LENGTH) == answers
    stats = engine.stats()
    if "num_gpu_blocks_override" in settings:
        assert stats.num_preemptions > 0
    else:
        assert stats.prefix_hits >= 100, "prompts asked again are found"
    engine.close()


def test_grammars_and_seeds_alone_and_in_a_crowd(tiny_experts: Path) -> None:
    llm = LLM(model=str(tiny_experts), device="cpu", max_model_len=256, max_num_batched_tokens=64)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    sampling = [
        SamplingParams(
            temperature=1, seed=i, max_tokens=40, structured_outputs=StructuredOutputs(json=schema) if i % 2 else None
        )
        for i in range(6)
    ]
    prompts = ["abc " * (9 * i + 1) for i in range(6)]
    together = [answer.outputs[0].text for answer in llm.generate(prompts, sampling, use_tqdm=False)]
    alone = [llm.generate(p, s, use_tqdm=False)[0].outputs[0].text for p, s in zip(prompts, sampling, strict=True)]
    assert together == alone
    assert all(json.loads(text)["a"] in (1, 2) for text in together[1::2])
    llm.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "glm4_moe"])
def test_log_probabilities_do_not_depend_on_company(family: str, tmp_path: Path) -> None:
    """Softmax and sigmoid routers, shared experts with and without a gate: to the last bit."""
    if library() is None:
        pytest.skip("without a compiler, GEMMs depend on the number of tokens")
    make_checkpoint(family, tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", skip_tokenizer_init=True, max_model_len=64, enable_prefix_caching=False
    )
    engine = Engine(config)

    def run(prompts: list[list[int]]) -> list[list[TokenLogprobs]]:
        found: list[list[TokenLogprobs]] = [[] for _ in prompts]
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
            engine.add_request(EngineRequest(str(i), prompt, sampling))
        while engine.has_work():
            for output in engine.step():
                found[int(output.request_id)] += output.logprobs or []
        return found

    prompts = [[3 + i] * (5 + 3 * i) for i in range(6)]
    assert run(prompts) == [run([prompt])[0] for prompt in prompts]
    engine.close()


@pytest.mark.parametrize("interval", [0, 1, 3])
def test_tokens_of_each_expert_are_counted_in_steps_with_prompts(
    tiny_experts: Path, monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    engine = Engine(
        EngineConfig(
            model=str(tiny_experts), device="cpu", max_model_len=64, max_num_batched_tokens=8,
            expert_load_interval=interval,
        )
    )  # fmt: skip
    num_experts = engine.spec.layers[0].mlp.num_experts  # type: ignore[union-attr]
    seen: list[list[int]] = []  # of each layer of each step: how many tokens its experts got
    route = Router.forward

    def watched(self: Router, *args: Any) -> Any:
        normed, ids, weights = route(self, *args)
        seen.append(ids[ids >= 0].bincount(minlength=num_experts).tolist())
        return normed, ids, weights

    monkeypatch.setattr(Router, "forward", watched)
    prompt = [5, 6, 7, 8, 9, 10, 11] * 8  # seven steps
    engine.add_request(EngineRequest("a", prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    num_layers = engine.spec.num_layers
    steps = [seen[at : at + num_layers] for at in range(0, len(seen), num_layers)]
    expected = ExpertTokens()
    for step in steps[interval - 1 : 7 : interval] if interval else ():
        expected.observe(dict(enumerate(step)))
    assert len(steps) == 7 + 3
    got = engine.expert_tokens.take()
    assert got == expected.layers
    assert engine.expert_tokens.take() == {}
    if interval == 1:
        assert got[0][-1] == engine.spec.layers[0].mlp.router.num_chosen * len(prompt)  # type: ignore[union-attr]
    engine.close()


def test_a_layer_takes_of_the_cache_what_it_needs(model: Any) -> None:
    """A latent is small; two layers of small heads share the room of one with large ones; a layer may read
    another's.
    """
    folder = model[0]
    config = EngineConfig(model=str(folder), device="cpu", skip_tokenizer_init=True, max_model_len=64, block_size=8)
    engine = Engine(config)
    runner: Any = engine.runner
    architecture, groups = runner.spec.architecture, len(runner.cache_groups)
    of_token = {
        "Qwen3MoeForCausalLM": 3 * 2 * 2 * 32,
        "Glm4MoeLiteForCausalLM": 3 * (40 + 16),
        "Gemma4ForCausalLM": 2 * 2 * 64,
    }[architecture]
    is_small = runner.spec.num_layers == 6
    if is_small:
        of_token = 2 * 64  # two layers with the window and one without have a cache of their own
    assert runner.kv_layout.block_bytes == 8 * of_token * 4
    assert groups == (2 if architecture.startswith("Gemma4") else 1)
    storages = {kv.untyped_storage().data_ptr(): kv.untyped_storage().nbytes() for kv in runner.forward.kv_cache}
    assert runner.kv_cache_bytes == sum(storages.values())
    engine.close()
