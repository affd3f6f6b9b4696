"""Images in prompts, through the whole engine: the same tokens as transformers generates, in chunks and after hits."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest, ImageInput
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.models.families.multimodal import READS_IMAGES
from engine.worker.images import token_positions

transformers = pytest.importorskip("transformers")

IMAGE, START, END = 290, 292, 293
SIDE, MERGE = 4, 2
NUM_TOKENS = 24
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
    "partial_rotary_factor": 1.0,
}
TEXT = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rope_parameters": ROPE,
    "eos_token_id": None,
}
STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": SIDE,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3VL": (TEXT, VISION | {"deepstack_visual_indexes": [0, 2]}),
    "Qwen3_5": (TEXT | STATES, VISION),
}


class Case(NamedTuple):
    """A model, a prompt, and the tokens that transformers generates with its images and without them."""

    folder: Path
    prompt: list[int]
    images: tuple[ImageInput, ...]
    answer: list[int]


def image(pixels: np.ndarray, start: int, grid: tuple[int, int]) -> ImageInput:
    data = pixels.tobytes()
    return ImageInput(start, len(pixels) // MERGE**2, grid, data, hashlib.sha256(data).hexdigest())


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    text, vision = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    config = getattr(transformers, f"{request.param}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=291,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{request.param}ForConditionalGeneration")(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "bias" in name:
            torch.nn.init.normal_(parameter, 0, 0.5 if "visual" in name else 0.2)
    model.save_pretrained(folder)
    rng = np.random.default_rng(5)
    prompt: list[int] = []
    shown: list[tuple[np.ndarray, tuple[int, int]]] = []
    images = []
    for num_text, grid in ((7, (6, 10)), (1, (8, 4)), (5, (2, 2)), (19, None)):
        prompt += rng.integers(1, 280, num_text).tolist()
        if grid is not None:
            pixels = rng.integers(0, 256, (grid[0] * grid[1], 3, SIDE, SIDE), dtype=np.uint8)
            images.append(image(pixels, len(prompt) + 1, grid))
            shown.append((pixels, grid))
            prompt += [START, *[IMAGE] * images[-1].num_tokens, END]
    return Case(folder, prompt, tuple(images), generated(model, prompt, shown))


def generated(model: Any, prompt: list[int], shown: list[tuple[np.ndarray, tuple[int, int]]]) -> list[int]:
    values = (np.concatenate([pixels for pixels, _ in shown]).astype(np.float32) / 255 - 0.5) / 0.5
    frames = np.repeat(values[:, :, None], 2, 2).reshape(len(values), -1)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=torch.tensor(frames),
            image_grid_thw=torch.tensor([(1, *grid) for _, grid in shown]),
            mm_token_type_ids=(ids == IMAGE).int(),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


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
            hf_overrides={READS_IMAGES: True},
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
