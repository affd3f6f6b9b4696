"""Decides which images a step encodes, within a budget of tokens, and which encoded images the worker keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from engine.core.batch import MAX_ENCODED_TOKENS, EncoderStep
from engine.core.engine_request import ImageInput
from engine.core.request import Request


class EncoderCache:
    """The encoded images of the worker, by content, and the encoder's budget in each step.

    A step encodes images before it computes the first of their tokens, at most as many tokens as its budget, or one
    larger image. A request whose next image does not fit waits, or computes the tokens before that image; others go on.
    The first image of a step always fits, so the first request in queue order never waits twice for the same image.
    Images that no request of the step needs are forgotten for new ones, the one used longest ago first.
    """

    def __init__(self) -> None:
        self.max_tokens = MAX_ENCODED_TOKENS
        self.num_tokens = 0  # of the images that are kept
        self.queries = self.hits = 0  # images that requests began to compute, and those that were encoded by then
        self.num_encoded = 0  # images
        self.seconds = 0.0  # that they took to encode
        self._kept: OrderedDict[str, int] = OrderedDict()  # digest → tokens, the one used longest ago first
        self._used: dict[str, int] = {}  # those of the step under construction
        self._budget = 0  # tokens that it may encode
        self._new_tokens = 0  # that it encodes
        self._forgotten: list[str] = []  # not returned by `take_step` yet

    def start_step(self, budget: int) -> None:
        """Begin to plan a step that encodes up to `budget` tokens."""
        self._used.clear()
        self._budget, self._new_tokens = budget, 0

    def limit(self, request: Request, start: int, budget: int) -> int:
        """Return how many tokens from index `start` on the request may compute in this step, at most `budget`. 0: it
        waits for its next image.
        """
        images = request.engine_request.images
        if not images or start >= images[-1].stop:
            return budget
        end = min(start + budget, request.num_tokens)
        used, new_tokens = self._used.copy(), self._new_tokens
        num_used = sum(used.values())
        for image in _of_chunk(images, start, end):
            digest, num_tokens = image.digest, image.num_tokens
            if digest in used:
                continue
            is_new = digest not in self._kept
            too_many = is_new and 0 < new_tokens > self._budget - num_tokens
            if too_many or (used and num_used + num_tokens > self.max_tokens):
                return max(image.start - start, 0)
            used[digest] = num_tokens
            num_used += num_tokens
            new_tokens += num_tokens if is_new else 0
        return budget

    def use(self, request: Request, start: int, end: int) -> None:
        """Let the step compute the request's tokens from index `start` to `end`, which `limit` allowed."""
        shown = list(_of_chunk(request.engine_request.images, start, end))
        for image in shown:
            if start <= image.start:
                self.queries += 1
                self.hits += image.digest in self._kept
        for image in shown:  # before others are forgotten for new ones
            if image.digest in self._kept:
                self._kept.move_to_end(image.digest)
                self._used[image.digest] = image.num_tokens
        for image in shown:
            if image.digest not in self._kept:
                self._make_room(image.num_tokens)
                self._kept[image.digest] = self._used[image.digest] = image.num_tokens
                self.num_tokens += image.num_tokens
                self.num_encoded += 1
                self._new_tokens += image.num_tokens

    def _make_room(self, num_tokens: int) -> None:
        while self._kept and self.num_tokens + num_tokens > self.max_tokens:
            digest = next(iter(self._kept))
            if digest in self._used:  # then all of them are used
                break
            self.num_tokens -= self._kept.pop(digest)
            self._forgotten.append(digest)

    def take_step(self) -> EncoderStep | None:
        """Return what the planned step encodes and what is forgotten before; None if it is nothing."""
        if not (self._new_tokens or self._forgotten):
            return None
        forgotten, self._forgotten = self._forgotten, []
        return EncoderStep(self._new_tokens, forgotten)

    def clear(self) -> None:
        """Forget all images, as the worker does after a failed step and in sleep."""
        self._kept.clear()
        self._used.clear()
        self._forgotten.clear()
        self.num_tokens = 0

    def check(self) -> None:
        """Assert all invariants."""
        assert self.num_tokens == sum(self._kept.values())
        assert self.num_tokens <= self.max_tokens or len(self._kept) == 1
        assert self._used.keys() <= self._kept.keys()
        assert not self._kept.keys() & set(self._forgotten)


def _of_chunk(images: Sequence[ImageInput], start: int, end: int) -> Iterator[ImageInput]:
    """Yield the images that have tokens in a chunk."""
    return (image for image in images if image.start < end and start < image.stop)
