"""The chat page: what its files may hold, and what it does in a real browser when one is installed."""

import itertools
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

STATIC = Path(__file__).resolve().parents[2] / "server" / "static"
STUB = Path(__file__).resolve().parents[1] / "support" / "page_stub.py"
FILES = {path.name: path.read_text() for path in sorted(STATIC.iterdir())}
SCRIPTS = "\n".join(text for name, text in FILES.items() if name.endswith(".js"))
HTML = FILES["index.html"]


# ---- the files ------------------------------------------------------------------------------------------------------


def test_every_address_is_on_this_server() -> None:
    for name, text in FILES.items():
        without_namespaces = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", without_namespaces), name


def test_referenced_files_exist() -> None:
    names = re.findall(r'(?:src|href)="static/([^"]+)"', HTML) + re.findall(r'from "\./([^"]+)"', SCRIPTS)
    assert {"chat.js", "chat.css", "sse.js"} <= set(names) <= set(FILES)


def test_no_inline_code_so_that_a_strict_policy_holds() -> None:
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son[a-z]+=", HTML)
    assert "default-src 'none'" in HTML


def test_model_text_never_becomes_markup() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", SCRIPTS)


def test_ids_in_the_script_exist_once_in_the_page() -> None:
    ids = re.findall(r'\sid="([^"]+)"', HTML)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("([^"]+)"\)', SCRIPTS)) <= set(ids)
    assert set(re.findall(r'(?:\sfor|aria-describedby|aria-labelledby|href)="#?([a-z-]+)"', HTML)) <= set(ids)


def test_the_page_is_small() -> None:
    assert sum(len(text.encode()) for text in FILES.values()) < 60_000


# ---- in a browser ---------------------------------------------------------------------------------------------------


LOADED = "!!document.querySelector('#status-dot:not([data-status=connecting])')"

# The browser reads commands from descriptor 3 and answers on 4.
WITH_PIPE = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3])
os.dup2(commands, 3), os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """Headless Chromium with one tab, driven by the DevTools protocol over its pipe."""

    def __init__(self, program: str, profile: Path) -> None:
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        flags += f" --disable-component-update --disable-sync --remote-debugging-pipe --user-data-dir={profile}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", WITH_PIPE, str(command_read), str(answer_write), program, *flags.split()],
            pass_fds=(command_read, answer_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._ids = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"id": next(self._ids), "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._next_message(deadline)
            if answer.get("id") == message["id"]:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next_message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            assert data, "the browser does not answer"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(timeout=30)

    def run(self, script: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + 30
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never came true: {condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.05)

    def press(self, key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({selector!r}).click()")

    # the page's own verbs

    def open(self, url: str) -> None:
        self.send("Page.navigate", url="about:blank")
        self.send("Storage.clearDataForOrigin", origin=url.rstrip("/"), storageTypes="local_storage")
        self.send("Page.navigate", url=url)
        self.wait(f"location.href === {url!r} && {LOADED}")

    def reload(self) -> None:
        self.run("window.before = true")
        self.send("Page.reload")
        self.wait(f"!window.before && {LOADED}")

    def ask(self, question: str, until: str | None = "done") -> None:
        self.run("document.querySelector('#prompt').focus()")
        self.send("Input.insertText", text=question)
        self.press("Enter", 13)
        if until:
            self.wait(f"document.querySelector('.turn:last-child')?.dataset.state === {until!r}")

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({selector!r}).innerText")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium installed")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def serve_stub(*flags: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(STUB), "--port", str(port), *flags])
    url = f"http://127.0.0.1:{port}/"
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(url)
            break
        except httpx.TransportError:
            assert process.poll() is None, "the stub died"
            assert time.monotonic() < deadline, "the stub does not answer"
            time.sleep(0.1)
    yield url
    process.terminate()
    process.wait(timeout=30)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    yield from serve_stub("--delay", "0.005")


@pytest.fixture(scope="module")
def locked_url() -> Iterator[str]:
    yield from serve_stub("--delay", "0", "--api-key", "sesame")


@pytest.fixture
def page(browser: Browser, url: str) -> Browser:
    browser.open(url)
    return browser


def test_an_answer_streams_into_the_page(page: Browser) -> None:
    assert page.text("#model-name") == "quire-demo"
    assert page.run("document.activeElement.id") == "prompt"
    page.ask("What is paged attention?", until="streaming")
    assert page.run("document.querySelector('#send').hidden && !document.querySelector('#stop').hidden")
    page.wait("document.querySelector('.turn').dataset.state === 'done'")
    shape = "[...document.querySelectorAll('.prose > *')].map((node) => node.className || node.tagName).join(' ')"
    assert page.run(shape) == "P OL code P"
    assert page.run("document.querySelectorAll('.prose > ol > li').length") == 3
    assert page.text(".prose pre").endswith(
        "    return block_table[position // block_size] * block_size + position % block_size"
    )
    assert re.fullmatch(r"[\d,]+ tokens · [\d,.]+ tokens/s · first after \d+\.\d\d s", page.text(".stats"))
    assert page.run("document.querySelector('#announcer').textContent").startswith("A **paged** KV cache")


def test_the_model_sees_the_conversation_and_the_settings(page: Browser) -> None:
    page.ask("What is 2 plus 3?")
    page.ask("refuse this", until="failed")
    page.click("#open-settings")
    page.run("document.querySelector('#system').focus()")
    page.send("Input.insertText", text="Be kind.")
    page.press("Escape", 27)
    page.ask("echo")
    assert json.loads(page.text(".turn:last-child pre")) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What is 2 plus 3?"},
        {"role": "assistant", "content": "2 plus 3 is **5**."},
        {"role": "user", "content": "echo"},
    ]
    page.click("#open-settings")
    page.run("document.querySelector('#max-tokens').focus()")
    page.send("Input.insertText", text="2")
    page.press("Escape", 27)
    page.ask("a story")
    assert page.text(".turn:last-child .stats").startswith("2 tokens")


