"""The measurement of the path from engine to socket: the real server's processes, an engine without a model."""

import json
from pathlib import Path

import pytest

from benchmarks.micro import server_path


def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    words = ["--streams", "4", "--tokens", "400", "--step-ms", "5", "--repeat", "1", "--model", "llama-100m"]
    words += ["--endpoint", "/v1/chat/completions", "--models-dir", str(tmp_path), "--save-result", str(path)]
    assert server_path.main(words) == 0
    result = json.loads(path.read_text())
    assert result["api_us_per_event"] > 0
    assert result["engine_process_us_per_token"] > 0
    assert result["tokens_per_event"] >= 0.9
    assert "api µs per event" in capsys.readouterr().out


@pytest.mark.slow
def test_a_refused_request_ends_it(tmp_path: Path) -> None:
    words = ["--streams", "2", "--repeat", "1", "--model", "llama-100m", "--models-dir", str(tmp_path)]
    with pytest.raises(RuntimeError, match="temperature"):
        server_path.main([*words, "--extra-body", '{"temperature": -1}'])
