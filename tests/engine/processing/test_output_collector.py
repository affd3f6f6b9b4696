"""From the engine's outputs to updates with text."""

from pathlib import Path

import pytest

from engine.core.batch import EngineOutput, StepOutputs, TokenLogprobs
from engine.core.params.sampling import SamplingParams
from engine.processing.output_collector import OutputCollector, deliver, logprobs_by_id, with_samples
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


def stream(tokenizer: Tokenizer | None, **sampling: object) -> OutputCollector:
    return OutputCollector([1], SamplingParams(**sampling), tokenizer)  # type: ignore[arg-type]


def test_news_merge_until_taken(tokenizer: Tokenizer) -> None:
    s = stream(tokenizer)
    ids = tokenizer.encode("hello")
    assert not s.has_output
    s.add(EngineOutput("a", ids[:1], num_cached_tokens=3, queued_time=1.0, scheduled_time=2.0), 10.0)
    for i in ids[1:]:
        s.add(EngineOutput("a", [i]), 11.0)
    update = s.take()
    assert (update.text, update.token_ids, update.finish_reason, update.num_cached_tokens) == ("hello", ids, None, 3)
    assert not s.has_output
    s.add(EngineOutput("a", tokenizer.encode("!"), "length"), 12.0)
    update = s.take()
    assert (update.text, update.finish_reason, update.num_cached_tokens) == ("!", "length", 3)
    assert s.finished
    times = update.timings
    assert (times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts) == (1.0, 2.0, 10.0, 12.0)
    assert times.num_generation_tokens == 6


def test_each_receiver_gets_its_run_of_the_columns(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    collectors = {name: stream(tokenizer) for name in "ab"}
    deliver(StepOutputs(outputs=[EngineOutput(name, ids[:1]) for name in "ab"]), collectors, 1.0)
    deliver(StepOutputs(["a", "gone", "b"], [*ids[1:], 7, ids[1]], counts=[len(ids) - 1, 1, 1]), collectors, 2.0)
    update = collectors["a"].take()
    assert (update.text, update.token_ids, update.timings.num_generation_tokens) == ("hello", ids, len(ids))
    assert update.timings.last_token_ts == 2.0
    assert collectors["b"].take().token_ids == ids[:2]


def test_stop_string_ends_the_request_at_its_token(tokenizer: Tokenizer) -> None:
    s = stream(tokenizer, stop=["lo w"], logprobs=0)
    ids = tokenizer.encode("hello world")
    logprobs = [TokenLogprobs(-float(i), 1, [], []) for i in range(len(ids))]
    s.add(EngineOutput("a", ids[:4], logprobs=logprobs[:4]), 1.0)
    assert s.take().text == "hel"
    s.add(EngineOutput("a", ids[4:], logprobs=logprobs[4:]), 2.0)
    update = s.take()
    assert (update.text, update.finish_reason, update.stop_reason) == ("", "stop", "lo w")
    assert tokenizer.decode(update.token_ids) == "o w"
    assert update.logprobs == logprobs[4:7]
    assert not s.finished  # the engine has not heard of it yet


def test_stop_token_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi!")
    for shown, text in ((False, "hi"), (True, "hi!")):
        s = stream(tokenizer, include_stop_str_in_output=shown, skip_special_tokens=False)
        s.add(EngineOutput("a", list(ids), "stop", ids[-1]), 1.0)
        update = s.take()
        assert (update.text, update.token_ids, update.stop_reason) == (text, ids, ids[-1])


def test_half_characters_wait(tokenizer: Tokenizer) -> None:
    s = stream(tokenizer)
    texts = []
    ids = tokenizer.encode("é")
    for i in ids:
        s.add(EngineOutput("a", [i]), 1.0)
        texts.append(s.take().text)
    assert texts == ["", "é"]


def test_no_text_without_detokenize_or_tokenizer(tokenizer: Tokenizer) -> None:
    for s in (stream(tokenizer, detokenize=False), stream(None)):
        s.add(EngineOutput("a", [5, 6], "length"), 1.0)
        update = s.take()
        assert (update.text, update.token_ids) == ("", [5, 6])


def test_samples_differ_in_seed_only() -> None:
    assert with_samples(SamplingParams()) == [SamplingParams()]
    assert [s.seed for s in with_samples(SamplingParams(n=3, seed=2**63 - 2))] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert {s.seed for s in with_samples(SamplingParams(n=3))} == {None}
    assert {s.n for s in with_samples(SamplingParams(n=3))} == {1}


def test_logprobs_by_id(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    (position,) = logprobs_by_id([a], [TokenLogprobs(-2.0, 5, [b, a], [-0.5, -2.0])], tokenizer)
    assert list(position) == [a, b]
    assert (position[a].rank, position[a].decoded_token, position[b].rank, position[b].logprob) == (5, "a", 1, -0.5)
