"""Images and videos beside other features: answers are those of each request alone in the plainest engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from engine import LLM, SamplingParams
from engine.core import encoder_cache
from engine.offline.images import GivenVideo
from tests.support.image_models import END, IMAGE, START, make_case
from tests.support.images import picture

VIDEO = 291
COMMON: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 160, "block_size": 4,
}  # fmt: skip
ALONE = {"max_num_seqs": 1, "enforce_eager": True, "enable_prefix_caching": False, "num_gpu_blocks_override": 64}
MANY = {"num_gpu_blocks_override": 256}
FEATURES: dict[str, dict[str, Any]] = {
    "recorded steps, prefix cache": MANY,
    "chunked prefill": MANY | {"max_num_batched_tokens": 11, "max_num_seqs": 4},
    "one image is kept, one encoded in a step": MANY | {"max_num_batched_tokens": 24},
    "preemption": {"num_gpu_blocks_override": 41, "max_num_batched_tokens": 32},
    "host tier": {"num_gpu_blocks_override": 48, "kv_offloading_size": 0.01},
    "drafts": MANY | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "tensor parallel": MANY | {"tensor_parallel_size": 2},
    "pipeline parallel": MANY | {"pipeline_parallel_size": 2},
}
HEAVY = {"tensor parallel", "pipeline parallel"}


@pytest.fixture(scope="module", params=["Qwen3VL", "Qwen3_5", "Qwen2_5_VL", "Mistral3", "Gemma3", "Kimi_K25"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(request.param, tmp_path_factory.mktemp(request.param), answers=False).folder


def llm_of(model: Path, settings: dict[str, Any], **more: Any) -> LLM:
    """With sliding windows, each of four layers has blocks of its own."""
    num_blocks = settings["num_gpu_blocks_override"] * (4 if "Gemma" in model.name else 1)
    return LLM(str(model), **COMMON | settings | more | {"num_gpu_blocks_override": num_blocks})


def prompts(model: Path) -> list[Any]:
    """Requests with images and without; for models that read videos, also some with two videos and an image."""
    rng = np.random.default_rng(0)

    def text(count: int) -> list[int]:
        found: list[int] = rng.integers(1, 250, count).tolist()
        return found

    image = [START, IMAGE, END]
    shared = [*text(9), *image, *text(5), *image]
    pictures = [picture(30, 18), picture(16, 44), picture(40, 40)]
    moving = [START, VIDEO, VIDEO, END]
    frames = [picture(24, 16 + i).resize((24, 16)) for i in range(7)]
    videos = [GivenVideo(frames[:3], 2), pictures[1], GivenVideo(frames[3:], 3)]
    film = [*text(7), *moving, *text(2), *image, *moving]
    with_videos = [
        {"prompt_token_ids": [*film, *text(5)], "multi_modal_data": {"image": videos}},
        {"prompt_token_ids": [*film, *text(9)], "multi_modal_data": {"image": videos}},
        {"prompt_token_ids": [*film, *text(5)], "multi_modal_data": {"image": [videos[2], pictures[1], videos[0]]}},
    ]
    return [
        *(with_videos if model.name.startswith("Qwen") else []),
        {"prompt_token_ids": [*shared, *text(3)], "multi_modal_data": {"image": pictures[:2]}},
        {"prompt_token_ids": text(20)},
        {"prompt_token_ids": [*shared, *text(12)], "multi_modal_data": {"image": pictures[:2]}},
        {"prompt_token_ids": [*image, *text(30)], "multi_modal_data": {"image": pictures[2]}},
        {"prompt_token_ids": [*shared, *text(4)], "multi_modal_data": {"image": [pictures[0], pictures[0]]}},
        {"prompt_token_ids": text(3) * 9},
    ]


def test_no_bit_depends_on_other_requests_in_deterministic_mode(model: Path) -> None:
    if model.name.startswith("Kimi"):
        pytest.skip("latent attention takes half a minute in this mode, whatever the encoder")
    sampling = SAMPLING.clone(max_tokens=6)

    def scores(llm: LLM, asked: list[Any]) -> list[float | None]:
        found = llm.generate(asked, sampling, use_tqdm=False)
        return [output.cumulative_logprob for each in found for output in each.outputs]

    llm = llm_of(model, ALONE, deterministic=True)
    alone = [score for each in prompts(model) for score in scores(llm, [each])]
    llm.close()
    for settings in (MANY, FEATURES["chunked prefill"]):
        llm = llm_of(model, settings, deterministic=True)
        assert scores(llm, prompts(model)) == alone
        llm.close()


SAMPLING = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True, logprobs=0, n=2)


def answers(llm: LLM, asked: list[Any]) -> list[list[list[int]]]:
    found = llm.generate(asked, SAMPLING, use_tqdm=False)
    assert all(output.error == "" for each in found for output in each.outputs)
    return [[output.token_ids for output in each.outputs] for each in found]


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[list[list[int]]]]:
    llm = llm_of(model, ALONE)
    yield [answers(llm, [each])[0] for each in prompts(model)]
    llm.close()


@pytest.mark.parametrize("feature", [pytest.param(e, marks=pytest.mark.heavy if e in HEAVY else ()) for e in FEATURES])
@pytest.mark.usefixtures("forked")
def test_answers_are_those_of_each_request_alone(
    feature: str, model: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_tight = feature.startswith("one image")
    if is_tight:
        monkeypatch.setattr(encoder_cache, "MAX_ENCODED_TOKENS", 1)
    llm = llm_of(model, FEATURES[feature])
    assert answers(llm, prompts(model)) == expected
    if is_tight:
        llm.reset_prefix_cache()
    assert answers(llm, prompts(model)) == expected, "again, with what is cached"
    if is_tight:
        assert llm._engine.stats().num_encoded > 3, "of three images, some were forgotten and encoded again"
    stats = llm._engine.stats()
    assert bool(stats.encoder_seconds) == bool(stats.num_encoded), "also with stages"
    if feature.startswith("recorded"):
        llm.sleep()
        llm.wake_up()
        assert answers(llm, prompts(model)) == expected, "after sleep"
    llm.close()
