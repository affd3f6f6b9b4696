"""Videos through the whole engine: the tokens that transformers generates for frames, beside images, and after hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM
from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.vision.loader import ImageLayout, ImageLoader
from engine.vision.processors import ImageProcessor
from engine.vision.sources import Media
from engine.vision.videos import OlderVideoProcessor, VideoProcessor, frames_at
from tests.engine.test_images import run
from tests.support.fake_engine import make_tokenizer
from tests.support.image_models import END, IMAGE, MERGE, NUM_TOKENS, SIDE, START, make_case, normalised
from tests.support.images import TEMPLATE, data_url, picture

pytest.importorskip("transformers")
VIDEO = 291
SPECIAL = [f"<{i}>" for i in range(259, IMAGE)] + [
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
]


@pytest.fixture(scope="module", params=["Qwen3VL", "Qwen3_5", "Qwen2_5_VL"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_case(request.param, tmp_path_factory.mktemp(request.param), answers=False)


def is_older(case: Any) -> bool:
    """Return whether times of frames are positions; else they are texts."""
    return type(case.model).__name__.startswith("Qwen2_5_VL")


def frames_of(patches: bytes) -> np.ndarray:
    """uint8 [N, 3, 2, P, P]"""
    return np.frombuffer(patches, np.uint8).reshape(2, -1, 3, SIDE, SIDE).transpose(1, 2, 0, 3, 4)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7, "block_size": 4}], ids=["whole", "chunks"])
def test_answers_are_those_of_transformers(case: Any, settings: dict[str, Any]) -> None:
    """A video of three frames, whose last one is read twice, between an image and another video."""
    layout = ImageLayout(IMAGE, merge_size=MERGE, video_id=VIDEO)
    processor = VideoProcessor(SIDE, MERGE, 64, 4096)
    if is_older(case):
        processor = OlderVideoProcessor(SIDE, MERGE, 64, 4096, time_steps=2.0)
    loader = ImageLoader(ImageProcessor(SIDE, MERGE, 64, 1024), Media(), IMAGE, "", 9, layout, processor)
    videos = [
        loader.load_frames(frames_at([picture(24, 16 + i).resize((24, 16)) for i in range(count)], 2.0))
        for count in (3, 2)
    ]
    still = loader.load_image(picture(20, 24))
    pair = [START, VIDEO, END]
    shown = [START, VIDEO, VIDEO, END] if is_older(case) else [9, *pair, 8, *pair]
    prompt = [5, 6, *shown, 7, START, IMAGE, END, 11, 12, *pair, 13]
    placed = loader.place(prompt, [videos[0], still, videos[1]])
    engine = Engine(
        EngineConfig(
            model=str(case.folder), dtype="float32", device="cpu", skip_tokenizer_init=True, max_model_len=256,
            num_gpu_blocks_override=384, **settings,
        )
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    asked = EngineRequest("a", placed.token_ids, sampling, name_ids=placed.name_ids, images=placed.images)
    answer = _generated(case.model, placed.token_ids, videos, still)
    beside = EngineRequest("b", [4, 5, 6], sampling)
    assert run(engine, asked, beside)[0]["a"] == answer
    again, cached = run(engine, asked)
    assert again["a"] == answer
    assert cached > placed.images[1].stop, "the prefix is found through a video"
    engine.close()


@torch.no_grad()
def _generated(model: Any, token_ids: list[int], videos: list[Any], still: Any) -> list[int]:
    of_videos = [np.concatenate([frames_of(pair.patches) for pair in video.pairs]) for video in videos]
    moving = np.concatenate(of_videos)
    pixels = normalised(model, moving.transpose(0, 2, 1, 3, 4).reshape(-1, 3, SIDE, SIDE))
    pixels = pixels.reshape(len(moving), 2, 3, SIDE, SIDE).transpose(0, 2, 1, 3, 4)
    image = normalised(model, np.frombuffer(still.patches, np.uint8).reshape(-1, 3, SIDE, SIDE))
    ids = torch.tensor([token_ids])
    more = {"second_per_grid_ts": torch.ones(len(videos))} if type(model).__name__.startswith("Qwen2_5") else {}
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=torch.tensor(np.repeat(image[:, :, None], 2, 2).reshape(len(image), -1)).float(),
        image_grid_thw=torch.tensor([(1, *still.grid)]),
        pixel_values_videos=torch.tensor(pixels.reshape(len(moving), -1)).float(),
        video_grid_thw=torch.tensor([(len(video.pairs), *video.pairs[0].grid) for video in videos]),
        mm_token_type_ids=(ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        **more,
    )
    found: list[int] = output[0, len(token_ids) :].tolist()
    return found


def test_llm_reads_videos(case: Any, tmp_path: Path) -> None:
    """Frames, an animated file and a data URL in messages; the times of pairs of frames stand before them."""
    tokenizer = make_tokenizer(TEMPLATE, SPECIAL)
    tokenizer._backend.save(str(case.folder / "tokenizer.json"))
    (case.folder / "chat_template.jinja").write_text(TEMPLATE)
    (case.folder / "video_preprocessor_config.json").write_text('{"size": {"shortest_edge": 64, "longest_edge": 4096}}')
    frames = [picture(24, 16 + i).resize((24, 16)) for i in range(4)]
    llm = LLM(str(case.folder), dtype="float32", device="cpu", max_model_len=256, num_gpu_blocks_override=96)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def asked(*parts: dict[str, Any]) -> Any:
        content = [*parts, {"type": "text", "text": "B"}]
        [answer] = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
        return answer

    image, video = {"type": "image", "image": frames[0]}, {"type": "video", "video": frames, "fps": 1}
    answer = asked(image, video)
    pads = "<|video_pad|>" * 6
    shown = "".join(f"<{time} seconds><|vision_start|>{pads}<|vision_end|>" for time in ("0.5", "2.5"))
    if is_older(case):
        shown = f"<|vision_start|>{pads}{pads}<|vision_end|>"
    still = f"<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>"
    text = f"<|im_start|>user\n{still}{shown}B<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt_token_ids == tokenizer.encode(text)
    file = tmp_path / "a.webp"
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=1000, lossless=True)
    same = asked(image, {"type": "video", "video": str(file)})
    assert same.prompt_token_ids == answer.prompt_token_ids
    assert same.outputs[0].token_ids == answer.outputs[0].token_ids
    url = data_url(file.read_bytes()).replace("image/png", "video/webp", 1)
    assert asked(image, {"type": "video_url", "video_url": {"url": url}}).prompt_token_ids == answer.prompt_token_ids
    with pytest.raises(ValueError, match=r"image 1: .*MP4 are not decoded here"):
        asked({"type": "video", "video": b"\0\0\0\x20ftypisom" + bytes(99)})
    with pytest.raises(ValueError, match="3 placeholders for 2 images"):
        asked(video, {"type": "text", "text": "<|video_pad|>"})
    llm.close()
    without = LLM(
        str(case.folder), dtype="float32", device="cpu", max_model_len=64, num_gpu_blocks_override=32,
        limit_mm_per_prompt={"video": 0},
    )  # fmt: skip
    with pytest.raises(ValueError, match="reads no videos"):
        without.chat([{"role": "user", "content": [video]}], sampling, use_tqdm=False)
    without.close()
