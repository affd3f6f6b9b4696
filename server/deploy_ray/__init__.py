"""Quire as an application of Ray Serve: `from server.deploy_ray import LLMConfig, build_openai_app`, named as in
`ray.serve.llm`.

Needs `pip install 'quire[ray]'`. Modules are imported on first use of a name, so configurations can be read without
Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.deploy_ray.builder import build_llm_deployment, build_openai_app
    from server.deploy_ray.config import LLMConfig, LLMServingArgs, ModelLoadingConfig

__all__ = ["LLMConfig", "LLMServingArgs", "ModelLoadingConfig", "build_llm_deployment", "build_openai_app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'server.deploy_ray' has no attribute {name!r}")
    home = "server.deploy_ray.builder" if name.startswith("build_") else "server.deploy_ray.config"
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ImportError("server.deploy_ray needs Ray: pip install 'quire[ray]'") from None
