"""Markdown on the chat page: what it looks like, that it runs nothing, and that long answers stay smooth."""

from __future__ import annotations

import pytest

from tests.support.chat_page import ChatPage
from tests.support.page_stub import RICH, Stub

pytestmark = pytest.mark.heavy

RENDER = """async (texts) => {
    const { MarkdownView } = await import("/static/js/markdown.js");
    const draw = (text, streamed) => {
      const box = document.createElement("div");
      const view = new MarkdownView(box, "x");
      for (let end = 1; streamed && end <= text.length; end++) view.update(text.slice(0, end), false);
      view.update(text, true);
      return box.innerHTML.replace(/ (dir|tabindex|target|rel)="[^"]*"/g, "");
    };
    await Promise.all([import("/static/vendor/highlight.js"), import("/static/vendor/temml.js")]);
    draw("```js\\nx\\n```\\n\\n\\\\(x\\\\)", false);
    await new Promise((resume) => setTimeout(resume));
    return texts.map((text) => [draw(text, false), draw(text, true)]);
  }"""

MARKDOWN = {
    "plain\nlines": "<p>plain<br>\nlines</p>",
    "a **b *c* d** _e_ snake_case_name": "<p>a <strong>b <em>c</em> d</strong> <em>e</em> snake_case_name</p>",
    "~~f~~ ***g***": "<p><s>f</s> <em><strong>g</strong></em></p>",
    "2 * 3 * 4 and **open": "<p>2 * 3 * 4 and **open</p>",
    "`a*b*` ``c`d`` \\*no\\*": "<p><code>a*b*</code> <code>c`d</code> *no*</p>",
    "# Title #\n---\n> q\n> r": "<h3>Title</h3><hr><blockquote><p>q<br>\nr</p></blockquote>",
    "- a\n- b\n  - c\n\nend": '<ul><li><p class="tight">a</p></li><li><p class="tight">b</p>'
    '<ul><li><p class="tight">c</p></li></ul></li></ul><p>end</p>',
    "3. a\n4. b": '<ol start="3"><li><p class="tight">a</p></li><li><p class="tight">b</p></li></ol>',
    "| a | b |\n|---|:-:|\n| 1 | **2** |": '<div class="table"><table><thead><tr><th>a</th>'
    '<th class="align-center">b</th></tr></thead><tbody><tr><td>1</td>'
    '<td class="align-center"><strong>2</strong></td></tr></tbody></table></div>',
    "<i>x</i> &amp;": "<p>&lt;i&gt;x&lt;/i&gt; &amp;</p>",
    "see https://example.org/a_b.": '<p>see <a href="https://example.org/a_b">https://example.org/a_b</a>.</p>',
    "![a cat](https://example.org/cat.png)": '<p><a href="https://example.org/cat.png">a cat</a></p>',
    "[a][1] and after\n\n[1]: https://example.org/": '<p><a href="https://example.org/">a</a> and after</p>',
    "it costs $5 or $6": "<p>it costs $5 or $6</p>",
    "```\nx < y\n```": '<div class="code"><div class="code-head"><span>text</span>'
    '<button type="button" class="copy-code">Copy</button></div><pre><code>x &lt; y</code></pre></div>',
}


def test_markdown_is_the_same_whole_and_streamed(page: ChatPage) -> None:
    results = page.run(RENDER, list(MARKDOWN))
    for (text, expected), (whole, streamed) in zip(MARKDOWN.items(), results, strict=True):
        assert whole.replace("\n<", "<").strip() == expected.replace("\n<", "<"), text
        assert streamed == whole, text


def test_a_list_with_some_tasks_keeps_its_bullets(page: ChatPage, stub: Stub) -> None:
    stub.answers["list"] = "- [x] done\n- a plain item\n- [ ] to do"
    page.ask("list")
    styles = page.run("[...document.querySelectorAll('.prose li')].map((li) => getComputedStyle(li).listStyleType)")
    assert styles == ["none", "disc", "none"]
    lefts = page.run("[...document.querySelectorAll('.prose li p')].map((p) => p.getBoundingClientRect().left)")
    assert max(lefts) - min(lefts) < 24


