"""`use_beam_search` over HTTP: vLLM's answers, in both kinds of completion, and what ends a search."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine import BeamSearchParams
from engine.core.batch import EngineOutput
from engine.core.engine_request import EngineRequest
from engine.processing.input_processor import InputProcessor
from engine.processing.output_collector import OutputCollector, RequestUpdate
from server.settings import ServerConfig
from tests.support.beams import by_definition, chance, top_logprobs
from tests.support.fake_engine import FakeEngine, make_tokenizer
from tests.support.live_server import Live, run_server, wait_until

END = 11  # a token of the answers, here the end of text
MODEL = chance(1, 12)
PROMPTS = ["Hi", "Hello"]
NUM_STEPS = 6


class DiceEngine(FakeEngine):
    """Its next token is that of `chance`. With `stops_at` a step waits until it is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_token_ids = (END,)
        self.stops_at: int | None = None  # tokens of the answer so far
        self.most_active = 0

    @property
    def _input_processor(self) -> InputProcessor:
        return replace(super()._input_processor, max_logprobs=9)

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]:
        self._input_processor.check(request)
        return self._next(request)

    async def _next(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]:
        request_id, prompt, sampling = request.request_id, request.prompt_token_ids, request.sampling
        assert request_id not in self.active
        self.active[request_id] = []
        self.most_active = max(self.most_active, len(self.active))
        self.requests.append((request_id, prompt, sampling))
        self.deadlines.append(request.deadline)
        try:
            waits = self.stops_at is not None and len(prompt) == 2 + self.stops_at
            self.holds = waits
            collector, now = OutputCollector(prompt, sampling, self.tokenizer), time.monotonic()
            while waits and request_id not in self.aborted and not request.deadline:
                await asyncio.sleep(0.005)
            if waits:
                collector.add(EngineOutput(request_id, [], "timeout" if request.deadline else "abort"), now)
            else:
                assert (sampling.temperature, sampling.max_tokens, sampling.logprobs) == (0, 1, sampling.logprobs)
                at = top_logprobs(MODEL(prompt), sampling.logprobs or 0)
                output = EngineOutput(request_id, at.top_ids[:1], "length", None, [at], 1, 0, now, now)
                collector.add(output, now)
            yield collector.take()
        finally:
            del self.active[request_id]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with run_server(DiceEngine()) as live:
        yield live


@pytest.fixture
def dice(server: Live) -> Iterator[Live]:
    server.engine.__init__()  # type: ignore[misc]
    yield server
    server.wait_idle()


def expected(prompt: str, width: int, length_penalty: float = 1.0, ignore_eos: bool = False) -> list[list[int]]:
    params = BeamSearchParams(
        beam_width=width, max_tokens=NUM_STEPS, length_penalty=length_penalty, ignore_eos=ignore_eos
    )
    return [tokens for tokens, _ in by_definition(MODEL, make_tokenizer().encode(prompt), params, END)]


def search(live: Live, prompt: Any = PROMPTS, **body: Any) -> httpx.Response:
    given = {"max_tokens": NUM_STEPS, "use_beam_search": True, "return_token_ids": True, **body}
    return live.complete(prompt, **given)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 1},
        {"n": 3},
        {"n": 4, "length_penalty": 0.0},
        {"n": 2, "length_penalty": -1.5},
        {"n": 3, "ignore_eos": True},
    ],
)
def test_answers_are_the_best_beams(dice: Live, options: dict[str, Any]) -> None:
    body = search(dice, **options).json()
    width = options["n"]
    more = {name: value for name, value in options.items() if name != "n"}
    tokens = [each for prompt in PROMPTS for each in expected(prompt, width, **more)]
    assert [choice["token_ids"] for choice in body["choices"]] == tokens
    assert [choice["finish_reason"] for choice in body["choices"]] == [
        "stop" if each[-1] == END and "ignore_eos" not in options else "length" for each in tokens
    ]
    assert body["usage"]["completion_tokens"] == sum(map(len, tokens))
    assert "warnings" not in body
    assert dice.engine.most_active <= 2 * width  # type: ignore[attr-defined]


def test_a_conversation(dice: Live) -> None:
    body = dice.chat("Hi", use_beam_search=True, n=2, max_tokens=4, temperature=0).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(texts)) == 2
    assert {choice["message"]["role"] for choice in body["choices"]} == {"assistant"}


