"""`system_fingerprint`: it changes when the bytes of an answer may, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.core.batch import SchedulerStats
from engine.processing import fingerprint
from engine.processing.fingerprint import system_fingerprint
from engine.replicas import process
from engine.replicas.messages import Ready, Start
from tests.support.tiny_model import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_without_the_mode_there_is_none(model: Path) -> None:
    assert system_fingerprint(EngineConfig(model=str(model)), model) == ""


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"dtype": "float32"}, True),
        ({"quantization": "int8"}, True),
        ({"kv_cache_dtype": "fp8"}, True),
        ({"hf_overrides": {"rope_theta": 500.0}}, True),
        ({"seed": 1}, True),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": 32}, False),
        ({"enable_prefix_caching": False, "enforce_eager": True, "num_gpu_blocks_override": 50}, False),
        ({"speculative_config": {"num_speculative_tokens": 3}, "data_parallel_size": 2}, False),
    ],
)
def test_settings(model: Path, settings: dict[str, Any], changes: bool) -> None:
    config = EngineConfig(model=str(model), deterministic=True)
    own = system_fingerprint(config, model)
    assert own.startswith("quire-")
    assert own == system_fingerprint(config, model)
    assert (system_fingerprint(replace(config, **settings), model) != own) == changes


def test_files_versions_and_the_machine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(model), deterministic=True)
    own = system_fingerprint(config, model)
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "__version__", "9.9.9")
        assert system_fingerprint(config, model) != own
    with monkeypatch.context() as patch:
        patch.setenv("QUIRE_CPU_ISA", "x86-64")
        assert system_fingerprint(config, model) != own
    weights = model / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert system_fingerprint(config, model) != own


def test_a_gpu_is_known_by_its_model_and_compiler(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = EngineConfig(model=str(model), deterministic=True), SimpleNamespace(is_accelerator=True, name="A")
    monkeypatch.setattr(fingerprint, "find_device", lambda name: device)
    own = system_fingerprint(config, model)
    with monkeypatch.context() as patch:
        patch.setenv("QUIRE_CPU_ISA", "x86-64")
        assert system_fingerprint(config, model) == own
    device.name = "B"
    assert system_fingerprint(config, model) != own
    device.name = "A"
    monkeypatch.setattr(fingerprint, "version", lambda name: "9.9.9")
    assert system_fingerprint(config, model) != own


def test_the_engine_process_computes_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An API process loads no PyTorch for it."""
    code = (
        "import sys; from engine.config import EngineConfig; from engine.processing.input_processor import "
        "InputProcessor; found = InputProcessor.load(EngineConfig(model=sys.argv[1], deterministic=True)); "
        "print(repr(found.fingerprint), 'torch' in sys.modules, found.of_engine(64, 'quire-1').info.fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
    assert done.stdout == "'' False quire-1\n"
    monkeypatch.setattr(process, "keep_to_one_node", lambda replica: None)
    config = EngineConfig(model=str(model), deterministic=True, device="cpu")
    made: Any = SchedulerStats
    counts = SimpleNamespace(num_blocks=3, block_size=8, max_model_len=64)
    options, stats = SimpleNamespace(max_num_seqs=2), made(*[0] * 9)
    engine = SimpleNamespace(runner=counts, options=options, stats=lambda: stats, summary=lambda: "an engine")
    _, ready = process._start(Start(config, ()), lambda *args, **options: engine)
    assert isinstance(ready, Ready)
    assert ready.fingerprint == system_fingerprint(config, model)
