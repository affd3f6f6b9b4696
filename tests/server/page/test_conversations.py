"""Conversations on the chat page: kept, listed, searched, exported, in several tabs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_page import SIZES, ChatPage
from tests.support.page_stub import Stub

pytestmark = pytest.mark.heavy


def titles(page: ChatPage) -> list[str]:
    return page.texts("#conversations .title")


def menu(page: ChatPage, title: str, action: str) -> None:
    item = page.tab.locator("#conversations li").filter(has_text=title)
    item.hover()
    item.locator(".more").click()
    page.tab.click(f"#menu-{action}")


def test_a_new_chat_destroys_nothing(page: ChatPage) -> None:
    page.ask("1 and 2")
    first = page.tab.url
    page.new_chat()
    page.ask("3 and 4")
    page.see("#conversations a", "1 and 2")
    assert titles(page) == ["3 and 4", "1 and 2"]
    page.tab.click("#conversations a >> nth=1")
    page.see(".question-text", "1 and 2")
    assert page.tab.url == first
    page.tab.reload()
    page.see(".prose", "1 plus 2 is 3.")
    page.tab.go_back()
    page.see(".question-text", "3 and 4")


def test_an_answer_goes_on_while_another_conversation_is_shown(page: ChatPage, stub: Stub) -> None:
    stub.delay = 0.003
    page.ask("a long one", until="streaming")
    page.new_chat()
    assert not page.tab.is_visible("#stop")
    stub.delay = 0
    page.ask("1 and 2")
    page.tab.click("#conversations a >> text=a long one")
    page.see(".question-text", "a long one")
    page.wait("done")
    assert page.texts(".prose")[0].endswith("still awake.”")


def test_drafts_are_kept(page: ChatPage) -> None:
    page.ask("1 and 2")
    page.tab.fill("#prompt", "half a thou")
    page.new_chat()
    assert page.run("document.querySelector('#prompt').value") == ""
    page.tab.fill("#prompt", "another")
    page.tab.click("#conversations a")
    page.see(".question-text", "1 and 2")
    assert page.run("document.querySelector('#prompt').value") == "half a thou"
    page.tab.reload()
    page.see(".question-text", "1 and 2")
    assert page.run("document.querySelector('#prompt').value") == "half a thou"
    page.tab.goto(page.tab.url.partition("#")[0] + "#/")
    page.tab.wait_for_selector("#welcome", state="visible")
    assert page.run("document.querySelector('#prompt').value") == "another"


def test_search_rename_delete_and_undo(page: ChatPage) -> None:
    page.ask("1 and 2")
    page.new_chat()
    page.ask("a story")
    page.tab.keyboard.press("Control+k")
    page.tab.keyboard.type("LIGHTHOUSE")  # of the answer
    page.see("#conversations mark", "lighthouse")  # of the whole word: each letter searches anew
    assert titles(page) == ["a story"]
    assert page.texts("#conversations .match")[0].startswith("Mira kept the lighthouse at the end")
    page.tab.fill("#search", "")
    page.until("document.querySelectorAll('#conversations li').length === 2")
    menu(page, "1 and 2", "rename")
    page.tab.keyboard.type("Sums")
    page.tab.keyboard.press("Enter")
    page.see("#conversations a", "Sums")
    menu(page, "a story", "delete")
    page.tab.wait_for_selector("#welcome", state="visible")
    page.until("document.querySelectorAll('#conversations li').length === 1")
    assert titles(page) == ["Sums"]
    page.tab.click("#toast-action")
    page.see(".question-text", "a story")
    page.see("#conversations a", "a story")


def test_export_and_import(page: ChatPage, tmp_path: Path, stub: Stub) -> None:
    page.set(system="Be kind.")
    stub.answers["hm?"] = "First."
    page.ask("hm?")
    stub.answers["hm?"] = "Second."
    page.tab.click(".answer .again")
    page.see(".prose", "Second.")
    with page.tab.expect_download() as markdown:
        menu(page, "hm?", "markdown")
    text = Path(markdown.value.path()).read_text()
    assert text == "# hm?\n\n> **System:** Be kind.\n\n## You\n\nhm?\n\n## quire-demo\n\nSecond.\n"
    with page.tab.expect_download() as exported:
        page.tab.click("#export-all")
    page.tab.set_input_files("#import-file", exported.value.path())
    page.see("#toast-text", "1 conversation was here already.")
    assert titles(page) == ["hm?"]
    menu(page, "hm?", "delete")
    page.tab.wait_for_selector("#conversations li", state="detached")
    page.tab.set_input_files("#import-file", exported.value.path())
    page.see("#toast-text", "Imported 1 conversation.")
    page.tab.click("#conversations a")
    page.see(".prose", "Second.")
    assert page.texts(".answer .branches") == ["2/2"]
    assert page.texts("#system-text") == ["Be kind."]


def test_an_import_continues_what_is_here_and_replaces_nothing_else(page: ChatPage, tmp_path: Path) -> None:
    page.ask("1 and 2")
    with page.tab.expect_download() as exported:
        page.tab.click("#export-all")
    early = Path(exported.value.path()).read_text()
    page.ask("3 and 4")
    with page.tab.expect_download() as exported:
        page.tab.click("#export-all")
    late = Path(exported.value.path()).read_text()

    def imports(text: str, told: str) -> None:
        page.tab.set_input_files("#import-file", {"name": "x.json", "mimeType": "", "buffer": text.encode()})
        page.see("#toast-text", told)

    imports(early, "1 conversation was here already.")
    menu(page, "1 and 2", "delete")
    page.tab.wait_for_selector("#conversations li", state="detached")
    imports(early, "Imported 1 conversation.")
    page.tab.click("#conversations a")
    page.see(".prose", "1 plus 2 is 3.")
    imports(late, "Updated 1 conversation.")
    page.see(".prose", "3 plus 4 is 7.")
    other = json.loads(early)
    other["conversations"][0]["messages"][1]["id"] = "0" * 24
    imports(json.dumps(other), "Imported 1 conversation.")
    page.until("document.querySelectorAll('#conversations li').length === 2")
    assert page.texts(".question-text") == ["1 and 2", "3 and 4"]


def test_a_found_message_is_shown(page: ChatPage, stub: Stub) -> None:
    """Also where another branch is shown."""
    stub.answers["which?"] = "The hidden needle."
    page.ask("which?")
    stub.answers["which?"] = "Another."
    page.tab.click(".answer .again")
    page.see(".prose", "Another.")
    page.ask("long")
    page.new_chat()
    page.tab.fill("#search", "NEEDLE")
    page.see("#conversations mark", "needle")
    page.tab.click("#conversations a")
    page.see(".prose", "The hidden needle.")
    assert "/" not in page.tab.url.partition("#/c/")[2]


def test_conversations_are_listed_by_date(page: ChatPage) -> None:
    script = """async () => {
        const { dateHeading } = await import("/static/js/sidebar.js");
        const at = (day, hour) => new Date(2026, 2, day, hour).getTime();
        const times = [[15, 0], [14, 23], [13, 9], [8, 0], [7, 23], [-15, 1], [-40, 1]];
        return times.map(([day, hour]) => dateHeading(at(day, hour), at(15, 1)));
      }"""
    days = ["Today", "Yesterday", "Previous 7 days", "Previous 7 days", "Previous 30 days", "Previous 30 days"]
    assert page.run(script) == [*days, "January 2026"]
    page.ask("1 and 2")
    page.see("#conversations h2", "Today")


def test_folders(page: ChatPage) -> None:
    page.ask("1 and 2")
    page.new_chat()
    page.ask("3 and 4")
    menu(page, "1 and 2", "folder")
    page.tab.keyboard.type("Sums")
    page.tab.keyboard.press("Enter")
    page.see(".folder summary", "Sums")
    assert page.texts(".folder .title") == ["1 and 2"]
    page.tab.click(".folder summary")
    page.tab.reload()
    page.see("#conversations .title", "3 and 4")
    assert titles(page) == ["", "3 and 4"], "a closed folder stays closed"
    page.tab.fill("#search", "1 and 2")
    page.see("#conversations .title", "1 and 2")
    page.tab.fill("#search", "")
    page.tab.click(".folder summary")
    menu(page, "1 and 2", "folder")
    assert page.run("document.activeElement.value") == "Sums"
    page.tab.keyboard.press("Delete")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_selector(".folder", state="detached")
    assert titles(page) == ["3 and 4", "1 and 2"]


@pytest.mark.parametrize("size", SIZES)
def test_the_list_begins_with_a_new_chat(page: ChatPage, size: str) -> None:
    page.tab.set_viewport_size(SIZES[size])
    page.ask("1 and 2")
    if size == "phone":
        page.tab.click("#toggle-sidebar")
    else:
        assert not page.tab.is_visible("#new-chat")
    page.tab.click("#new-in-list")
    page.tab.wait_for_selector("#welcome", state="visible")
    assert page.tab.is_visible("#new-in-list") == (size == "desktop")


def test_escape_closes_what_is_open_and_nothing_else(page: ChatPage) -> None:
    page.tab.set_viewport_size(SIZES["phone"])
    page.ask("1 and 2")
    page.tab.click("#toggle-sidebar")
    menu(page, "1 and 2", "rename")
    page.tab.keyboard.press("Escape")
    page.tab.wait_for_selector("input.rename", state="detached")
    assert page.run("document.body.dataset.sidebar") == "open"
    page.tab.keyboard.press("Escape")
    assert page.run("[document.body.dataset.sidebar, document.activeElement.id]") == ["closed", "toggle-sidebar"]
    page.tab.set_viewport_size(SIZES["desktop"])
    page.tab.keyboard.press("Escape")
    assert page.run("document.body.dataset.sidebar") == "open", "beside the conversation, the list stays"


def test_a_file_of_something_else_is_refused(page: ChatPage) -> None:
    for content in ("not JSON", "[]", json.dumps({"format": "quire-conversations", "conversations": 3})):
        page.tab.set_input_files("#import-file", {"name": "x.json", "mimeType": "", "buffer": content.encode()})
        page.see("#toast-text", "x.json cannot be imported")
        page.run("document.querySelector('#toast').hidden = true")
    assert page.tab.locator("#conversations li").count() == 0


def test_several_tabs_agree(page: ChatPage, context: Any) -> None:
    page.ask("1 and 2")
    other = ChatPage(context.new_page()).open(page.tab.url)
    other.see(".prose", "1 plus 2 is 3.")
    other.ask("3 and 4")
    page.see(".prose", "3 plus 4 is 7.")
    page.ask("5 and 6")
    other.see(".prose", "5 plus 6 is 11.")
    menu(other, "1 and 2", "delete")
    page.tab.wait_for_selector("#welcome", state="visible")


def test_a_question_asked_while_another_tab_writes(page: ChatPage, stub: Stub) -> None:
    """It is neither lost nor asked without what was said before."""
    page.ask("1 and 2")
    for i in range(12):  # the other tab writes shortly before the question, at the same time, or after it
        page.run(
            """(milliseconds) => {
              const channel = new BroadcastChannel("quire");
              setTimeout(() => channel.postMessage(location.hash.slice(4)), Math.max(-milliseconds, 0));
              setTimeout(() => {
                document.querySelector("#prompt").value = "1 and 2";
                document.querySelector("#prompt").dispatchEvent(new Event("input"));
                document.querySelector("#prompt").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
              }, Math.max(milliseconds, 0));
            }""",
            (i - 4) / 2,
        )
        page.tab.locator(".turn.question").nth(i + 1).wait_for()
        page.wait("done")
        assert len(stub.requests[-1]["messages"]) == 2 * i + 3


def test_an_address_of_no_conversation_is_a_new_chat(page: ChatPage, url: str) -> None:
    page.tab.goto(f"{url}#/c/0123456789abcdef01234567")
    page.tab.wait_for_selector("#welcome", state="visible")
    assert page.tab.url == f"{url}#/"


MAY_LEAVE = "dispatchEvent(new Event('beforeunload', { cancelable: true }))"


def test_a_browser_without_room(page: ChatPage) -> None:
    """Questions are answered, the user is told once, and nothing is lost while the page is open, or once there is
    room.
    """
    page.run("""() => {
      const put = IDBObjectStore.prototype.put;
      window.full = true;
      IDBObjectStore.prototype.put = function (...all) {
        const request = put.apply(this, all);
        if (window.full) queueMicrotask(() => { try { this.transaction.abort(); } catch {} });
        return request;
      };
      const error = Object.getOwnPropertyDescriptor(IDBTransaction.prototype, "error");
      Object.defineProperty(IDBTransaction.prototype, "error", {
        get() { return window.full ? new DOMException("full", "QuotaExceededError") : error.get.call(this); },
      });
    }""")
    page.ask("1 and 2")
    page.see("#toast-text", "lost when you close the page")
    with page.tab.expect_download() as download:
        page.tab.click("#toast-action")
    exported = json.loads(Path(download.value.path()).read_text())
    assert exported["conversations"][0]["messages"][0]["content"] == "1 and 2"
    page.ask("5 and 6")
    assert not page.tab.is_visible("#toast")
    assert not page.run(MAY_LEAVE)
    page.new_chat()
    page.ask("3 and 4")
    page.see("#conversations a", "1 and 2")
    assert titles(page) == ["3 and 4", "1 and 2"]
    page.tab.fill("#search", "5 plus 6")
    page.until("document.querySelectorAll('#conversations a').length === 1")
    assert titles(page) == ["1 and 2"]
    page.run("window.full = false")
    page.tab.click("#conversations a >> text=1 and 2")
    page.see(".prose", "5 plus 6 is 11.")
    page.ask("7 and 8")
    page.tab.fill("#search", "")
    menu(page, "3 and 4", "delete")
    page.until("document.querySelectorAll('#conversations a').length === 1")
    assert page.run(MAY_LEAVE)
    page.tab.reload()
    page.see(".prose", "7 plus 8 is 15.")
    assert page.texts(".question-text") == ["1 and 2", "5 and 6", "7 and 8"]
    assert titles(page) == ["1 and 2"]


def test_a_browser_that_blocks_storage(context: Any, url: str) -> None:
    context.add_init_script("""
      const refuse = () => { throw new DOMException("denied", "SecurityError"); };
      for (const name of ["localStorage", "sessionStorage"]) Object.defineProperty(window, name, { get: refuse });
      IDBFactory.prototype.open = refuse;
    """)
    page = ChatPage(context.new_page()).open(url)
    page.tab.set_viewport_size({"width": 390, "height": 800})
    page.ask("1 and 2")
    page.see("#toast-text", "SecurityError")
    box = page.tab.locator("#toast").bounding_box()
    assert 0 < box["x"] < box["x"] + box["width"] < 390
    page.tab.set_viewport_size({"width": 1280, "height": 860})
    first = page.tab.url
    page.new_chat()
    page.ask("3 and 4")
    page.tab.click("#conversations a >> text=1 and 2")
    page.see(".prose", "1 plus 2 is 3.")
    assert page.tab.url == first
