"""`quire bench serve --replay`: a trace's arrivals, lengths and shared prefixes, with tokens of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import serve
from benchmarks.serving.trace import TracedRequest, read_trace, synthesize
from engine.errors import ConfigError
from tests.support.stub_sse import Stub


def line(timestamp: float, input_length: int, hash_ids: list[int], output_length: int = 5, **more: Any) -> str:
    entry = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length}
    return json.dumps({**entry, "hash_ids": hash_ids, **more})


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(*lines: str) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def common(a: list[int], b: list[int]) -> int:
    """Number of tokens that they have in common at the beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def synthesized(trace: list[TracedRequest], vocab_size: int, seed: int) -> list[list[int]]:
    return [request.prompt for request in synthesize(trace, vocab_size, seed) if isinstance(request.prompt, list)]


def test_requests_are_in_the_order_of_their_arrival(write: Any) -> None:
    path = write(line(2500, 70, [1], block_size=64), "", line(500, 600, [7, 8], 0))
    first, second = read_trace(path)
    assert (first.seconds, first.input_len, first.output_len, first.block_size) == (0.0, 600, 1, 512)
    assert (second.seconds, second.input_len, second.output_len, second.block_size) == (2.0, 70, 5, 64)


def test_prompts_have_their_lengths_and_share_what_the_trace_shares(write: Any) -> None:
    """Mooncake numbers a last block that is not full; `quire serve` does not."""
    path = write(line(0, 1100, [1, 2, 3]), line(1, 1300, [1, 2, 4]), line(2, 40, [9, 8], block_size=16),
                 line(3, 40, [9, 8], block_size=16), line(4, 600, [5, 6]))  # fmt: skip
    trace = read_trace(path)
    prompts = synthesized(trace, 10_000, seed=1)
    assert [len(prompt) for prompt in prompts] == [1100, 1300, 40, 40, 600]
    a, b, c, d, e = prompts
    assert 1024 <= common(a, b) < 1030
    assert 32 <= common(c, d) < 36
    assert common(a, e) < 5
    assert prompts == synthesized(trace, 10_000, seed=1)
    assert common(a, synthesized(trace, 10_000, seed=2)[0]) < 5
    assert max(synthesized(trace, 50, seed=1)[0]) < 50


@pytest.mark.parametrize(
    "wrong",
    [
        "{}",
        "[1]",
        "no json",
        line(0, 0, []),
        line(0, 10, [], -1),
        line(0, 10, [1], block_size=0),
        line(0, 10, ["a"]),  # type: ignore[list-item]
        line(0, 10, None),  # type: ignore[arg-type]
        '{"timestamp": "x", "input_length": 1, "output_length": 1}',
        "[" * 100_000,
    ],
)
def test_a_wrong_line_is_named(write: Any, wrong: str) -> None:
    with pytest.raises(ConfigError, match="line 2: must be like"):
        read_trace(write(line(0, 10, [1]), wrong))


def test_files_that_are_no_traces(tmp_path: Path, write: Any) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(write(""))


def test_a_replay_sends_the_trace_at_its_times(
    stub: Stub, tmp_path: Path, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(line(1000, 30, [1], 3, block_size=16), line(1300, 20, [1], 2, block_size=16), line(1100, 9, [], 4))
    words = [
        "--disable-tqdm",
        "--replay",
        str(path),
        "--replay-speed",
        "2",
        "--save-result",
        "--result-dir",
        str(tmp_path),
    ]
    assert serve.main(["--base-url", stub.url("ok"), *words]) == 0
    _, *sent = stub.requests
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in sent) == [(9, 4), (20, 2), (30, 3)]
    assert all(body["ignore_eos"] for body in sent)
    long, short = (next(body["prompt"] for body in sent if len(body["prompt"]) == n) for n in (30, 20))
    assert common(long, short) >= 16
    assert "Replaying 3 requests of 0.3 s, 2 times as fast" in capsys.readouterr().out
    (saved,) = tmp_path.glob("*.json")
    result = json.loads(saved.read_text())
    assert result["num_prompts"] == 3
    assert result["duration"] >= 0.14  # 0.15 s by the trace; a timer may be early by its resolution
    assert "send_lateness_p99_ms" in result["client"]
    assert (
        serve.main(["--base-url", stub.url("ok"), "--disable-tqdm", "--replay", str(path), "--num-prompts", "2"]) == 0
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset-name", "nano"], "replay says all about the prompts"),
        (["--output-len", "5"], "replay says all about the prompts"),
        (["--request-rate", "5"], "replay has times of its own"),
        (["--find-max-rate", "p99_ttft:500"], "replay has times of its own"),
        (["--endpoint", "/v1/chat/completions"], "replay sends token ids"),
    ],
)
def test_what_a_replay_cannot_be_combined_with(
    write: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(line(0, 10, [1]))
    with pytest.raises((ConfigError, SystemExit)) as raised:
        serve.main(["--replay", str(path), *words])
    assert message in str(raised.value) + capsys.readouterr().err
