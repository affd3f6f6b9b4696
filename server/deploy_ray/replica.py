"""A replica: an engine with Quire's complete HTTP application, called without a socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from starlette.types import Message

from engine import AsyncEngine, EngineDeadError
from server.app import create_app
from server.deploy_ray.autoscaling import replica_load
from server.deploy_ray.config import LLMConfig
from server.deploy_ray.forwarded import ForwardedRequest, Head

MAX_WAITING = 64  # messages of a response that the ingress has not taken; beyond that the app waits


class LLMServer:
    """The deployment's class. Ray Serve creates it, checks its health and ends it."""

    async def __init__(self, llm_config: LLMConfig) -> None:  # type: ignore[misc]  # Ray Serve waits for it
        """Load the model."""
        config, settings = llm_config.engine_config(), llm_config.server_config()
        self._engine = await AsyncEngine.start(config)
        self._app = create_app(
            self._engine,
            settings,
            served_model_names=config.served_model_name,
            log_stats=not config.disable_log_stats,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        self._running = contextlib.AsyncExitStack()
        await self._running.enter_async_context(self._app.router.lifespan_context(self._app))

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[Head | bytes, None]:
        """Yield the head of the response, then parts of its body. Closing the generator aborts the request."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(MAX_WAITING)
        hung_up = asyncio.Event()
        received: Iterator[Message] = iter([{"type": "http.request", "body": request.body, "more_body": False}])

        async def receive() -> Message:
            if (message := next(received, None)) is not None:
                return message
            await hung_up.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            await messages.put(message)

        async def run() -> None:
            with contextlib.suppress(Exception):  # the app has answered and logged it
                await self._app(dict(request.scope), receive, send)
            await messages.put(None)  # skipped after a cancellation, when nothing reads

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif piece := message.get("body"):
                    yield piece + _waiting(messages)
        finally:
            hung_up.set()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def check_health(self) -> None:
        """Raise an error if only a new replica helps. The engine itself restarts a lost engine process."""
        if self._engine.state.phase == "dead":
            raise EngineDeadError(self._engine.state.reason)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"load": replica_load(self._engine.stats)}

    def __del__(self) -> None:
        """Close the engine. Ray Serve calls this after the replica's requests have finished."""
        if (engine := getattr(self, "_engine", None)) is not None:
            engine.close()


def _waiting(messages: asyncio.Queue[Message | None]) -> bytes:
    """Take all queued parts at once, for fewer and longer messages to the ingress."""
    pieces = []
    while not messages.empty():
        message = messages.get_nowait()
        if message is None:
            messages.put_nowait(None)
            break
        pieces.append(message.get("body", b""))
    return b"".join(pieces)
