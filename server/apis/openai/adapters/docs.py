"""The API reference of /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from server.apis.endpoint import Endpoint

TAG = "Models and tokens"

ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/load_lora_adapter",
        TAG,
        "Serve a LoRA adapter",
        "Reads a folder of PEFT's on the server's machine, checks it, and serves it as `lora_name`. "
        "`load_inplace`: replaces an adapter of that name. Needs `--enable-lora`; of API keys one with `admin: true`, "
        "else `--lora-folder`.",
        requests={"A folder": {"lora_name": "sql", "lora_path": "/adapters/sql"}},
        text="Success: LoRA adapter 'sql' added successfully.",
        statuses=(403, 503),
    ),
    Endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        TAG,
        "Serve a LoRA adapter no more",
        "Its running requests go on.",
        requests={"By name": {"lora_name": "sql"}},
        text="Success: LoRA adapter 'sql' removed successfully.",
        statuses=(403, 404),
    ),
)
