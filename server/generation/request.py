"""What clients ask for, in no API's spelling. Each API converts its requests to these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal, Self

from server.http.callers import Caller
from server.http.errors import APIError, Names

FUNCTION_NAME = r'^[^\s"\\<>{}\[\]]{1,256}$'
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
ToolMode = Literal["none", "auto", "required"]
MAX_PLAIN_VARIABLES = 8  # of a chat template that works on the event loop
MAX_TIMEOUT_MS = 24 * 3600 * 1000
# Arguments of `ChatTemplate.render` that are fields of a conversation.
RESERVED_TEMPLATE_VARIABLES = frozenset(
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made."""

    id: str | None
    name: str
    arguments: Any  # a JSON object, or its text


@dataclass(slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str  # "system", "developer", "user", "assistant", "tool", or another that the chat template has
    content: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None  # a JSON schema; None: there are no arguments
    strict: bool  # refuse a schema that cannot be enforced
    definition: dict[str, Any]  # what chat templates show: {"type": "function", "function": {…}}
    path: tuple[str | int, ...]  # where the request has it
    grammar: tuple[str, str] | None = (
        None  # of the text that is its only argument: the argument's name, Lark's notation
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether and which tools the answer calls."""

    mode: ToolMode = "auto"
    names: list[str] = field(default_factory=list)  # the tools that may be called; empty: all
    several: bool = True  # false: at most one call


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the chat template makes a prompt of."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    verbosity: Verbosity | None = None
    may_be_merged: bool = False  # where the chat template refuses the order of the messages; see `merged`
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # further ones

    def merged(self) -> Conversation:
        """The same for templates that take one system message, at the beginning, and then the roles alternately."""
        messages: list[Message] = []
        texts: list[list[str]] = []  # of each message
        for message in self.messages:
            is_system = message.role in ("system", "developer")
            role = message.role if not is_system else "system" if all(m.role == "system" for m in messages) else "user"
            if messages and messages[-1].role == role and role in ("system", "user"):
                texts[-1].append(message.content or "")
            else:
                messages.append(replace(message, role=role))
                texts.append([message.content or ""])
        for message, parts in zip(messages, texts, strict=True):
            if len(parts) > 1:
                message.content = "\n\n".join(filter(None, parts))
        return replace(self, messages=messages)

    @property
    def thinking_variables(self) -> dict[str, Any]:
        """Variables for the chat template, by the names that different model families have for the same."""
        variables: dict[str, Any] = {}
        thinks = self.enable_thinking
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            thinks = self.reasoning_effort != "none" if thinks is None else thinks
        if thinks is not None:
            variables |= {"enable_thinking": thinks, "thinking": thinks}
        return variables

    def template_options(self) -> dict[str, Any]:
        """Arguments for `ChatTemplate.render` beside the messages."""
        verbosity = {"verbosity": self.verbosity} if self.verbosity is not None else {}
        return {
            **self.thinking_variables,
            **verbosity,
            **self.template_variables,
            "tools": [tool.definition for tool in self.tools] or None,
            "documents": self.documents,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }

    @property
    def num_chars(self) -> int | None:
        """About how much text it is; None: much depends on the template."""
        variables = self.template_variables.values()
        is_plain = len(variables) <= MAX_PLAIN_VARIABLES and all(
            isinstance(each, bool | int | float) for each in variables
        )
        if self.tools or self.documents or not is_plain or any(message.tool_calls for message in self.messages):
            return None
        return sum(100 + len(message.content or "") + len(message.reasoning or "") for message in self.messages)

    def check(self) -> None:
        """`APIError` names what cannot be rendered."""
        if reserved := RESERVED_TEMPLATE_VARIABLES & self.template_variables.keys():
            raise APIError(400, f"must not hold {min(reserved)}, which has its own field", "template_variables")
        names: set[str] = set()
        for tool in self.tools:
            if tool.name in names:
                raise APIError(400, f"there are two tools of the name {tool.name!r}", *tool.path, "name")
            names.add(tool.name)


TextPrompts = list[str] | list[list[int]] | list[tuple[str, str]]  # texts, token ids, or pairs of texts to be compared


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """What every request to the engine says. `names` is how the API that it came by calls fields, as of `field_name`."""

    prompt: Conversation | TextPrompts
    id_prefix: str  # how the id of the answer begins
    names: Names = field(default_factory=dict)
    model: str | None = None  # None: the one served
    request_id: str | None = None  # how the id of the answer ends; None: a new one
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None  # keep this many tokens of the prompt; -1: as many as fit
    keep_first_tokens: bool = False  # truncate at the end instead of at the beginning
    cache_salt: str = ""
    priority: int = 0
    user: str = ""  # who asks, as the client says
    owner: str = ""  # requests of different owners get fair parts of the server; see `of`
    timeout_ms: int | None = None  # milliseconds that the answer may take; None: any time
    arrival: float = field(default_factory=monotonic)  # monotonic seconds

    def of(self, caller: Caller) -> Self:
        """The same with its owner."""
        return replace(self, owner=caller.owner(self.user))

    @property
    def deadline(self) -> float:
        """Monotonic seconds; 0: none."""
        return self.arrival + self.timeout_ms / 1000 if self.timeout_ms is not None else 0.0

    @property
    def num_prompts(self) -> int:
        return len(self.prompt) if isinstance(self.prompt, list) else 1

    @property
    def conversation(self) -> Conversation | None:
        return self.prompt if isinstance(self.prompt, Conversation) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(PromptRequest):
    """Answers to be generated: `n` to each prompt."""

    sampling: dict[str, Any]  # fields of `SamplingParams` that the client gave
    default_max_tokens: int | None = None  # where neither client nor model says; None: as many as fit
    structured_outputs: dict[str, Any] = field(default_factory=dict)  # fields of `StructuredOutputs`; empty: free text
    tool_choice: ToolChoice = ToolChoice()
    include_reasoning: bool = True
    length_penalty: float | None = None  # of a beam search, whose `n` best answers are given; None: answers are sampled

    @property
    def tool_mode(self) -> ToolMode:
        """Whether the answer may or must call tools."""
        return self.tool_choice.mode if self.tools else "none"

    @property
    def tools(self) -> list[Tool]:
        return self.conversation.tools if self.conversation is not None else []

    @property
    def callable_tools(self) -> list[tuple[int, Tool]]:
        """The tools that may be called, with their indexes."""
        chosen = frozenset(self.tool_choice.names)
        return [(index, tool) for index, tool in enumerate(self.tools) if not chosen or tool.name in chosen]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest(PromptRequest):
    """Embeddings to be computed: one of each prompt."""

    pooling: dict[str, Any]  # fields of `PoolingParams` that the client gave
