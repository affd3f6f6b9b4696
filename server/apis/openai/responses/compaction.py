"""/v1/responses/compact: replaces a conversation by its user messages and a summary written by the model."""

from __future__ import annotations

import dataclasses
import secrets
from contextlib import aclosing
from typing import Any

from server.apis.openai.responses.answering import usage_object
from server.apis.openai.responses.asked import Asked
from server.apis.openai.responses.items import packed
from server.generation.caller import Caller
from server.generation.request import Message
from server.generation.server_state import ServerState
from server.generation.start import generate
from server.generation.warnings import Warnings
from server.parsing.pieces import Blocks, Content

_REQUEST = (
    "Summarize the conversation so far, so that another assistant can go on with it without having read it: what was "
    "asked, what was done and found, what was decided, and what is left to do. Write only the summary."
)


async def compacted(server: ServerState, asked: Asked, warnings: Warnings, caller: Caller) -> dict[str, Any]:
    """Return the compacted conversation."""
    conversation = asked.request.conversation
    assert conversation is not None
    messages = [*conversation.messages, Message(role="user", content=_REQUEST)]
    summarized = dataclasses.replace(conversation, messages=messages, tools=[])
    generation = await generate(server, dataclasses.replace(asked.request, prompt=summarized), warnings, caller)
    blocks = Blocks()
    async with aclosing(generation.events()) as events:
        async for _, _, pieces in events:
            blocks.extend(pieces)
    summary = {"id": f"cmp_{secrets.token_hex(16)}", "type": "compaction"}
    return {
        "id": generation.id,
        "object": "response.compaction",
        "created_at": generation.created,
        "output": [
            *(_user_message(message.content or "") for message in conversation.messages if message.role == "user"),
            summary | {"encrypted_content": packed(blocks.text(Content))},
        ],
        "usage": usage_object(generation.usage),
    }


def _user_message(text: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {
        "id": f"msg_{secrets.token_hex(16)}",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": content,
    }
