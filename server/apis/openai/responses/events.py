"""Builds a response of /v1/responses while it is generated: its output items and events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from server.apis.openai.responses.items import packed
from server.apis.openai.responses.tools import CallableTool, CallForm
from server.generation.errors import RequestError
from server.http.sse import event
from server.parsing.pieces import Block, Blocks, CallArguments, CallStart, Content, Piece, Reasoning

_PREFIX = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "local_shell_call": "lsh_",
}


class ResponseBuilder:
    """Appends the pieces of one answer to `response["output"]` and returns the events for them.

    A block becomes one output item. Its events: `output_item.added`, for text also `content_part.added`; deltas; the
    `done` event of the text or the arguments; for text `content_part.done`; `output_item.done`.
    """

    def __init__(
        self,
        response: dict[str, Any],
        tools: Sequence[CallableTool] = (),
        *,
        packs_reasoning: bool = False,
        log: list[bytes] | None = None,
    ) -> None:
        """`response`: the object to fill, without output. `packs_reasoning`: add `encrypted_content` to reasoning.
        `log`: a list that each event is also appended to.
        """
        self.response = response
        self._forms = {each.tool.name: each.form for each in tools}
        self._packs_reasoning, self._log = packs_reasoning, log
        self._blocks = Blocks()
        self._open: Block | None = None
        self._logprobs: list[dict[str, Any]] = []  # of the open text item
        self._held_logprobs: list[dict[str, Any]] = []  # of tokens before their text arrives
        self._sequence_number = 0

    def start(self) -> bytes:
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def hold(self, logprobs: list[dict[str, Any]]) -> None:
        """Hold the log probabilities of tokens until their content arrives."""
        self._held_logprobs += logprobs

    def add(self, piece: Piece) -> bytes:
        logprobs, self._held_logprobs = self._held_logprobs, []
        data = b""
        if self._blocks.add(piece):
            data = self._close("completed") + self._begin(self._blocks.all[-1])
        match piece:
            case Content(text):
                self._logprobs += logprobs
                data += self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)
            case Reasoning(text):
                data += self._part_event("response.reasoning_text.delta", delta=text)
            case CallArguments(_, text) if self._item["type"] == "function_call":
                data += self._item_event("response.function_call_arguments.delta", delta=text)
        return data

    def finish(self, status: str, reason: str | None, usage: dict[str, Any]) -> bytes:
        """Return the last events. `status`: "completed", "incomplete" with a `reason`, or "cancelled"."""
        event_status = "completed" if status == "completed" else "incomplete"
        data = b""
        if self._lacks_message(status):
            data = self._close("completed") + self._begin(Block(Content))
        data += self._close(event_status)
        if reason is not None:
            self.response["incomplete_details"] = {"reason": reason}
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        self.response |= {"status": status, "usage": usage}
        return data + self._event(f"response.{event_status}", response=self.response)

    def fail(self, error: RequestError) -> bytes:
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=self.response)

    def _lacks_message(self, status: str) -> bool:
        """Return True if the answer has no item yet that a conversation continues: it gets a message without text."""
        kinds = {block.kind for block in self._blocks.all}
        return status != "cancelled" and (not kinds or (status == "completed" and kinds == {Reasoning}))

    # ---- one item ----

    def _begin(self, block: Block) -> bytes:
        if block.kind is Content:
            item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
        elif block.kind is Reasoning:
            item = {"type": "reasoning", "summary": [], "content": []}
        else:
            item = self._form(block).item(block.id)
        item = {"id": _PREFIX[item["type"]] + secrets.token_hex(16), "status": "in_progress", **item}
        self.response["output"].append(item)
        self._open, self._logprobs = block, []
        data = self._event("response.output_item.added", output_index=self._index, item=item)
        if block.kind is not CallStart:
            data += self._part_event("response.content_part.added", part=self._part(""))
        return data

    def _form(self, block: Block) -> CallForm:
        """Return the form of a call. An unguided model may call an unknown tool, shown as a function call."""
        return self._forms.get(block.name) or CallForm("function", block.name)

    def _close(self, status: str) -> bytes:
        block, self._open = self._open, None
        if block is None:
            return b""
        self._logprobs += self._held_logprobs
        text, item = block.text, self._item
        item["status"] = status
        if block.kind is CallStart:
            item |= self._form(block).members(text)
            data = self._call_end(item)
        else:
            part = self._part(text)
            item["content"] = [part]
            if block.kind is Content:
                data = self._part_event("response.output_text.done", text=text, logprobs=self._logprobs)
            else:
                data = self._part_event("response.reasoning_text.done", text=text)
                item |= {"encrypted_content": packed(text)} if self._packs_reasoning else {}
            data += self._part_event("response.content_part.done", part=part)
        return data + self._event("response.output_item.done", output_index=self._index, item=item)

    def _call_end(self, item: dict[str, Any]) -> bytes:
        match item["type"]:
            case "function_call":
                done = "response.function_call_arguments.done"
                return self._item_event(done, name=item["name"], arguments=item["arguments"])
            case "custom_tool_call":  # its text is part of a JSON object, which must be complete
                data = self._item_event("response.custom_tool_call_input.delta", delta=item["input"])
                return data + self._item_event("response.custom_tool_call_input.done", input=item["input"])
        return b""

    def _part(self, text: str) -> dict[str, Any]:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}

    # ---- events ----

    @property
    def _item(self) -> dict[str, Any]:
        """The current output item."""
        item: dict[str, Any] = self.response["output"][-1]
        return item

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _part_event(self, event_type: str, **members: Any) -> bytes:
        return self._item_event(event_type, content_index=0, **members)

    def _item_event(self, event_type: str, **members: Any) -> bytes:
        return self._event(event_type, item_id=self._item["id"], output_index=self._index, **members)

    def _event(self, event_type: str, **members: Any) -> bytes:
        data = msgspec.json.encode({"type": event_type, "sequence_number": self._sequence_number, **members})
        self._sequence_number += 1
        encoded = event(data, event_type.encode())
        if self._log is not None:
            self._log.append(encoded)
        return encoded
