"""Finds out what a chat template keeps of a conversation, by rendering small conversations with marked texts.

Templates drop messages without an error, or refuse orders of roles that clients send. Their source does not tell
reliably, so it is not read: what a template does with a message is seen in its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from time import monotonic
from typing import Any, Literal

from engine.text.chat_template import ChatTemplate, ChatTemplateError

Message = dict[str, Any]
ContentForm = Literal["empty", "null", "missing"]
ReasoningForm = Literal["reasoning_content", "thinking", "part"]
Variables = Literal["", "tools", "functions", "xml_tools"]
MAX_SECONDS = 10.0  # of probing; a usual template takes some hundredths of a second
CALL_ID = "call00001"  # accepted by templates that require nine letters and digits


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template writes the tool calls of earlier turns."""

    content: ContentForm = "empty"  # the content of a message that has calls and no text
    arguments_as_text: bool = False  # arguments are JSON text, not an object
    names_results: bool = False  # the message of a result requires the tool's name
    several: bool = True  # one message may have several calls
    text_beside: bool = True  # a message may have text and calls
    text_and_reasoning: bool = True  # a message with calls may have both
    unanswered: bool = True  # a user's message may follow a call that has no result
    orphaned: bool = True  # a result may stand without its call
    result_ids: bool = True  # results show the ids of their calls


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The messages that a template keeps as they are. The defaults need no change of any conversation."""

    parts: bool = False  # content must be a list of typed parts
    variables: Literal["", "tools", "functions", "xml_tools"] = (
        ""  # what the template requires, see `required_variables`
    )
    system: bool = True  # a system message at the beginning
    several_systems: bool = True  # several of them there
    late_system: bool = True  # a system message after other messages
    developer: bool = True  # the role `developer`, as a role of its own
    without_user: bool = True  # a conversation without a user's message
    consecutive_users: bool = True
    consecutive_assistants: bool = True
    user_after_tool: bool = True  # a user's message after a tool's result
    assistant_first: bool = True  # an assistant's message before any user's
    empty_answers: bool = True  # an assistant's message without text and calls
    results: bool = True  # messages of the role `tool`
    short_ids: bool = False  # ids of tool calls have nine letters and digits
    reasoning: ReasoningForm = "reasoning_content"
    calls: CallForm | None = CallForm()  # None: the template writes no calls

    def strictest(self) -> TemplateTraits:
        """Return traits of a template that takes one system message, then user and assistant in turns."""
        orders = [
            field.name for field in fields(self) if field.default is True and field.name not in ("system", "results")
        ]
        calls = self.calls
        if calls is not None:
            calls = replace(calls, several=False, unanswered=False, orphaned=False)
        changed: dict[str, Any] = dict.fromkeys(orders, False)
        return replace(self, **changed, calls=calls)

    def keeping(self, lost: Sequence[Message]) -> TemplateTraits:
        """Return traits that change messages which the template lost although probes of their kind were kept."""
        traits, calls = self, self.calls
        for message in lost:
            match message["role"]:
                case "system" | "developer":
                    traits = replace(traits, late_system=False, several_systems=False, system=traits.several_systems)
                case "user":
                    traits = replace(traits, consecutive_users=False, user_after_tool=False)
                case "tool":
                    calls = replace(calls, several=False, orphaned=False) if calls is not None else None
                case "assistant" if not message.get("tool_calls"):
                    traits = replace(traits, consecutive_assistants=False)
                case "assistant":
                    calls = replace(calls, text_beside=False) if message["content"] and calls is not None else None
        return replace(traits, calls=calls)

    def plainest(self) -> TemplateTraits:
        """Return traits of a template that takes only texts of user and assistant in turns."""
        return replace(self.strictest(), system=False, calls=None, results=False)


def required_variables(kind: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return variables that some templates require: `tools` as a list even if it is empty, Firefunction's
    `functions`, or SmolLM3's `xml_tools`.
    """
    if kind == "xml_tools":
        return {"xml_tools": list(tools or ())}
    if kind == "tools":
        return {"tools": list(tools or ())}
    if kind == "functions":
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        return {"functions": json.dumps(list(tools or ()), indent=4, ensure_ascii=False), "datetime": now}
    return {}


