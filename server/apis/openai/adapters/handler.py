"""/v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from server.apis.openai.adapters.protocol import LoadAdapterRequest, UnloadAdapterRequest
from server.generation.caller import Caller
from server.generation.checks import check_admin
from server.generation.server_state import ServerState
from server.http.bodies import warnings_about
from server.http.callers import caller_of
from server.http.errors import APIError


def add_routes(app: FastAPI, server: ServerState) -> None:
    adapters, strict = server.model.adapters, server.settings.strict

    def check(caller: Caller, what: str) -> None:
        check_admin(caller, what)
        if not server.engine.max_loras:
            raise APIError(400, "this server serves no LoRA adapters: start it with --enable-lora", lead=None)

    @app.post("/v1/load_lora_adapter", response_model=None)
    async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
        warnings_about(body, strict)
        caller = caller_of(request)
        check(caller, "loading an adapter")
        await adapters.load(
            caller,
            body.lora_name,
            body.lora_path,
            in_place=bool(body.load_inplace),
            parent=body.base_model_name,
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", response_model=None)
    async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
        warnings_about(body, strict)
        check(caller_of(request), "unloading an adapter")
        await adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
