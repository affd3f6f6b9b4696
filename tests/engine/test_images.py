"""Images in prompts, through the whole engine: the same tokens as transformers generates, in chunks and after hits."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.models.errors import ModelError
from engine.worker.images import image_places, token_positions
from tests.oracles.families import rename_tensors
from tests.support.fake_engine import make_tokenizer
from tests.support.image_models import (
    END,
    FAMILIES,
    IMAGE,
    MERGE,
    NUM_TOKENS,
    SIDE,
    START,
    Case,
    encoded,
    generated,
    image,
    make_case,
    save_as_published,
)
from tests.support.images import PLACEHOLDER, TEMPLATE, data_url, picture, saved

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
    if case.images[0].sees_both_ways and settings:
        settings = settings | {"max_num_batched_tokens": 15}  # as the largest image has
    engine = Engine(
        EngineConfig(
            model=str(case.folder),
            dtype="float32",
            device="cpu",
            skip_tokenizer_init=True,
            max_model_len=256,
            num_gpu_blocks_override=96 * 16 // settings.get("block_size", 16),
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
    stats = engine.stats()
    assert stats.num_encoded == 2 * len(case.images), "each image once, in whatever chunks"
    assert stats.encoder_queries - stats.encoder_hits == stats.num_encoded
    assert stats.encoder_seconds > 0


def test_encoded_images_are_those_of_transformers(case: Case) -> None:
    config = EngineConfig(
        model=str(case.folder), dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=64,
        num_gpu_blocks_override=32,
    )  # fmt: skip
    engine = Engine(config)
    with torch.inference_mode():
        found = torch.cat([each.embeddings for each in engine.runner.images._run(case.images)])  # type: ignore[attr-defined]
    engine.close()
    want = encoded(case.model, case)
    assert found.shape == want.shape
    assert (found - want).abs().max() <= 1e-4 * want.abs().max()


def test_positions_of_an_image() -> None:
    images = (image(np.zeros((24, 3, SIDE, SIDE), np.uint8), 2, (4, 6)),)
    assert token_positions(images, MERGE, 0, 10).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert token_positions(images, MERGE, 4, 9).tolist() == [[2, 2, 2, 2, 5], [2, 3, 3, 3, 5], [4, 2, 3, 4, 5]]


def test_positions_of_videos_without_texts() -> None:
    """The time of frames counts in positions, and the text behind them goes on behind all of these."""
    patches = np.zeros((8, 3, SIDE, SIDE), np.uint8)
    starts, moments = (1, 3, 5, 9, 12), (0, 3, 5, 0, None)
    images = tuple(
        replace(image(patches, start, (2, 4)), moment=moment) for start, moment in zip(starts, moments, strict=True)
    )
    want: list[np.ndarray] = []

    def write(num_text: int, *times: int) -> None:
        """Write texts and videos as Qwen2.5-VL was published: behind the largest position so far."""
        begin = 1 + max((int(each.max()) for each in want), default=-1)
        want.append(np.tile(np.arange(num_text), (3, 1)) + begin)
        for time in times:
            want.append(np.array([[time, time], [0, 0], [0, 1]]) + begin + num_text)

    write(1, 0, 3, 5)
    write(2, 0)
    write(1, 0)
    write(4)
    together = np.concatenate(want, 1)
    assert token_positions(images, MERGE, 0, 18).tolist() == together.tolist()
    assert token_positions(images, MERGE, 4, 8).tolist() == together[:, 4:8].tolist()
    *_, (_, _, end) = image_places(images, MERGE)
    assert end - images[-1].stop == together[0, -1] + 1 - 18


def test_llm_reads_pictures(case: Case, tmp_path: Path) -> None:
    """Pictures of odd sizes through `LLM`: pixels and tokens equal those of transformers."""
    if "Qwen3VL" not in case.folder.name:
        pytest.skip("one family is enough: the others differ below")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    special = [f"<{i}>" for i in range(259, IMAGE)] + ["<|image_pad|>", "<291>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer = make_tokenizer(TEMPLATE, special)
    tokenizer._backend.save(str(case.folder / "tokenizer.json"))
    (case.folder / "chat_template.jinja").write_text(TEMPLATE)
    pictures = [picture(37, 22), picture(9, 30)]
    pictures[1].save(tmp_path / "a.png")
    oracle = Qwen2VLImageProcessorPil(
        patch_size=SIDE, merge_size=MERGE, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 64, "longest_edge": 4096},
    )  # fmt: skip
    shown: list[tuple[np.ndarray, tuple[int, int]]] = []
    for each in pictures:
        found = oracle(each)
        frames = np.asarray(found["pixel_values"]).reshape(-1, 3, 2, SIDE, SIDE)[:, :, 0]
        _, rows, columns = map(int, found["image_grid_thw"][0])
        shown.append((((frames * 0.5 + 0.5) * 255).round().astype(np.uint8), (rows, columns)))

    def parts(first: Any, second: Any) -> list[dict[str, Any]]:
        content = [{"type": "text", "text": "A"}, first, {"type": "text", "text": "B"}, second]
        return [{"role": "user", "content": content}]

    llm = LLM(
        str(case.folder), dtype="float32", device="cpu", max_model_len=256, num_gpu_blocks_override=96,
        limit_mm_per_prompt={"image": 2},
    )  # fmt: skip
    assert "reads text and images" in llm._engine.summary()
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    by_url = {"type": "image_url", "image_url": {"url": data_url(saved(pictures[0]))}}
    by_path = {"type": "image", "image": str(tmp_path / "a.png")}
    [answer] = llm.chat(parts(by_url, by_path), sampling, use_tqdm=False)
    assert answer.prompt_token_ids.count(IMAGE) == sum(len(pixels) // MERGE**2 for pixels, _ in shown)
    assert answer.outputs[0].token_ids == generated(case.model, answer.prompt_token_ids, shown)[:8]
    text = "<|im_start|>user\nA" + PLACEHOLDER + "B" + PLACEHOLDER + "<|im_end|>\n<|im_start|>assistant\n"
    given: Any = {"prompt": text, "multi_modal_data": {"image": pictures}}
    [same] = llm.generate(given, sampling, use_tqdm=False)
    assert same.outputs[0].token_ids == answer.outputs[0].token_ids
    assert same.num_cached_tokens
    assert same.num_cached_tokens > len(shown[0][0]) // MERGE**2, "the same images, the same prefix"
    for wrong, reason in (
        ({"prompt": text, "multi_modal_data": {"image": pictures[0]}}, "2 placeholders for 1 images"),
        ({"prompt": text, "multi_modal_data": {"image": pictures * 2}}, "at most 2"),
        ({"prompt": text, "multi_modal_data": {"image": [pictures[0], 5]}}, "image 2: it must be a Pillow image"),
        ({"prompt": text, "multi_modal_data": {"video": []}}, "multi_modal_data"),
    ):
        with pytest.raises(ValueError, match=reason):
            llm.generate(wrong, sampling, use_tqdm=False)
    llm.close()


def test_llm_writes_what_stands_around_images(case: Case) -> None:
    if "Gemma3" not in case.folder.name:
        pytest.skip("only Gemma 3 has texts around images")
    names = {START: "<start_of_image>", IMAGE: "<soft>", END: "<end_of_image>"}
    template = TEMPLATE.replace(PLACEHOLDER, "<start_of_image>")
    tokenizer = make_tokenizer(template, [names.get(i, f"<{i}>") for i in range(259, END + 1)])
    tokenizer._backend.save(str(case.folder / "tokenizer.json"))
    (case.folder / "chat_template.jinja").write_text(template)
    llm = LLM(str(case.folder), dtype="float32", device="cpu", max_model_len=128, num_gpu_blocks_override=64)
    content = [{"type": "text", "text": "A"}, {"type": "image", "image": picture(9, 9)}, {"type": "text", "text": "B"}]
    sampling = SamplingParams(temperature=0, max_tokens=2)
    [answer] = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
    image = "\n\n<start_of_image>" + "<soft>" * 9 + "<end_of_image>\n\n"
    text = f"<|im_start|>user\nA{image}B<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt_token_ids == tokenizer.encode(text)
    llm.close()
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}
    (case.folder / "preprocessor_config.json").write_text(json.dumps(crops))
    llm = LLM(str(case.folder), dtype="float32", device="cpu", max_model_len=256, num_gpu_blocks_override=128)
    content[1] = {"type": "image", "image": picture(25, 10)}
    [answer] = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
    shown = f"Here is the original image {image} and here are some crops to help you see better {image} {image} {image}"
    text = f"<|im_start|>user\nA{shown}B<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt_token_ids == tokenizer.encode(text), "as transformers' processor writes it"
    llm.close()
    (case.folder / "preprocessor_config.json").write_text("{}")


def test_internvl_as_opengvlab_publishes_it(case: Case, tmp_path: Path) -> None:
    """Other names of the same weights; tokens of images by the tokenizer's names."""
    if "InternVL" not in case.folder.name:
        pytest.skip("only InternVL has a second published form")
    save_as_published(case.folder, tmp_path)
    names = {IMAGE - 2: "<img>", IMAGE - 1: "</img>", IMAGE: "<IMG_CONTEXT>"}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"  # knows no images
    make_tokenizer(template, [names.get(i, f"<{i}>") for i in range(259, END + 1)])._backend.save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", max_model_len=256, num_gpu_blocks_override=96)
    assert "reads text and images" in llm._engine.summary()
    content = [{"type": "image", "image": picture(24, 12)}, {"type": "text", "text": "A"}]
    sampling = SamplingParams(temperature=0, max_tokens=2)
    [answer] = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
    ids = answer.prompt_token_ids
    first, last = ids.index(IMAGE - 2), ids.index(IMAGE - 1)
    assert ids[first + 1 : last] == [IMAGE] * (9 * 3), "two tiles and the whole image"
    llm.close()
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 256, "num_gpu_blocks_override": 96}
    engine = Engine(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", **settings))
    found, _ = run(engine, asked(case, "a"))
    assert found["a"] == case.answer
    engine.close()


@pytest.mark.parametrize("architecture", ["KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration"])
def test_kimi_as_moonshot_publishes_it(architecture: str, case: Case, tmp_path: Path) -> None:
    """Other fields of the same models; Kimi-VL's projector has other names, too."""
    if "Kimi" not in case.folder.name:
        pytest.skip("only Kimi's encoder has these forms")
    shutil.copytree(case.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    vision, image = config["vision_config"], config.pop("image_token_id")
    config |= {"architectures": [architecture], "media_placeholder_token_id": image}
    for field in ("pos_emb_height", "pos_emb_width"):
        vision[f"init_{field}"] = vision.pop(field)
    if "VL" in architecture:
        names = {"pre_norm": "pre_norm", "proj.0": "linear_1", "proj.2": "linear_2"}
        rename_tensors(tmp_path, {f"mm_projector.{old}": f"multi_modal_projector.{new}" for old, new in names.items()})
    else:
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            vision[f"vt_{field}"] = vision.pop(field)
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 256, "num_gpu_blocks_override": 96}
    engine = Engine(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", **settings))
    found, _ = run(engine, asked(case, "a"))
    assert found["a"] == case.answer
    engine.close()


def test_a_step_has_room_for_an_image_whose_tokens_see_each_other(case: Case) -> None:
    if "Gemma" not in case.folder.name:
        pytest.skip("other models compute any part of an image")
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be at least"):
        LLM(str(case.folder), device="cpu", skip_tokenizer_init=True, max_num_batched_tokens=8)


def test_a_text_model_saved_without_the_encoder_is_told_what_to_do(case: Case, tmp_path: Path) -> None:
    shutil.copytree(case.folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = ("visual", "vision", "multi_modal", "mm_projector")
    text = {name: value for name, value in tensors.items() if not any(part in name for part in parts)}
    assert len(text) < len(tensors)
    save_file(text, tmp_path / "model.safetensors")
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}
    with pytest.raises(ModelError, match="holds no encoder of images; --language-model-only"):
        LLM(str(tmp_path), **settings)
    LLM(str(tmp_path), language_model_only=True, **settings).close()


def test_only_the_text_model_is_loaded_where_that_is_asked_for(case: Case) -> None:
    for settings in ({"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0}}):
        config = EngineConfig(
            model=str(case.folder), dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=64,
            num_gpu_blocks_override=32, **settings,
        )  # fmt: skip
        engine = Engine(config)
        assert engine.spec.vision is None
        assert not any("vision" in name for name, _ in engine.runner.model.named_parameters())  # type: ignore[attr-defined]
        engine.close()
