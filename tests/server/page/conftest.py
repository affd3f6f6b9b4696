"""A browser and a stand-in for the server, for tests of the chat page."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from tests.support.chat_page import ChatPage
from tests.support.page_stub import Stub, build_app

FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS.split())
        yield browser
        browser.close()


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """Serve an app in a thread. Gives its address. `port`: 0: any."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio wants to see TCP
    listener.bind(("127.0.0.1", port))
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(uvicorn_server.serve(sockets=[listener])), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not uvicorn_server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert uvicorn_server.started
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        uvicorn_server.should_exit = True
        thread.join(60)
        listener.close()


@pytest.fixture(scope="package")
def server() -> Iterator[tuple[Stub, str]]:
    stub = Stub()
    with serving(build_app(stub)) as url:
        yield stub, url


@pytest.fixture
def stub(server: tuple[Stub, str]) -> Stub:
    """The server's stand-in, as new."""
    server[0].__init__()  # type: ignore[misc]
    return server[0]


@pytest.fixture
def url(stub: Stub, server: tuple[Stub, str]) -> str:
    return server[1]


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    """A browser without memories; whatever its pages report as an error fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, accept_downloads=True)
    context.set_default_timeout(60_000)
    problems: list[str] = []
    context.on("weberror", lambda error: problems.append(str(error.error)))
    context.on("console", lambda message: problems.extend([message.text] * ("Content Security" in message.text)))
    yield context
    context.close()
    assert problems == []


@pytest.fixture
def page(context: Any, url: str) -> ChatPage:
    return ChatPage(context.new_page()).open(url)
