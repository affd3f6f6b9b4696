"""Videos in chat completions: frames reach the engine with their times; formats that are not decoded are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.vision.loader import ImageLayout, ImageLoader
from engine.vision.processors import ImageProcessor
from engine.vision.sources import Media
from engine.vision.videos import VideoProcessor
from tests.support.fake_engine import FakeEngine, make_tokenizer
from tests.support.images import TEMPLATE, data_url, in_base64, picture, saved
from tests.support.live_server import Live, run_server

SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
START, PAD, END, VIDEO = 259, 260, 261, 262
FRAMES = [saved(picture(24, 16 + i).resize((24, 16)), "JPEG") for i in range(3)]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    engine = FakeEngine(max_model_len=600)
    engine.tokenizer = make_tokenizer(TEMPLATE, SPECIAL)
    layout = ImageLayout(PAD, video_id=VIDEO, video_texts=("<|vision_start|>", "<|video_pad|>", "<|vision_end|>"))
    processor = ImageProcessor(4, 2, 256, 1024)
    videos = VideoProcessor(4, 2, 64, 4096, max_frames=8)
    engine.images = ImageLoader(processor, Media(()), PAD, "".join(SPECIAL[:3]), 3, layout, videos)
    with run_server(engine) as found:
        yield found


def ask(live: Live, *parts: Any) -> Any:
    live.engine.with_images.clear()
    return live.post("/v1/chat/completions", messages=[{"role": "user", "content": list(parts)}])


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def test_frames_and_their_times(live: Live) -> None:
    frames = ",".join(map(in_base64, FRAMES))
    still = {"type": "image_url", "image_url": data_url(FRAMES[0])}
    response = ask(live, video(f"data:video/jpeg;fps=1;base64,{frames}"), still, {"type": "text", "text": "What?"})
    assert response.status_code == 200, response.text
    [request] = live.engine.with_images
    assert live.engine.tokenizer is not None
    encode = live.engine.tokenizer.encode
    pair = [START, *[VIDEO] * 6, END]
    want = [*encode("<0.5 seconds>"), *pair, *encode("<2.0 seconds>"), *pair, START]
    at = request.prompt_token_ids.index(VIDEO) - 1 - len(encode("<0.5 seconds>"))
    assert request.prompt_token_ids[at : at + len(want)] == want
    assert [image.num_frames for image in request.images] == [2, 2, 1]
    assert len(request.images[0].patches) == 2 * 24 * 16 * 3


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (data_url(b"\0\0\0\x20ftypisom" + bytes(99)).replace("image/png", "video/mp4"), "send its frames"),
        ("data:video/jpeg;base64," + ",".join([in_base64(FRAMES[0])] * 9), "more than 8 frames"),
        ("data:video/jpeg;base64,AAAA,!", "base64 is not valid"),
        ("http://127.0.0.1/a.gif", "not allowed here"),
    ],
)
def test_what_is_refused(live: Live, url: str, reason: str) -> None:
    response = ask(live, video(url))
    assert response.status_code == 400
    assert "video 1: " in response.text
    assert reason in response.text


def test_a_model_without_videos_says_so(live: Live) -> None:
    loader = live.engine.images
    assert loader is not None
    processor, loader.video_processor = loader.video_processor, None
    response = ask(live, video(data_url(FRAMES[0])))
    loader.video_processor = processor
    assert response.status_code == 400
    assert "this model reads no videos" in response.text


@pytest.mark.parametrize(
    ("path", "field", "part"),
    [
        ("/v1/responses", "input", {"type": "input_video", "video_url": data_url(FRAMES[0])}),
        ("/v1/messages", "messages", {"type": "video", "source": {"type": "url", "url": data_url(FRAMES[0])}}),
        (
            "/v1/messages",
            "messages",
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "video", "source": {}}]},
        ),
    ],
)
def test_apis_that_have_no_videos_name_the_one_that_has(live: Live, path: str, field: str, part: Any) -> None:
    asked: dict[str, Any] = {"max_tokens": 4, "model": live.engine.model_name} if field == "messages" else {}
    response = live.post(path, **asked, **{field: [{"role": "user", "content": [part]}]})
    assert response.status_code == 400
    assert "video" in response.text
    assert "/v1/chat/completions" in response.text
