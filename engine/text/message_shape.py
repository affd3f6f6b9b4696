"""Brings a conversation to the shape in which a chat template keeps every message: merges, moves, splits and folds
messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from engine.text.template_traits import CallForm, Message, TemplateTraits, in_parts, with_content, with_reasoning

_SYSTEM = ("system", "developer")
_NO_RESULT = "(no result)"  # of a call that was given up


def shaped(messages: Sequence[Message], traits: TemplateTraits) -> tuple[list[Message], list[str]]:
    """Return the messages for a template with these traits, and how the conversation differs from the given one.

    `messages`: as OpenAI's chat API has them; content is text, every call has an id and an object as arguments, and
    `reasoning` holds reasoning. A conversation that needs no change comes back in the same order.
    """
    shape = _Shape(traits)
    found = shape.in_order(shape.with_calls(shape.with_systems(messages)))
    return [_formed(message, traits) for message in found], list(shape.changes)


class _Shape:
    """The changes of one conversation."""

    def __init__(self, traits: TemplateTraits) -> None:
        self._traits = traits
        self.changes: dict[str, None] = {}

    def _changed(self, change: str) -> None:
        self.changes[change] = None

    # ---- system messages ----

    def with_systems(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with as many system messages as the template keeps, where it keeps them."""
        traits = self._traits
        if not traits.developer:
            messages = [
                message | {"role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        num_first = next((i for i, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages))
        first, rest = list(messages[:num_first]), list(messages[num_first:])
        if not traits.late_system and any(message["role"] in _SYSTEM for message in rest):
            self._changed("the chat template takes system messages at the beginning only: later ones became the user's")
            rest = [message | {"role": "user"} if message["role"] in _SYSTEM else message for message in rest]
        if len(first) > 1 and not (traits.several_systems and traits.system):
            self._changed("the chat template takes one system message: several are merged")
            first = [_joined(first)]
        if first and not traits.system:
            self._changed("the chat template takes no system message: its text begins the user's first message")
            folded = [first[0] | {"role": "user"}, *rest[: bool(rest and rest[0]["role"] == "user")]]
            return [_joined(folded), *rest[len(folded) - 1 :]]
        if not traits.without_user and not any(message["role"] == "user" for message in [*first, *rest]):
            self._changed(
                "the chat template requires a message of the user: the system's became one" if first else _FILLED
            )
            user = first[-1] | {"role": "user"} if first else _user("")
            return [*first[:-1], user, *rest]
        return first + rest

    # ---- calls and their results ----

    def with_calls(self, messages: list[Message]) -> list[Message]:
        """Return messages in which calls and results have a form that the template keeps."""
        found: list[Message] = []
        at = 0
        while at < len(messages):
            message, at = messages[at], at + 1
            if message.get("tool_calls"):
                num_results = 0
                while at + num_results < len(messages) and messages[at + num_results]["role"] == "tool":
                    num_results += 1
                results, at = messages[at : at + num_results], at + num_results
                found += self._round(message, results, is_last=at == len(messages))
            elif message["role"] == "tool":
                found.append(self._orphan(message))
            else:
                found.append(message)
        return found

    def _round(self, message: Message, results: list[Message], is_last: bool) -> list[Message]:
        """Return the messages of one turn of calls with its results. `is_last`: the conversation ends with it."""
        form, calls = self._traits.calls, message["tool_calls"]
        if form is None:
            return self._as_texts(message, results)
        before, message = self._apart(message, form)
        names = {call["id"]: call["function"]["name"] for call in calls}
        if form.names_results:
            results = [
                {"name": names[id], **each} if (id := each.get("tool_call_id")) in names else each for each in results
            ]
        if not form.unanswered and not (is_last and not results):
            answered = {result.get("tool_call_id") for result in results}
            if missing := [call for call in calls if call["id"] not in answered]:
                self._changed("the chat template requires a result of every call: a missing one was added")
                named = [{"name": names[call["id"]]} if form.names_results else {} for call in missing]
                results = results + [
                    {"role": "tool", **name, "tool_call_id": call["id"], "content": _NO_RESULT}
                    for call, name in zip(missing, named, strict=True)
                ]
        if not form.result_ids:
            results = self._by_calls(results, [call["id"] for call in calls])
        if len(calls) == 1 or form.several:
            return [*before, message, *results]
        self._changed("the chat template takes one call in a message: several are split, each with its result")
        own: dict[str | None, list[Message]] = {}  # results by their calls' ids
        for result in results:
            own.setdefault(result.get("tool_call_id"), []).append(result)
        split = before
        for number, call in enumerate(calls):
            split.append((message if not number else {"role": message["role"], "content": ""}) | {"tool_calls": [call]})
            split += own.pop(call["id"], [])
        return split + [result for left in own.values() for result in left]

    def _by_calls(self, results: list[Message], ids: list[str]) -> list[Message]:
        """Return results in the order of their calls, by which alone the model can tell them apart."""
        order = {id: number for number, id in enumerate(ids)}
        found = sorted(results, key=lambda each: order.get(str(each.get("tool_call_id")), len(ids)))
        if found != results:
            self._changed("the chat template shows no ids of calls: results are put in the order of their calls")
        return found

    def _apart(self, message: Message, form: CallForm) -> tuple[list[Message], Message]:
        """Return what precedes a message with calls, and the message with only what may stand beside calls."""
        text, reasoning = message["content"], message.get("reasoning")
        if text and not form.text_beside:
            self._changed("the chat template takes no text beside calls: it became a message of its own")
            return [{"role": message["role"], "content": text}], message | {"content": ""}
        if text and reasoning and not form.text_and_reasoning:
            self._changed("the chat template takes no text beside reasoning and calls: it became reasoning")
            return [], message | {"content": "", "reasoning": f"{reasoning}\n\n{text}"}
        return [], message

    def _as_texts(self, message: Message, results: list[Message]) -> list[Message]:
        self._changed("the chat template takes no tool calls: those of earlier turns became text")
        texts = [message["content"], *map(_call_text, message["tool_calls"])]
        message = {key: value for key, value in message.items() if key != "tool_calls"}
        return [message | {"content": "\n".join(filter(None, texts))}, *map(self._orphan, results)]

    def _orphan(self, result: Message) -> Message:
        """Return a result whose call the template does not see."""
        form = self._traits.calls
        if self._traits.results if form is None else form.orphaned:
            return result
        self._changed("the chat template takes no tool results without their calls: they became text of the user")
        return _user(f"<tool_response>\n{result['content']}\n</tool_response>")

    # ---- the order of roles ----

    def in_order(self, messages: list[Message]) -> list[Message]:
        """Return messages in an order of roles that the template takes."""
        traits = self._traits
        found: list[Message] = []
        had_user = had_answer = (
            False  # `had_answer`: the newest text is the assistant's; calls and results do not count
        )
        for message in messages:
            role, before = message["role"], found[-1]["role"] if found else None
            if role == "user" and before == "user" and not traits.consecutive_users:
                self._changed("the chat template takes one message of the user at a time: adjacent ones are merged")
                found[-1] = _joined([found[-1], message])
                continue
            if role == "user" and before == "tool" and not traits.user_after_tool:
                self._changed(
                    "the chat template takes no user's message after a tool's result: it is added to the result"
                )
                found[-1] = _joined([found[-1], message])
                continue
            if role == "assistant":
                is_answer = not message.get("tool_calls")
                if is_answer and not message["content"] and not traits.empty_answers:
                    self._changed("the chat template takes no answer without text: an empty one is left out")
                    continue
                if not had_user and not traits.assistant_first:
                    self._changed(_FILLED)
                    found.append(_user(""))
                elif is_answer and had_answer and not traits.consecutive_assistants:
                    if before == "assistant" and not found[-1].get("tool_calls"):
                        self._changed("the chat template takes one answer at a time: adjacent ones are merged")
                        found[-1] = _joined([found[-1], message])
                        continue
                    self._changed(_FILLED)
                    found.append(_user(""))
                had_user, had_answer = True, is_answer or had_answer
            elif role == "user":
                had_user, had_answer = True, False
            found.append(message)
        return found


_FILLED = "the chat template requires a message of the user before the assistant's: an empty one was added"


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _joined(messages: Sequence[Message]) -> Message:
    """Return the first message with the texts of all, and what else the last has."""
    texts = [message["content"] for message in messages if message["content"]]
    reasoning = [message["reasoning"] for message in messages if message.get("reasoning")]
    more = {"reasoning": "\n\n".join(reasoning)} if reasoning else {}
    return messages[0] | {"content": "\n\n".join(texts)} | more


def _call_text(call: Message) -> str:
    return f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"


def _formed(message: Message, traits: TemplateTraits) -> Message:
    """Return a message in the form that the template takes: nothing of it is lost or moved."""
    form = traits.calls
    if message.get("tool_calls") and form is not None:
        message = with_content(
            message | {"tool_calls": [_formed_call(call, traits, form) for call in message["tool_calls"]]}, form.content
        )
    if message.get("tool_call_id") and traits.short_ids:
        message = message | {"tool_call_id": _short_id(message["tool_call_id"])}
    if message.get("reasoning"):
        message = with_reasoning(message, traits.reasoning)
    return in_parts(message) if traits.parts else message


def _formed_call(call: Message, traits: TemplateTraits, form: CallForm) -> Message:
    function = call["function"]
    if form.arguments_as_text:
        function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return call | {"id": _short_id(call["id"]) if traits.short_ids else call["id"], "function": function}


def _short_id(given: str) -> str:
    """Return an id of nine letters and digits for an id that another server may have made."""
    if len(given) == 9 and given.isalnum():
        return given
    return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]
