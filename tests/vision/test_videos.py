"""Videos as frames: sizes, sampled frames, times and patches beside transformers' processor; limits; bad files."""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib.util
import sys
import weakref
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from engine.models.errors import ModelError
from engine.models.families.vision import VISION
from engine.vision import videos
from engine.vision.decode import ImageError
from engine.vision.sources import ImageSource, Media
from engine.vision.videos import (
    Frames,
    OlderVideoProcessor,
    VideoProcessor,
    frames_at,
    frames_of_files,
    read_video_processor,
)
from tests.support.images import loader, picture, saved

PROCESSOR = VideoProcessor(4, 2, min_pixels=64, max_pixels=4096, max_frames=9)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """transformers' modules of the video processor and of the processor, without torchvision."""
    pytest.importorskip("transformers")
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():  # remembered from now on
        for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
            monkeypatch.setitem(sys.modules, f"torchvision{name}", ModuleType(f"torchvision{name}"))
    from transformers.models.qwen3_vl import processing_qwen3_vl

    return importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl"), processing_qwen3_vl


def animated(count: int, size: tuple[int, int] = (24, 16), format: str = "GIF", **options: Any) -> bytes:
    frames = [picture(size[0], size[1]).point(lambda value, i=i: (value + 20 * i) % 256) for i in range(count)]
    file = BytesIO()
    more = {"lossless": True} if format == "WEBP" else {}
    frames[0].save(file, format, save_all=True, append_images=frames[1:], **more, **options)
    return file.getvalue()


def test_sizes_and_samples_are_those_of_transformers(theirs: tuple[Any, Any]) -> None:
    processor = VideoProcessor(16, 2)
    for count in (2, 3, 4, 5, 7, 16, 100, 768):
        for height, width in ((32, 32), (480, 640), (1080, 1920), (5, 300), (17, 90), (33, 31)):
            want = theirs[0].smart_resize(
                count, height, width, temporal_factor=2, factor=32, min_pixels=4096, max_pixels=25_165_824
            )
            assert processor.size_of(count, height, width) == want, (count, height, width)
    oracle = theirs[0].Qwen3VLVideoProcessor
    fields = type("Fields", (), {"fps": 2, "min_frames": 4, "max_frames": 768})()
    for count, rate in ((1, 10), (2, 2), (3, 24), (10, 10), (95, 30), (240, 24), (3000, 3)):
        metadata = type("Metadata", (), {"total_num_frames": count, "fps": rate})()
        assert processor.sampled(count, rate) == oracle.sample_frames(fields, metadata).tolist(), (count, rate)


def test_sizes_and_samples_of_older_models_are_those_of_transformers(theirs: tuple[Any, Any]) -> None:
    module = importlib.import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    processor = OlderVideoProcessor(14, 2, 3136, 602_112)
    for height, width in ((28, 28), (480, 640), (1080, 1920), (5, 300), (17, 90), (33, 31)):
        want = module.smart_resize(height, width, min_pixels=3136, max_pixels=602_112)
        assert processor.size_of(9, height, width) == want
    fields = {"fps": 2, "min_frames": 4, "max_frames": 768, "num_frames": None, "temporal_patch_size": 2}
    oracle = type("Fields", (), fields)()
    for count in (2, 3, 4, 5, 7, 10, 11, 95, 240, 3000, 9999):
        for rate in (0.5, 2, 3, 10, 23.976, 60):
            metadata = type("Metadata", (), {"total_num_frames": count, "fps": rate})()
            want = module.Qwen2VLVideoProcessor.sample_frames(oracle, metadata).tolist()
            assert processor.sampled(count, rate) == want, (count, rate)
    assert processor.sampled(1, 2) == [0]


