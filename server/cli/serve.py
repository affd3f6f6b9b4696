"""`quire serve`: runs the engine process and the HTTP server, and handles signals."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import ConfigError, EngineConfig, EngineError
from engine.flags import add_flags
from engine.utils.imports import uncollected
from engine.utils.log import configure_logging
from server.cli.common import load_with_model, models_argument
from server.cli.exposure import command_line_warning, exposure_warning, reachable_urls
from server.cli.vllm_options import ADVICE
from server.listening import connections_of, http_server, tune_interpreter
from server.settings import ServerConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from engine import AsyncEngine
    from server.http.connections import Connections
    from server.observability.readiness import Readiness
    from server.observability.server_metrics import ServerMetrics
    from server.processes.pool import ApiProcesses
    from server.several.pool import ModelPool

_log = logging.getLogger(__name__)
CLOSE_SECONDS = 2.0  # time for clients to read the rest of their responses when the server stops

EPILOG = """examples:
  quire serve                                      the bundled demo model, chat page at http://127.0.0.1:8000
  quire serve Qwen/Qwen3-0.6B --port 9000
  quire serve ./my-model --max-model-len 32k --api-key-file keys.yaml
  quire serve Qwen/Qwen3-0.6B ./my-model           two models behind one port, each loaded when it is asked for
  quire serve --config serve.yaml                  "name: value" lines, with the names of the options above

