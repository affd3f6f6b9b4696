"""A long answer never holds up the page: what the browser itself counts as long tasks."""

from __future__ import annotations

import pytest

from tests.support.chat_page import ChatPage

MAX_MS = 200  # in which a key that was pressed would wait


@pytest.mark.slow  # a clock decides: of a quiet machine
def test_a_long_answer_never_holds_up_the_page(page: ChatPage) -> None:
    page.run("""() => {
        window.tasks = [];
        new PerformanceObserver((list) => tasks.push(...list.getEntries().map((entry) => entry.duration)))
          .observe({ type: "longtask", buffered: true });
      }""")
    page.ask("endless 20000")
    page.until("new Promise((done) => setTimeout(() => done(true), 500))")  # the last ones are reported
    tasks = page.run("tasks")
    print(f"{len(tasks)} tasks over 50 ms, the longest {max(tasks, default=0):.0f} ms")
    assert max(tasks, default=0) <= MAX_MS