def probe(
    template: ChatTemplate, *, with_tools: bool = False, variables: Mapping[str, Any] | None = None
) -> TemplateTraits:
    """Return the traits of `template`. `with_tools`: for requests with tools. `variables`: additional template
    variables.
    """
    tools, deadline = [_TOOL] if with_tools else None, monotonic() + MAX_SECONDS
    kinds: tuple[Variables, ...] = ("", "tools", "functions")
    if with_tools and "xml_tools" in template.source:
        kinds = ("", "xml_tools")
    try:
        for required in kinds:
            given = {"tools": tools, **(variables or {}), **required_variables(required, tools)}
            for parts in (False, True):
                probe = _Probe(template, given, parts, deadline)
                text = probe.render([_user()]) or ""
                is_shown = "xml_tools" not in kinds or required or _TOOL["function"]["name"] in text
                if "PROBEASK" in text and is_shown and not (parts and "type" in text):  # and no list as it is
                    return replace(probe.traits(), parts=parts, variables=required)
    except TimeoutError:
        pass
    return TemplateTraits()  # nothing is known: requests will show what the template refuses


def takes_image_parts(template: ChatTemplate, variables: Mapping[str, Any], traits: TemplateTraits) -> bool:
    """Return whether a template writes something for a part of the type "image" in the user's message."""
    given = {"tools": None, **variables, **required_variables(traits.variables, None)}

    def rendered(*parts: Message) -> str:
        try:
            return template.render([{"role": "user", "content": list(parts)}], **given)
        except ChatTemplateError:
            return ""

    question = {"type": "text", "text": "PROBEASK"}
    text, plain = rendered({"type": "image"}, question), rendered(question)
    return "PROBEASK" in text and text != plain and "'type'" not in text and '"type"' not in text


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_other",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"probe_size": {"type": "string", "description": "A size."}},
            "required": [],
        },
    },
}
_NAME, _KEY, _VALUE, _RESULT = "probe_lookup", "probe_city", "PROBEPARIS", "PROBERESULT"


def _user(text: str = "PROBEASK") -> Message:
    return {"role": "user", "content": text}


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


