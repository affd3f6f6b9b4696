"""Messages and tools of OpenAI's chat API, and their conversion to the neutral request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from engine.vision.sources import ImageSource
from server.generation.request import FUNCTION_NAME, Conversation, Message, Tool, ToolCall, ToolChoice, text_and_images
from server.http.bodies import ArgumentsSchema, Body, one_message, optional, wrong

ROLE = r"^[\w .-]{1,64}$"
# Field names of the neutral conversation in OpenAI's chat API.
NAMES = {
    "prompt": "messages",
    "tools[].name": "tools[].function.name",
    "messages[].tool_calls[].arguments": "messages[].tool_calls[].function.arguments",
    "template_variables": "chat_template_kwargs",
}


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: str | None


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str | None = None


class ThinkingPart(Body):
    """Reasoning, as Mistral's and Anthropic's APIs return it."""

    type: Literal["thinking", "reasoning"]
    thinking: str | list[TextPart] | None = None
    text: str | None = None

    NAMES_UNKNOWN: ClassVar[bool] = False

    @property
    def reasoning(self) -> str:
        if isinstance(self.thinking, list):
            return "".join(part.text or "" for part in self.thinking)
        return self.thinking or self.text or ""


class ImageURL(Body):
    url: str
    detail: str | None = None

    NO_EFFECT: ClassVar[Any] = {"detail": ("auto", "high", "original")}


class ImagePart(Body):
    """An image: a data URL, or another one that the server allows."""

    type: Literal["image_url"]
    image_url: ImageURL | str
    uuid: str | None = None  # by which other servers cache images

    NO_EFFECT: ClassVar[Any] = {"uuid": None}

    @property
    def source(self) -> ImageSource:
        return ImageSource(self.image_url if isinstance(self.image_url, str) else self.image_url.url)


class VideoPart(Body):
    """A video as frames: an animated file or pictures, in a data URL or another one that the server allows."""

    type: Literal["video_url"]
    video_url: ImageURL | str
    uuid: str | None = None

    NO_EFFECT: ClassVar[Any] = {"uuid": None}

    @property
    def source(self) -> ImageSource:
        url = self.video_url if isinstance(self.video_url, str) else self.video_url.url
        return ImageSource(url, is_video=True)


class FunctionCall(Body):
    name: str
    arguments: Any = None  # a JSON object as a string, as in OpenAI's API, or the object itself


class ToolCallFields(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: int | None = None


def _typed_parts(content: Any) -> Any:
    """Give the type of texts to parts that are strings or have a text alone: other servers read these, too."""
    if not isinstance(content, list):
        return content
    texts = ({"text": part} if isinstance(part, str) else part for part in content)
    return [
        {**part, "type": "text"} if isinstance(part, dict) and "text" in part and part.get("type") is None else part
        for part in texts
    ]


class MessageFields(Body):
    """One message. Accepts the empty fields of an answer's message, so that clients can send it back unchanged."""

    role: str = Field(
        pattern=ROLE, description="`system`, `user`, `assistant`, `tool`, or another role of the chat template."
    )
    content: Annotated[
        str | list[TextPart | ImagePart | VideoPart | RefusalPart | ThinkingPart] | None,
        one_message("a string or a list of text, image and video parts; other parts are not supported"),
        BeforeValidator(_typed_parts),
    ] = None
    name: str | None = None
    tool_calls: list[ToolCallFields] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: FunctionCall | None = None  # the older form of one call

    NO_EFFECT: ClassVar[Any] = {"annotations": ([],)}


