"""`quire count`: the most frequent tokens of texts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from engine.models.families import read_spec
from engine.text.tokenizer import Tokenizer
from server.cli import main as cli

TEXTS = ["a cat sat on a mat\nand sat\n", "the cat"]


def test_the_most_frequent_tokens_are_saved(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0])
    messages = [{"role": "user", "content": "zzz"}, {"role": "assistant", "content": TEXTS[1]}]
    lines = [{"messages": messages}, {"text": "on"}, {"other": 1}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    files = [str(tmp_path / name) for name in ("a.txt", "b.jsonl")]
    output = tmp_path / "tokens.json"
    assert cli.main(["count", str(tiny_model), *files, "--size", "5", "--output", str(output)]) == 0
    tokenizer = Tokenizer.from_folder(tiny_model)
    counts = Counter(token for text in (*TEXTS, "on") for token in tokenizer.encode(text, add_special_tokens=False))
    found, ends = json.loads(output.read_text())["token_ids"], read_spec(tiny_model).eos_token_ids
    assert len(found) == 5
    assert {*ends} <= {*found}
    chosen = [counts[token] for token in found if token not in ends]
    assert sorted(chosen) == sorted(counts.values())[-len(chosen) :]
    share = sum(counts[token] for token in found) / counts.total()
    assert f"5 of {len(counts)} tokens are {share:.2%} of {counts.total()}" in capsys.readouterr().out


def test_a_file_that_is_no_text_is_an_error(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("a.txt", b"\xff"), ("b.jsonl", b"{")):
        (tmp_path / name).write_bytes(content)
        assert cli.main(["count", str(tiny_model), str(tmp_path / name), "--output", str(tmp_path / "o")]) == 1
        assert f"{name}: cannot be read as text" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