def test_times_of_older_models_are_positions() -> None:
    processor = OlderVideoProcessor(4, 2, 64, 4096, time_steps=2.0)
    images = [picture(24, 16 + i).resize((24, 16)) for i in range(7)]
    found = processor(frames_at(images, 2.0))
    assert found.seconds == ()
    assert [pair.moment for pair in found.pairs] == [0, 2, 4, 6]
    faster = processor(frames_at(images, 3.0))
    assert [pair.moment for pair in faster.pairs] == [0, 1, 2, 4]
    same = [a.digest == b.digest for a, b in zip(found.pairs, faster.pairs, strict=True)]
    assert same == [True, False, False, False], "another time is another prefix"
    with pytest.raises(ImageError, match="too small for the time between them"):
        processor(frames_at(images, 0.4))
    with pytest.raises(ImageError, match="too small for the time between them"):
        processor(frames_at(images, 1e-320))
    processor(frames_at(images[:1], 1e-9))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_patches_and_times_are_those_of_transformers(count: int, theirs: tuple[Any, Any]) -> None:
    import torch

    images = [picture(24, 16 + i).resize((24, 16)) for i in range(count)]
    found = PROCESSOR(frames_at(images, 3.0))
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)[None]
    patches, *grid = theirs[0].Qwen3VLVideoProcessor.patchify(None, pixels, 4, 2, 2)
    assert [pair.grid for pair in found.pairs] == [tuple(grid[1:])] * grid[0]
    own = np.stack([np.frombuffer(pair.patches, np.uint8).reshape(2, -1, 3, 4, 4) for pair in found.pairs])
    want = patches[0].view(grid[0], -1, 3, 2, 4, 4).permute(0, 3, 1, 2, 4, 5)
    assert np.array_equal(own, want.numpy())
    seconds = theirs[1].Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), 3.0, 2)
    assert list(found.seconds) == pytest.approx(seconds)
    assert found.num_tokens == len(found.pairs) * 6
    assert found.num_bytes == own.size
    assert len({pair.digest for pair in found.pairs}) == len(found.pairs)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animated_file_is_sampled_by_its_times(format: str) -> None:
    frames = frames_of_files([animated(20, format=format, duration=100)], None, PROCESSOR)
    assert frames.seconds == pytest.approx([0.0, 0.6, 1.3, 1.9])
    assert {image.size for image in frames.images} == {(24, 16)}
    if format == "WEBP":
        want = picture(24, 16).point(lambda value: (value + 380) % 256)
        assert np.array_equal(np.asarray(frames.images[3]), np.asarray(want))
    slow = frames_of_files([animated(5, format=format, duration=250)], None, PROCESSOR)
    assert slow.seconds == pytest.approx([0.0, 0.25, 0.75, 1.0])
    assert slow.rate == pytest.approx(4.0 * 4 / 5)
    still = frames_of_files([saved(picture(24, 16))], None, PROCESSOR)
    assert still.seconds == [0.0]