def test_formulas_code_tasks_and_footnotes(page: ChatPage, stub: Stub) -> None:
    stub.answers["all"] = RICH + "\n\n\\[ e^{i\\pi} + 1 = 0 \\]"
    page.ask("all")
    page.tab.wait_for_selector(".hljs-keyword")
    page.until("document.querySelectorAll('.prose math').length === 3")
    assert page.tab.locator(".prose math[display=block]").count() == 2
    assert page.texts(".hljs-keyword") == ["def", "return"]
    boxes = "[...document.querySelectorAll('.prose input')].map((box) => [box.checked, box.disabled])"
    assert page.run(boxes) == [[True, True], [False, True]]
    address = page.tab.url
    page.tab.click(".footnote-ref a >> nth=0")
    page.see(".footnotes", "Efficient Memory Management")
    assert page.tab.url == address  # which names the conversation


def test_words_do_not_break_inside_cells(page: ChatPage, stub: Stub) -> None:
    page.tab.set_viewport_size({"width": 390, "height": 844})
    page.ask("a table")
    lines = """[...document.querySelectorAll('th')].slice(0, 1).map((cell) => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return range.getClientRects().length;
      })"""
    assert page.run(lines) == [1]  # “Strategy”
    assert page.run(
        "document.querySelector('#scroller').scrollWidth <= document.querySelector('#scroller').clientWidth"
    )


VECTORS = [
    "<script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    "<svg onload=window.hit=1>",
    "<svg><script>window.hit=1</script></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hit=1>",
    '<iframe srcdoc="<script>parent.hit=1</script>"></iframe>',
    "<details open ontoggle=window.hit=1>x</details>",
    "<input autofocus onfocus=window.hit=1>",
    '<a href="javascript:window.hit=1">click</a>',
    "[click](javascript:window.hit=1)",
    "[click](JaVaScRiPt:window.hit=1)",
    "[click](java\nscript:window.hit=1)",
    "[click](data:text/html,<script>window.hit=1</script>)",
    "[click](vbscript:window.hit=1)",
    "<javascript:window.hit=1>",
    '![x](x"onerror="window.hit=1)',
    '[click](https://example.org/"onclick="window.hit=1)',
    "[x]: javascript:window.hit=1\n\n[x]",
    "```<img/src=x/onerror=window.hit=1>\n</code><img src=x onerror=window.hit=1>\n```",
    "```html\n<img src=x onerror=window.hit=1><script>window.hit=1</script>\n```",
    "\\(\\href{javascript:window.hit=1}{click}\\)",
    "$$\\includegraphics[alt=x]{https://example.org/x.png}$$",
    '\\(\\class{x" onmouseover="window.hit=1}{x}\\) \\(\\style{x:expression(window.hit=1)}{x}\\)',
    "[^x]\n\n[^x]: <img src=x onerror=window.hit=1> [click](javascript:window.hit=1)",
    "| <img src=x onerror=window.hit=1> |\n|---|\n| [c](javascript:window.hit=1) |",
    '<form action="javascript:window.hit=1"><button>click</button></form><style>*{display:none}</style>',
]


def test_hostile_text_runs_nothing(page: ChatPage, stub: Stub) -> None:
    assert len(VECTORS) >= 18
    stub.answers["all"] = "\n\n".join(VECTORS)
    page.ask("all")
    for vector in VECTORS:
        stub.answers["one"] = vector
        page.new_chat()
        page.ask("one")
    page.run("document.querySelectorAll('.prose a').forEach((each) => each.removeAttribute('target') || each.click())")
    forbidden = "script, img, iframe, svg:not(.icon), object, embed, form:not(#form), style, link:not(head link)"
    for address in page.run("[...document.querySelectorAll('#conversations a')].map((each) => each.hash)"):
        page.run("(hash) => { location.hash = hash; }", address)
        page.tab.wait_for_selector(f"#conversations a[aria-current][href='{address}']")
        page.run("document.querySelectorAll('.prose *').forEach((each) => each.dispatchEvent(new Event('mouseover')))")
        assert page.tab.locator(f"#log :is({forbidden})").count() == 0
        addresses = page.run("[...document.querySelectorAll('#log a')].map((each) => each.getAttribute('href'))")
        assert all(each.startswith(("https://example.org/", "#")) for each in addresses if each is not None)
        handlers = "[...document.querySelectorAll('#log *')].flatMap((each) => each.getAttributeNames())"
        assert not [name for name in page.run(handlers) if name.startswith("on")]
    assert page.run("window.hit") is None


