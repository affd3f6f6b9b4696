"""A conversation to a prompt, by the chat template. Knows messages and what templates expect of them; no endpoints."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from engine.text.chat_template import ChatTemplateError
from server.generation.served_model import Serving
from server.http.errors import APIError
from server.openai.protocol import Message


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt, and what is known of the model's thoughts."""

    token_ids: list[int]
    in_reasoning: bool  # it ends inside of them
    past_reasoning: bool  # there will be none


def encode_messages(
    serving: Serving, messages: list[Message], options: dict[str, Any], add_special_tokens: bool
) -> Prompt:
    """The prompt's token ids by the chat template, which writes the beginning of text itself.

    `options`: arguments of `ChatTemplate.render`.
    """
    if serving.template is None:
        raise APIError(400, serving.no_template)
    conversation = [_for_template(serving, message, index) for index, message in enumerate(messages)]
    try:
        text = serving.template.render(conversation, **{**serving.settings.default_chat_template_kwargs, **options})
    except ChatTemplateError as error:
        raise APIError(400, f"the chat template refuses the messages: {error}", "messages") from None
    continued = conversation[-1]["content"] if options["continue_final_message"] else ""
    reasoning = serving.reasoning_format
    return Prompt(
        serving.tokenizer.encode(text, add_special_tokens=add_special_tokens),
        reasoning is not None and reasoning.opened_by(text, continued),
        reasoning is None or reasoning.closed_by(text, continued),
    )


def _for_template(serving: Serving, message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: content is one text, the arguments of tool calls are objects."""
    assert serving.template is not None
    turn: dict[str, Any] = {"role": message.role, "content": message_text(message)}
    if message.role == "developer" and "developer" not in serving.template.source:
        turn["role"] = "system"
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = _tool_call_id(serving, message.tool_call_id)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": _tool_call_id(serving, call.id or f"call_{index}_{number}"),
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        call.function.arguments, f"messages[{index}].tool_calls[{number}].function.arguments"
                    ),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        turn["reasoning"] = turn["reasoning_content"] = reasoning
    return turn


def message_text(message: Message) -> str:
    """What it says, in one text."""
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content)
    return message.content or message.refusal or ""


def _arguments(given: Any, field: str) -> Any:
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        return json.loads(given or "{}")
    except (ValueError, RecursionError):
        raise APIError(400, f"{field}: must be JSON, got {given[:100]!r}", field) from None


def _tool_call_id(serving: Serving, given: str) -> str:
    """The id as the chat template wants it: calls of another server's answers may have ids of another form."""
    short = serving.tool_format is not None and serving.tool_format.short_ids
    if not short or (len(given) == 9 and given.isalnum()):
        return given
    return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]