def test_pictures_of_a_data_url() -> None:
    media, images = Media(()), [saved(picture(24, 16), "JPEG"), saved(picture(24, 17).resize((24, 16)), "JPEG")]
    encoded = ",".join(base64.b64encode(each).decode() for each in images)
    files, rate = media.read_frames(ImageSource(f"data:video/jpeg;base64,{encoded}", is_video=True), 9)
    assert (files, rate) == (images, None)
    assert frames_of_files(files, rate, PROCESSOR).seconds == [0.0, 0.5]
    assert media.read_frames(ImageSource(f"data:video/jpeg;fps=4;base64,{encoded}", is_video=True), 9) == (images, 4.0)
    with pytest.raises(ImageError, match="more than 1 frames"):
        media.read_frames(ImageSource(f"data:video/jpeg;base64,{encoded}", is_video=True), 1)
    with pytest.raises(ImageError, match="fps must be"):
        media.read_frames(ImageSource(f"data:video/jpeg;fps=0;base64,{encoded}", is_video=True), 9)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mp4 = b"\0\0\0\x20ftypisom" + bytes(200)
    for files, reason in (
        ([mp4], "MP4 are not decoded here: send its frames"),
        ([animated(3)[:-200]], "damaged|no"),
        ([saved(picture(24, 16))] * 10, "at most 9"),
        ([saved(picture(24, 16)), mp4], "frame 2: it is no PNG"),
        ([saved(picture(900, 4))], "one side may be at most"),
    ):
        with pytest.raises(ImageError, match=reason):
            PROCESSOR(frames_of_files(files, None, PROCESSOR))
    with pytest.raises(ImageError, match="differ in size"):
        PROCESSOR(Frames([picture(24, 16), picture(16, 24)], [0, 1]))
    with pytest.raises(ImageError, match="no frames"):
        frames_at([], None)
    monkeypatch.setattr(videos, "MAX_PIXELS", 1000)
    with pytest.raises(ImageError, match="20 frames of 24 x 16 pixels"):
        frames_of_files([animated(20)], None, PROCESSOR)
    with pytest.raises(ImageError, match="3 frames of 24 x 16 pixels"):
        frames_at([picture(24, 16)] * 3, None)
    monkeypatch.setattr(videos, "MAX_SOURCE_FRAMES", 10)
    with pytest.raises(ImageError, match="at most 10"):
        frames_of_files([animated(20)], None, PROCESSOR)


def test_the_file_of_videos(tmp_path: Path) -> None:
    vision = VISION["Qwen3VLForConditionalGeneration"]({"vision_config": {}}, {})
    assert vision is not None
    assert read_video_processor(tmp_path, vision) == VideoProcessor(16, 2)
    file = tmp_path / videos.FILE
    file.write_text('{"size": {"shortest_edge": 100, "longest_edge": 5000}, "max_frames": 12, "fps": 1}')
    assert read_video_processor(tmp_path, vision) == VideoProcessor(16, 2, 100, 5000, max_frames=12, rate=1.0)
    for wrong in ('{"size": {"shortest_edge": 0}}', '{"fps": 0}', '{"max_frames": 1}', "{"):
        file.write_text(wrong)
        with pytest.raises(ModelError, match=videos.FILE):
            read_video_processor(tmp_path, vision)
    older = VISION["Qwen2_5_VLForConditionalGeneration"]({"vision_config": {"tokens_per_second": 2}}, {})
    assert older is not None
    file.unlink()
    assert read_video_processor(tmp_path, older) == OlderVideoProcessor(14, 2, 100_352, 602_112, time_steps=2.0)
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 3136, "max_pixels": 12845056}')
    assert read_video_processor(tmp_path, older) == OlderVideoProcessor(14, 2, 3136, 12_845_056, time_steps=2.0)
    without = VISION["Gemma3ForConditionalGeneration"]({"vision_config": {}}, {})
    assert without is not None
    assert read_video_processor(tmp_path, without) is None


def test_an_error_keeps_no_pixels_alive() -> None:
    """Its traceback holds the frames of functions: nothing may hold it, or hundreds of megabytes wait for the garbage
    collector.
    """
    seen: list[weakref.ref[Any]] = []

    def make() -> Any:
        pixels = picture(24, 16)
        seen.append(weakref.ref(pixels))
        raise ImageError("damaged")

    images = loader(1, "")
    gc.disable()
    try:
        with contextlib.suppress(ImageError):
            images._once(b"key", make)
        assert seen[0]() is None
    finally:
        gc.enable()


def test_sizes_are_checked_before_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(videos, "decode", decoded.append)
    monkeypatch.setattr(videos, "MAX_PIXELS", 1000)
    with pytest.raises(ImageError, match="2 frames of 24 x 40 pixels"):
        frames_of_files([saved(picture(24, 16)), saved(picture(24, 40))], None, PROCESSOR)
    with pytest.raises(ImageError, match="frame 2: it is no PNG"):
        frames_of_files([saved(picture(24, 16)), b"-"], None, PROCESSOR)
    assert decoded == []
