"""The request fields of /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from server.http.bodies import Body, optional


class LoadAdapterRequest(Body):
    """An adapter to serve."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = optional("Name of the model that the adapter changes, shown as its parent.")
    load_inplace: bool | None = optional("Replace an adapter of the same name.")


class UnloadAdapterRequest(Body):
    """An adapter to serve no more."""

    lora_name: str
    lora_int_id: int | None = optional("Has no effect.")