def test_thoughts_are_folded_away(page: Browser) -> None:
    page.ask("think about paged attention", until="streaming")
    page.wait("document.querySelector('.thinking-text').textContent.length > 40")
    assert page.text(".thinking-label") == "Thinking"
    page.wait("document.querySelector('.turn').dataset.state === 'done'")
    assert page.text(".thinking-label") == "Thoughts"
    assert page.text(".prose").startswith("A paged KV cache")
    assert not page.run("document.querySelector('.thinking').open")
    page.click(".thinking-label")
    assert page.text(".thinking-text").startswith("The user wants to know")
    page.ask("echo")
    assert json.loads(page.text(".turn:last-child pre"))[1]["content"].startswith("A **paged** KV cache")


def test_stop_keeps_what_was_written(page: Browser) -> None:
    page.ask("long", until="streaming")
    page.press("Escape", 27)
    page.wait("document.querySelector('.turn').dataset.state === 'stopped'")
    assert 0 < page.run("document.querySelector('.prose').innerText.length") < 4000
    page.ask("1 and 2")
    assert page.text(".turn:last-child .prose") == "1 plus 2 is 3."


def test_regenerate_writes_the_last_answer_again(page: Browser) -> None:
    page.ask("1 and 2")
    page.click(".turn:last-child .again")
    page.wait("document.querySelector('.turn').dataset.state === 'done'")
    assert page.run("document.querySelectorAll('.turn').length") == 1
    assert page.text(".prose") == "1 plus 2 is 3."


def test_errors_are_shown_where_they_happened(page: Browser) -> None:
    page.ask("refuse", until="failed")
    assert "maximum context length is 2048" in page.text(".failure-text")
    page.ask("break a story", until="failed")
    assert page.text(".turn:last-child .failure-text") == "The engine stopped."
    assert page.text(".turn:last-child .prose").startswith("Mira kept the lighthouse")

    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.send("Network.enable")
    page.send("Network.emulateNetworkConditions", offline=True, **offline)
    page.ask("anyone there?", until="failed")
    assert "cannot be reached" in page.text(".turn:last-child .failure-text")
    page.wait("document.querySelector('#status-dot').dataset.status === 'offline'")
    page.send("Network.emulateNetworkConditions", offline=False, **offline)
    page.wait("document.querySelector('#status-dot').dataset.status === 'ready'")
    page.click(".turn:last-child .retry")
    page.wait("document.querySelector('.turn:last-child').dataset.state === 'done'")
    page.send("Network.disable")


def test_a_key_is_asked_for_only_when_the_server_wants_one(page: Browser, locked_url: str) -> None:
    assert page.run("document.querySelector('#key-row').hidden")
    page.open(locked_url)
    page.wait("document.querySelector('#settings').open && document.activeElement.id === 'api-key'")
    page.send("Input.insertText", text="sesame")
    page.press("Escape", 27)
    page.wait("document.querySelector('#status-dot').dataset.status === 'ready'")
    page.ask("1 and 2")
    assert page.text(".prose") == "1 plus 2 is 3."


def test_the_conversation_survives_a_reload_and_new_chat_can_be_undone(page: Browser) -> None:
    page.ask("1 and 2")
    page.reload()
    assert page.text(".question-text") == "1 and 2"
    assert page.text(".prose") == "1 plus 2 is 3."
    page.click("#new-chat")
    assert page.run("!document.querySelector('.turn') && !document.querySelector('#welcome').hidden")
    page.click("#undo")
    assert page.text(".prose") == "1 plus 2 is 3."


