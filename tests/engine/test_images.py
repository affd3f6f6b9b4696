"""Images in prompts, through the whole engine: the same tokens as transformers generates, in chunks and after hits."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.worker.images import token_positions
from tests.support.image_models import FAMILIES, MERGE, NUM_TOKENS, SIDE, Case, image, make_case

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param))


def asked(case: Case, name: str, *, flip: bool = False) -> EngineRequest:
    """flip: the images have other pixels."""
    images = list(case.images)
    if flip:
        for i, each in enumerate(images):
            pixels = (255 - np.frombuffer(each.patches, dtype=np.uint8)).tobytes()
            images[i] = replace(each, patches=pixels, digest=hashlib.sha256(pixels).hexdigest())
    names = list(case.prompt)
    for each in images:
        first = int(each.digest[:12], 16) | 1 << 62
        names[each.start : each.stop] = range(first, first + each.num_tokens)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return EngineRequest(name, list(case.prompt), sampling, name_ids=names, images=tuple(images))


def run(engine: Engine, *requests: EngineRequest) -> tuple[dict[str, list[int]], int]:
    """Return the tokens of each request, and how many of the last one's prompt were cached."""
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    cached = 0
    for each in requests:
        engine.add_request(each)
    while engine.has_work():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            cached = output.num_cached_tokens
    return tokens, cached


@pytest.mark.parametrize(
    "settings",
    [{}, {"enforce_eager": True, "max_num_batched_tokens": 7, "max_num_seqs": 3, "block_size": 4}],
    ids=["whole", "chunks"],
)
def test_answers_are_those_of_transformers(case: Case, settings: dict[str, Any]) -> None:
    engine = Engine(
        EngineConfig(
            model=str(case.folder),
            dtype="float32",
            device="cpu",
            skip_tokenizer_init=True,
            max_model_len=256,
            num_gpu_blocks_override=96,
            **settings,
        )
    )
    plain = EngineRequest("text", case.prompt[:5], SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    alone, _ = run(engine, plain)
    together, _ = run(engine, asked(case, "first"), replace(plain, request_id="beside"))
    assert together == {"first": case.answer, "beside": alone["text"]}
    again, cached = run(engine, asked(case, "again"))
    assert again["again"] == case.answer
    assert cached > case.images[0].stop, "the prefix is found through the first image"
    other, cached = run(engine, asked(case, "other", flip=True))
    assert cached <= case.images[0].start, "another image, another prefix"
    assert other["other"] != case.answer


def test_positions_of_an_image() -> None:
    images = (image(np.zeros((24, 3, SIDE, SIDE), np.uint8), 2, (4, 6)),)
    assert token_positions(images, MERGE, 0, 10).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert token_positions(images, MERGE, 4, 9).tolist() == [[2, 2, 2, 2, 5], [2, 3, 3, 3, 5], [4, 2, 3, 4, 5]]
