"""Renders conversations so that no message is lost: with the template's own shape of a message list, and checked."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import monotonic
from typing import Any

from engine.text.call_arguments import read_arguments
from engine.text.chat_template import ChatTemplate, ChatTemplateError
from engine.text.image_marks import ImageForm, images_of, shown
from engine.text.kept_text import lost_messages
from engine.text.message_shape import shaped
from engine.text.template_traits import Message, TemplateTraits, probe, required_variables, takes_image_parts

_log = logging.getLogger(__name__)
_MAX_RETRY_SECONDS = 0.5  # a template that takes longer to refuse messages is not asked again


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt. `changes`: how the conversation differs from the given one, each for a warning."""

    text: str
    messages: list[Message]  # as passed to the template
    changes: tuple[str, ...] = ()
    images: tuple[int, ...] = ()  # indexes of the images in the order in which the prompt shows them


class ChatRenderer:
    """Renders conversations with one chat template. `render` is thread-safe."""

    def __init__(self, template: ChatTemplate, variables: Mapping[str, Any] | None = None) -> None:
        """Probe the template. `variables`: defaults of additional template variables."""
        self.template = template
        self._variables = dict(variables or {})
        self._shapes: dict[
            bool, tuple[TemplateTraits, ...]
        ] = {}  # by whether there are tools; the first is the probed one
        for has_tools in (False, True):
            traits = probe(template, with_tools=has_tools, variables=self._variables)
            self._shapes[has_tools] = (traits, traits.strictest(), traits.plainest())

    def traits(self, has_tools: bool) -> TemplateTraits:
        """Return what the template keeps of a conversation with tools, or without."""
        return self._shapes[has_tools][0]

    @cached_property
    def _takes_image_parts(self) -> bool:
        return takes_image_parts(self.template, self._variables, self._shapes[False][0])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        image_text: str = "",
        **options: Any,
    ) -> RenderedChat:
        """Return the prompt of a conversation in the form of OpenAI's chat API. Arguments as of `ChatTemplate.render`.

        `image_text`: what stands for an image in a prompt of this model, if the messages' texts have marks of images;
        see `image_marks`. It is used where the template does not know images itself.

        If the template refuses or loses messages although they have the shape that the probe found, plainer shapes are
        tried. Raises `ChatTemplateError` if it refuses all of them.
        """
        given, notes = _complete(messages)
        shapes, begun = self._shapes[bool(tools)], monotonic()
        options = {**self._variables, "tools": tools, **required_variables(shapes[0].variables, tools), **options}
        form = ImageForm(self._takes_image_parts, image_text) if image_text else None
        best: tuple[int, RenderedChat] | None = None
        refusal: ChatTemplateError | None = None
        tried: list[list[Message]] = []
        left = list(reversed(shapes))
        while left and (best is None or best[0]):
            traits = left.pop()
            found, changes = shaped(given, traits)
            if found in tried:
                continue
            tried.append(found)
            images = images_of(found) if form is not None else []
            if form is not None:
                found = [shown(message, form) for message in found]
            try:
                text = self.template.render(found, **options)
            except ChatTemplateError as error:
                refusal = refusal or error
            else:
                lost = [given[index] for index in lost_messages(given, text)]
                if best is None or len(lost) < best[0]:
                    best = len(lost), RenderedChat(text, found, (*notes, *changes), tuple(images))
                if lost:
                    other = traits.keeping(lost)
                    left += [other.keeping(lost), other]  # the second time, what is left over is changed, too
            if monotonic() - begun > _MAX_RETRY_SECONDS:
                break
        if best is None:
            assert refusal is not None
            raise refusal
        num_lost, rendered = best
        if tools and not any(tool["function"]["name"] in rendered.text for tool in tools if "function" in tool):
            notes = [*rendered.changes, "the chat template does not show the tools"]
            rendered = replace(rendered, changes=tuple(notes))
        if not num_lost:
            return rendered
        _log.warning("the chat template leaves out the text of %d messages, in every shape that was tried", num_lost)
        change = f"the chat template leaves out the text of {num_lost} messages"
        return replace(rendered, changes=(*rendered.changes, change))


def _complete(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[str]]:
    """Return messages with text as content, objects as arguments and ids of calls and results; and what was changed."""
    found: list[Message] = []
    notes: dict[str, None] = {}
    open_ids: list[tuple[str, str]] = []  # calls without a result, with their names
    for index, message in enumerate(messages):
        given = {**message, "content": _text(message.get("content"))}
        if reasoning := message.get("reasoning") or message.get("reasoning_content"):
            given["reasoning"] = reasoning
        if calls := message.get("tool_calls"):
            given["tool_calls"] = [
                _complete_call(call, f"call_{index}_{number}", notes) for number, call in enumerate(calls)
            ]
            open_ids = [(call["id"], call["function"]["name"]) for call in given["tool_calls"]]
        elif "tool_calls" in given:
            del given["tool_calls"]
        if given["role"] == "tool":
            call_id, name = given.get("tool_call_id"), given.get("name")
            if not call_id and open_ids:
                call_id = next((id for id, called in open_ids if called == name), open_ids[0][0])
                given["tool_call_id"] = call_id
            open_ids = [each for each in open_ids if each[0] != call_id]
        found.append(given)
    return found, list(notes)


def _complete_call(call: Mapping[str, Any], default_id: str, notes: dict[str, None]) -> Message:
    function = call["function"]
    arguments, is_whole = read_arguments(function.get("arguments"))
    if not is_whole:
        notes[
            f"the arguments of a call of {function['name'][:100]} are not a JSON object: what can be read of them is "
            "kept"
        ] = None
    return {
        "id": call.get("id") or default_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _text(content: Any) -> str:
    """Return the text of a message's content: a string, typed parts, or nothing."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(part["text"] for part in content if isinstance(part.get("text"), str))
