"""The chat templates of the served model, each with the formats of tool calls and reasoning that follow from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine import ConfigError
from engine.text.chat_renderer import ChatRenderer
from engine.text.chat_template import ChatTemplate, ChatTemplateError
from engine.text.chat_templates import DEFAULT, chosen_name
from engine.text.tokenizer import Tokenizer
from server.generation.request import RESERVED_TEMPLATE_VARIABLES, GenerationRequest, PromptRequest
from server.parsing.formats import GENERIC, ToolFormat
from server.parsing.probe import find_tool_format
from server.parsing.probe_reasoning import probe_reasoning_format
from server.parsing.reasoning import HARMONY, ReasoningFormat
from server.settings import ServerConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One chat template, and the formats of the answers to its prompts."""

    renderer: ChatRenderer
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None

    @classmethod
    def of(cls, template: ChatTemplate, settings: ServerConfig) -> ChatFormat:
        """Return the formats that the settings name, else those found in the template."""
        tools = find_tool_format(settings.tool_call_parser, template)
        reasoning = probe_reasoning_format(settings.reasoning_parser, template)
        if tools is not None and tools.name == "openai":
            reasoning = HARMONY  # tool calls can be told apart only with this format
        return cls(ChatRenderer(template, settings.default_chat_template_kwargs), tools, reasoning)

    @property
    def source(self) -> str:
        return self.renderer.template.source

    @property
    def writes_harmony(self) -> bool:
        """Return whether answers are in gpt-oss's harmony format."""
        return self.reasoning_format is HARMONY

    def format_for(self, request: GenerationRequest) -> ToolFormat | None:
        """Return the format of the answer's tool calls. None: it has no calls, or the model's format is unknown."""
        if request.tool_mode == "none":
            return None
        return GENERIC if self.tool_format is None and request.tool_mode == "required" else self.tool_format

    def takes_several_calls(self, request: GenerationRequest) -> bool:
        """Return whether an answer may call more than one tool."""
        format, calls = self.format_for(request), self.renderer.traits(True).calls
        is_single = (format is not None and format.single) or (calls is not None and not calls.several)
        return request.tool_choice.several and not self.writes_harmony and not is_single


class ChatFormats:
    """The chat formats of a model by the names of its templates; empty if it has no template that works."""

    def __init__(self, tokenizer: Tokenizer | None, settings: ServerConfig, model_name: str) -> None:
        """A broken template in the model folder is not an error; raises `ConfigError` for a configured one."""
        self._formats: dict[str, ChatFormat] = {}
        self.missing = ""  # why there is no template
        special = tokenizer.special_tokens_map if tokenizer is not None else {}
        if reserved := RESERVED_TEMPLATE_VARIABLES & settings.default_chat_template_kwargs.keys():
            raise ConfigError(f"default_chat_template_kwargs must not contain {min(reserved)}")
        own = settings.read_chat_template()
        if own is not None:
            try:
                self._formats[DEFAULT] = ChatFormat.of(ChatTemplate(own, special), settings)
            except ChatTemplateError as error:
                raise ConfigError(f"chat_template: {error}") from None
        elif tokenizer is not None:
            self._add(tokenizer.chat_templates, special, settings, model_name)
        if not self._formats:
            advice = "use /v1/completions, or start the server with --chat-template FILE"
            self.missing = f"{self.missing or f'the model {model_name} has no chat template'}: {advice}"

    def _add(self, sources: Mapping[str, str], special: Mapping[str, str], settings: ServerConfig, name: str) -> None:
        for each, source in sources.items():
            try:
                self._formats[each] = ChatFormat.of(ChatTemplate(source, special), settings)
            except ChatTemplateError as error:
                which = "the model's chat template" if len(sources) == 1 else f"the model's chat template {each!r}"
                _log.warning("%s does not work: %s", which, error)
                self.missing = f"the chat template of the model {name} does not work ({error})"

    @property
    def default(self) -> ChatFormat | None:
        return self._formats[chosen_name(self._formats, has_tools=False)] if self._formats else None

    @property
    def with_tools(self) -> ChatFormat | None:
        return self._formats[chosen_name(self._formats, has_tools=True)] if self._formats else None

    def of(self, request: PromptRequest) -> ChatFormat | None:
        """Return the format of a request: tools and documents choose among named templates. None: there is none."""
        conversation: Any = request.conversation
        if conversation is None or not self._formats:
            return self.default
        name = chosen_name(
            self._formats, has_tools=bool(conversation.tools), has_documents=bool(conversation.documents)
        )
        return self._formats[name]
