"""Budgets of the encoder: how many images a step encodes and how many are kept, at their limits."""

from __future__ import annotations

from engine.core.encoder_cache import EncoderCache
from engine.core.engine_request import EngineRequest, ImageInput
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from tests.core.test_scheduler import request, scheduled, step

SIZE = 6  # tokens of an image


def with_images(name: str, *digests: str, text: int = 2, length: int = SIZE) -> Request:
    """A prompt of images, each behind `text` tokens."""
    stride = text + length
    images = tuple(ImageInput(i * stride + text, length, (1, length), b"", digest) for i, digest in enumerate(digests))
    names = [ord(name) * 1000 + i for i in range(stride * len(digests) + 1)]
    for each in images:
        names[each.start : each.stop] = [(1 << 62) + 100 * ord(each.digest) + i for i in range(length)]
    prompt = [1] * len(names)
    params = SamplingParams(max_tokens=9)
    return Request(EngineRequest(name, prompt, params, name_ids=names, images=images), frozenset(), seed=1)


def cache(max_tokens: int, budget: int) -> EncoderCache:
    found = EncoderCache()
    found.max_tokens = max_tokens
    found.start_step(budget)
    return found


def test_a_step_has_all_images_that_are_kept_together() -> None:
    asked = with_images("r", "a", "b", "c")
    found = cache(2 * SIZE, 100)
    assert found.limit(asked, 0, 100) == 2 * 8 + 2, "up to the third image"
    assert found.limit(asked, 0, 9) == 9
    found.use(asked, 0, 18)
    assert (found.num_encoded, found.num_tokens) == (2, 2 * SIZE)
    assert found.limit(with_images("s", "b", "a"), 0, 100) == 100, "both are there"
    assert found.limit(with_images("s", "b", "d"), 0, 100) == 10, "none of the step's is forgotten for another"
    found.check()
    found.take_step()
    found.start_step(100)
    assert found.limit(asked, 18, 100) == 100
    found.use(asked, 18, 25)
    step = found.take_step()
    assert step is not None
    assert (step.num_tokens, step.forgotten) == (SIZE, ["a"])
    found.check()


def test_an_image_above_what_is_kept_is_alone() -> None:
    found = cache(SIZE - 1, 100)
    assert found.limit(with_images("r", "a", "b"), 0, 100) == 8 + 2
    found.use(with_images("r", "a", "b"), 0, 10)
    assert found.limit(with_images("s", "c"), 0, 100) == 2
    found.check()


def test_a_step_encodes_its_budget_and_what_is_kept_costs_nothing() -> None:
    found = cache(1000, SIZE + 1)
    asked = with_images("r", "a", "b")
    assert found.limit(asked, 0, 100) == 8 + 2, "a second one is above the budget"
    found.use(asked, 0, 10)
    found.start_step(SIZE)
    assert found.limit(asked, 0, 100) == 100, "the first is encoded, the second is the budget"
    found.start_step(1)
    assert found.limit(asked, 10, 100) == 100, "the first image of a step always fits"
    found.use(asked, 10, 17)
    assert found.limit(with_images("s", "a", "c"), 0, 100) == 8 + 2


def test_a_request_whose_prefix_ends_in_an_image_does_not_keep_others_waiting() -> None:
    """It starts without a token, ahead of younger requests."""
    s = Scheduler(100, 4, 8, 40, 200)
    s.encoder.max_tokens = 19
    s.add(with_images("a", "x", text=0))
    step(s)
    s.abort("a")
    s.encoder.clear()  # as when other images took its place
    for each in (with_images("c", "z", text=0, length=19), with_images("b", "x", "y", text=0), request("d", 3)):
        s.add(each)
    begun, _ = step(s)
    assert scheduled(begun) == {"c": 20, "d": 3}
    assert [new.request_id for new in begun.new_requests] == ["c", "d"]
    then, _ = step(s)
    assert scheduled(then) == {"c": 1, "d": 1, "b": 9}
    assert [(new.request_id, new.num_computed_tokens) for new in then.new_requests] == [("b", 4)]
