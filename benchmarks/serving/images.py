"""Random images for the prompts of `bench serve`: vLLM's dataset `random-mm`."""

from __future__ import annotations

import ast
import base64
import math
import random
from dataclasses import dataclass, replace
from io import BytesIO

from benchmarks.workloads import Request
from engine.errors import ConfigError

MAX_PIXELS = 50_000_000
GRAIN = 8  # pixels between two random values: between them an image is smooth, so files have a photograph's size


@dataclass(frozen=True, slots=True)
class ImageShape:
    """Number and sizes of the images of a request."""

    base_items: int
    range_ratio: float  # the number varies by this fraction
    most: int  # images of a request
    sizes: tuple[tuple[int, int], ...]  # height, width
    weights: tuple[float, ...]  # of each size
    num_distinct: int | None  # images of all requests are chosen from so many; None: each is another one

    def attach(self, requests: list[Request], seed: int) -> list[Request]:
        """Return the requests with images as data URLs."""
        rng = random.Random(seed)
        low = math.floor(self.base_items * (1 - self.range_ratio))
        high = min(math.ceil(self.base_items * (1 + self.range_ratio)), self.most)
        known = [self._image(rng) for _ in range(self.num_distinct or 0)]

        def images() -> tuple[str, ...]:
            count = rng.randint(min(low, high), high)
            return tuple(rng.choice(known) if known else self._image(rng) for _ in range(count))

        return [replace(request, images=images()) for request in requests]

    def _image(self, rng: random.Random) -> str:
        """Return a random JPEG file as a data URL."""
        from PIL import Image

        ((height, width),) = rng.choices(self.sizes, self.weights)
        rough = -(-width // GRAIN), -(-height // GRAIN)
        pixels = Image.frombytes("RGB", rough, rng.randbytes(3 * rough[0] * rough[1]))
        file = BytesIO()
        pixels.resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def read_buckets(text: str) -> tuple[tuple[tuple[int, int], ...], tuple[float, ...]]:
    """Read sizes and weights from vLLM's form, such as "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}": height, width and
    frames. Raises `ConfigError`.
    """
    wanted = "an object such as '{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}'"
    try:
        given = ast.literal_eval(text)
        found = {key: float(weight) for key, weight in given.items()}
    except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):
        raise ConfigError(f"random_mm_bucket_config must be {wanted}, got {text!r}") from None
    for key, weight in found.items():
        is_size = isinstance(key, tuple) and len(key) == 3 and all(type(each) is int and each > 0 for each in key)
        if not is_size or not 0 <= weight < math.inf or math.prod(key[:2]) > MAX_PIXELS:
            raise ConfigError(f"random_mm_bucket_config must be {wanted}, got {key!r}: {weight}")
        if key[2] > 1 and weight:
            raise ConfigError(f"random_mm_bucket_config: {key} is a video; only images (1 frame) are sent")
    used = {key: weight for key, weight in found.items() if weight}
    if not used:
        raise ConfigError("random_mm_bucket_config must have a size with a weight above 0")
    return tuple((height, width) for height, width, _ in used), tuple(used.values())
