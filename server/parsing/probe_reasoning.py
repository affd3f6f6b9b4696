"""Finds the marks around a model's reasoning: by name, by what its chat template contains, or by rendering
reasoning.
"""

from __future__ import annotations

import re
from typing import Any

from engine.text.chat_template import ChatTemplate, ChatTemplateError
from server.parsing.reasoning import ReasoningFormat, find_reasoning_format

_QUESTION, _THOUGHT, _CONTENT = "quire question", "quire thought", "quire content"
_USER: dict[str, Any] = {"role": "user", "content": _QUESTION}
_PLAIN: dict[str, Any] = {"role": "assistant", "content": _CONTENT}
_MARK = r"(<[^<>\s]*>(?:\w+<[^<>\s]*>)?)"
_LAST, _FIRST = re.compile(rf"{_MARK}\s*$"), re.compile(rf"\s*{_MARK}")
_ON: dict[str, Any] = {"enable_thinking": True, "thinking": True}


def probe_reasoning_format(name: str, template: ChatTemplate | None) -> ReasoningFormat | None:
    """Return the format with this name; for "auto", the one whose marks the template contains or writes, or None."""
    found = find_reasoning_format(name, template.source if template is not None else "")
    if found is not None or name != "auto" or template is None:
        return found
    for variables in ({}, _ON):
        if (found := _written(template, variables)) is not None:
            return found
    return None


def _written(template: ChatTemplate, variables: dict[str, Any]) -> ReasoningFormat | None:
    """Return the marks that a template writes around the reasoning of the last message."""
    thoughts = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), _THOUGHT)
    text = _render(template, [_USER, {**_PLAIN, **thoughts}], variables)
    lead, _, rest = text.partition(_QUESTION)[2].partition(_THOUGHT)
    gap, _, after = rest.partition(_CONTENT)
    opened = _render(template, [_USER], variables, add_generation_prompt=True).partition(_QUESTION)[2]
    if opened.strip() and lead.startswith(opened) and len(lead) > len(opened):
        lead = lead[len(opened) :]
    begin, end = _LAST.search(lead), _FIRST.match(gap)
    plain = _render(template, [_USER, _PLAIN], variables).partition(_QUESTION)[2].partition(_CONTENT)[0]
    if begin is None or end is None or plain.rstrip().endswith(begin[1]):
        return None
    if "assistant" in gap:  # the content is a message of its own
        return ReasoningFormat(begin[1], gap.strip())
    opening = gap[end.end() :].strip()
    closing = _FIRST.match(after) if opening else None
    return ReasoningFormat(begin[1], end[1], answer=(opening, closing[1] if closing else ""))


def _render(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    add_generation_prompt: bool = False,
) -> str:
    try:
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
    except ChatTemplateError:
        return ""
