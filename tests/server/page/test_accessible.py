"""The chat page for everyone: axe-core finds nothing serious, in both themes, on a desktop and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_page import SIZES, ChatPage
from tests.support.page_stub import Stub

pytestmark = pytest.mark.heavy

LOOKS = [
    ("light", "desktop"),
    ("dark", "phone"),
    pytest.param("light", "phone", marks=pytest.mark.slow),
    pytest.param("dark", "desktop", marks=pytest.mark.slow),
]
# Until nothing changes its colour or place any more, except what turns for ever.
FADED = """() => Promise.all(document.getAnimations()
  .filter((each) => each.effect.getComputedTiming().endTime < Infinity)
  .map((each) => each.finished.catch(() => {})))"""
AXE = Path(__file__).parent / "vendor" / "axe.min.js"


def serious(page: ChatPage) -> list[Any]:
    """Findings of axe-core that are serious or worse."""
    page.run(FADED)
    found = page.run("async () => (await axe.run()).violations")
    return [
        (each["id"], [node["target"] for node in each["nodes"]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize(("theme", "size"), LOOKS)
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
        page.run("document.querySelectorAll('#settings details').forEach((each) => (each.open = true))")
        page.tab.wait_for_selector(f"#{dialog}[open]")
        assert serious(page) == [], dialog
        page.tab.keyboard.press("Escape")
    if size == "phone":
        page.tab.click("#toggle-sidebar")
        assert serious(page) == []
    context.close()


@pytest.fixture
def phone(browser: Any, url: str) -> Iterator[ChatPage]:
    """The page on a touch screen."""
    context = browser.new_context(viewport=SIZES["phone"], has_touch=True, is_mobile=True)
    yield ChatPage(context.new_page()).open(url)
    context.close()


def test_a_tap_shows_the_alternatives_of_a_token(phone: ChatPage) -> None:
    phone.set(logprobs=True)
    phone.ask("1 and 2")
    phone.last(".show-tokens").tap()
    phone.tab.tap(".token >> nth=1")
    phone.see("#alternatives", "90.5 %")
    phone.tab.tap(".question-text")
    phone.tab.wait_for_selector("#alternatives", state="hidden")


def test_a_panel_covers_nothing_of_its_button(phone: ChatPage) -> None:
    phone.ask("long")
    phone.last(".stats").tap()
    phone.tab.wait_for_selector("#figures", state="visible")
    panel, button = phone.tab.locator("#figures").bounding_box(), phone.last(".stats").bounding_box()
    assert panel["y"] + panel["height"] <= button["y"] or panel["y"] >= button["y"] + button["height"]
    assert 0 <= panel["y"] < panel["y"] + panel["height"] <= 844


def test_columns_of_a_wide_table_stay_readable(phone: ChatPage) -> None:
    phone.ask("Show me a table")
    assert phone.run("((box) => box.scrollWidth > box.clientWidth + 50)(document.querySelector('.table'))")
    widths = phone.run("[...document.querySelectorAll('.table tbody tr:first-child td')].map((td) => td.offsetWidth)")
    lines = phone.run("[...document.querySelectorAll('.table tbody td')].map((td) => td.offsetHeight / 26)")
    assert widths[-1] >= 176
    assert max(lines) < 3.5, "24 characters fit on a line"


def test_no_shortcuts_without_a_keyboard(phone: ChatPage) -> None:
    assert not phone.tab.is_visible("#keys")
    phone.tab.tap("#toggle-sidebar")
    assert phone.tab.is_visible("#import")
    assert not phone.tab.is_visible("#open-shortcuts")


def test_compared_answers_are_pages_to_swipe_between(phone: ChatPage, stub: Stub, url: str) -> None:
    stub.models = ["big", "small"]
    phone.open(url)
    phone.tab.tap("#open-settings")
    phone.tab.check("[name=compare][value=big]")
    phone.tab.check("[name=compare][value=small]")
    phone.tab.tap("[aria-label='Close settings']")
    phone.ask("a story")
    phone.until("document.querySelectorAll('.group [data-state=done]').length === 2")
    first, second = (phone.tab.locator(".group .answer").nth(i).bounding_box() for i in range(2))
    assert first["y"] == second["y"]
    assert first["width"] > 300
    assert first["x"] + first["width"] < second["x"] < 390, "the next one shows at the edge"
    assert phone.run("document.querySelector('#scroller').scrollWidth <= innerWidth")
    phone.last(".choose").tap()
    phone.see(".group .answer.other .model-label", "big")


@pytest.mark.parametrize("size", SIZES)
def test_nothing_sticks_out(page: ChatPage, size: str) -> None:
    page.tab.set_viewport_size(SIZES[size])
    page.ask("Show me a table")
    page.ask("x" * 300)
    wide = "[document.documentElement, document.querySelector('#scroller')].some((e) => e.scrollWidth > e.clientWidth)"
    assert not page.run(wide)
