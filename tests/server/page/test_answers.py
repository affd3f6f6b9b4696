"""Asking and answering on the chat page, in a real browser."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.chat_page import SIZES, ChatPage
from tests.support.page_stub import Stub

pytestmark = pytest.mark.heavy


def test_an_answer_streams_into_the_page(page: ChatPage, stub: Stub) -> None:
    assert page.texts("#model-name") == ["quire-demo"]
    assert page.run("document.activeElement.id") == "prompt"
    stub.delay = 0.02
    page.ask("What is paged attention?", until="streaming")
    assert page.run("document.querySelector('#send').hidden && !document.querySelector('#stop').hidden")
    page.wait("done")
    shape = "[...document.querySelectorAll('.prose > *')].map((node) => node.className || node.tagName).join(' ')"
    assert page.run(shape) == "P OL code P"
    assert page.tab.locator(".prose > ol > li").count() == 3
    assert page.texts(".prose pre")[0].endswith("* block_size + position % block_size")
    assert re.fullmatch(r"[\d,]+ tokens · 50 tokens/s · first token after 0\.12 s", page.texts(".stats")[0])
    assert page.run("document.querySelector('#announcer').textContent").startswith("A **paged** KV cache")


def test_all_figures_of_an_answer(page: ChatPage) -> None:
    page.ask("1 and 2")
    page.last(".stats").click()
    figures = page.texts("#figures dl")[0].split("\n")
    assert dict(zip(figures[::2], figures[1::2], strict=True)) == {
        "Time to first token": "0.120 s",
        "Queued": "0.002 s",
        "Prefill": "2,000 tokens/s",
        "Decode": "50 tokens/s",
        "Prompt": "12 tokens",
        "of which cached": "8",
        "Answer": "5 tokens",
    }


def test_thoughts_are_folded_away_with_their_time(page: ChatPage) -> None:
    page.ask("think about paged attention")
    assert re.fullmatch(r"Thought for [\d.]+ s", page.texts(".thinking-label")[0])
    assert page.texts(".prose")[0].startswith("A paged KV cache")
    assert not page.run("document.querySelector('.thinking').open")
    page.tab.click(".thinking-label")
    page.see(".thinking-text p", "The user wants to know")
    page.ask("echo")
    assert json.loads(page.last("pre").inner_text())[1]["content"].startswith("A **paged** KV cache")


def test_thoughts_that_the_server_left_in_the_text(page: ChatPage, stub: Stub) -> None:
    stub.answers["why"] = "<think>Because.</think>\n\nSo **that**."
    page.ask("why")
    assert page.texts(".prose") == ["So that."]
    assert page.run("document.querySelector('.thinking-text').textContent") == "Because."


def test_reasoning_is_rendered(page: ChatPage, stub: Stub) -> None:
    stub.answers["why"] = "<think>First *this*:\n\n- one\n- two\n\n`x`</think>So."
    page.ask("why")
    page.tab.click(".thinking-label")
    assert page.texts(".thinking-text li") == ["one", "two"]
    assert page.texts(".thinking-text em") == ["this"]
    assert page.texts(".prose") == ["So."]


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (
            '{"a":[1,2.50,{}],"b":"`` x: [1] \\" ```"}',
            '{\n  "a": [\n    1,\n    2.50,\n    {}\n  ],\n  "b": "`` x: [1] \\" ```"\n}',
        ),
        ('{\n "n": 12345678901234567890 }', '{\n "n": 12345678901234567890 }'),
        ("[1] is a *reference*", None),
        ("{not} JSON", None),
    ],
)
def test_answers_in_json_are_code(page: ChatPage, stub: Stub, answer: str, shown: str | None) -> None:
    stub.answers["json"] = answer
    page.ask("json")
    if shown is None:
        assert page.tab.locator(".prose pre").count() == 0
        return
    assert page.texts(".code-head span") == ["json"]
    assert page.texts(".prose pre code") == [shown]
    page.ask("echo")
    assert json.loads(page.last("pre").inner_text())[1]["content"] == answer, "the model sees its own words"


def test_stop_keeps_what_was_written_and_continue_goes_on(page: ChatPage, stub: Stub) -> None:
    stub.delay = 0.01
    page.ask("long", until="streaming")
    page.tab.keyboard.press("Escape")
    page.wait("stopped")
    assert 0 < len(page.texts(".prose")[0]) < 4000
    stub.delay = 0
    page.tab.click(".resume")
    page.wait("done")
    assert page.texts(".prose")[0].endswith("and so it goes on.")
    body = stub.requests[-1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["messages"][-1]["role"] == "assistant"


def test_regenerate_keeps_the_alternatives(page: ChatPage, stub: Stub) -> None:
    stub.answers["who?"] = "The first."
    page.ask("who?")
    stub.answers["who?"] = "The second."
    page.tab.click(".answer .again")
    page.see(".prose", "The second.")
    assert page.texts(".answer .branches") == ["2/2"]
    page.tab.click(".answer [aria-label='Previous alternative']")
    assert page.texts(".prose") == ["The first."]
    page.ask("echo")  # what follows belongs to the alternative that is shown
    assert json.loads(page.last("pre").inner_text())[1]["content"] == "The first."


def test_editing_a_question_begins_a_branch(page: ChatPage) -> None:
    page.ask("1 and 2")
    page.ask("echo this")
    page.tab.hover(".turn.question >> nth=0")
    page.tab.click(".question .edit-button >> nth=0")
    page.tab.fill(".edit-text", "4 and 5")
    page.tab.click(".edit button[type=submit]")
    page.see(".prose", "4 plus 5 is 9.")
    assert page.texts(".question-text") == ["4 and 5"]
    page.tab.click(".question [aria-label='Previous alternative']")
    assert page.texts(".question-text") == ["1 and 2", "echo this"]


@pytest.mark.parametrize("size", SIZES)
def test_the_keys_of_the_edit_box_are_those_of_the_composer(page: ChatPage, stub: Stub, size: str) -> None:
    page.tab.set_viewport_size(SIZES[size])
    page.ask("1 and 2")
    page.tab.hover(".question-text")
    page.tab.click(".question .edit-button")
    assert page.texts(".question button:visible") == ["Cancel", "Send"]
    page.tab.keyboard.press("Escape")
    assert page.tab.is_visible(".question .copy")
    page.tab.click(".question .edit-button")
    page.tab.keyboard.press("Shift+Enter")
    page.tab.keyboard.type("and 3")
    page.tab.keyboard.press("Enter")
    page.see(".prose", "1 plus 2 plus 3 is 6.")
    assert stub.requests[-1]["messages"][-1]["content"] == "1 and 2\nand 3"


def test_editing_an_answer_changes_what_the_model_sees(page: ChatPage) -> None:
    page.ask("1 and 2")
    page.tab.click(".answer .edit-button")
    page.tab.fill(".edit-text", "It is three.")
    page.tab.click(".edit button[type=submit]")
    page.see(".prose", "It is three.")
    page.ask("echo")
    assert json.loads(page.last("pre").inner_text())[1]["content"] == "It is three."


def test_arrow_up_in_an_empty_field_edits_the_last_question(page: ChatPage) -> None:
    page.ask("1 and 2")
    page.tab.press("#prompt", "ArrowUp")
    assert page.run("document.activeElement.value") == "1 and 2"


def test_errors_are_shown_where_they_happened(page: ChatPage, context: Any) -> None:
    page.ask("refuse", until="failed")
    page.see(".failure-text", "maximum context length is 2048")
    page.ask("break a story", until="failed")
    assert page.last(".failure-text").inner_text() == "The engine stopped."
    assert page.last(".prose").inner_text().startswith("Mira kept the lighthouse")
    context.set_offline(True)
    page.ask("anyone there?", until="failed")
    assert "cannot be reached" in page.last(".failure-text").inner_text()
    page.wait_for_status("offline")
    context.set_offline(False)
    page.wait_for_status("ready")
    page.last(".retry").click()
    page.wait("done")


def test_an_answer_without_a_proper_end_is_an_error(page: ChatPage) -> None:
    page.ask("cut short", until="failed")
    assert page.last(".failure-text").inner_text() == "The answer ended before it was complete."
    page.ask("abort", until="failed")
    assert page.last(".failure-text").inner_text() == "The server ended this request early."
    assert page.last(".retry").is_visible()


def test_a_question_without_an_answer_is_left_out_of_the_prompt(page: ChatPage, stub: Stub) -> None:
    page.ask("refuse", until="failed")
    page.ask("1 and 2")
    assert [message["content"] for message in stub.requests[-1]["messages"]] == ["1 and 2"]


def test_a_text_file_goes_with_the_question(page: ChatPage, stub: Stub) -> None:
    page.tab.set_input_files("#file", {"name": "a.py", "mimeType": "text/x-python", "buffer": b"```\nprint(1)"})
    page.see(".chip bdi", "a.py")
    page.ask("echo what this is")
    assert stub.requests[-1]["messages"][0]["content"] == "a.py:\n````\n```\nprint(1)\n````\n\necho what this is"
    assert page.texts(".attachment summary") == ["a.py"]
    page.tab.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\0\0"})
    page.see("#toast-text", "a.png is not a text file")
    assert page.tab.locator(".chip").count() == 0


def test_answers_of_several_models_side_by_side(page: ChatPage, stub: Stub, url: str) -> None:
    stub.models = ["big", "small"]
    page.open(url)
    page.tab.click("#open-settings")
    page.tab.check("[name=compare][value=big]")
    page.tab.check("[name=compare][value=small]")
    page.tab.keyboard.press("Escape")
    page.ask("1 and 2")
    page.until("document.querySelectorAll('.group [data-state=done]').length === 2")
    assert page.texts(".group .model-label") == ["big", "small"]
    assert page.texts(".group .branches .count") == []  # both are seen
    assert [body["model"] for body in stub.requests] == ["big", "small"]
    page.tab.click(".group .answer >> nth=1 >> .choose")
    assert page.tab.locator(".group .answer.other .model-label").inner_text() == "big"
    page.tab.click(".group .answer >> nth=0 >> .again")
    page.until("document.querySelectorAll('.group .branches .count').length === 2")
    assert page.texts(".group .branches .count") == ["2/2", "2/2"]
    page.ask("echo")
    assert len(stub.requests[-1]["messages"]) == 3


def test_a_reader_who_scrolled_up_is_left_alone(page: ChatPage, stub: Stub) -> None:
    stub.delay = 0.005
    page.ask("long", until="streaming")
    page.until("document.querySelector('#scroller').scrollTop > 300")
    page.run("document.querySelector('#scroller').scrollTop -= 250")
    page.tab.wait_for_selector("#to-latest", state="visible")
    before = page.run("document.querySelector('#scroller').scrollTop")
    page.wait("done")
    assert page.run("document.querySelector('#scroller').scrollTop") == before
    page.tab.click("#to-latest")
    page.tab.wait_for_selector("#to-latest", state="hidden")


def test_only_the_conversation_scrolls(page: ChatPage) -> None:
    page.ask("long").ask("long")
    assert page.run("document.querySelector('#scroller').scrollHeight > innerHeight")
    assert page.run("document.documentElement.scrollHeight === innerHeight")


def test_events_parse_wherever_the_network_cuts_them(page: ChatPage) -> None:
    stream = ": hello\n\ndata: one\n\ndata:two\r\ndata: three\r\n\r\nevent: x\rid: 1\r\rdata\rdata:  é\r\r: end\n\n"
    script = """async (text) => {
        const { EventParser } = await import("/static/js/sse.js");
        const seen = new Set();
        for (let i = 0; i <= text.length; i++) for (let j = i; j <= text.length; j++) {
          const parser = new EventParser();
          const parts = [text.slice(0, i), text.slice(i, j), text.slice(j)];
          seen.add(JSON.stringify(parts.flatMap((part) => parser.push(part))));
        }
        return [...seen];
      }"""
    assert page.run(script, stream) == ['["one","two\\nthree","\\n é"]']