def test_text_and_log_probabilities(dice: Live) -> None:
    (choice,) = search(dice, "Hi", n=1, logprobs=2).json()["choices"]
    tokens = choice["token_ids"]
    shown = tokens[:-1] if choice["finish_reason"] == "stop" else tokens
    assert choice["text"] == make_tokenizer().decode(shown)
    prompt, found = make_tokenizer().encode("Hi"), choice["logprobs"]["token_logprobs"]
    assert found == pytest.approx([MODEL(prompt + tokens[:i])[token] for i, token in enumerate(tokens)])
    assert {len(tops) for tops in choice["logprobs"]["top_logprobs"]} <= {2, 3}


def test_own_stop_tokens_end_answers(dice: Live) -> None:
    stops = [4, 5, 6, 7]
    choices = search(dice, "Hi", n=3, stop_token_ids=stops, length_penalty=-3).json()["choices"]
    ended = [choice for choice in choices if choice["token_ids"][-1] in stops]
    assert ended
    assert all((each["finish_reason"], each["stop_reason"]) == ("stop", each["token_ids"][-1]) for each in ended)
    assert not any(set(choice["token_ids"][:-1]) & {*stops, END} for choice in choices)


def test_stop_strings_have_no_effect(dice: Live) -> None:
    plain, stopped = (
        search(dice, "Hi", n=2).json(),
        search(dice, "Hi", n=2, stop=[chr(i) for i in range(33, 45)]).json(),
    )
    assert stopped["warnings"] == ["stop: has no effect in a beam search"]
    assert [choice["text"] for choice in stopped["choices"]] == [choice["text"] for choice in plain["choices"]]


def test_what_a_search_cannot_heed_is_named(dice: Live) -> None:
    body = search(dice, "Hi", temperature=0.7, top_p=0.5, presence_penalty=1, seed=3).json()
    assert len(body["warnings"]) == 4
    assert all("has no effect in a beam search" in warning for warning in body["warnings"])


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"n": 11}, "n", "must be at most 10 in a beam search, got 11"),
        (
            {"n": 5},
            "n",
            "5 beams need more log probabilities than the server gives: logprobs must be at most max_logprobs",
        ),
        ({"stream": True}, "use_beam_search", "is not supported with stream=true"),
        ({"length_penalty": 11}, "length_penalty", "less than or equal to 10"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty", "requires use_beam_search=true"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "cannot be given together with use_beam_search"),
        ({"guided_choice": ["a"]}, "guided_choice", "cannot be given together with use_beam_search"),
        ({"prompt": [999]}, "prompt", "token ids must be from 0 to 258"),
    ],
)
def test_errors(dice: Live, body: dict[str, Any], param: str, message: str) -> None:
    response = search(dice, **{"prompt": "Hi", "n": 2, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert not dice.engine.active


def test_a_search_counts_as_many_requests_as_beams(serve: Callable[..., Live]) -> None:
    live = serve(DiceEngine(), ServerConfig(max_num_queued_reqs=0))
    live.engine.max_num_seqs = 3
    live = serve(live.engine, ServerConfig(max_num_queued_reqs=0))
    assert search(live, "Hi", n=2).status_code == 200
    response = search(live, n=2)
    assert (response.status_code, "asks for 4 answers" in response.text) == (400, True)


def test_a_search_can_be_aborted(dice: Live) -> None:
    dice.engine.stops_at = 2  # type: ignore[attr-defined]
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(search(dice, "Hi", n=2, request_id="mine")))
    thread.start()
    wait_until(lambda: dice.engine.holds and len(dice.engine.active) == 1)
    assert dice.http.post("/v1/requests/cmpl-mine/abort").status_code == 200
    thread.join()
    choices = answers[0].json()["choices"]
    assert [choice["finish_reason"] for choice in choices if len(choice["token_ids"]) == 2] == ["abort"] * len(choices)


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_search_ends_at_its_deadline(dice: Live, num_tokens: int) -> None:
    dice.engine.stops_at = num_tokens  # type: ignore[attr-defined]
    response = search(dice, "Hi", n=2, timeout_ms=60_000)
    if not num_tokens:
        assert response.status_code == 504
        return
    cut = [choice for choice in response.json()["choices"] if choice["finish_reason"] == "abort"]
    assert cut
    assert {(len(choice["token_ids"]), choice["stop_reason"]) for choice in cut} == {(num_tokens, "timeout")}


def test_a_client_that_hangs_up_ends_its_search(dice: Live) -> None:
    dice.engine.stops_at = 3  # type: ignore[attr-defined]
    url, body = f"http://127.0.0.1:{dice.port}/v1/completions", {"prompt": "Hi", "n": 2, "use_beam_search": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=httpx.Timeout(60, read=0.5))
    dice.wait_idle()
    assert not dice.engine.aborted
    assert len(dice.engine.requests) <= 1 + 2 * 3, "it has gone on"