Each option can also be set by an environment variable, such as QUIRE_MAX_MODEL_LEN=32k. The command line takes
precedence over the environment, and the environment over the file. The base URL for OpenAI clients is
http://127.0.0.1:8000/v1.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible HTTP API, with a chat page",
        description="Serve a model over an OpenAI-compatible HTTP API, with a chat page at /.",
        epilog=EPILOG,
    )
    models_argument(parser)
    add_flags(parser, EngineConfig, ServerConfig)
    parser.advice = ADVICE
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; SIGHUP restarts the engine. The socket is bound before the model is loaded."""
    first, *others = args.model_arguments or [None]
    args.model_argument = first
    del args.model_arguments
    config, settings = load_with_model(args, EngineConfig, ServerConfig)
    configs = _configs(config, settings, others)
    check_adapters(config, settings)
    check_processes(configs, settings)
    from server.observability.logs import RequestFields

    os.environ["QUIRE_LOG_FORMAT"] = settings.log_format  # the engine process logs in the same format
    configure_logging(RequestFields(settings.disable_access_log_for_endpoints))
    if (warning := command_line_warning(args)) is not None:
        _log.warning("%s", warning)
    with contextlib.closing(listen(settings)) as listener:
        import uvloop

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(configs, settings, listener))
        finally:
            if settings.uds:
                Path(settings.uds).unlink(missing_ok=True)


def check_adapters(config: EngineConfig, settings: ServerConfig) -> None:
    """Raise `ConfigError` if adapters are given that are not served."""
    for name in ("lora_modules", "lora_folder"):
        if getattr(settings, name) and not config.enable_lora:
            raise ConfigError(f"{name} needs enable_lora")


def check_processes(configs: Sequence[EngineConfig], settings: ServerConfig) -> None:
    """Raise `ConfigError` if several API processes are asked for, with what they cannot share."""
    if settings.api_server_count == 1:
        return
    if len(configs) > 1:
        raise ConfigError("api_server_count needs a single model: the first API process wakes the models of others")
    if configs[0].enable_lora:
        raise ConfigError("api_server_count needs a server without enable_lora: each process has adapters of its own")
    if settings.record_trace is not None:
        raise ConfigError("record_trace needs a single API process, which sees all requests")


def listen(settings: ServerConfig) -> socket.socket:
    """Return a bound socket that does not listen yet. `ConfigError` when the address is in use or invalid."""
    if settings.uds:
        return _listen_unix(settings.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise ConfigError(f"host must be an address of this machine, got {settings.host!r}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {settings.port} is in use: stop the program on {where}, or choose another --port"
            ) from None
        if error.errno == errno.EACCES:
            raise ConfigError(
                f"this user may not listen on port {settings.port}: choose a --port of 1024 or more"
            ) from None
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from None
    return listener


def _listen_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as other:
                if other.connect_ex(path) == 0:
                    raise ConfigError(f"uds {path} is in use by another server")
            os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"uds: cannot listen on {path}: {error.strerror or error}") from None
    except ConfigError:
        listener.close()
        raise
    return listener


def _configs(config: EngineConfig, settings: ServerConfig, others: Sequence[str]) -> list[EngineConfig]:
    """Return the configuration of each model. Raises `ConfigError`, and `ModelError` as `load_with_model`."""
    if not others:
        for name in ("max_loaded_models", "sleep_level", "model_keep_alive"):
            if getattr(settings, name) is not None:
                raise ConfigError(f"{name} needs several models: quire serve MODEL MODEL ...")
        return [config]
    from engine.models.catalog import check_local
    from server.several.pool import configs_of

    for model in others:
        check_local(model, config.hf_overrides)
    return configs_of(config, settings, others)


async def _serve(configs: Sequence[EngineConfig], settings: ServerConfig, listener: socket.socket) -> int:
    from engine import AsyncEngine

    service = _Service()
    with service.signals():
        engine: AsyncEngine | ModelPool
        if len(configs) == 1:
            engine = AsyncEngine.launch(configs[0])
        else:
            from server.several.pool import ModelPool

            if (settings.max_loaded_models or 1) > 1:
                # Processes take turns on the GPU, during which prefill attention for Hopper was wrong: see
                # docs/troubleshooting.md. Engine processes get this environment.
                os.environ.setdefault("QUIRE_PORTABLE", "1")
            engine = ModelPool(configs, settings)
        try:
            await service.serve(engine, configs[0], settings, listener)
            return 1 if engine.state.phase == "dead" else 0
        except asyncio.CancelledError:
            if service.received:
                return 128 + service.received[0]
            raise
        finally:
            engine.close()


class _Service:
    """Runs the server and handles signals before the engine is ready, while it serves and while it stops."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._main = asyncio.current_task()
        self._server: Any = None
        self._readiness: Readiness | None = None
        self._engine: AsyncEngine | ModelPool | None = None  # set once the engine is ready
        self._stopping: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._connections: Connections | ApiProcesses | None = None
        self._deadline = 0.0  # when running requests are aborted; monotonic seconds
        self._patience = 0.0

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, self._restart)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)

    async def serve(
        self,
        engine: AsyncEngine | ModelPool,
        engine_config: EngineConfig,
        settings: ServerConfig,
        listener: socket.socket,
    ) -> None:
        """Serve until a signal. Before the engine is ready, answer only that it starts. Raises the errors of
        `AsyncEngine.ready`, and `ConfigError` when another process listens on the address by now.
        """
        from engine import AsyncEngine

        with uncollected():
            from server.app import create_starting_app
            from server.observability.readiness import Readiness
            from server.observability.server_metrics import ServerMetrics
            from server.starting import Switch

        readiness, metrics = Readiness(engine), ServerMetrics(engine)
        switch = Switch(create_starting_app(settings, readiness, metrics), readiness)
        processes: ApiProcesses | None = None
        if settings.api_server_count > 1:
            from server.processes.pool import ApiProcesses

            assert isinstance(engine, AsyncEngine)
            processes = ApiProcesses(switch, engine, settings, readiness)
            metrics.api_processes = processes.pids
            self._server = self._connections = processes
        else:
            self._connections = connections = connections_of(settings)
            self._server = http_server(switch, settings, connections)
        self._readiness, self._patience = readiness, settings.shutdown_timeout
        serving = asyncio.create_task(self._run(settings, listener))
        ready = asyncio.create_task(engine.ready())
        gc.collect()  # while the engine loads
        try:
            await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await serving  # raises: the server could not start
            await ready
            tune_interpreter()
            async with _opened(engine, engine_config, settings, readiness, metrics) as app:
                switch.switch_to(app)
                if processes is not None:
                    processes.open(app.state.server)  # type: ignore[attr-defined]  # it is a FastAPI
                self._engine = engine
                _say(engine.summary, settings)
                name = engine.model.name if isinstance(engine, AsyncEngine) else engine.name
                _say(ready_lines(name, settings, listener), settings)
                await self._until_stopped(engine, serving)
        finally:
            ready.cancel()
            self._server.should_exit = True
            self._force()
            self._connections.abort()
            await asyncio.wait([serving])

    async def _run(self, settings: ServerConfig, listener: socket.socket) -> None:
        """Run the HTTP server until it stops."""
        if (warning := exposure_warning(settings, listener)) is not None:
            _log.warning("%s", warning)
        try:
            await self._server.serve(sockets=[listener])
        except OSError as error:
            raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None
        if not self._server.started:
            raise EngineError("the HTTP server could not start; the log says why")

    async def _until_stopped(self, engine: AsyncEngine | ModelPool, serving: asyncio.Task[None]) -> None:
        watch = asyncio.create_task(self._end_with(engine))
        try:
            await serving
        finally:
            watch.cancel()
            for task in (self._stopping, self._restarting):
                if task is not None:
                    task.cancel()

    async def _end_with(self, engine: AsyncEngine | ModelPool) -> None:
        """Stop the server once the engine is dead, so that the supervisor of the server can restart it."""
        state = engine.state
        while state.phase != "dead":
            state = await engine.state_change(state)
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._close())

    def _restart(self) -> None:
        """Restart the replicas one after the other, unless a restart is in progress."""
        if self._engine is None or self._stopping is not None:
            return
        if self._restarting is None or self._restarting.done():
            _log.info("restarting the engine: each request may take up to %g s to finish", self._patience)
            self._restarting = asyncio.create_task(self._engine.restart(self._patience))

    def _signalled(self, number: int) -> None:
        self.received.append(number)
        if self._readiness is not None:
            self._readiness.is_draining = True
        if self._engine is None:
            assert self._main is not None
            self._main.cancel()
        elif self._stopping is None:
            self._deadline = time.monotonic() + self._patience
            self._stopping = asyncio.create_task(self._stop())
        elif len(self.received) == 2:
            self._deadline = 0.0
        else:
            self._force()

    def _force(self) -> None:
        # Hides errors about cut-off requests, which are expected.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server.force_exit = True

    async def _stop(self) -> None:
        """Let running requests finish until the deadline while new requests are refused, then close.

        Incomplete uploads and responses that clients do not read do not delay the stop.
        """
        assert self._connections is not None
        is_logged = False
        while (num_working := self._connections.num_working) and time.monotonic() < self._deadline:
            if self._connections.is_counted and not is_logged:
                is_logged = True
                _log.info(
                    "stopping: %d request%s may take up to %g s to finish; another signal aborts %s",
                    num_working,
                    "s" * (num_working > 1),
                    self._patience,
                    "them" if num_working > 1 else "it",
                )
            await asyncio.sleep(0.05)
        await self._close()

    async def _close(self) -> None:
        """Abort all requests, including ones that still arrive, until this task is cancelled."""
        assert self._engine is not None
        assert self._connections is not None
        self._server.should_exit = True
        close = time.monotonic() + CLOSE_SECONDS
        while True:
            self._engine.abort_all()
            if time.monotonic() > close:
                self._connections.abort()
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _opened(
    engine: AsyncEngine | ModelPool,
    config: EngineConfig,
    settings: ServerConfig,
    readiness: Readiness,
    metrics: ServerMetrics,
) -> AsyncIterator[ASGIApp]:
    """Provide the app of an engine that is ready, or of several models, in the block."""
    from engine import AsyncEngine
    from server.app import create_app

    if not isinstance(engine, AsyncEngine):
        from server.several.front import Front

        async with engine.opened(readiness, metrics):
            yield Front(engine, settings)
        return
    app = create_app(
        engine,
        settings,
        served_model_names=config.served_model_name,
        log_stats=not config.disable_log_stats,
        kv_cache_dtype=config.kv_cache_dtype,
        readiness=readiness,
        server_metrics=metrics,
    )
    async with app.router.lifespan_context(app):
        yield app


def _say(text: str, settings: ServerConfig) -> None:
    """Print `text` to the terminal, or log it when the log format is JSON."""
    if settings.log_format == "json":
        _log.info(text)
    else:
        print(text, flush=True)


def ready_lines(model_name: str, settings: ServerConfig, listener: socket.socket) -> str:
    """Return the lines about all addresses of the server."""
    if settings.uds:
        return f"Ready: {model_name} at the Unix socket {settings.uds}"
    scheme = "https" if settings.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    elif ":" in host:
        host = f"[{host}]"
    url, root = f"{scheme}://{host}:{port}", settings.root_path.rstrip("/")
    pages = {"API": "/v1", "chat page": "/", "reference": "/docs", "metrics": "/metrics"}
    lines = [f"  {name:<11}{url}{root}{path}" for name, path in pages.items()]
    others = [each for each in reachable_urls(listener, scheme) if each != url]
    lines += [f"  {'network':<11}{each}{root}/" for each in others]
    return "\n".join([f"Ready: {model_name}", *lines])
