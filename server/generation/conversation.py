"""Renders conversations into prompts with the chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.text.chat_template import ChatTemplate, ChatTemplateError
from engine.text.tokenizer import Tokenizer
from server.generation.request import Conversation, Message, ToolCall
from server.http.errors import APIError
from server.parsing.harmony import EFFORTS, in_turns
from server.parsing.reasoning import HARMONY, ReasoningFormat

CheckText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and whether it ends before, inside or after the model's reasoning."""

    token_ids: list[int]
    in_reasoning: bool = False  # the prompt ends inside the reasoning
    past_reasoning: bool = True  # the answer will contain no reasoning
    is_merged: bool = False  # rendered from `Conversation.merged`


class ConversationEncoder:
    """Renders and tokenizes conversations for one model."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        reasoning: ReasoningFormat | None,
        *,
        default_variables: Mapping[str, Any],
        short_call_ids: bool,
    ) -> None:
        """`default_variables`: for the template. `short_call_ids`: it requires tool call ids of nine characters."""
        self._template, self._tokenizer, self._reasoning = template, tokenizer, reasoning
        self._default_variables, self._short_call_ids = default_variables, short_call_ids

    def encode(self, conversation: Conversation, add_special_tokens: bool, check: CheckText | None = None) -> Prompt:
        """Return the prompt of a conversation. The template writes the beginning-of-text token itself.

        `check` is called with the rendered text and may raise before tokenization. Raises `APIError` when the template
        rejects the messages.
        """
        conversation.check()
        is_merged = False
        try:
            messages, text = self._rendered(conversation)
        except ChatTemplateError as error:
            reason = f"the chat template rejected the messages: {error}"
            refusal = APIError(400, reason, "messages", lead=None)
            if not conversation.may_be_merged:
                raise refusal from None
            try:
                messages, text = self._rendered(conversation.merged())
            except ChatTemplateError:
                raise refusal from None
            is_merged = True
        if check is not None:
            check(text)
        continued = messages[-1]["content"] if conversation.continue_final_message else ""
        reasoning = self._reasoning
        return Prompt(
            self._tokenizer.encode(text, add_special_tokens=add_special_tokens),
            reasoning is not None and reasoning.opened_by(text, continued),
            reasoning is None or reasoning.closed_by(text, continued),
            is_merged,
        )

    def _rendered(self, conversation: Conversation) -> tuple[list[dict[str, Any]], str]:
        """Return the messages as passed to the template, and the rendered text. Raises `ChatTemplateError`."""
        messages = [self._for_template(message, index) for index, message in enumerate(conversation.messages)]
        options = {**self._default_variables, **conversation.template_options()}
        if self._reasoning is HARMONY:
            messages = in_turns(messages)
            if (effort := options.get("reasoning_effort")) in EFFORTS:
                options["reasoning_effort"] = EFFORTS[effort]
        return messages, self._template.render(messages, **options)

    def _for_template(self, message: Message, index: int) -> dict[str, Any]:
        """Convert a message to the form templates expect: content is one string, tool call arguments are objects."""
        given: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "developer" and "developer" not in self._template.source:
            given["role"] = "system"
        if message.name is not None:
            given["name"] = message.name
        if message.tool_call_id is not None:
            given["tool_call_id"] = self._call_id(message.tool_call_id)
        if message.tool_calls:
            given["tool_calls"] = [
                {
                    "id": self._call_id(call.id or f"call_{index}_{number}"),
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": _arguments(call, "messages", index, "tool_calls", number, "arguments"),
                    },
                }
                for number, call in enumerate(message.tool_calls)
            ]
        if message.reasoning is not None:
            given["reasoning"] = given["reasoning_content"] = message.reasoning
        return given

    def _call_id(self, given: str) -> str:
        """Convert a tool call id to the form the template requires. Ids from other servers may differ."""
        if not self._short_call_ids or (len(given) == 9 and given.isalnum()):
            return given
        return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]


def _arguments(call: ToolCall, *path: str | int) -> Any:
    given = call.arguments
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        return json.loads(given or "{}")
    except (ValueError, RecursionError):
        raise APIError(400, f"the arguments of {call.name} must be JSON, got {given[:100]!r}", *path) from None
