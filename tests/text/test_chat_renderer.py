"""Conversations in the shapes that chat templates keep: nothing is lost, nothing refused, and each change is told."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.text.call_arguments import read_arguments
from engine.text.chat_renderer import ChatRenderer, RenderedChat
from engine.text.chat_template import ChatTemplate, ChatTemplateError
from engine.text.kept_text import lost_messages
from engine.text.message_shape import shaped
from engine.text.template_traits import CallForm, TemplateTraits
from tests.support import templates
from tests.support.conversations import (
    AGAIN,
    ALL,
    ANSWER,
    ASK,
    DEVELOPER,
    SECOND,
    SYSTEM,
    TOOL,
    call,
    called,
    result,
    said,
    texts_of,
)

PUBLISHED = Path(os.environ.get("QUIRE_TEST_TEMPLATES", "/nonexistent"))


def renderer(source: str) -> ChatRenderer:
    return ChatRenderer(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))


def render(name: str, messages: list[dict[str, Any]], **options: Any) -> RenderedChat:
    return renderer(templates.PECULIAR[name]).render(messages, **options)


def check_all_is_kept(found: ChatRenderer) -> None:
    for name, messages in ALL.items():
        for tools in (None, [TOOL]):
            rendered = found.render(messages, tools=tools)
            wanted = Counter(texts_of(messages))
            lost = [
                text for text, times in wanted.items() if rendered.text.count(text) < (times if text != "lookup" else 1)
            ]
            assert not lost, (name, bool(tools), rendered)
            assert not any("leaves out" in change for change in rendered.changes), (name, rendered)


@pytest.mark.parametrize("name", templates.ALL)
def test_no_message_is_lost_or_refused(name: str) -> None:
    check_all_is_kept(renderer(templates.ALL[name]))


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="QUIRE_TEST_TEMPLATES names no folder of chat templates")
def test_published_templates_lose_nothing() -> None:
    paths = sorted(PUBLISHED.glob("*.jinja"))
    assert paths
    for path in paths:
        check_all_is_kept(renderer(path.read_text(encoding="utf-8")))


def test_what_a_template_takes_stays_as_it_is() -> None:
    found = renderer(templates.HERMES)
    for name in (
        "two systems",
        "system later",
        "two users",
        "text beside",
        "two calls",
        "user after result",
        "cancelled",
    ):
        messages = ALL[name]
        rendered = found.render(messages)
        assert rendered.changes == ()
        assert [message["role"] for message in rendered.messages] == [message["role"] for message in messages]
    assert found.traits(False) == TemplateTraits(developer=False, calls=CallForm(result_ids=False))


@pytest.mark.parametrize(
    ("name", "messages", "text"),
    [
        ("one system", [SYSTEM, SECOND, ASK], "SYSONE\n\nSYSTWO[user]2+2?"),
        ("system first", [DEVELOPER, SYSTEM, ASK], "[system]DEVTEXT\n\nSYSONE[user]2+2?"),
        (
            "system first",
            [SYSTEM, ASK, ANSWER, SECOND, AGAIN],
            "[system]SYSONE[user]2+2?[assistant]It is 4.[user]SYSTWO[user]3+3?",
        ),
        ("system first", [SYSTEM], "[user]SYSONE"),
        ("first message only", [SYSTEM, DEVELOPER, ASK], "[instructions]SYSONE\n\nDEVTEXT[user]2+2?"),
        ("first message only", [ASK, SYSTEM], "[user]2+2?[user]SYSONE"),
        ("turns only", [SYSTEM, ASK], "<turn>user\nSYSONE\n\n2+2?"),
        ("turns only", [said("assistant", "Hello!"), ASK], "<turn>user\n<turn>assistant\nHello!<turn>user\n2+2?"),
        ("turns with calls", [ASK, AGAIN], "[user]2+2?\n\n3+3?"),
        (
            "turns with calls",
            [ASK, called(call(call_id="call00001")), result("R", "call00001"), said("user", "<reminder>")],
            '[user]2+2?[TOOL_CALLS]lookup[CALL_ID]call00001[ARGS]{"city": "Paris"}'
            "[TOOL_RESULTS]call00001[TOOL_CONTENT]R\n\n<reminder>",
        ),
        (
            "one call",
            [ASK, called(call("{}", "c1"), call("{}", "c2")), result("R2", "c2"), result("R1", "c1")],
            '<user>2+2?<assistant>{"name": "lookup", "arguments": {}}<tool>R1'
            '<assistant>{"name": "lookup", "arguments": {}}<tool>R2',
        ),
        (
            "one call",
            [ASK, called(call("{}"), text="I look."), result("R")],
            '<user>2+2?<assistant>I look.<assistant>{"name": "lookup", "arguments": {}}<tool>R',
        ),
        ("null beside calls", [ASK, called(call()), result("R")],
        '[user]2+2?<call>lookup\n{"city": "Paris"}</call>[tool]R'),
        ("arguments as text", [ASK, called(call("{}")), result()], "2+2?|CALL lookup {}|RESULT|"),
        (
            "thinking parts",
            [ASK, called(call("{}"), reasoning="WHY"), result("R")],
            "[user]2+2?[assistant][THINK]WHY[/THINK][call lookup {}][tool]R",
        ),
        ("parts", [SYSTEM, ASK], "[system]SYSONE[user]2+2?"),
        ("system in the last", [SYSTEM, ASK, ANSWER, AGAIN], "[user]2+2?[assistant]It is 4.[SYSONE][user]3+3?"),
        (
            "system in the last",
            [SYSTEM, ASK, called(call("{}")), result("R")],
            "[user]SYSONE\n\n2+2?[assistant][call lookup {}][tool]R",
        ),
    ],
)  # fmt: skip
def test_shapes(name: str, messages: list[dict[str, Any]], text: str) -> None:
    assert render(name, messages).text == text


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        ("one system", [SYSTEM, SECOND, ASK], "several are merged"),
        ("system first", [ASK, SYSTEM], "at the beginning only"),
        ("turns only", [SYSTEM, ASK], "no system message"),
        ("turns only", [ASK, AGAIN], "adjacent ones are merged"),
        ("turns only", [ASK, called(call()), result()], "became text"),
        ("turns with calls", [ASK, called(call()), result(), AGAIN], "added to the result"),
        ("turns with calls", [ASK, called(call()), AGAIN], "a missing one was added"),
        ("one call", ALL["two calls"], "one call in a message"),
        ("one call", ALL["text beside"], "no text beside calls"),
        ("first message only", ALL["text and reasoning beside"], "it became reasoning"),
        ("first message only", [ASK, result()], "without their calls"),
        ("one system", ALL["arguments cut off"], "not a JSON object"),
    ],
)
def test_changes_are_told(name: str, messages: list[dict[str, Any]], words: str) -> None:
    changes = render(name, messages).changes
    assert any(words in change for change in changes), changes


def test_results_without_ids_follow_in_the_order_of_their_calls() -> None:
    given = ALL["two calls, results in another order"]
    rendered = renderer(templates.HERMES).render(given)
    assert rendered.text == renderer(templates.HERMES).render(ALL["two calls"]).text
    assert rendered.text.index("R1") < rendered.text.index("R2")
    assert any("in the order of their calls" in change for change in rendered.changes)
    with_ids = renderer(templates.PECULIAR["turns with calls"]).render(given)
    assert with_ids.text.index("R2") < with_ids.text.index("R1")
    assert not any("in the order of their calls" in change for change in with_ids.changes)


def test_thoughts_beside_a_call() -> None:
    """With reasoning they are joined while the answer goes on; once there is an answer, the text is kept apart."""
    going_on = [ASK, called(call("{}"), text="I look.", reasoning="WHY"), result("R")]
    assert "[thoughts]WHY\n\nI look.[call lookup]{}" in render("first message only", going_on).text
    over = render("first message only", [*going_on, ANSWER, AGAIN])
    assert over.text == "[user]2+2?[answer]I look.[call lookup]{}[result]R[answer]It is 4.[user]3+3?"


def test_the_prompt_of_a_growing_conversation_grows() -> None:
    """A rendered prompt stays the beginning of the next one: the prefix cache holds it."""
    turns = [called(call(call_id=f"c{i}"), text=f"Step {i}.") for i in range(4)]
    rounds = [each for i, turn in enumerate(turns) for each in (turn, result(f"R{i}", f"c{i}"))]
    for name in ("turns with calls", "one call", "turns only", "null beside calls", "system first"):
        found, before = renderer(templates.PECULIAR[name]), ""
        for end in range(2, len(rounds) + 1, 2):
            text = found.render([SYSTEM, ASK, *rounds[:end]]).text
            assert text.startswith(before), name
            before = text


def test_a_refusal_in_every_shape_is_the_first_one() -> None:
    found = renderer(
        "{% for m in messages %}{% if 'X' in m.content %}{{ raise_exception('no ' ~ messages | length) }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ChatTemplateError, match="no 2"):
        found.render([said("user", "X"), said("user", "Y")])


def test_a_template_that_drops_messages_in_every_shape_is_told_of() -> None:
    found = renderer("{% for m in messages[-1:] %}{{ m.role }}: {{ m.content[:3] }}{% endfor %}")
    assert found.render([said("user", "a long question")]).changes == (
        "the chat template leaves out the text of 1 messages",
    )


def test_continued_answers() -> None:
    for name in ("turns only", "thinking parts", "one system"):
        messages = [SYSTEM, ASK, said("assistant", "It is ")]
        text = render(name, messages, add_generation_prompt=False, continue_final_message=True).text
        assert text.endswith(("It is", "It is ")), name


def test_many_calls_and_results_are_put_in_order_at_once() -> None:
    """By id: comparing each with each would take minutes."""
    num = 20_000
    calls = [call("{}", str(i)) for i in range(num)]
    results = [result(str(i), str(i)) for i in reversed(range(num))]
    traits = TemplateTraits(calls=CallForm(several=False))
    messages, _ = shaped([ASK, called(*calls, text=""), *results], traits)
    assert [message["content"] for message in messages if message["role"] == "tool"] == [str(i) for i in range(num)]


@pytest.mark.parametrize(
    ("given", "found", "is_whole"),
    [
        ('{"city": "Paris"}', {"city": "Paris"}, True),
        ({"city": "Paris"}, {"city": "Paris"}, True),
        (None, {}, True),
        ("", {}, True),
        ("null", {}, True),
        ("{", {}, False),
        ('{"city": "Par', {"city": "Par"}, False),
        ('{"city": "Paris", "da', {"city": "Paris"}, False),
        ('{"a": [1, 2', {"a": [1, 2]}, False),
        ("London", {"INVALID_JSON": "London"}, False),
        ('"London"', {"INVALID_JSON": '"London"'}, False),
        (["London"], {"INVALID_JSON": '["London"]'}, False),
        ({"INVALID_JSON": '{"city": "Par'}, {"city": "Par"}, False),
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}, False),
        (r'{"a": "\ud83d\ude00 \\ud83d"}', {"a": "\N{GRINNING FACE} \\ud83d"}, True),
        ("[" * 100_000, {"INVALID_JSON": "[" * 100_000}, False),
    ],
)  # fmt: skip
def test_arguments(given: Any, found: dict[str, Any], is_whole: bool) -> None:
    assert read_arguments(given) == (found, is_whole)
    json.dumps(found, ensure_ascii=False).encode()


def test_lost_texts() -> None:
    messages = [said("user", " a\n  b "), said("assistant", "<think>x</think> y"), said("user", 'say "hi"\n')]
    assert lost_messages(messages, 'a\n  b|y|say \\"hi\\"') == []
    assert lost_messages(messages, "> a\n> b|y") == [2]
    assert lost_messages([ASK, ASK], "2+2?") == [0, 1]
    assert lost_messages([ASK, ASK], "2+2? 2+2?") == []
    assert lost_messages([called(call(), text="")], "calls nothing") == [0]


def test_the_search_for_lost_texts_is_bounded() -> None:
    num_searched = 0  # characters

    class Prompt(str):
        __slots__ = ()

        def find(self, text: str, start: int) -> int:  # type: ignore[override]
            nonlocal num_searched
            num_searched += len(self) - start
            return super().find(text, start)

        def count(self, text: str) -> int:  # type: ignore[override]
            nonlocal num_searched
            num_searched += len(self)
            return super().count(text)

    messages = [said("user", f"<{i}>") for i in range(20_000)]
    lost = lost_messages(messages, Prompt("x" * (1 << 20)))
    assert 0 < len(lost) < 300
    assert num_searched <= (1 << 28) + 4 * (1 << 20)


def test_a_slow_template_is_not_probed_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.text.template_traits.MAX_SECONDS", -1.0)
    assert renderer(templates.HERMES).traits(True) == TemplateTraits()


def test_tools_that_the_template_does_not_show() -> None:
    words = "the chat template does not show the tools"
    assert words in render("turns only", [ASK], tools=[TOOL]).changes
    assert words not in render("turns only", [ASK]).changes
    assert renderer(templates.HERMES).render([ASK], tools=[TOOL]).changes == ()


def test_requests_may_set_variables_that_templates_require() -> None:
    assert render("functions", [ASK], functions="F;", datetime="D;").text.startswith("F;D;")


def test_tools_that_the_template_reads_under_another_name() -> None:
    source = "{% for t in xml_tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    rendered = renderer(source + templates.PECULIAR["turns only"]).render([ASK], tools=[TOOL])
    assert "<tool>lookup</tool>" in rendered.text
    assert not rendered.changes
    assert "<tool>" not in renderer(source + templates.PECULIAR["turns only"]).render([ASK]).text
    both = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    assert "<tool>" not in renderer(both + source + templates.PECULIAR["turns only"]).render([ASK], tools=[TOOL]).text
