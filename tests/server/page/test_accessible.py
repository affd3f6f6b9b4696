"""The chat page for everyone: axe-core finds nothing serious, in both themes, on a desktop and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_page import SIZES, ChatPage
from tests.support.page_stub import Stub

pytestmark = pytest.mark.heavy

AXE = Path(__file__).parent / "vendor" / "axe.min.js"


def serious(page: ChatPage) -> list[Any]:
    """Findings of axe-core that are serious or worse."""
    page.tab.wait_for_timeout(1000)  # colours fade in
    found = page.run("async () => (await axe.run()).violations")
    return [
        (each["id"], [node["target"] for node in each["nodes"]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_serious(browser: Any, stub: Stub, url: str, theme: str, size: str) -> None:
    context = browser.new_context(viewport=SIZES[size], color_scheme=theme, bypass_csp=True, reduced_motion="reduce")
    page = ChatPage(context.new_page()).open(url)
    page.tab.add_script_tag(path=str(AXE))
    assert serious(page) == []
    page.set(logprobs=True, system="Be kind.")
    page.ask("Show me a table and think")
    page.ask("break a story", until="failed")
    page.tab.wait_for_selector(".hljs-keyword")
    assert serious(page) == []
    for button, dialog in (("open-settings", "settings"), ("open-status", "status")):
        page.tab.click(f"#{button}")
        page.run("document.querySelectorAll('.more-settings').forEach((each) => (each.open = true))")
        page.tab.wait_for_selector(f"#{dialog}[open]")
        assert serious(page) == [], dialog
        page.tab.keyboard.press("Escape")
    if size == "phone":
        page.tab.click("#toggle-sidebar")
        assert serious(page) == []
    context.close()


@pytest.mark.parametrize("size", SIZES)
def test_nothing_sticks_out(page: ChatPage, size: str) -> None:
    page.tab.set_viewport_size(SIZES[size])
    page.ask("Show me a table")
    page.ask("x" * 300)
    wide = "[document.documentElement, document.querySelector('#scroller')].some((e) => e.scrollWidth > e.clientWidth)"
    assert not page.run(wide)
