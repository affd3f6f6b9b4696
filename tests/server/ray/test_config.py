"""Configuration of a Ray Serve application. Ray need not be installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from engine.core.batch import SchedulerStats
from server.deploy_ray import LLMConfig, LLMServingArgs
from server.deploy_ray.autoscaling import by_load, replica_load


def config(**fields: Any) -> LLMConfig:
    return LLMConfig.model_validate({"model_loading_config": {"model_id": "Qwen/Qwen3-0.6B"}, **fields})


def test_names_are_those_of_ray_serve_llm() -> None:
    found = LLMConfig.model_validate(
        {
            "model_loading_config": {"model_id": "small", "model_source": "Qwen/Qwen3-0.6B"},
            "engine_kwargs": {"tensor_parallel_size": 2, "data_parallel_size": 2, "max_model_len": "32k"},
            "deployment_config": {"autoscaling_config": {"max_replicas": 4}, "max_ongoing_requests": 10},
            "accelerator_type": "H200",
        }
    )
    engine = found.engine_config()
    assert (engine.model, engine.served_model_name, engine.max_model_len) == ("Qwen/Qwen3-0.6B", ("small",), 32_000)
    options = found.deployment_options()
    assert options["name"] == "LLMServer:small"
    assert options["ray_actor_options"] == {"num_gpus": 4, "accelerator_type": "H200"}
    assert options["max_ongoing_requests"] == 10, "what is given wins"
    assert options["autoscaling_config"]["max_replicas"] == 4
    assert options["autoscaling_config"]["policy"] == {"policy_function": "server.deploy_ray.autoscaling:by_load"}


def test_a_model_without_a_source_is_its_name() -> None:
    found = config(engine_kwargs={"device": "cpu"}, runtime_env={"env_vars": {"A": "b"}})
    assert found.engine_config().model == "Qwen/Qwen3-0.6B"
    options = found.deployment_options()
    assert options["name"] == "LLMServer:Qwen--Qwen3-0_6B"
    assert options["ray_actor_options"] == {"num_cpus": 1, "runtime_env": {"env_vars": {"A": "b"}}}
    assert "autoscaling_config" not in options


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine_kwargs": {"max_model_length": 9}}, "engine_kwargs: there is no option max_model_length"),
        ({"engine_kwargs": {"block_size": 3}}, "engine_kwargs: block_size must be a power of two, got 3"),
        ({"engine_kwargs": {"model": "m"}}, "engine_kwargs: model stands in model_loading_config"),
        (
            {"engine_kwargs": {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}},
            "distributed_executor_backend must be mp here: a replica is on one machine",
        ),
        (
            {"server_kwargs": {"port": 9}},
            "server_kwargs: port is of no use here: Ray Serve's http_options has its like",
        ),
        ({"server_kwargs": {"api_key_file": "/absent"}}, "server_kwargs: .*/absent"),
        ({"llm_engine": "vLLM"}, "llm_engine"),
        ({"model_loading_config": {"model_id": ""}}, "model_id"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**fields)


def test_several_models_and_files(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text("model_loading_config: {model_id: second}\n")
    first = {"model_loading_config": {"model_id": "first"}}
    patient = {**first, "server_kwargs": {"body_timeout": 90}}
    args = LLMServingArgs.model_validate({"llm_configs": [patient, str(file)]})
    assert [each.model_id for each in args.llm_configs] == ["first", "second"]
    assert args.body_timeout == 90, "the longest"
    with pytest.raises(ValidationError, match="each model_id must stand once"):
        LLMServingArgs.model_validate({"llm_configs": [first, first]})
    with pytest.raises(ValidationError, match="llm_configs"):
        LLMServingArgs.model_validate({"llm_configs": []})


def test_without_ray_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; from server.deploy_ray import build_openai_app"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1] == "ImportError: server.deploy_ray needs Ray: pip install 'quire[ray]'"


def stats(num_running: int, num_waiting: int, num_free: int) -> SchedulerStats:
    return SchedulerStats(num_running, num_waiting, 100, num_free, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("each", "requests", "wanted"),
    [
        ([stats(0, 0, 100)], 0, 0),
        ([stats(8, 8, 50)], 16, 2),  # as many wait as run
        ([stats(8, 24, 0), stats(8, 0, 20)], 40, 5),  # three times as many, and a full one
        ([stats(8, 0, 60)], 8, 0.5),  # tokens fill half of what they should
        ([stats(8, 0, 99)], 192, 3),  # many short ones
        ([None], 0, 1),  # it starts
    ],
)
def test_replicas_follow_the_queue_and_the_tokens(
    each: list[SchedulerStats | None], requests: float, wanted: float
) -> None:
    context = SimpleNamespace(
        aggregated_metrics={"load": {index: replica_load(one) for index, one in enumerate(each)}},
        total_num_requests=requests,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 64),
    )
    assert by_load(context)[0] == pytest.approx(wanted)
