"""Files of images in data URLs."""

from __future__ import annotations

import base64
import random

import pytest

from engine.vision import sources
from engine.vision.decode import ImageError
from engine.vision.sources import from_base64


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PART_CHARS", 8)


def test_base64_in_parts() -> None:
    rng = random.Random(0)
    for size in range(5, 60):
        data = rng.randbytes(size)
        text = base64.b64encode(data).decode()
        assert from_base64(text) == data
        assert from_base64(f" {text[:5]}\n{text[5:]}") == data


@pytest.mark.parametrize("text", ["YQ==YWJj", "YWJjYQ==YWJj", "YWJjYWJjYWI=YWJj", "YWJjYWJjY", "YWJjYWJj-_==", "é" * 8])
def test_base64_that_is_not_valid(text: str) -> None:
    with pytest.raises(ImageError, match="base64 is not valid"):
        from_base64(text)
