"""The host tier's benchmark, small."""

import json
from pathlib import Path

import pytest

from benchmarks.offline import host_tier
from engine.core import tiers

SMALL = ["--device", "cpu", "--max-model-len", "256", "--rounds", "1", "--host-gib", "0.01", "--max-num-seqs", "4"]


def test_evicting(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--requests", "8", "--least", "20", "--most", "30", "--cache-tokens", "256"]
    path = tmp_path / "result.json"
    assert host_tier.main([str(tiny_model), str(tmp_path), *SMALL, *words, "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert results["external_hits"] == 0, "no request has the prefix of another one"
    assert len(results["tokens_per_second"]["with"]) == 1
    assert " 0 of" not in capsys.readouterr().out, "evicted blocks are in host memory"


def test_conversations(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "MIN_LOADED_TOKENS", 1)
    words = ["--conversations", "8", "--times", "2", "--turns", "4", "--turn-tokens", "30", "--answer-tokens", "10"]
    words += ["--seconds", "1", "--work", "conversations", "--thinking", "0.001"]
    path = tmp_path / "result.json"
    assert host_tier.main([str(tiny_model), str(tmp_path), *SMALL, *words, "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert results["cache_tokens"] == 8 * 100 // 2
    assert min(results["median_time_to_first"].values()) > 0
    assert " 0 tokens loaded" not in capsys.readouterr().out
