"""`--record-trace`: what traffic was like, and nothing of what was said."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.trace import read_trace, synthesize
from engine.errors import ConfigError
from server.metrics import SampleWatch
from server.observability import recorder
from server.observability.recorder import Ended, TrafficRecorder
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, wait_until

SECRET = "The password of the harbour is swordfish, and it must not be written down anywhere at all."


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def lines(path: Path, count: int) -> list[dict[str, Any]]:
    """The trace, once it has so many lines."""
    wait_until(lambda: path.read_text().count("\n") >= count)
    return [json.loads(line) for line in path.read_text().splitlines()]


def add(recorded: TrafficRecorder, prompt: list[int], salt: str = "", received: float = 0.0) -> None:
    sample = SampleWatch(None, len(prompt), None, True, False, num_tokens=7)  # type: ignore[arg-type]
    recorded.add(Ended(received or recorded._start, salt, [prompt], [sample]))


def test_each_answer_is_a_line_without_any_text(serve: Callable[..., Live], path: Path) -> None:
    live = serve(FakeEngine(), ServerConfig(record_trace=str(path)))
    live.complete(SECRET, max_tokens=5, user="anna", cache_salt="pepper")
    live.chat(SECRET, max_tokens=4, n=2)
    live.post("/v1/embeddings", input=SECRET)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = lines(path, 4)
    assert [(line["output_length"], line["max_tokens"]) for line in found] == [(5, 5), (4, 4), (4, 4), (0, 1)]
    assert found[0]["input_length"] == len(SECRET.encode())
    assert found[0]["finish_reason"] == "length"
    assert [line["timestamp"] for line in found] == sorted(line["timestamp"] for line in found)
    assert set(found[0]) == {
        "timestamp", "input_length", "output_length", "hash_ids", "block_size", "max_tokens", "finish_reason"
    }  # fmt: skip
    text = path.read_text()
    for word in ("swordfish", "anna", "pepper", "cmpl-", "toy"):
        assert word not in text


def test_a_request_that_is_cut_off_is_a_line(serve: Callable[..., Live], path: Path) -> None:
    live = serve(FakeEngine(), ServerConfig(record_trace=str(path)))
    live.engine.holds_after = 3
    with live.http.stream(
        "POST", "/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 400}
    ) as response:
        next(response.iter_lines())
    assert lines(path, 1)[0]["finish_reason"] == "abort"


def test_equal_prefixes_have_equal_numbers_and_replay_shares_them(path: Path) -> None:
    recorded = TrafficRecorder(path, block_size=4)
    shared = list(range(9))
    add(recorded, [*shared, 50, 51, 52])
    add(recorded, [*shared, 60, 61, 62, 63, 64])
    add(recorded, shared, salt="other")
    add(recorded, [1, *shared])
    recorded.close()
    a, b, other, shifted = (line["hash_ids"] for line in lines(path, 4))
    assert [len(ids) for ids in (a, b, other, shifted)] == [3, 3, 2, 2]
    assert a[:2] == b[:2]
    assert len({*a, *b, *other, *shifted}) == 8, "all others differ"
    assert max(a) < 2**53
    prompts = [list(request.prompt) for request in synthesize(read_trace(path), 1000, seed=0)]
    assert [len(prompt) for prompt in prompts] == [12, 14, 9, 10]
    assert prompts[0][:8] == prompts[1][:8]
    assert prompts[0][8:12] != prompts[1][8:12]


def test_another_recording_goes_on_with_other_numbers(path: Path) -> None:
    first = TrafficRecorder(path, 4)
    add(first, [1, 2, 3, 4], received=first._start + 100)
    first.close()
    second = TrafficRecorder(path, 4)
    add(second, [1, 2, 3, 4], received=second._start + 101)
    second.close()
    before, after = lines(path, 2)
    assert (before["timestamp"], after["timestamp"]) == (100_000, 101_000)
    assert before["hash_ids"] != after["hash_ids"], "the key was forgotten"
    third = TrafficRecorder(path, 4)
    assert time.monotonic() - third._start >= 101
    third.close()


OTHERS = [
    "my diary\n",
    '{"no": "timestamp"}\n',
    "[]",
    '{"timestamp": 1764201600, "message": "a line of another log"}\n',
    '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [], "block_size": 4, "max_tokens": 1, '
    '"finish_reason": "stop"}',  # without its line end: the next line would be part of it
]


@pytest.mark.parametrize("content", OTHERS)
def test_another_kind_of_file_stays_as_it_is(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError, match="is no trace, and stays as it is"):
        TrafficRecorder(path, 4)
    assert path.read_text() == content
    with pytest.raises(ConfigError, match="Is a directory"):
        TrafficRecorder(path.parent, 4)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is no regular file"):  # and does not wait for a reader
        TrafficRecorder(path, 4)


def test_a_full_disk_is_one_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    recorded = TrafficRecorder(path, 4)
    monkeypatch.setattr(recorded, "_write", full)
    for _ in range(3):
        add(recorded, [1, 2, 3, 4])
    recorded.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not recorded any more: No space left" in caplog.text


def test_requests_do_not_wait_for_a_slow_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "MAX_WAITING", 2)
    began, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        began.set()
        assert go_on.wait(60)

    recorded = TrafficRecorder(path, 4)
    monkeypatch.setattr(recorded, "_write", slow)
    add(recorded, [1])
    assert began.wait(60)
    for _ in range(4):
        add(recorded, [1])
    go_on.set()
    recorded.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "not recorded any more: the disk is too slow" in caplog.text
