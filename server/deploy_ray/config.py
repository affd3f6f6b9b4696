"""The configuration of a Ray Serve application, with the names of `ray.serve.llm`. Can be read without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine import ConfigError, EngineConfig
from engine.flags import load, settings_of
from server.settings import ServerConfig

# Settings of the socket of `quire serve`, which Ray Serve replaces.
OF_THE_SOCKET = (
    *("host", "port", "uds", "root_path", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "max_header_bytes"),
    *("header_timeout", "keep_alive_timeout", "send_timeout", "max_connections", "shutdown_timeout"),
    *("uvicorn_log_level", "disable_uvicorn_access_log"),
)
S = TypeVar("S")
NUM_REQUESTS = 256  # default number of concurrent requests per replica


class _Config(BaseModel):
    """Refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ModelLoadingConfig(_Config):
    """The model, and its name for clients."""

    model_id: str = Field(min_length=1, description="the name that clients call the model by")
    model_source: str | None = Field(None, description="folder or Hugging Face id of the model; else model_id")
    tokenizer_source: str | None = Field(
        None, description="folder or Hugging Face id of its tokenizer; else the model's"
    )


class LLMConfig(_Config):
    """One model and the deployment that serves it."""

    model_loading_config: ModelLoadingConfig
    engine_kwargs: dict[str, Any] = Field({}, description="options of `quire serve` about model and engine")
    server_kwargs: dict[str, Any] = Field({}, description="its options about the API, such as api_key_file")
    deployment_config: dict[str, Any] = Field({}, description="options of `serve.deployment`")
    accelerator_type: str | None = Field(None, description="kind of GPU, as Ray names it: H200, A10G, L4")
    runtime_env: dict[str, Any] | None = Field(None, description="runtime environment of the replicas")

    @model_validator(mode="after")
    def _check(self) -> LLMConfig:
        self.engine_config()
        self.server_config()
        return self

    @property
    def model_id(self) -> str:
        return self.model_loading_config.model_id

    def engine_config(self) -> EngineConfig:
        """Return the engine's configuration. Raises `ConfigError` for settings that `quire serve` would refuse."""
        loading = self.model_loading_config
        own = {
            "model": loading.model_source or loading.model_id,
            "served_model_name": (loading.model_id,),
            "tokenizer": loading.tokenizer_source,
        }
        if wrong := own.keys() & self.engine_kwargs.keys():
            raise ConfigError(f"engine_kwargs: {min(wrong)} stands in model_loading_config")
        if self.engine_kwargs.get("distributed_executor_backend") == "ray":
            raise ConfigError(
                "engine_kwargs: distributed_executor_backend must be mp here: a replica is on one machine"
            )
        return _settings(EngineConfig, "engine_kwargs", self.engine_kwargs | own)

    def server_config(self) -> ServerConfig:
        """Return the server's configuration. Raises `ConfigError` for settings that `quire serve` would refuse, or that
        are Ray Serve's.
        """
        if wrong := self.server_kwargs.keys() & OF_THE_SOCKET:
            raise ConfigError(f"server_kwargs: {min(wrong)} is of no use here: Ray Serve's http_options has its like")
        return _settings(ServerConfig, "server_kwargs", self.server_kwargs)

    def deployment_options(self) -> dict[str, Any]:
        """Return the options of the deployment: the given ones, and defaults derived from the other settings."""
        engine, given = self.engine_config(), self.deployment_config
        options: dict[str, Any] = {
            "name": f"LLMServer:{self.model_id.replace('/', '--').replace('.', '_')}",
            "max_ongoing_requests": 4 * (engine.max_num_seqs or NUM_REQUESTS),
            "health_check_period_s": 10,
            "health_check_timeout_s": 30,
            "graceful_shutdown_timeout_s": 300,
            "request_router_config": {"request_router_class": "server.deploy_ray.router.PrefixAwareRouter"},
            **given,
        }
        actor = self._resources(engine) | given.get("ray_actor_options", {})
        if self.runtime_env is not None:
            actor = {"runtime_env": self.runtime_env} | actor
        options["ray_actor_options"] = actor
        if "autoscaling_config" in given:
            options["autoscaling_config"] = {
                "target_ongoing_requests": engine.max_num_seqs or NUM_REQUESTS,
                "policy": {"policy_function": "server.deploy_ray.autoscaling:by_load"},
                **given["autoscaling_config"],
            }
        return options

    def _resources(self, engine: EngineConfig) -> dict[str, Any]:
        count = engine.num_ranks * engine.data_parallel_size
        if engine.device == "cpu":
            return {"num_cpus": count}
        kind = {} if self.accelerator_type is None else {"accelerator_type": self.accelerator_type}
        return {"num_gpus": count, **kind}


class LLMServingArgs(_Config):
    """An application: its models and its ingress deployment."""

    llm_configs: list[LLMConfig] = Field(min_length=1, description="one for each model, or a path to a YAML file of it")
    ingress_deployment_config: dict[str, Any] = Field({}, description="options of the ingress's deployment")

    @model_validator(mode="before")
    @classmethod
    def _read_files(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("llm_configs"), list):
            return value
        configs = [
            yaml.safe_load(Path(each).read_text(encoding="utf-8")) if isinstance(each, str) else each
            for each in value["llm_configs"]
        ]
        return {**value, "llm_configs": configs}

    @model_validator(mode="after")
    def _check(self) -> LLMServingArgs:
        names = [each.model_id for each in self.llm_configs]
        if len(set(names)) < len(names):
            raise ValueError(f"llm_configs: each model_id must stand once, got {names}")
        return self

    @property
    def body_timeout(self) -> float:
        """Time limit for a request's body in seconds: the longest of all models, since the body names the model."""
        return max(each.server_config().body_timeout for each in self.llm_configs)

    def ingress_options(self) -> dict[str, Any]:
        """Return the options of the ingress deployment. It computes little, so it reserves no CPU core."""
        return {
            "max_ongoing_requests": 10_000,
            "graceful_shutdown_timeout_s": 300,
            "ray_actor_options": {"num_cpus": 0},
            **self.ingress_deployment_config,
        }


def _settings(cls: type[S], where: str, given: Mapping[str, Any]) -> S:
    if unknown := given.keys() - settings_of(cls).keys():
        raise ConfigError(f"{where}: there is no option {min(unknown)}")
    try:
        settings: S = load(given, cls, environ={})[0]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return settings
