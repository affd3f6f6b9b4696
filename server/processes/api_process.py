"""Entry point of an API process: `python -m server.processes.api_process`, with the arguments of `ChildProcess`.

It answers what needs no more than the engine: chats, completions, messages, embeddings, scores. The main process
answers the rest: what is stored, lists, metrics, administration.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
import zmq
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.replicas.calls import Calls
from engine.replicas.guest import Lost, Outputs
from engine.replicas.heartbeat import Heartbeat
from engine.replicas.link import Link
from engine.replicas.messages import Call, Reply, Shutdown
from engine.utils.log import configure_logging
from engine.worker.parallel.lifeline import end_with_parent
from server.generation.siblings import ListedModel, Siblings
from server.listening import connections_of, http_server, tune_interpreter
from server.observability.logs import RequestFields
from server.processes.forwarding import Forwarder
from server.processes.messages import (
    Answer,
    BodyWanted,
    Changed,
    Configure,
    Failed,
    Listening,
    Serve,
    Working,
    decode_told,
)

_log = logging.getLogger(__name__)
TICK_SECONDS = 0.05
OWN_PATHS = frozenset(  # with POST
    [
        *("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"),
        *("/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
        *("/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        *("/classify", "/v1/classify", "/tokenize", "/detokenize"),
    ]
)


class ApiProcess:
    """This process: its HTTP server, and its share of the engine once that is ready."""

    def __init__(self, link: Link, listener: socket.socket, beat: Callable[[], None]) -> None:
        """`beat`: called at intervals, as a sign of life."""
        self._link, self._listener, self._beat = link, listener, beat
        self._configured: asyncio.Future[Configure] = asyncio.get_running_loop().create_future()
        self._forward = Forwarder(link.send)
        self._calls = Calls(self._send_call)
        self._tasks: set[asyncio.Task[None]] = set()
        self._contexts = contextlib.AsyncExitStack()
        self._app: ASGIApp | None = None  # None until the engine is ready
        self._engine: Any = None  # a `RemoteEngine`
        self._requests: Any = None  # a `LocalRequests`
        self._changed: Changed | None = None  # the latest
        self._server: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI app."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        is_own = path in OWN_PATHS and scope["method"] == "POST" and not self._is_draining
        await (self._app if is_own and self._app is not None else self._forward)(scope, receive, send)

    @property
    def _is_draining(self) -> bool:
        return self._changed is not None and self._changed.is_draining

    async def run(self) -> None:
        """Serve until `Shutdown`."""
        self._link.listen(self._take)
        told = await self._configured
        settings = told.settings
        configure_logging(RequestFields(settings.disable_access_log_for_endpoints))
        if settings.max_connections is not None:
            settings = replace(settings, max_connections=math.ceil(settings.max_connections / told.count))
        connections = connections_of(settings)
        self._server = http_server(self, settings, connections)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._link.send(Listening())
        async with self._contexts:
            while not serving.done():
                self._beat()
                await asyncio.wait({serving}, timeout=TICK_SECONDS)
                if self._is_draining:
                    self._link.send(Working(connections.num_working))
            serving.result()

    def _take(self, message: bytes) -> None:
        for told in decode_told(message):
            match told:
                case Outputs(outputs):
                    self._engine.deliver(outputs)
                case Lost(request_id, reason):
                    self._engine.lost(request_id, reason)
                case Answer() | BodyWanted() | Failed():
                    self._forward.take(told)
                case Reply():
                    self._calls.reply(told)
                case Call():
                    self._in_background(self._called(told))
                case Changed():
                    self._changed = told
                    if self._engine is not None:
                        self._engine.update(told.status)
                case Configure():
                    self._configured.set_result(told)
                case Serve():
                    self._in_background(self._open(told))
                case Shutdown():
                    self._server.should_exit = True

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the API process cannot go on", exc_info=error)
            self._server.should_exit = self._server.force_exit = True

    async def _open(self, told: Serve) -> None:
        """Load what requests need, and answer them from then on."""
        from engine.processing.input_processor import InputProcessor
        from engine.replicas.remote import RemoteEngine
        from server.app import create_app
        from server.observability.readiness import Readiness
        from server.observability.server_metrics import ServerMetrics
        from server.processes.local_requests import LocalRequests
        from server.processes.shared_limits import SharedQueue, SharedRateLimits

        settings, facts = (await self._configured).settings, told.facts
        processor = await asyncio.to_thread(InputProcessor.load, facts.config)
        engine = RemoteEngine(facts, processor, told.status, self._link.send, self._calls.call)
        self._contexts.callback(engine.close)
        names = facts.config.served_model_name
        siblings = Siblings(
            lambda: [ListedModel(names, server.model.started, server.model, is_awake=True)],
            rate_limits=SharedRateLimits(self._calls.call, self._call_only),
            queue=SharedQueue(self._calls.call, self._call_only),
        )
        metrics = ServerMetrics(engine)
        metrics.registry.register(siblings.requests)
        app = create_app(
            engine, settings, served_model_names=names, log_stats=False, kv_cache_dtype=facts.config.kv_cache_dtype,
            readiness=Readiness(engine), server_metrics=metrics, siblings=siblings,
        )  # fmt: skip
        server = app.state.server
        await self._contexts.enter_async_context(app.router.lifespan_context(app))
        lag = asyncio.create_task(metrics.lag.watch())
        self._contexts.callback(lag.cancel)
        self._requests = LocalRequests(server)
        tune_interpreter()
        self._engine = engine
        if self._changed is not None:
            engine.update(self._changed.status)
        self._app = app

    def _send_call(self, call: Call) -> bool:
        self._link.send(call)
        return True

    def _call_only(self, method: str, **arguments: Any) -> None:
        """Call a method of the main process without waiting for its result."""
        self._link.send(Call(-1, method, arguments))

    async def _called(self, call: Call) -> None:
        """Answer what the main process asks."""
        try:
            result = await getattr(self._requests, call.method)(**call.arguments)
            self._link.send(Reply(call.id, result))
        except Exception as error:
            self._link.send(Reply(call.id, error=type(error).__name__))


async def _run(commands: str, events: str, beat: Callable[[], None], listener: socket.socket) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as incoming, context.socket(zmq.PUSH) as outgoing:
        for each in (incoming, outgoing):
            each.set_hwm(0)  # queued messages are bounded by the tokens of the running requests
        incoming.bind(commands)
        outgoing.connect(events)
        outgoing.linger = 1000
        link = Link(outgoing, incoming)
        try:
            await ApiProcess(link, listener, beat).run()
        finally:
            link.close()


def main() -> None:
    """Serve until the main process says `Shutdown`, or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the main process
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    commands, events, file, descriptor = sys.argv[1:]
    heartbeat = Heartbeat(Path(file))
    with (
        socket.socket(fileno=int(descriptor)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_run(commands, events, heartbeat.beat, listener))


if __name__ == "__main__":
    main()