def test_only_the_conversation_scrolls(page: Browser) -> None:
    page.ask("long")
    page.ask("long")
    assert page.run("document.querySelector('#scroller').scrollHeight > innerHeight")
    assert page.run("document.documentElement.scrollHeight === innerHeight")


def test_a_reader_who_scrolled_up_is_left_alone(page: Browser) -> None:
    page.ask("long", until="streaming")
    page.wait("document.querySelector('#scroller').scrollTop > 300")
    page.run("document.querySelector('#scroller').scrollTop -= 250")
    page.wait("!document.querySelector('#to-latest').hidden")
    before = page.run("document.querySelector('#scroller').scrollTop")
    page.wait("document.querySelector('.turn').dataset.state === 'done'")
    assert page.run("document.querySelector('#scroller').scrollTop") == before
    page.click("#to-latest")
    page.wait("document.querySelector('#to-latest').hidden")


def test_nothing_sticks_out_on_a_phone(page: Browser) -> None:
    page.send("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    page.ask("What is paged attention?")
    page.ask("x" * 300)
    wide = "[document.documentElement, document.querySelector('#scroller')].some((e) => e.scrollWidth > e.clientWidth)"
    assert not page.run(wide)
    page.send("Emulation.clearDeviceMetricsOverride")


def test_model_text_stays_text(page: Browser) -> None:
    page.ask("hostile")
    assert page.run("document.querySelectorAll('.prose img, .prose b').length") == 0
    assert page.run("[...document.querySelectorAll('.prose a')].map((a) => a.href)") == ["https://example.org/"]
    assert page.run("document.title") == "quire-demo · Quire"


def test_events_parse_wherever_the_network_cuts_them(page: Browser) -> None:
    stream = ": hello\n\ndata: one\n\ndata:two\r\ndata: three\r\n\r\nevent: x\rid: 1\r\rdata\rdata:  é\r\r: end\n\n"
    script = """
      import("/static/sse.js").then(({ EventParser }) => {
        const text = %s, seen = new Set();
        for (let i = 0; i <= text.length; i++) for (let j = i; j <= text.length; j++) {
          const parser = new EventParser();
          const parts = [text.slice(0, i), text.slice(i, j), text.slice(j)];
          seen.add(JSON.stringify(parts.flatMap((part) => parser.push(part))));
        }
        return [...seen];
      })"""
    assert page.run(script % json.dumps(stream)) == ['["one","two\\nthree","\\n é"]']


MARKDOWN = {
    "plain\nlines": "<p>plain<br>lines</p>",
    "a **b *c* d** _e_ snake_case_name": "<p>a <strong>b <em>c</em> d</strong> <em>e</em> snake_case_name</p>",
    "~~f~~ ***g***": "<p><del>f</del> <strong><em>g</em></strong></p>",
    "2 * 3 * 4 and **open": "<p>2 * 3 * 4 and **open</p>",
    "`a*b*` ``c`d`` \\*no\\*": "<p><code>a*b*</code> <code>c`d</code> *no*</p>",
    "# Title #\n---\n> q\n> r": "<h3>Title</h3><hr><blockquote><p>q<br>r</p></blockquote>",
    "- a\n- b\n  - c\n\nend": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>end</p>",
    "3. a\n   - b\n4. c": '<ol start="3"><li>a<ul><li>b</li></ul></li><li>c</li></ol>',
    "| a | b |\n|---|:-:|\n| 1 | **2** |": '<div class="table"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
    "<tbody><tr><td>1</td><td><strong>2</strong></td></tr></tbody></table></div>",
    "<i>x</i> &amp;": "<p>&lt;i&gt;x&lt;/i&gt; &amp;amp;</p>",
}


def test_markdown(page: Browser) -> None:
    script = """
      import("/static/markdown.js").then(({ renderMarkdown }) => %s.map((text) => {
        const whole = document.createElement("div"), streamed = document.createElement("div");
        renderMarkdown(whole, text);
        for (let end = 1; end <= text.length; end++) renderMarkdown(streamed, text.slice(0, end));
        return [whole.innerHTML, streamed.innerHTML];
      }))"""
    results = page.run(script % json.dumps(list(MARKDOWN)))
    for (text, expected), (whole, streamed) in zip(MARKDOWN.items(), results, strict=True):
        assert whole == expected, text
        assert streamed == expected, text


def test_hostile_markdown_takes_no_time(page: Browser) -> None:
    texts = [
        "*" * 5000,
        "[" * 5000,
        "> " * 5000,
        "`a" * 5000,
        "**a " * 5000,
        "- " * 5000,
        "_a_" * 5000,
        "| " * 5000,
        "\\" * 5000,
    ]
    script = """
      import("/static/markdown.js").then(({ renderMarkdown }) => %s.map((text) => {
        const start = performance.now();
        renderMarkdown(document.createElement("div"), text);
        return performance.now() - start;
      }))"""
    assert max(page.run(script % json.dumps(texts))) < 2000
