"""The chat page on the server's own app, from the start of its engine to an answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.page.conftest import serving
from tests.support.chat_page import SIZES, ChatPage
from tests.support.starting import Starting

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(("size", "theme"), [("desktop", "light"), ("phone", "dark")])
def test_from_the_start_of_the_engine_to_an_answer(browser: Any, size: str, theme: str) -> None:
    context = browser.new_context(viewport=SIZES[size], color_scheme=theme)
    starting = Starting()
    starting.engine.states.advance("loading", 0.5)
    with serving(starting.switch) as url:
        page = ChatPage(context.new_page()).open(url, until="waiting")
        paints = "performance.getEntriesByType('paint').map(({ startTime }) => startTime)"
        assert max(page.run(paints)) < 20_000  # milliseconds: most of a second on a quiet machine
        assert page.texts("#start-text")[0].startswith("Loading the model 50 %")
        page.ask("Hello", until="waiting")
        starting.open()
        page.wait("done")
        assert page.texts(".prose") == ["Grüße! Ein 👋 von mir. Zwei plus zwei ist vier.\n\nEnd"]
        page.tab.click("#open-status")
        page.see("#status-figures dd", "of 512")
        assert page.texts("#phase") == ["Ready"]
        assert page.texts("#status-note") == [""]
    context.close()
