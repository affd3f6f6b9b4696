"""Builds Ray Serve applications from configurations, like `ray.serve.llm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from server.deploy_ray.config import LLMConfig, LLMServingArgs
from server.deploy_ray.ingress import OpenAiIngress
from server.deploy_ray.replica import LLMServer


def build_llm_deployment(llm_config: LLMConfig) -> Any:
    """Return the bound deployment of one model. Its method `respond` takes requests from an ingress."""
    return serve.deployment(LLMServer, **llm_config.deployment_options()).bind(llm_config)


def build_openai_app(llm_serving_args: Mapping[str, Any] | LLMServingArgs) -> Any:
    """Return the application for `llm_serving_args` (see `LLMServingArgs`).

    Use it as `serve.run(build_openai_app({"llm_configs": [...]}))`, or in a Serve config file as
    `import_path: server.deploy_ray:build_openai_app`, with `llm_serving_args` as `args`.
    """
    args = LLMServingArgs.model_validate(llm_serving_args)
    models = {each.model_id: build_llm_deployment(each) for each in args.llm_configs}
    return serve.deployment(OpenAiIngress, **args.ingress_options()).bind(models, args.body_timeout)