class _Probe:
    """Renders probes with one template."""

    def __init__(self, template: ChatTemplate, variables: dict[str, Any], parts: bool, deadline: float) -> None:
        """`parts`: content is given as parts. `deadline`: in monotonic seconds."""
        self._template, self._variables, self._parts, self._deadline = template, variables, parts, deadline

    def render(self, messages: Sequence[Message]) -> str | None:
        """Return the prompt; None if the template refuses the messages. `TimeoutError` after the deadline."""
        if monotonic() > self._deadline:
            raise TimeoutError
        if self._parts:
            messages = [in_parts(message) for message in messages]
        try:
            return self._template.render(messages, **self._variables)
        except ChatTemplateError:
            return None

    def keeps(self, messages: Sequence[Message], *marks: str) -> bool:
        """Return whether all texts, or the `marks`, are in the prompt."""
        text = self.render(messages)
        marks = marks or tuple(message["content"] for message in messages if message.get("content"))
        return text is not None and all(mark in text for mark in marks)

    def traits(self) -> TemplateTraits:
        answer, again = _said("assistant", "PROBEANSWER"), _user("PROBEAGAIN")
        system, second = _said("system", "PROBESYSTEM"), _said("system", "PROBESECOND")
        developer = self._knows_developer()
        roles = [("system", "system"), ("developer", "system"), ("system", "developer")][: 3 if developer else 1]
        calls = self._call_form()
        traits = TemplateTraits(
            system=self.keeps([system, _user()]),
            several_systems=all(
                self.keeps([_said(one, "PROBESYSTEM"), _said(other, "PROBESECOND"), _user()]) for one, other in roles
            ),
            late_system=self.keeps([system, _user(), answer, second, again]) and self.keeps([_user(), system]),
            developer=developer,
            without_user=self.keeps([system]),
            consecutive_users=self.keeps([_user(), again]) and self.keeps([_user(), answer, again, _user("PROBELAST")]),
            consecutive_assistants=self.keeps([_user(), answer, _said("assistant", "PROBEMORE"), again]),
            assistant_first=self.keeps([answer, _user()]) and self.keeps([system, answer, _user()]),
            empty_answers=self.keeps([_user(), _said("assistant", ""), again]),
            results=self.keeps([_user(), answer, _result(calls or CallForm())]),
            calls=calls,
        )
        if calls is None:
            return traits
        traits = replace(traits, reasoning=self._reasoning_form(calls))
        calls = replace(
            calls,
            several=self._keeps_several(calls),
            text_beside=self.keeps(_round(calls, content="PROBETEXT"), "PROBETEXT", _VALUE, _RESULT),
            text_and_reasoning=self._keeps_text_and_reasoning(calls, traits.reasoning),
            unanswered=self.keeps([*_round(calls)[:-1], again], _VALUE, "PROBEAGAIN"),
            orphaned=self.keeps([_user(), _round(calls)[-1]], "PROBEASK", _RESULT),
            result_ids=CALL_ID in (self.render(_round(calls)) or CALL_ID).rpartition(_VALUE)[2],
        )
        after = [*_round(calls), again]
        return replace(
            traits,
            calls=calls,
            user_after_tool=self.keeps(after, _VALUE, _RESULT, "PROBEAGAIN"),
            short_ids=not self.keeps(_round(calls, call_id="call_probe_0000001"), _VALUE, _RESULT),
        )

    def _knows_developer(self) -> bool:
        """Return whether `developer` is a role of its own, and not written like any other name."""
        given, unknown = (self.render([_said(role, "PROBESYSTEM"), _user()]) for role in ("developer", "proberole"))
        if given is None or "PROBESYSTEM" not in given:
            return False
        return unknown is None or unknown.replace("proberole", "developer") != given

    def _call_form(self) -> CallForm | None:
        """Return the first form in which a call is written well, else one that keeps it. None: there is none."""
        forms = [
            CallForm(content, as_text, named)
            for named in (False, True)
            for as_text in (False, True)
            for content in ("empty", "null", "missing")
        ]
        kept = []
        for form in forms:
            text = self.render(_round(form))
            if text is None or any(mark not in text for mark in (_NAME, _KEY, _VALUE, _RESULT)):
                continue
            if f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text:  # neither Python's form nor text within text
                return form
            kept.append(form)
        return kept[0] if kept else None

    def _keeps_several(self, form: CallForm) -> bool:
        first, second = _call(form), _call(form, "call00002", "PROBEROME")
        messages = [
            _user(),
            _calling(form, [first, second]),
            *(_result(form, one["id"], text) for one, text in ((first, _RESULT), (second, "PROBEOTHER"))),
        ]
        return self.keeps(messages, _VALUE, "PROBEROME", _RESULT, "PROBEOTHER")

    def _reasoning_form(self, form: CallForm) -> ReasoningForm:
        for reasoning in ("reasoning_content", "thinking", "part"):
            messages = _round(form)
            messages[1] = with_reasoning({**messages[1], "reasoning": "PROBEWHY"}, reasoning)
            text = self.render(messages) or ""
            if (
                all(mark in text for mark in ("PROBEWHY", _VALUE))
                and "'thinking'" not in text
                and '"thinking"' not in text
            ):
                return reasoning
        return "reasoning_content"

    def _keeps_text_and_reasoning(self, form: CallForm, reasoning: ReasoningForm) -> bool:
        messages = _round(form)
        messages[1] = with_reasoning({**messages[1], "reasoning": "PROBEWHY"}, reasoning)
        if not self.keeps(messages, "PROBEWHY"):
            return True  # reasoning is left out anyway
        messages = _round(form, content="PROBETEXT")
        messages[1] = with_reasoning({**messages[1], "reasoning": "PROBEWHY"}, reasoning)
        return self.keeps(messages, "PROBEWHY", "PROBETEXT", _VALUE)


def _call(form: CallForm, call_id: str = CALL_ID, value: str = _VALUE) -> Message:
    arguments = f'{{"{_KEY}": "{value}"}}' if form.arguments_as_text else {_KEY: value}
    return {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}


def _calling(form: CallForm, calls: list[Message], content: str = "") -> Message:
    return with_content({"role": "assistant", "content": content, "tool_calls": calls}, form.content)


def _result(form: CallForm, call_id: str = CALL_ID, text: str = _RESULT) -> Message:
    named = {"name": _NAME} if form.names_results else {}
    return {"role": "tool", **named, "tool_call_id": call_id, "content": text}


def _round(form: CallForm, content: str = "", call_id: str = CALL_ID) -> list[Message]:
    """Return a question, a call and its result."""
    return [_user(), _calling(form, [_call(form, call_id)], content), _result(form, call_id)]


def with_content(message: Message, form: ContentForm) -> Message:
    """Return a message with calls whose content, if it is empty, has the form that the template takes."""
    if message.get("content") or form == "empty":
        return message
    if form == "null":
        return message | {"content": None}
    return {key: value for key, value in message.items() if key != "content"}


def with_reasoning(message: Message, form: ReasoningForm) -> Message:
    """Return a message whose `reasoning` has the form that the template takes."""
    reasoning = message["reasoning"]
    message = message | {"reasoning_content": reasoning}
    if form == "thinking":
        return message | {"thinking": reasoning}
    if form == "part":
        text = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        return message | {"content": [{"type": "thinking", "thinking": reasoning}, *text]}
    return message


def in_parts(message: Message) -> Message:
    """Return a message whose text is a list of parts."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
