"""Runs the same requests in a configuration, and each of them alone in the plainest engine with the same arithmetic."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import LLM, Adapter, AsyncEngine, BeamSearchParams, EngineConfig, EngineRequest, LoRARequest, SamplingParams
from engine.core.batch import SchedulerStats
from engine.core.params.pooling import UNSAMPLED, PoolingParams
from engine.core.params.structured import StructuredOutputs
from engine.processing.adapters import find_adapter
from engine.processing.output_collector import EmbeddingOutput, Logprob, logprobs_by_id, with_samples
from tests.composition import faults
from tests.composition.configurations import Configuration
from tests.composition.features import BY_NAME, CHECKPOINTS, MODEL_DRAFTERS
from tests.oracles.block_drafters import make_block_drafter
from tests.oracles.families import make_checkpoint
from tests.oracles.quantised import make_quantised
from tests.oracles.random_adapters import write_random_adapter

BLOCK = 8
SHARED = [7 * i % 250 + 1 for i in range(3 * BLOCK)]  # the prefix of some prompts
# What no configuration changes.
COMMON: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 104, "block_size": BLOCK, "debug_checks": True,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "enforce_eager": True, "enable_prefix_caching": False, "num_gpu_blocks_override": 200,
    "speculative_config": {"num_speculative_tokens": 0},
}  # fmt: skip
ADAPTERS = ("first", "second")
ARITHMETIC = ("quantization", "kv_cache_dtype")  # settings that change what a model computes


@dataclass(frozen=True)
class Request:
    """`feature`: which feature it uses; requests without one are in every configuration. `adapter`: the name of its
    LoRA adapter.
    """

    prompt: list[int]
    sampling: SamplingParams
    feature: str = ""
    adapter: str = ""

    def find_adapter(self, model: Path) -> Adapter | None:
        return find_adapter(self.adapter, str(model / self.adapter)) if self.adapter else None


def _sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | fields)


REQUESTS = {
    **{f"growing {i}": Request([5 + i], _sampling(max_tokens=36, logprobs=2)) for i in range(4)},
    "long": Request([3 * i % 250 + 2 for i in range(60)], _sampling(max_tokens=18, logprobs=2)),
    "shared": Request([*SHARED, 9], _sampling(max_tokens=12, logprobs=2)),
    "sampled": Request([*SHARED, 17, 21], _sampling(temperature=0.8, seed=3)),
    "grammar": Request(
        [40, 41],
        _sampling(temperature=1.0, seed=4, structured_outputs=StructuredOutputs(regex="[a-c]{12}")),
        "grammars",
    ),
    "another grammar": Request(
        [*SHARED, 3], _sampling(structured_outputs=StructuredOutputs(regex="([x-z]-){8}")), "grammars"
    ),
    "log-probabilities": Request([*SHARED, 30], _sampling(logprobs=3), "log-probabilities"),
    "prompt": Request([*SHARED, 31], _sampling(logprobs=1, prompt_logprobs=2), "prompt log-probabilities"),
    "several": Request([60, 61, 62], _sampling(temperature=1.0, seed=8, n=3), "several completions"),
    "filters": Request(
        [70, 71],
        _sampling(
            temperature=0.9, seed=9, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3,
            max_tokens=16,
        ),
        "filters and penalties",
    ),
    **{
        f"{adapter} adapter": Request([*SHARED, 9], _sampling(max_tokens=12, logprobs=2), "LoRA adapters", adapter)
        for adapter in ADAPTERS
    },
}  # fmt: skip
BEAM = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)


@dataclass
class Answer:
    """The results of a request.

    `tokens`, `ends`: token ids and finish reason of each completion. `positions`: for each token of all completions,
    id → log-probability of it and of the most likely ones, if wanted. `values`: the prompt's, or an embedding.
    """

    tokens: list[list[int]]
    ends: list[str | None]
    positions: list[dict[int, float]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def make_model(configuration: Configuration, folder: Path, tokenizer: Path) -> Path:
    """Write the configuration's checkpoint, with the files of a tokenizer."""
    shape = CHECKPOINTS[configuration.checkpoint].shape
    formats = [BY_NAME[name].checkpoint for name in configuration.features if BY_NAME[name].checkpoint]
    if formats:
        make_quantised(formats[0], folder, shape=shape, family=configuration.checkpoint)
    else:
        make_checkpoint(configuration.checkpoint, folder, shape)
    if {"draft models", "rejection sampling"} & configuration.features:
        make_checkpoint("qwen3", folder / "draft", {"num_hidden_layers": 1})
    if "block drafters" in configuration:
        config = json.loads((folder / "config.json").read_text())
        of = SimpleNamespace(**config.get("text_config", config))
        make_block_drafter("dflash", folder / "block", SimpleNamespace(config=of))
    if "LoRA adapters" in configuration:
        for seed, name in enumerate(ADAPTERS):
            experts = adapts_experts(configuration)
            write_random_adapter(folder / name, folder, 8, seed, experts=experts, embeddings=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def adapts_experts(configuration: Configuration) -> bool:
    """Return whether adapters change experts, too."""
    return "experts" in CHECKPOINTS[configuration.checkpoint].features


def settings_of(configuration: Configuration, folder: Path) -> dict[str, Any]:
    """Return the engine's settings. `folder`: for the files of features."""
    settings = dict(PLAIN)
    for name, feature in BY_NAME.items():
        if name in configuration:
            settings |= feature.settings
    if "LoRA adapters" in configuration:
        settings |= {"lora_embeddings": True, "lora_tokens": 2, "lora_experts": adapts_experts(configuration)}
    if "preemption" in configuration:
        settings["num_gpu_blocks_override"] *= CHECKPOINTS[configuration.checkpoint].num_groups
    return {
        key: value.replace("{folder}", str(folder)) if isinstance(value, str) else value
        for key, value in settings.items()
    }


def alone(configuration: Configuration, model: Path) -> dict[str, Answer]:
    """Run each request by itself."""
    settings = settings_of(configuration, model)
    names = [*ARITHMETIC, "enable_lora", "lora_embeddings", "lora_tokens", "lora_experts"]
    if any(BY_NAME[name].kind == "weights" for name in configuration.features):
        # Each rank rounds its part of what it multiplies by a scale of its own, deterministic mode each eighth.
        names += ["tensor_parallel_size", "deterministic"]
    arithmetic = {name: settings[name] for name in names if name in settings}
    llm = LLM(str(model), **COMMON | PLAIN | arithmetic)
    try:
        found: dict[str, Answer] = {}
        for name, request in _wanted(configuration).items():
            found |= _generate(llm, {name: request}, model)
        return found | _others(llm)
    finally:
        llm.close()


def together(configuration: Configuration, model: Path, folder: Path) -> list[dict[str, Answer]]:
    """Run the requests in one batch, twice, with a restart between where the prefix cache is kept in a file.

    Checks that the features have been used.
    """
    settings = COMMON | settings_of(configuration, folder)
    runs = 2 if "prefix-cache file" in configuration else 1
    rounds = 1 if runs == 2 else 2
    with _injected(configuration):
        found: list[dict[str, Answer]] = []
        for run in range(runs):
            answers, stats = (_offline if "offline" in configuration else _async)(
                configuration, model, settings, rounds
            )
            found += answers
            if run or (runs == 1 and "prefix cache" in configuration):
                assert stats.prefix_hits >= len(SHARED), "no prefix was found in the cache"
            for each in answers:
                if (culprit := each.pop(faults.CULPRIT, None)) is not None:
                    assert culprit.ends == ["error"]
            if "preemption" in configuration and "data parallel" not in configuration:
                assert stats.num_preemptions > 0, "nothing was preempted"
            if not configuration.features.isdisjoint(MODEL_DRAFTERS):
                assert stats.num_draft_tokens > 0, "nothing was proposed"
            if "drafts" in configuration:
                assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, "none was accepted or none rejected"
        return found


@contextmanager
def _injected(configuration: Configuration) -> Iterator[None]:
    """Set up what tests add to an engine: masks that are late, a request whose steps fail."""
    names = [name for name in ("deferred sampling", "step isolation") if name in configuration]
    with pytest.MonkeyPatch.context() as patch:
        faults.inject(names, patch)
        yield


def _offline(
    configuration: Configuration, model: Path, settings: dict[str, Any], rounds: int
) -> tuple[list[dict[str, Answer]], SchedulerStats]:
    llm = LLM(str(model), **settings)
    try:
        found = []
        for _ in range(rounds):
            for level in _sleep_levels(configuration):
                llm.sleep(level)
                llm.wake_up()
            found.append(_generate(llm, _wanted(configuration), model) | _others(llm))
        return found, llm._engine.stats()
    finally:
        llm.close()


def _sleep_levels(configuration: Configuration) -> tuple[int, ...]:
    """Return the levels at which the engine sleeps before each round."""
    if "sleep" not in configuration:
        return ()
    return (2,) if {"tensor parallel", "pipeline parallel"} & configuration.features else (1, 2)


def _wanted(configuration: Configuration) -> dict[str, Request]:
    return {name: each for name, each in REQUESTS.items() if not each.feature or each.feature in configuration} | (
        {faults.CULPRIT: Request(faults.CULPRIT_PROMPT, _sampling(max_tokens=44))}
        if "step isolation" in configuration
        else {}
    )


def _generate(llm: LLM, requests: dict[str, Request], model: Path) -> dict[str, Answer]:
    results = llm.generate(
        [{"prompt_token_ids": each.prompt} for each in requests.values()],
        [each.sampling for each in requests.values()],
        use_tqdm=False,
        lora_request=[
            LoRARequest(each.adapter, 1, str(model / each.adapter)) if each.adapter else None
            for each in requests.values()
        ],
    )
    found = {}
    for name, result in zip(requests, results, strict=True):
        positions = [_numbers(each) for output in result.outputs for each in output.logprobs or ()]
        found[name] = Answer(
            [output.token_ids for output in result.outputs],
            [output.finish_reason for output in result.outputs],
            positions,
            _scores(result.prompt_logprobs or ()),
        )
    return found


def _others(llm: LLM) -> dict[str, Answer]:
    """Run what is no list of requests: beam search and embeddings."""
    [beams] = llm.beam_search([{"prompt_token_ids": [*SHARED, 50]}], BEAM)
    embeddings = llm.embed([{"prompt_token_ids": [*SHARED, 51]}], use_tqdm=False)
    return {
        "beam search": Answer(
            [each.tokens for each in beams.sequences],
            [each.finish_reason for each in beams.sequences],
            values=[each.cum_logprob for each in beams.sequences],
        ),
        "embeddings": Answer([], [], values=list(embeddings[0].outputs.embedding)),
    }


def _async(
    configuration: Configuration, model: Path, settings: dict[str, Any], rounds: int
) -> tuple[list[dict[str, Answer]], SchedulerStats]:
    async def run() -> tuple[list[dict[str, Answer]], SchedulerStats]:
        engine = await AsyncEngine.start(EngineConfig(model=str(model), **settings))
        try:
            found = []
            for number in range(rounds):
                for level in _sleep_levels(configuration):
                    await engine.sleep(level)
                    await engine.wake_up()
                names = list(requests := _wanted(configuration))
                answers = await asyncio.gather(
                    *(_stream(engine, f"{name} {number}", requests[name], model) for name in names),
                    _embed(engine, str(number)),
                )
                found.append(dict(zip([*names, "embeddings"], answers, strict=True)))
            await asyncio.sleep(0)
            stats = engine.stats
            assert stats is not None
            return found, stats
        finally:
            engine.close()

    return asyncio.run(run())


async def _stream(engine: AsyncEngine, name: str, request: Request, model: Path) -> Answer:
    """Run the completions of a request as the server does, each with a seed of its own."""
    sampling = await engine.prepare(request.sampling)
    completions = await asyncio.gather(
        *(
            _completion(
                engine, EngineRequest(f"{name} {index}", request.prompt, each, adapter=request.find_adapter(model))
            )
            for index, each in enumerate(with_samples(sampling))
        )
    )
    return Answer(
        [tokens for each in completions for tokens in each.tokens],
        [end for each in completions for end in each.ends],
        [position for each in completions for position in each.positions],
        [value for each in completions for value in each.values],
    )


async def _completion(engine: AsyncEngine, request: EngineRequest) -> Answer:
    tokens: list[int] = []
    found = Answer([tokens], [None])
    async for update in engine.generate(request):
        tokens += update.token_ids
        found.ends = [update.finish_reason]
        if update.logprobs:
            found.positions += map(_numbers, logprobs_by_id(update.token_ids, update.logprobs, None))
        if update.prompt_logprobs:
            found.values += _scores(logprobs_by_id(request.prompt_token_ids[1:], update.prompt_logprobs, None))
    return found


def _numbers(position: dict[int, Logprob]) -> dict[int, float]:
    return {token_id: each.logprob for token_id, each in position.items()}


def _scores(positions: Iterable[dict[int, Logprob] | None]) -> list[float]:
    return [each.logprob for position in positions for each in (position or {}).values()]


async def _embed(engine: AsyncEngine, number: str) -> Answer:
    pooling = PoolingParams(pooling=engine.model.default_pooling, normalize=True)
    request = EngineRequest(f"embedding {number}", [*SHARED, 51], UNSAMPLED, pooling=pooling)
    data = b""
    async for update in engine.generate(request):
        data = update.embedding or data
    return Answer([], [], values=EmbeddingOutput.read(data).embedding)


def kept_by(configuration: Configuration, answers: dict[str, Answer]) -> dict[str, Answer]:
    """Return the answers that are the same in this configuration: with rejection sampling, those that do not sample."""
    if "rejection sampling" not in configuration:
        return answers
    wanted = _wanted(configuration)
    return {
        name: answer for name, answer in answers.items() if name not in wanted or not wanted[name].sampling.temperature
    }


def differing(expected: dict[str, Answer], got: dict[str, Answer], tolerance: float) -> dict[str, str]:
    """Return what is wrong with the answers of `got`, by request.

    Where the two most likely tokens are closer than the tolerance, rounding may choose either. The rest differs then.
    """
    found = {name: _difference(expected[name], answer, tolerance) for name, answer in got.items()}
    return {name: difference for name, difference in found.items() if difference}


def _difference(expected: Answer, got: Answer, tolerance: float) -> str:
    if expected.ends != got.ends:
        return f"ended with {got.ends}, not {expected.ends}"
    if expected.values != pytest.approx(got.values, abs=tolerance):
        return f"{got.values}, not {expected.values}"
    start = 0
    for ours, theirs in zip(expected.tokens, got.tokens, strict=True):
        for index, (right, token) in enumerate(zip(ours, theirs, strict=True)):
            position = expected.positions[start + index] if expected.positions else {}
            if right != token:
                if position.get(token, -math.inf) < position.get(right, 0.0) - 2 * tolerance:
                    return f"token {index} is {token}, not {right}: {position}"
                break
            if position and sorted(position.values()) != pytest.approx(
                sorted(got.positions[start + index].values()), abs=tolerance
            ):
                return f"log-probabilities {index} are {got.positions[start + index]}, not {position}"
        start += len(ours)
    return ""