class Function(Body):
    """The function of a tool. Additional fields are passed to the chat template."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: ArgumentsSchema = optional("A JSON schema of the arguments. Default: no arguments.")
    strict: bool | None = optional("Refuse a schema that cannot be enforced, instead of returning a warning.")


class ToolFields(Body):
    """A tool that the model may call. Additional fields are passed to the chat template."""

    type: Literal["function"]
    function: Function

    NAMES_UNKNOWN: ClassVar[bool] = False


class ToolName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: ToolName


class ToolSubset(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


ToolChoiceField = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    one_message(
        '"none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    ),
]


class ConversationFields(Body):
    """The fields that the chat template renders."""

    messages: list[MessageFields] = Field(
        min_length=1, description="The conversation; `content` is a string or a list of text and image parts."
    )
    tools: list[ToolFields] | None = optional(
        "Functions that the model may call, each with a name, a description and a JSON schema of its arguments."
    )
    add_generation_prompt: bool | None = optional(
        "Let the chat template add the opening of the assistant's message.", True
    )
    continue_final_message: bool | None = optional("Continue the last message instead of starting a new one.", False)
    chat_template_kwargs: dict[str, Any] | None = optional("Additional variables for the chat template.")
    documents: list[dict[str, Any]] | None = optional("Documents, for chat templates that include them.")

    @model_validator(mode="after")
    def _check_conversation(self) -> ConversationFields:
        if self.add_generation_prompt and self.continue_final_message:
            raise wrong("cannot be true together with add_generation_prompt", "continue_final_message")
        for index, message in enumerate(self.messages):
            if message.content is None and message.role not in ("assistant", "tool", "function"):
                raise wrong("is required", "messages", index, "content")
        return self

    def conversation(self, **more: Any) -> Conversation:
        """Return the neutral conversation. `more`: additional fields of `Conversation`."""
        adds = self.add_generation_prompt
        fields: dict[str, Any] = {
            "messages": [_message(each) for each in self.messages],
            "tools": [neutral_tool(each, index) for index, each in enumerate(self.tools or ())],
            "documents": self.documents,
            "add_generation_prompt": adds if adds is not None else not self.continue_final_message,
            "continue_final_message": bool(self.continue_final_message),
            "template_variables": self.chat_template_kwargs or {},
        }
        return Conversation(**{**fields, **more})


def _message(given: MessageFields) -> Message:
    reasoning = given.reasoning_content if given.reasoning_content is not None else given.reasoning
    if isinstance(given.content, list):
        thoughts = [part.reasoning for part in given.content if isinstance(part, ThinkingPart)]
        content = text_and_images(_shown(part) for part in given.content if not isinstance(part, ThinkingPart))
        reasoning = reasoning if reasoning is not None or not thoughts else "".join(thoughts)
    else:
        content = {"content": given.content or given.refusal or ""}
    calls = [
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in given.tool_calls or ()
    ]
    if given.function_call is not None and not calls:
        calls = [ToolCall(id=None, name=given.function_call.name, arguments=given.function_call.arguments)]
    return Message(
        role="tool" if given.role == "function" else given.role,
        **content,
        name=given.name,
        tool_call_id=given.tool_call_id,
        tool_calls=calls,
        reasoning=reasoning,
    )


def _shown(part: TextPart | ImagePart | VideoPart | RefusalPart) -> str | ImageSource:
    if isinstance(part, ImagePart | VideoPart):
        return part.source
    return (part.refusal if isinstance(part, RefusalPart) else part.text) or ""


def neutral_tool(given: ToolFields, index: int) -> Tool:
    function = given.function
    return Tool(
        name=function.name,
        parameters=function.parameters,
        strict=bool(function.strict),
        definition=given.model_dump(exclude_unset=True),
        path=("tools", index),
    )


def tool_choice(given: Any, parallel: bool | None) -> ToolChoice:
    """Convert `tool_choice`. `given`: a `ToolChoiceField` or None. `parallel`: whether several calls are allowed."""
    several = parallel is not False
    match given:
        case NamedTool(function=tool):
            return ToolChoice(mode="required", names=[tool.name], several=False)
        case AllowedTools(allowed_tools=subset):
            return ToolChoice(mode=subset.mode, names=[tool.function.name for tool in subset.tools], several=several)
        case None:
            return ToolChoice(several=several)
    return ToolChoice(mode=given, several=several)
