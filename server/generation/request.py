"""API-neutral requests. Each API converts its request bodies to these classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from engine.text.image_marks import marked
from engine.vision.sources import ImageSource
from server.generation.caller import Caller
from server.generation.errors import InvalidRequestError, Names

FUNCTION_NAME = r'^[^\s"\\<>{}\[\]]{1,256}$'
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
ToolMode = Literal["none", "auto", "required"]
MAX_PLAIN_VARIABLES = 8  # most template variables for rendering on the event loop
MAX_TIMEOUT_MS = 24 * 3600 * 1000
# Arguments of `ChatTemplate.render` that are fields of a conversation.
RESERVED_TEMPLATE_VARIABLES = frozenset(
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call made by the model."""

    id: str | None
    name: str
    arguments: Any  # a JSON object, or one as a string


@dataclass(slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str  # "system", "developer", "user", "assistant", "tool", or another role of the chat template
    content: str | None = None  # in it, `engine.text.image_marks` stand for the images
    images: list[ImageSource] = field(default_factory=list)
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    reasoning: str | None = None


def text_and_images(parts: Iterable[str | ImageSource]) -> dict[str, Any]:
    """Return `content` and `images` of a message with these parts."""
    content, images = marked(parts)
    return {"content": content, "images": images}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Any  # a JSON schema, an object once it is sound; None: the function has no arguments
    strict: bool  # reject the request if the schema cannot be enforced
    definition: dict[str, Any]  # passed to the chat template: {"type": "function", "function": {…}}
    path: tuple[str | int, ...]  # path of the tool in the request
    grammar: tuple[str, str] | None = (
        None  # for a tool with one text argument: the argument's name and its Lark grammar
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Return whether the answer calls tools, and which ones."""

    mode: ToolMode = "auto"
    names: list[str] = field(default_factory=list)  # the tools that may be called; empty: all
    several: bool = True  # allow several calls; False: at most one


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The input of the chat template."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    verbosity: Verbosity | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # additional variables

    @property
    def thinking_variables(self) -> dict[str, Any]:
        """Return template variables for thinking, under the names that different model families use."""
        variables: dict[str, Any] = {}
        thinks = self.enable_thinking
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            thinks = self.reasoning_effort != "none" if thinks is None else thinks
        if thinks is not None:
            variables |= {"enable_thinking": thinks, "thinking": thinks}
        return variables

    def template_options(self) -> dict[str, Any]:
        """Return the arguments of `ChatTemplate.render` except the messages."""
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
        """Approximate length in characters; None if it depends much on the template."""
        variables = self.template_variables.values()
        is_plain = len(variables) <= MAX_PLAIN_VARIABLES and all(
            isinstance(each, bool | int | float) for each in variables
        )
        if self.tools or self.documents or not is_plain or any(message.tool_calls for message in self.messages):
            return None
        return sum(100 + len(message.content or "") + len(message.reasoning or "") for message in self.messages)

    def check(self) -> None:
        """Raise `RequestError` if a template variable is reserved or two tools have the same name."""
        if reserved := RESERVED_TEMPLATE_VARIABLES & self.template_variables.keys():
            raise InvalidRequestError(
                f"must not contain {min(reserved)}, which has its own field", "template_variables"
            )
        names: set[str] = set()
        for tool in self.tools:
            if tool.name in names:
                raise InvalidRequestError(
                    f"two tools are named {tool.name!r}: names must be unique", *tool.path, "name"
                )
            names.add(tool.name)


TextPrompts = list[str] | list[list[int]] | list[tuple[str, str]]  # texts, token ids, or pairs to compare


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """Fields of every request to the engine. `names`: the API's own field names, as of `field_name`."""

    prompt: Conversation | TextPrompts
    id_prefix: str  # prefix of the response id
    names: Names = field(default_factory=dict)
    model: str | None = None  # None: the served model
    request_id: str | None = None  # the rest of the response id; None: a random one
    add_special_tokens: bool = False
    truncate_prompt_tokens: int | None = None  # keep this many tokens of the prompt; -1: as many as fit
    keep_first_tokens: bool = False  # truncate at the end instead of at the beginning
    cache_salt: str = ""
    priority: int = 0
    user: str = ""  # end user, as named by the client
    tenant: str = ""  # API key, user or client address, for fair scheduling; see `of`
    timeout_ms: int | None = None  # milliseconds from arrival to the end of the answer; None: no limit
    arrival: float = 0.0  # monotonic seconds; see `of`

    def of(self, caller: Caller, arrival: float = 0.0) -> Self:
        """Return the request with its tenant set from the caller, and its arrival, which deadlines count from."""
        return replace(self, tenant=caller.tenant(self.user), arrival=arrival)

    @property
    def deadline(self) -> float:
        """Deadline in monotonic seconds; 0: none."""
        return self.arrival + self.timeout_ms / 1000 if self.timeout_ms is not None else 0.0

    @property
    def num_prompts(self) -> int:
        return len(self.prompt) if isinstance(self.prompt, list) else 1

    @property
    def conversation(self) -> Conversation | None:
        return self.prompt if isinstance(self.prompt, Conversation) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(PromptRequest):
    """A request to generate `n` answers to each prompt."""

    sampling: dict[str, Any]  # fields of `SamplingParams` set by the client
    default_max_tokens: int | None = None  # if neither client nor model sets it; None: as many as fit
    structured_outputs: dict[str, Any] = field(default_factory=dict)  # fields of `StructuredOutputs`; empty: free text
    tool_choice: ToolChoice = ToolChoice()
    include_reasoning: bool = True
    length_penalty: float | None = None  # of a beam search for the `n` best answers; None: sample the answers

    @property
    def tool_mode(self) -> ToolMode:
        """Return whether the answer may or must call tools."""
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
    """A request to compute one embedding for each prompt."""

    pooling: dict[str, Any]  # fields of `PoolingParams` set by the client
    prompt_name: str | None = None  # of the model's own prompts, put before texts; None: its default, if wanted
    has_default_prompt: bool = False  # texts get the model's default prompt
    wants_logits: bool = False  # of a classifier; else embeddings
