"""Block-sparse attention beside dense attention: both models run, and the blocks are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.micro import block_sparse
from benchmarks.model_shapes import SHAPES

TINY = {"hidden_size": 64, "ff_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}


def test_both_kinds_of_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SHAPES["phi-3-small"] | TINY | {"num_hidden_layers": 2, "vocab_size": 10240}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model", str(tmp_path), "--device", "cpu", "--layers", "2", "--context", "1280", "--requests", "2"]
    assert block_sparse.main([*words, "--steps", "2", "--local", "4", "--stride", "8", "--rounds", "1"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "2 layers, 1,280 tokens, a head sees 30.0% of the blocks"  # 4 and 16 / 8 of 20
    assert [line.split(":")[0] for line in lines] == ["decode", "prefill"]
    assert all("times as fast; attention" in line for line in lines)
