"""Request: counts, and each way to end."""

import pytest

from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request

EOS, STOP, OTHER = 0, 5, 9


def request(prompt: tuple[int, ...] = (1, 2, 3), **sampling: object) -> Request:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(EngineRequest("r", list(prompt), params), frozenset({EOS, 1}), seed=1)


def end(request: Request) -> tuple[str | None, int | None]:
    return request.finish_reason, request.stop_reason


def test_prompt_is_copied() -> None:
    prompt = [1, 2, 3]
    r = Request(EngineRequest("r", prompt, SamplingParams()), frozenset(), seed=1)
    r.append([OTHER])
    assert prompt == [1, 2, 3]
    assert r.token_ids == [1, 2, 3, OTHER]
    assert (r.num_prompt_tokens, r.num_computed_tokens) == (3, 0)


def test_ends_of_text_give_no_stop_reason() -> None:
    for token in (EOS, 1):
        r = request()
        r.append([OTHER])
        assert end(r) == (None, None)
        r.append([token])
        assert end(r) == ("stop", None)


def test_stop_token_ids_are_the_stop_reason() -> None:
    r = request(stop_token_ids=[STOP, 6])
    r.append([STOP])
    assert end(r) == ("stop", STOP)


def test_a_stop_token_that_is_an_end_of_text_too_gives_no_stop_reason() -> None:
    r = request(stop_token_ids=[EOS])
    r.append([EOS])
    assert end(r) == ("stop", None)


def test_ignore_eos() -> None:
    r = request(ignore_eos=True)
    r.append([EOS])
    assert end(r) == (None, None)
    r = request(ignore_eos=True, stop_token_ids=[EOS])
    r.append([EOS])
    assert end(r) == ("stop", EOS)


def test_max_tokens() -> None:
    r = request(max_tokens=2)
    r.append([OTHER])
    assert end(r) == (None, None)
    r.append([OTHER])
    assert end(r) == ("length", None)


def test_an_end_of_text_as_the_last_allowed_token_is_a_stop() -> None:
    r = request(max_tokens=1)
    r.append([EOS])
    assert end(r) == ("stop", None)


@pytest.mark.parametrize("token", [EOS, STOP])
def test_min_tokens(token: int) -> None:
    r = request(min_tokens=3, stop_token_ids=[STOP])
    r.append([token])
    r.append([token])
    assert end(r) == (None, None)
    r.append([token])
    assert r.finish_reason == "stop"


def test_no_max_tokens_has_no_length_of_its_own() -> None:
    r = request(max_tokens=None)
    for _ in range(1000):
        r.append([OTHER])
    assert end(r) == (None, None)