def test_titles_and_file_names_are_text_too(page: ChatPage) -> None:
    hostile = "<img src=x onerror=window.hit=1>"
    page.tab.set_input_files("#file", {"name": f"{hostile}.txt", "mimeType": "text/plain", "buffer": hostile.encode()})
    page.set(system=hostile)
    page.ask(hostile)
    page.see("#conversations a", hostile)
    assert page.tab.locator("main img, aside img").count() == 0
    assert page.run("window.hit") is None


HARD = [
    "*",
    "[",
    "> ",
    "`a",
    "**a ",
    "- ",
    "_a_",
    "| ",
    "\\",
    "<",
    "![",
    "](",
    "$a",
    "\\(",
    "1. ",
    "[^a]",
    "#",
    "~~",
    "&",
]


def test_hostile_markdown_takes_no_time(page: ChatPage) -> None:
    script = """async (texts) => {
        const { MarkdownView } = await import("/static/js/markdown.js");
        return texts.map((text) => {
          const start = performance.now();
          new MarkdownView(document.createElement("div"), "x").update(text, true);
          return performance.now() - start;
        });
      }"""
    assert max(page.run(script, [text * 5000 for text in HARD])) < 10_000


@pytest.mark.parametrize("opener", ["\u202e", "\u202b", "\u2067"])
def test_unbalanced_direction_overrides_stay_inside_their_answer(page: ChatPage, stub: Stub, opener: str) -> None:
    stub.answers["turn"] = f"abc {opener} def"
    page.ask("turn")
    page.ask(f"me {opener} too")
    mirrored = """(selector) => {
        const element = document.querySelector(selector), range = document.createRange();
        const text = document.createTreeWalker(element, NodeFilter.SHOW_TEXT).nextNode();
        const left = (at) => (range.setStart(text, at), range.setEnd(text, at + 1), range.getBoundingClientRect().left);
        return left(0) > left(1);
      }"""
    for selector in (".stats", ".brand span", "#keys kbd", "#model-name", ".failure + .meta .stats"):
        assert not page.run(mirrored, selector), selector


def test_right_to_left_text_has_its_direction(page: ChatPage, stub: Stub) -> None:
    stub.answers["hi"] = "שלום עולם\n\nhello\n\n- مرحبا\n- abc"
    page.ask("hi")
    directions = "[...document.querySelectorAll('.prose > p, .prose p')].map((p) => getComputedStyle(p).direction)"
    assert page.run(directions) == ["rtl", "ltr", "rtl", "ltr"]


def test_a_long_answer_leaves_alone_what_is_finished(page: ChatPage, stub: Stub) -> None:
    page.run("""() => {
        window.work = { added: 0, disturbed: 0 };
        new MutationObserver((changes) => {
          for (const { target, addedNodes, removedNodes, nextSibling } of changes) {
            if (!target.matches(".prose")) continue;
            work.added += addedNodes.length;
            if (nextSibling !== null) work.disturbed += removedNodes.length;
          }
        }).observe(document.querySelector("#log"), { childList: true, subtree: true });
      }""")
    page.ask("endless 20000")
    assert page.tab.locator(".prose > *").count() > 300
    # Only the newest block is ever made anew, so that a frame costs the same at the end as at the beginning.
    work = page.run("window.work")
    assert work["added"] > 300
    assert work["disturbed"] == 0
