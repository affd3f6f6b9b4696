"""A live server over the fake engine: real sockets, real uvicorn, in a thread."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from server.app import create_app
from server.http.browsers import HEADERS
from server.http.connections import Connections
from server.listening import connections_of
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine


@dataclass
class Live:
    """A running server."""

    engine: FakeEngine
    http: httpx.Client
    port: int
    connections: Connections

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, content: str = "Hi", **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": content}], **body})

    def complete(self, prompt: Any = "Hi", **body: Any) -> httpx.Response:
        return self.post("/v1/completions", prompt=prompt, **body)

    def wait_idle(self, seconds: float = 60) -> None:
        """Until the engine works on nothing."""
        wait_until(lambda: not self.engine.active, seconds)

    def prompt_text(self) -> str:
        """The newest prompt as the engine got it."""
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer.decode(self.engine.requests[-1][1], skip_special_tokens=False)


Serve = Callable[..., Live]


def start_answering(serve: Serve, template: str, answer: str, settings: ServerConfig | None = None) -> Live:
    """Serve a model with this chat template that always writes `answer`."""
    live = serve(FakeEngine(template=template, max_model_len=4096), settings)
    live.engine.answer = answer
    return live


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


@contextlib.contextmanager
def run_server(
    engine: FakeEngine, settings: ServerConfig | None = None, *, send_buffer: int | None = None, **options: Any
) -> Iterator[Live]:
    """`send_buffer`: bytes that the kernel holds for a client that does not read."""
    settings = settings or ServerConfig()
    options = {"log_stats": False} | options  # at any time, in the log of whichever test runs
    app = create_app(engine, settings, **options)
    connections = connections_of(settings)
    config = uvicorn.Config(
        app,
        http=connections.protocol,  # type: ignore[arg-type]  # makes one
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]  # handed to `call_later`
        ws="none",
        log_config=None,
        lifespan="on",
        headers=list(HEADERS),
        timeout_graceful_shutdown=2,
        root_path=settings.root_path,
    )
    server = uvicorn.Server(config)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio wants to see TCP
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.started
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        yield Live(engine, http, port, connections)
    server.should_exit = True
    thread.join(60)
    listener.close()
    assert not thread.is_alive()
