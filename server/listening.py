"""The HTTP server of a process, and its interpreter."""

from __future__ import annotations

import contextlib
import gc
import logging
import ssl
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.utils.log import debugging, traceback_without_text
from server.settings import ServerConfig

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from server.http.connections import Connections

UVICORN_ROUTINE = ("Started server process", "Waiting for application", "Application s", "Finished server process")


def tune_interpreter() -> None:
    """Tune garbage collection and thread switching for short pauses.

    Objects loaded by now are never collected. A collection looks at few objects, since it stops the event loop (2 ms
    for ten thousand objects, more on a shared core), and runs rarely. The event loop waits less for threads that read
    large requests, because a stream wakes it several times per token.
    """
    gc.freeze()
    gc.set_threshold(2_000, 2, 600)
    sys.setswitchinterval(0.0005)


def connections_of(settings: ServerConfig) -> Connections:
    """Return the connection limits and time-outs of `settings`. Raises the process's limit of open files."""
    from server.http.connections import ConnectionLimits, Connections, default_max_connections, raise_open_files
    from server.http.entrance import Entrance

    max_connections = default_max_connections(raise_open_files())
    limits = ConnectionLimits(
        max_connections=settings.max_connections or max_connections,
        max_header_bytes=settings.max_header_bytes,
        header_timeout=settings.header_timeout,
        send_timeout=settings.send_timeout,
    )
    keys = settings.read_keys()
    return Connections(limits, Entrance(keys.find if keys is not None else None))


def http_server(app: ASGIApp, settings: ServerConfig, connections: Connections) -> uvicorn.Server:
    """Return the HTTP server of a process. It does not run yet."""
    import uvicorn

    from server.http.browsers import HEADERS

    logging.getLogger("uvicorn").setLevel(1)  # the filters below decide
    logging.getLogger("uvicorn.error").addFilter(_is_notable)
    logging.getLogger("uvicorn.error").addFilter(without_text)
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # a function that makes a protocol
        ws="none",
        # A float works: it is passed to `call_later`.
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]
        log_config=None,
        log_level=settings.uvicorn_log_level,
        access_log=not settings.disable_uvicorn_access_log,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
        lifespan="off",  # the app's lifespan begins once the engine is ready
        headers=list(HEADERS),
    )

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the process handles signals

    return Server(config)


def _is_notable(record: logging.LogRecord) -> bool:
    """Return whether a log record of uvicorn is more than a routine message about start and stop."""
    return record.levelno != logging.INFO or not record.msg.startswith(UVICORN_ROUTINE)


def without_text(record: logging.LogRecord) -> bool:
    """Remove the exception's message, which may contain text of requests, from a log record of uvicorn; return True."""
    if record.exc_info and (error := record.exc_info[1]) is not None and not debugging():
        record.exc_info, record.exc_text = None, traceback_without_text(error)
    return True
