"""Workloads: the published ones to the token, the same on every machine, and files with their mistakes named."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import workloads
from benchmarks.workloads import Request
from engine.errors import ConfigError


def test_nano_is_the_published_one() -> None:
    work = workloads.named("nano", 151936)
    assert workloads.num_tokens(work.requests) == (142827, 133966)
    assert len(work.requests) == 256
    assert max(max(request.prompt) for request in work.requests) == 10000
    assert not work.prefix_caching


def test_texts_to_embed() -> None:
    work = workloads.named("embed", 30522)
    assert work.embeds
    assert len(work.requests) == 4096
    lens = [len(request.prompt) for request in work.requests]
    assert (min(lens), max(lens)) == (20, 300)
    assert not workloads.named("prefill", 30522).embeds


@pytest.mark.parametrize(
    ("name", "count", "input_len", "output_len"),
    [
        ("latency1", 1, 32, 128),
        ("latency8", 8, 32, 128),
        ("decode", 256, 128, 512),
        ("prefill", 128, 2048, 1),
        ("rag", 512, 1024, 128),
        ("longctx", 8, 16384, 128),
        ("prefix", 256, 2176, 64),
        ("copy1", 1, 416, 256),
        ("copy", 8, 416, 256),
        ("3x5x7", 3, 5, 7),
    ],
)
def test_named_workloads(name: str, count: int, input_len: int, output_len: int) -> None:
    work = workloads.named(name, 300)
    assert len(work.requests) == count
    assert {(len(request.prompt), request.output_len) for request in work.requests} == {(input_len, output_len)}
    assert max(max(request.prompt) for request in work.requests) < 300  # type: ignore[operator]
    assert work == workloads.named(name, 300)
    assert work.longest == input_len + output_len
    assert work.greedy == name.startswith("copy")
    if work.greedy:
        assert all(request.prompt[:288] == request.prompt[128:] for request in work.requests)
    if name == "prefix":
        assert work.prefix_caching
        assert len({tuple(request.prompt[:2048]) for request in work.requests}) == 1
        assert len({tuple(request.prompt[2048:]) for request in work.requests}) == count
    assert str(output_len) in workloads.describe(name)


@pytest.mark.parametrize("name", ["nanoo", "0x1x1", "1x1", "1x1x1x1", ""])
def test_an_unknown_workload(name: str) -> None:
    with pytest.raises(ConfigError, match="is neither COUNTxINPUTxOUTPUT"):
        workloads.named(name, 300)


def random_requests(**more: Any) -> list[Request]:
    given = {"input_len": 100, "output_len": 20, "range_ratio": 0.0, "prefix_len": 0, "vocab_size": 50, "seed": 1}
    return workloads.random_requests(200, **{**given, **more})


def test_random_lengths() -> None:
    assert {(len(r.prompt), r.output_len) for r in random_requests()} == {(100, 20)}
    varied = random_requests(range_ratio=0.5)
    assert {len(r.prompt) for r in varied} <= set(range(50, 151))
    assert {r.output_len for r in varied} == set(range(10, 31))
    prefixed = random_requests(prefix_len=30)
    assert {len(r.prompt) for r in prefixed} == {130}
    assert len({tuple(r.prompt[:30]) for r in prefixed}) == 1
    assert random_requests() == random_requests() != random_requests(seed=2)
    assert max(max(r.prompt) for r in random_requests()) == 49


def test_prefix_repetition() -> None:
    requests = workloads.prefix_repetition(
        20, num_prefixes=4, prefix_len=8, suffix_len=3, output_len=5, vocab_size=1000, seed=0
    )
    prefixes = [tuple(request.prompt[:8]) for request in requests]
    assert len(requests) == 20
    assert all(prefixes.count(prefix) == 5 for prefix in set(prefixes))
    assert len(set(prefixes)) == 4
    assert {len(request.prompt) for request in requests} == {11}


def test_prompts_of_files(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\n")
    lines.write_text('{"prompt": "a", "output_len": 3}\n{"prompt": [1, 2]}\n{"messages": [{"role": "user"}]}\n')
    assert workloads.read_prompts(text, 9) == [Request("one", 9), Request("two", 9)]
    assert workloads.read_prompts(lines, 9) == [Request("a", 3), Request([1, 2], 9), Request([{"role": "user"}], 9)]
    assert [r.prompt for r in workloads.repeated(workloads.read_prompts(text, 9), 5)] == [
        "one",
        "two",
        "one",
        "two",
        "one",
    ]
    assert len(workloads.repeated(workloads.read_prompts(text, 9), None)) == 2


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '"a"',
        "{}",
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"prompt": [1, "a"]}',
        '{"prompt": "a", "output_len": 0}',
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: must be"):
        workloads.read_prompts(path, 9)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    for name, message in (("empty.txt", "no prompt"), ("bytes.txt", "not UTF-8"), ("nowhere", "No such file")):
        with pytest.raises(ConfigError, match=message):
            workloads.read_prompts(tmp_path / name, 9)


def test_sharegpt(tmp_path: Path) -> None:
    def entry(*words: int) -> dict[str, Any]:
        return {"conversations": [{"value": "w " * count} for count in words]}

    path = tmp_path / "share.json"
    entries = [entry(5, 6), entry(5), entry(2000, 5), entry(1000, 1500), entry(3, 9), entry(9, 2), {}, entry(8, 9, 10)]
    path.write_text(json.dumps(entries))
    found = workloads.read_sharegpt(path, None, lambda text: len(text.split()))
    assert [(len(r.prompt.split()), r.output_len) for r in found if isinstance(r.prompt, str)] == [(5, 6), (8, 9)]
    assert {r.output_len for r in workloads.read_sharegpt(path, 12, lambda text: len(text.split()))} == {12}
    path.write_text("{")
    with pytest.raises(ConfigError, match="not ShareGPT"):
        workloads.read_sharegpt(path, None, len)
