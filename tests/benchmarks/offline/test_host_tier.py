"""The host tier's benchmark, small."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

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


def test_restart(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "MIN_LOADED_TOKENS", 1)
    file, path = tmp_path / "folder" / "prefixes.kv", tmp_path / "result.json"
    words = ["--work", "restart", "--prompt-tokens", "200", "--prefix-file", str(file), "--json", str(path)]
    assert host_tier.main([str(tiny_model), str(tmp_path), *SMALL, *words]) == 0
    results = json.loads(path.read_text())["results"]
    assert len(results["computed"]) == len(results["again"]) == 2
    assert results["share_found"] == 1, "of 199 tokens, 192 are in whole blocks"
    assert " 0 read" not in capsys.readouterr().out, "the cache holds one prompt"
    assert not file.exists()


class OfVllm:
    """Stands for vLLM's engine: each request makes as many tokens as it asked for, one in a step."""

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments, self.left, self.engine_core = arguments, dict[str, int](), Mock()

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SimpleNamespace) -> None:
        assert len(prompt["prompt_token_ids"]) >= 30
        assert params.ignore_eos
        assert params.output_kind == "delta"
        self.left[name] = params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[SimpleNamespace]:
        self.left = {name: left - 1 for name, left in self.left.items()}
        ended = [name for name, left in self.left.items() if not left]
        made = [SimpleNamespace(token_ids=[1])]
        outputs = [SimpleNamespace(request_id=each, outputs=made, finished=each in ended) for each in self.left]
        for name in ended:
            del self.left[name]
        return outputs


def test_conversations_beside_vllm(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gets the same context, cache and host memory."""
    made: list[OfVllm] = []

    def from_engine_args(arguments: SimpleNamespace) -> OfVllm:
        made.append(OfVllm(arguments))
        return made[-1]

    vllm, sampling_params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm.__dict__.update(
        EngineArgs=SimpleNamespace, SamplingParams=SimpleNamespace,
        LLMEngine=SimpleNamespace(from_engine_args=from_engine_args),
    )  # fmt: skip
    sampling_params.__dict__["RequestOutputKind"] = SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling_params)
    words = ["--conversations", "8", "--times", "2", "--turns", "4", "--turn-tokens", "30", "--answer-tokens", "10"]
    words += ["--seconds", "0.5", "--work", "conversations", "--engines", "with,vllm"]
    path = tmp_path / "result.json"
    assert host_tier.main([str(tiny_model), str(tmp_path), *SMALL, *words, "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert list(results["ratios"]) == ["with / vllm"]
    assert results["turns_per_second"]["vllm"][0] > 0
    arguments = made[0].arguments
    assert (arguments.kv_offloading_size, arguments.num_gpu_blocks_override) == (0.01, 8 * 100 // 2 // 16)
    assert arguments.max_model_len == 256
    made[0].engine_core.shutdown.assert_called_once()
