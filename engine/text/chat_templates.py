"""The chat templates of a model: one, or several with names. A request's tools and documents choose one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.text.chat_renderer import ChatRenderer
from engine.text.chat_template import ChatTemplate

DEFAULT, WITH_TOOLS, WITH_DOCUMENTS = "default", "tool_use", "rag"


def chosen_name(names: Mapping[str, Any], *, has_tools: bool, has_documents: bool = False) -> str:
    """Return the name of the template for a request, as transformers chooses: `tool_use` if there are tools."""
    if has_tools and WITH_TOOLS in names:
        return WITH_TOOLS
    if has_documents and WITH_DOCUMENTS in names:
        return WITH_DOCUMENTS
    return DEFAULT if DEFAULT in names else next(iter(names))


def choose_renderer(
    sources: Mapping[str, str],
    special_tokens: Mapping[str, str],
    *,
    has_tools: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> ChatRenderer:
    """Return the renderer for requests with tools or without. Raises `ChatTemplateError` if the template is invalid."""
    source = sources[chosen_name(sources, has_tools=has_tools)]
    return ChatRenderer(ChatTemplate(source, special_tokens), variables)
