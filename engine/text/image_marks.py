"""Marks that stand for images in the texts of a conversation, until the chat template shows them.

A message's text goes through many changes (see `message_shape`), which so apply to messages with images too. Marks
begin with a character that Unicode reserves for such uses. A text that has one by itself shows at most its own images.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.text.template_traits import Message

START, END = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"{START}(\\d{{1,6}}){END}")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The form in which a chat template takes images."""

    as_parts: bool  # as parts of the type "image"; else as a text
    text: str  # the model's placeholder, with what stands around it


def mark(index: int) -> str:
    """Return the mark of the image with this index in the conversation."""
    return f"{START}{index}{END}"


def marked(parts: Iterable[str | T], first: int = 0) -> tuple[str, list[T]]:
    """Join texts and images of a message: return its text with marks, and the images.

    Texts beside each other are joined by a line break. first: index of the message's first image.
    """
    found: list[str] = []
    images: list[T] = []
    was_text = False
    for part in parts:
        if isinstance(part, str):
            if part:
                found.append(("\n" if was_text else "") + part.replace(START, ""))
                was_text = True
        else:
            found.append(mark(first + len(images)))
            images.append(part)
            was_text = False
    return "".join(found), images


def renumbered(text: str, first: int) -> str:
    """Return a text whose marks are counted from `first`."""
    return _MARK.sub(lambda found: mark(first + int(found[1])), text) if first else text


def split(text: str) -> list[str | int]:
    """Return the texts between marks and the indexes of images, in order; no text is empty."""
    parts = _MARK.split(text)
    return [part if i % 2 == 0 else int(part) for i, part in enumerate(parts) if part]


def images_of(messages: Sequence[Message]) -> list[int]:
    """Return the indexes of the images in messages as `message_shape.shaped` returns them, in order."""
    return [part for message in messages for text in _texts(message) for part in split(text) if isinstance(part, int)]


def shown(message: Message, form: ImageForm) -> Message:
    """Return a message in which images stand as the chat template takes them."""
    content = message.get("content")
    texts = _texts(message)
    if not any(START in text for text in texts):
        return message
    if not form.as_parts and isinstance(content, str):
        return message | {"content": _MARK.sub(lambda _: form.text, content)}
    parts: list[dict[str, Any]] = []
    for given in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        text: Any = given.get("text")
        if not isinstance(text, str):
            parts.append(given)
            continue
        for part in split(text if form.as_parts else _MARK.sub(lambda _: form.text, text)):
            parts.append({"type": "image"} if isinstance(part, int) else given | {"text": part})
    return message | {"content": parts}


def _texts(message: Message) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if isinstance(part.get("text"), str)]
