"""The chat page as tests use it."""

from __future__ import annotations

from typing import Any

SIZES = {"desktop": {"width": 1280, "height": 860}, "phone": {"width": 390, "height": 844}}


class ChatPage:
    """A tab with the chat page. `tab`: Playwright's page."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab

    def open(self, url: str, until: str = "ready") -> ChatPage:
        self.tab.goto(url)
        self.wait_for_status(until)
        return self

    def wait_for_status(self, status: str) -> None:
        self.tab.wait_for_selector(f"#status-dot[data-status={status}]", state="attached")

    def look(self) -> None:
        """Let the page look at the server now, not at its next interval."""
        self.run("document.dispatchEvent(new Event('visibilitychange'))")

    def ask(self, question: str, until: str = "done") -> ChatPage:
        before = self.tab.locator(".turn.question").count()
        self.tab.fill("#prompt", question)
        self.tab.wait_for_selector("#stop", state="hidden")  # while it answers, the page takes no questions
        self.tab.press("#prompt", "Enter")
        self.tab.locator(".turn.question").nth(before).wait_for()
        return self.wait(until)

    def new_chat(self) -> None:
        self.tab.keyboard.press("Control+Shift+o")
        self.tab.wait_for_selector("#welcome", state="visible")

    def wait(self, state: str) -> ChatPage:
        """Until the newest answer is in this state and, if that is an end, the page takes questions again."""
        script = "(state) => [...document.querySelectorAll('.answer')].at(-1)?.dataset.state === state"
        self.tab.wait_for_function(script, arg=state)
        if state not in ("waiting", "streaming"):
            self.tab.wait_for_selector("#stop", state="hidden")
        return self

    def run(self, script: str, argument: Any = None) -> Any:
        return self.tab.evaluate(script, argument)

    def until(self, condition: str) -> None:
        self.tab.wait_for_function(f"() => {condition}")

    def texts(self, selector: str) -> list[str]:
        return self.tab.locator(selector).all_inner_texts()

    def last(self, selector: str) -> Any:
        return self.tab.locator(f".answer {selector}").last

    def see(self, selector: str, text: str) -> None:
        """Wait until an element of this kind with this text is seen."""
        self.tab.locator(selector).filter(has_text=text).first.wait_for()

    def set(self, **values: Any) -> None:
        """Fill in settings by the ids of their controls."""
        self.tab.click("#open-settings")
        self.tab.evaluate("document.querySelectorAll('#settings details').forEach((each) => (each.open = true))")
        for name, value in values.items():
            control = self.tab.locator(f"#{name.replace('_', '-')}")
            control.set_checked(value) if isinstance(value, bool) else control.fill(value)
        self.tab.keyboard.press("Escape")
