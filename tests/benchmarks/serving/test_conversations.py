"""`quire bench serve --dataset-name conversations`: turns that repeat all before them, and what the server says of
them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import replicas, serve
from benchmarks.serving.client import Answer
from benchmarks.serving.conversations import Conversation, Conversations, ConversationShape, token_ids_of
from benchmarks.workloads import Request
from tests.support.stub_sse import Stub

SHAPE = ConversationShape(
    num_at_once=3, num_turns=4, num_system_prompts=2, system_len=50, turn_len=20, output_len=10, range_ratio=0.5,
    thinking_seconds=0.0, vocab_size=1000, seed=1,
)  # fmt: skip


def answer(*token_ids: int, prompt_len: int = 0) -> Answer:
    events = [b"data: " + json.dumps({"choices": [{"token_ids": [token_id]}]}).encode() for token_id in token_ids]
    return Answer(prompt_len, times=array("d", [1.0] * len(events)), output_len=len(events), events=events)


def test_a_turn_repeats_all_before_it() -> None:
    conversation = Conversation(SHAPE, 5)
    first = conversation.next_turn()
    assert isinstance(first.prompt, list)
    assert 50 + 10 <= len(first.prompt) <= 50 + 30
    assert 5 <= first.output_len <= 15
    assert conversation.answered([7, 8, 9]) == 0
    second = conversation.next_turn()
    assert second.prompt[: len(first.prompt) + 3] == [*first.prompt, 7, 8, 9]
    assert 10 <= len(second.prompt) - len(first.prompt) - 3 <= 30
    assert conversation.num_turns_left == 2


def test_a_number_stands_for_a_conversation() -> None:
    prompts = [Conversation(SHAPE, number).next_turn().prompt for number in range(200)]
    assert prompts == [Conversation(SHAPE, number).next_turn().prompt for number in range(200)]
    systems = [tuple(prompt[:50]) for prompt in prompts]
    first, second = sorted(map(systems.count, set(systems)))
    assert second > 1.5 * first, "one of the two is twice as common"
    assert len({tuple(prompt[50:60]) for prompt in prompts}) == 200
    assert [Conversation(SHAPE, number).num_turns_left for number in range(5)] == [1, 2, 3, 4, 4]


def test_so_many_at_once_for_so_many_requests() -> None:
    sent: list[Request] = []
    running = most = 0

    async def ask(request: Request) -> Answer:
        nonlocal running, most
        sent.append(request)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return answer(*range(request.output_len), prompt_len=len(request.prompt))

    async def run() -> None:
        conversations = Conversations(SHAPE, ask)
        assert len(await conversations.run(10, lambda: None)) == 10
        assert len(await conversations.run(11, lambda: None)) == 11

    asyncio.run(run())
    assert len(sent) == 21
    assert most == 3
    turns = [len(request.prompt) > 50 + 30 for request in sent]  # others are first turns
    assert turns[:3] == [False] * 3
    assert turns[10:].count(False) == 3, "the second call went on with conversations of the first"


def test_thinking_takes_time() -> None:
    thinker = Conversation(dataclasses.replace(SHAPE, thinking_seconds=2.0), 1)
    times = [thinker.answered([]) for _ in range(500)]
    assert 1.6 < sum(times) / 500 < 2.4


def test_answers_must_have_token_ids() -> None:
    assert token_ids_of(answer(3, 4, 5)) == [3, 4, 5]
    without = Answer(0, times=array("d", [1.0]), output_len=1, events=[b'data: {"choices": [{"text": "a"}]}'])
    assert token_ids_of(without) == []
    assert without.error.startswith("no token ids: conversations need a server with return_token_ids")
    assert token_ids_of(Answer(0, cause="timeout")) == []


def test_a_run(stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--dataset-name conversations --max-concurrency 3 --num-prompts 12 --num-warmups 6 --disable-tqdm"
    words += " --conversations-system-len 30 --conversations-turn-len 5 --conversations-output-len 4 --save-result"
    assert serve.main([*words.split(), "--base-url", stub.url("ok"), "--result-dir", str(tmp_path)]) == 0
    assert "Successful requests:                     12 " in capsys.readouterr().out
    test, *sent = stub.requests
    assert len(sent) == 6 + 12
    assert all(body["return_token_ids"] and body["ignore_eos"] for body in sent)
    prompts = [body["prompt"] for body in sent]
    longest = max(prompts, key=len)
    assert sum(longest[: len(prompt)] == prompt for prompt in prompts) > 2, "turns of one conversation"
    assert not any(longest[:30] == test["prompt"][:30] for _ in sent), "nothing of it is cached"
    (result,) = tmp_path.glob("*.json")
    assert json.loads(result.read_text())["settings"]["conversations_num_turns"] == 8


def test_a_server_without_token_ids(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dataset-name", "conversations", "--max-concurrency", "3", "--num-prompts", "12", "--disable-tqdm"]
    assert serve.main([*words, "--base-url", stub.url("lump"), "--extra-body", '{"return_token_ids": false}']) == 1
    assert "The first request failed: no token ids" in capsys.readouterr().out


def metrics(**values: dict[str, float]) -> str:
    rows = {"queries": "prefix_cache_queries", "hits": "prefix_cache_hits", "generated": "generation_tokens"}
    lines = ["# TYPE vllm:prefix_cache_queries counter"]
    for name, by_engine in values.items():
        for engine, value in by_engine.items():
            lines.append(f'vllm:{rows[name]}_total{{engine="{engine}",model_name="m"}} {value}')
            lines.append(f'vllm:{rows[name]}_created{{engine="{engine}",model_name="m"}} 1.7e+09')
    return "\n".join(lines) + "\n"


def test_what_engines_did_between_two_readings() -> None:
    before = metrics(queries={"0": 100, "1": 50}, hits={"0": 40, "1": 0}, generated={"0": 7, "1": 8})
    after = metrics(queries={"0": 1100, "1": 550}, hits={"0": 840, "1": 300}, generated={"0": 107, "1": 48})
    assert replicas.between(before, after) == {
        "prefix_cache_queries": 1500,
        "prefix_cache_hits": 1100,
        "prefix_cache_hit_rate": pytest.approx(1100 / 1500),
        "engine_tokens": {"0": 300, "1": 240},
        "busiest_engine": pytest.approx(300 / 270),
    }
    assert replicas.between("", after)["engine_tokens"] == {"0": 1100 - 840 + 107, "1": 550 - 300 + 48}


@pytest.mark.parametrize("text", ["", "some_total 5\n", metrics(queries={"0": 5.0}, hits={"0": 1.0})])
def test_nothing_is_said_without_metrics_or_lookups(text: str) -> None:
    assert replicas.between(text, text) == {}


def test_one_engine_has_no_busiest() -> None:
    found: dict[str, Any] = replicas.between("", metrics(queries={"0": 8}, hits={"0": 2}, generated={"0": 1}))
    assert "busiest_engine" not in found
    assert found["engine_tokens"] == {"0": 7}
