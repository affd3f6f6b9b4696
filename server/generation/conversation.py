"""Renders conversations into prompts with the chat template."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.text.chat_renderer import RenderedChat
from engine.text.chat_template import ChatTemplateError
from engine.text.image_marks import renumbered
from engine.vision.decode import ImageError
from engine.vision.loader import ImageLoader, Picture, PromptWithImages
from server.generation.chat_format import ChatFormat
from server.generation.errors import InvalidRequestError
from server.generation.request import Conversation, Message
from server.generation.roles import check_roles
from server.generation.tool_schemas import completed_definitions, plain_definitions
from server.parsing.harmony import EFFORTS

# Forms of tools for templates that fail on the given one, with what is said of them.
_OTHER_TOOLS = (
    (completed_definitions, "the chat template reads optional fields of tools, which are shown as empty"),
    (plain_definitions, "the chat template cannot show the schemas of these tools, and is given simpler ones"),
)

EncodeText = Callable[[str], list[int]]  # tokenizes as much of a text as can be in the prompt; may raise `RequestError`


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and whether it ends before, inside or after the model's reasoning."""

    token_ids: list[int]
    in_reasoning: bool = False  # the prompt ends inside the reasoning
    past_reasoning: bool = True  # the answer will contain no reasoning
    changes: tuple[str, ...] = ()  # how its conversation differs from the request's
    chat: ChatFormat | None = None  # the format it was rendered with; None: the request has no conversation
    images: PromptWithImages | None = None  # the same tokens, with images


class ConversationEncoder:
    """Renders and tokenizes conversations with one chat template."""

    def __init__(self, chat: ChatFormat, loader: ImageLoader | None, caller: str) -> None:
        """loader: None: the model reads text only. caller: who holds the images' memory."""
        self._chat, self._loader, self._caller = chat, loader, caller

    def encode(self, conversation: Conversation, encode: EncodeText, images: Sequence[Picture] = ()) -> Prompt:
        """Return the prompt of a conversation. The template writes the beginning-of-text token itself.

        images: of all messages, in order.

        Raises `RequestError` as `encode` does, and when the template rejects the messages in every shape.
        """
        conversation.check()
        check_roles(conversation.messages, self._chat.source)
        options = conversation.template_options()
        if self._chat.writes_harmony and (effort := options.get("reasoning_effort")) in EFFORTS:
            options["reasoning_effort"] = EFFORTS[effort]
        if images and self._loader is not None:
            options["image_text"] = self._loader.text
        rendered = self._rendered(_given_messages(conversation), options)
        text = rendered.text
        continued = conversation.messages[-1].content or "" if conversation.continue_final_message else ""
        reasoning = self._chat.reasoning_format
        shown = [images[index] for index in rendered.images] if images else []
        token_ids = encode(self._written(text, shown))
        placed = self._placed(token_ids, shown) if images else None
        return Prompt(
            token_ids if placed is None else placed.token_ids,
            reasoning is not None and reasoning.opened_by(text, continued),
            reasoning is None or reasoning.closed_by(text, continued),
            rendered.changes,
            self._chat,
            placed,
        )

    def _written(self, text: str, images: Sequence[Picture]) -> str:
        """Return a prompt's text as the model's processor completes it around images."""
        if not images or self._loader is None:
            return text
        try:
            return self._loader.written(text, images)
        except ImageError as error:
            raise _misplaced(error) from None

    def _placed(self, token_ids: list[int], images: Sequence[Picture]) -> PromptWithImages:
        assert self._loader is not None
        try:
            return self._loader.place(token_ids, images, self._caller)
        except ImageError as error:
            raise _misplaced(error) from None

    def _rendered(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> RenderedChat:
        """Render messages; if the template fails, once more with tools as more templates read them."""
        try:
            return self._chat.renderer.render(messages, **options)
        except ChatTemplateError as error:
            given = options.get("tools") or []
            for change, note in _OTHER_TOOLS:
                tools = change(given)
                if tools != given:
                    with contextlib.suppress(ChatTemplateError):
                        rendered = self._chat.renderer.render(messages, **{**options, "tools": tools})
                        return replace(rendered, changes=(*rendered.changes, note))
            reason = f"the chat template rejected the messages: {error}"
            raise InvalidRequestError(reason, "messages", lead=None) from None


def _misplaced(error: ImageError) -> InvalidRequestError:
    reason = f"{error}: the texts have some of their own, or the chat template does not show these images"
    return InvalidRequestError(reason, "messages")


def _given_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the messages, with images counted through all of them."""
    found, num_images = [], 0
    for message in conversation.messages:
        given = _given(message)
        if message.images:
            given["content"] = renumbered(given["content"], num_images)
            num_images += len(message.images)
        found.append(given)
    return found


def _given(message: Message) -> dict[str, Any]:
    """Return a message in the form of OpenAI's chat API."""
    given: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.name is not None:
        given["name"] = message.name
    if message.tool_call_id is not None:
        given["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        given["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls
        ]
    if message.reasoning is not None:
        given["reasoning"] = message.reasoning
    return given
