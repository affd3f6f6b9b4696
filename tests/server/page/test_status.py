"""The server's status on the page: the dot in the header, and the panel behind it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chat_page import SIZES, ChatPage
from tests.support.page_stub import Stub

pytestmark = pytest.mark.heavy


def test_the_dot_says_what_the_engine_is_doing(context: Any, stub: Stub, url: str) -> None:
    stub.ready = {"phase": "loading", "fraction": 0.42, "seconds_left": 12.3}
    page = ChatPage(context.new_page()).open(url, until="waiting")
    assert page.texts("#model-name") == ["Loading the model 42 %, about 13 s left"]
    stub.ready = {"phase": "ready"}
    page.wait_for_status("ready")
    assert page.texts("#model-name") == ["quire-demo"]
    stub.ready = {"phase": "dead", "fraction": None, "seconds_left": None}
    page.look()
    page.wait_for_status("offline")
    assert page.texts("#model-name") == ["The engine has stopped"]
    stub.ready = {"phase": "capturing", "fraction": None, "seconds_left": 200, "num_restarts": 1}
    page.look()
    page.wait_for_status("waiting")
    assert page.texts("#model-name") == ["Restarting: Capturing CUDA graphs, about 3 min left"]


@pytest.mark.parametrize("size", SIZES)
def test_a_question_asked_while_the_engine_starts_is_answered_once_it_is_ready(
    context: Any, stub: Stub, url: str, size: str
) -> None:
    stub.ready = {"phase": "loading", "fraction": 0.42, "seconds_left": 12.3}
    page = ChatPage(context.new_page())
    page.tab.set_viewport_size(SIZES[size])
    page.open(url, until="waiting")
    assert page.texts("#start-text") == ["Loading the model 42 %, about 13 s left"]
    assert page.run("document.querySelector('#start-progress').value") == 0.42
    page.ask("1 and 2", until="waiting")
    page.see(".waiting-for", "Loading the model 42 %")
    stub.ready = {"phase": "compiling", "fraction": None, "seconds_left": None}
    page.see(".waiting-for", "Compiling kernels")
    assert stub.requests == []
    page.tab.keyboard.press("Escape")
    page.wait("stopped")
    page.last(".again").click()
    page.wait("waiting")
    stub.ready = {"phase": "ready"}
    page.wait("done")
    assert (page.texts(".prose"), len(stub.requests)) == (["1 plus 2 is 3."], 1)


def test_the_bundled_model_is_introduced_with_a_way_to_a_real_one(page: ChatPage, stub: Stub, url: str) -> None:
    page.see("#toy code", "quire serve Qwen/Qwen3-0.6B")
    assert not page.tab.is_visible("#start")
    stub.models = ["Qwen/Qwen3-0.6B"]
    page.open(url)
    assert not page.tab.is_visible("#toy")


def test_the_panel_shows_the_server_at_work(page: ChatPage) -> None:
    page.ask("1 and 2")
    page.tab.click("#open-status")
    page.until("document.querySelector('#plot-line').getAttribute('points').includes(' ')")
    shown = page.texts("#status-figures")[0].split("\n")
    figures = dict(zip(shown[::2], shown[1::2], strict=True))
    assert (figures["Running"], figures["Waiting"]) == ("3", "2")
    assert (figures["KV cache in use"], figures["Prefix cache hits"]) == ("25.0 %", "75.0 %")
    assert figures["Drafts accepted"] == "87.5 %"
    assert figures["Prompts not cached"] == "1,200 changed text, 12 new text"
    assert figures["Generated"] != "0 tokens/s"
    assert figures["Tokens in this chat"].endswith(" of 2,048")
    assert page.run("[...document.querySelectorAll('.links a')].map((each) => each.getAttribute('href'))") == [
        "docs",
        "metrics",
    ]


def test_a_failed_answer_shows_at_once_that_the_engine_is_gone(page: ChatPage, stub: Stub) -> None:
    page.ask("the engine dies", until="failed")
    assert page.texts(".failure-text") == ["The engine stopped and is restarting. Try again in a moment."]
    assert page.texts("#model-name") == ["Restarting, about 3 s left"]
    page.until("getComputedStyle(document.querySelector('#status-dot')).backgroundColor === 'rgb(166, 58, 43)'")
    stub.ready = {"phase": "dead", "fraction": None, "seconds_left": None}
    page.wait_for_status("offline")
    page.ask("break it", until="failed")
    assert page.last(".failure-text").inner_text().startswith("The engine has stopped.")
    stub.ready = {"phase": "ready"}
    page.ask("break it", until="failed")
    assert page.last(".failure-text").inner_text() == "The engine stopped."


def test_the_panel_of_a_server_that_is_gone_shows_no_figures(page: ChatPage, context: Any) -> None:
    page.tab.set_viewport_size(SIZES["phone"])
    page.tab.click("#open-status")
    page.see("#status-figures dd", "25.0 %")
    context.set_offline(True)
    page.see("#status-note", "cannot be reached")
    page.until("[...document.querySelectorAll('#status-figures dd')].every(({ textContent }) => textContent === '–')")
    context.set_offline(False)
    page.see("#status-figures dd", "25.0 %")
    assert page.texts("#status-note") == [""]


def test_an_idle_server_has_no_peak(page: ChatPage, stub: Stub) -> None:
    stub.growth = 0
    page.open(page.tab.url)
    page.tab.click("#open-status")
    page.see("#status-figures dd", "0 tokens/s")
    assert page.texts("#plot-most") == ["0 tokens/s"]


def test_the_plot_has_a_past_when_the_panel_is_opened(page: ChatPage) -> None:
    for _ in range(2):
        with page.tab.expect_response("**/metrics"):
            page.look()
    page.tab.click("#open-status")
    page.see("#status-figures dd", "2,048")
    assert page.run("document.querySelector('#plot-line').getAttribute('points')") != ""


def test_metrics_are_summed_over_engines_and_a_restart_is_no_negative_rate(page: ChatPage) -> None:
    script = """async () => {
        const { parseMetrics, ratesOf } = await import("/static/js/status.js");
        const text = 'vllm:num_requests_running{engine="0"} 3.0\\nvllm:num_requests_running{engine="1"} 4.0\\n' +
              'quire:prefix_misses_total{engine="0",reason="evicted"} 2.0\\n' +
              'quire:prefix_misses_total{engine="1",reason="evicted"} 1.0\\n' +
              'vllm:num_requests_running_other 9\\n# HELP vllm:prompt_tokens_total x\\nvllm:prompt_tokens_total 1e3\\n';
        const rates = ratesOf([{ at: 0, generated: 10 }, { at: 2000, generated: 50 }, { at: 4000, generated: 8 }]);
        return [parseMetrics(text), rates.map(({ generated }) => generated)];
      }"""
    assert page.run(script) == [{"running": 7, "prompt": 1000, "misses": [["evicted", 3]]}, [20, 0]]


def test_the_page_can_be_installed(page: ChatPage) -> None:
    script = """async () => {
        const manifest = await (await fetch(document.querySelector("link[rel=manifest]").href)).json();
        const base = document.querySelector("link[rel=manifest]").href;
        const icons = await Promise.all(
          manifest.icons.map(async ({ src }) => (await fetch(new URL(src, base))).status));
        return [manifest.display, new URL(manifest.start_url, base).pathname, icons];
      }"""
    assert page.run(script) == ["standalone", "/", [200, 200, 200]]
