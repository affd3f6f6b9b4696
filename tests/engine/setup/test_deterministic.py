"""Refusals of deterministic mode on a GPU: what has no form there, or one that has not run on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ConfigError
from engine.config import EngineConfig
from engine.models.families import read_spec
from engine.setup.deterministic import check_deterministic
from engine.worker.device import CpuDevice
from tests.oracles.families import make_checkpoint
from tests.oracles.hybrids import make_hybrid


class Accelerator(CpuDevice):
    is_accelerator = True


def check(folder: Path, family: str, settings: dict[str, Any]) -> None:
    (make_hybrid if family == "lfm2" else make_checkpoint)(family, folder)
    config = EngineConfig(model=str(folder), deterministic=True, **settings)
    check_deterministic(config, read_spec(folder), Accelerator(), torch.float16)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "lfm2"])
def test_all_kinds_of_layers_have_the_mode(family: str, tmp_path: Path) -> None:
    check(tmp_path, family, {"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram"}})


def test_adapters_and_fp8_caches_have_the_mode(tmp_path: Path) -> None:
    check(tmp_path, "qwen3", {"enable_lora": True, "kv_cache_dtype": "fp8"})


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("qwen3", {"tensor_parallel_size": 2}, "tensor_parallel_size: its deterministic form has not run on a GPU yet"),
        (
            "qwen3",
            {"enable_lora": True, "lora_embeddings": True},
            "lora_embeddings: it has no deterministic form on GPUs",
        ),
    ],
)
def test_what_a_gpu_has_not_run_is_refused(family: str, settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"deterministic cannot be used with {reason}"):
        check(tmp_path, family, settings)
