"""The chat page with the models of another server beside its own: two of the server's own apps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.processes import free_port
from engine import ConfigError
from server.app import create_app
from server.chat_page import page_with
from server.settings import ServerConfig
from tests.server.page.conftest import serving
from tests.server.page.test_accessible import AXE, LOOKS, serious
from tests.support.chat_page import SIZES, ChatPage
from tests.support.fake_engine import ANSWER, FakeEngine

pytestmark = pytest.mark.heavy

KEY, OTHER_KEY = "own-" + "k" * 20, "other-" + "k" * 20
OTHERS_ANSWER = "The other one says this."


@pytest.fixture
def servers() -> Iterator[tuple[str, str]]:
    """The URLs of a server whose page names another one, and of that one, which allows the page. Both need a key."""
    port, other = free_port(), FakeEngine()
    other.answer = OTHERS_ANSWER
    allowed = ServerConfig(api_key=(OTHER_KEY,), allowed_origins=(f"http://127.0.0.1:{port}",))
    with serving(create_app(other, allowed, served_model_names=["far"], log_stats=False)) as other_url:
        names = ServerConfig(api_key=(KEY,), page_servers=(other_url, "http://127.0.0.1:9"))
        own = create_app(FakeEngine(), names, served_model_names=["near"], log_stats=False)
        with serving(own, port) as url:
            yield url, other_url


def _with_key(page: ChatPage, url: str) -> ChatPage:
    page.open(url, until="locked")
    page.tab.fill("#api-key", KEY)
    page.tab.keyboard.press("Escape")
    page.wait_for_status("ready")
    return page


@pytest.mark.parametrize(("size", "theme"), [("desktop", "light"), ("phone", "dark")])
def test_answers_of_two_servers_side_by_side(browser: Any, servers: tuple[str, str], size: str, theme: str) -> None:
    url, other_url = servers
    host = re.sub(r"https?://|/", "", other_url)
    context = browser.new_context(viewport=SIZES[size], color_scheme=theme, reduced_motion="reduce")
    sent: list[tuple[str, str | None]] = []
    context.on("request", lambda request: sent.append((request.url, request.headers.get("authorization"))))
    page = _with_key(ChatPage(context.new_page()), url)
    page.tab.click("#open-settings")
    page.see("#others .error", f"{host}: The server requires an API key.")
    page.see("#others .error", "http://127.0.0.1:9/ cannot be reached, or does not allow this page: start it with "
             f"--allowed-origins {url.rstrip('/')}")  # fmt: skip
    page.tab.fill("#others input:visible", "wrong")
    page.tab.press("#others input:visible", "Tab")
    page.see("#others .error", f"{host}: The server rejected this API key.")
    page.tab.fill("#others input:visible", OTHER_KEY)
    page.tab.press("#others input:visible", "Tab")
    page.tab.check("[name=compare][value$=far]")
    page.tab.check("[name=compare][value=near]")
    assert page.texts("#compare label") == ["near", f"far · {host}"]
    page.tab.keyboard.press("Escape")
    page.ask("Hello")
    page.until("document.querySelectorAll('.group [data-state=done]').length === 2")
    assert page.texts(".group .model-label") == ["near", f"far · {host}"]
    assert page.texts(".group .prose") == [ANSWER, OTHERS_ANSWER]
    assert page.texts("#model-select option") == ["near", f"far · {host}"]
    for address, key in sent:
        expected = OTHER_KEY if address.startswith(other_url) else KEY
        assert key in (None, f"Bearer {expected}", "Bearer wrong"), "each server gets its own key only"
    context.close()


def test_a_chat_with_a_model_of_the_other_server(page: ChatPage, servers: tuple[str, str]) -> None:
    url, other_url = servers
    _with_key(page, url)
    page.tab.click("#open-settings")
    page.tab.fill("#others input:visible", OTHER_KEY)
    page.tab.press("#others input:visible", "Tab")
    page.tab.wait_for_selector("#model-select option >> nth=1", state="attached")
    page.tab.keyboard.press("Escape")
    page.tab.select_option("#model-select", index=1)
    page.ask("Hello")
    assert page.texts(".answer .prose") == [OTHERS_ANSWER]
    page.run("(server) => sessionStorage.removeItem('quire.key' + server)", other_url)
    page.ask("And now?", until="failed")
    assert page.texts(".failure-text >> visible=true") == ["The server requires an API key."]
    page.tab.wait_for_selector("#settings[open]")
    assert page.run("document.activeElement.id") == "key-0", "the key that is missing"
    page.wait_for_status("ready")  # the page's own server is not blamed


@pytest.mark.parametrize(("theme", "size"), LOOKS)
def test_nothing_serious_with_others(browser: Any, servers: tuple[str, str], theme: str, size: str) -> None:
    context = browser.new_context(viewport=SIZES[size], color_scheme=theme, bypass_csp=True, reduced_motion="reduce")
    page = _with_key(ChatPage(context.new_page()), servers[0])
    page.tab.add_script_tag(path=str(AXE))
    page.tab.click("#open-settings")
    page.see("#others .error", "requires an API key")
    page.tab.locator("#others").scroll_into_view_if_needed()
    assert serious(page) == []
    context.close()


def test_the_policy_names_them_and_nothing_else() -> None:
    page = page_with(ServerConfig(page_servers=("http://a:1/v1", "https://b.example/x/", "http://a:1")).page_servers)
    assert "connect-src 'self' http://a:1/ https://b.example/x/; manifest-src" in page


@pytest.mark.parametrize("url", ["a:1", "ftp://a", "http://", "http://a b", "http://a;script-src *", "http://a/\"><b>",
                                 "http://*:80", "http://a?b", "http://user@a"])  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="page_servers must be URLs such as http://host:8000"):
        ServerConfig(page_servers=(url,))
