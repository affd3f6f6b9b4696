"""Checks of requests before they reach the engine, and warnings about what has no effect."""

from __future__ import annotations

from dataclasses import replace

from server.generation.caller import Caller
from server.generation.chat_format import ChatFormat
from server.generation.conversation import Prompt
from server.generation.errors import InvalidRequestError, NotPermittedError
from server.generation.model import Model
from server.generation.request import GenerationRequest, PromptRequest
from server.generation.tool_schemas import sound_tool
from server.generation.warnings import Warnings
from server.parsing.harmony import EFFORTS
from server.settings import ServerConfig

MAX_SAMPLES = 2048  # prompts × n, or texts to embed
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1000  # characters


def check_admin(caller: Caller, what: str) -> None:
    """Raise `NotPermittedError` if the caller may not do `what`, which concerns other callers."""
    if not caller.is_admin:
        raise NotPermittedError(f"{what} requires a key with `admin: true` in the key file")


def check_priority(request: PromptRequest, caller: Caller) -> None:
    if request.priority < 0 and not caller.may_prioritise:
        raise NotPermittedError("values below 0 require a key with `priority: true` in the key file", "priority")


def check_tools(
    settings: ServerConfig, request: GenerationRequest, chat: ChatFormat | None, warnings: Warnings
) -> None:
    choice, names = request.tool_choice, {tool.name for tool in request.tools}
    if not names and (choice.names or choice.mode == "required"):
        raise InvalidRequestError("requires tools", "tool_choice")
    if unknown := [name for name in choice.names if name not in names]:
        raise InvalidRequestError(f"names the tool {unknown[0]!r}, which is not in tools", "tool_choice")
    if request.tool_mode == "none":
        return
    if request.tool_mode == "auto" and not settings.enable_auto_tool_choice:
        raise InvalidRequestError(
            '"auto" is disabled on this server: use "none", "required" or a function', "tool_choice"
        )
    if chat is not None and chat.tool_format is None:
        is_off = settings.tool_call_parser == "none"
        why = "the server parses no tool calls" if is_off else "the chat template has no known tool call format"
        forced = "the answer is a list of JSON objects" if request.tool_mode == "required" else "the answer is text"
        warnings.add(f"{why}, so {forced}: --tool-call-parser NAME sets a format", "tools")


def check_stop(request: GenerationRequest) -> None:
    stop = request.sampling.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_LENGTH for text in stop):
        reason = f"must be at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters each"
        raise InvalidRequestError(reason, "stop")


def check_num_samples(request: PromptRequest, n: int) -> None:
    """Bound the number of samples: each is an engine request, and needs preparation first."""
    num_prompts = request.num_prompts
    if num_prompts * n > MAX_SAMPLES:
        each = f" with n={n}" if n > 1 else ""
        raise InvalidRequestError(
            f"must be at most {MAX_SAMPLES // n} prompts{each}, got {num_prompts}", "prompt", lead=" "
        )


def with_sound_tools(request: GenerationRequest, warnings: Warnings) -> GenerationRequest:
    """Return the request with sound schemas of its tools, with a warning of each change."""
    conversation = request.conversation
    if conversation is None or not conversation.tools:
        return request
    found = [sound_tool(tool) for tool in conversation.tools]
    for tool, notes in found:
        for note in notes:
            warnings.add(f"{tool.name}: {note}", *tool.path)
    return replace(request, prompt=replace(conversation, tools=[tool for tool, _ in found]))


def warn_of_changes(prompt: Prompt, warnings: Warnings) -> None:
    """Warn of each way in which the prompt differs from the request's conversation."""
    for change in prompt.changes:
        warnings.add(change, "messages")


def warn_of_unused_variables(request: GenerationRequest, chat: ChatFormat | None, warnings: Warnings) -> None:
    if (conversation := request.conversation) is None:
        return
    source = chat.source if chat is not None else ""
    for name in ("reasoning_effort", "enable_thinking"):
        if getattr(conversation, name) is not None and not any(
            variable in source for variable in conversation.thinking_variables
        ):
            warnings.add("has no effect: the chat template does not use it", name)
    nearest = EFFORTS.get(conversation.reasoning_effort or "")
    if chat is not None and chat.writes_harmony and nearest is not None:
        warnings.add(f"the model supports low, medium and high: treated as {nearest}", "reasoning_effort")
    if conversation.verbosity not in (None, "medium") and "verbosity" not in source:
        warnings.add("has no effect: the chat template does not use it", "verbosity")


def warn_of_short_outputs(
    model: Model, request: GenerationRequest, prompts: list[list[int]], warnings: Warnings
) -> None:
    left = model.info.max_model_len - max(map(len, prompts))
    if (request.sampling.get("max_tokens") or 0) > left:
        warnings.add(f"the context has room for only {left} tokens of the answer", "max_tokens")


def check_prompts(model: Model, prompts: list[list[int]], num_reserved: int) -> None:
    """Check the prompts' lengths. `num_reserved`: tokens of the context to leave for the answer."""
    most = model.info.max_model_len
    for prompt in prompts:
        if not prompt:
            raise InvalidRequestError("is empty: it must have at least one token", "prompt", lead=" ")
        if len(prompt) + num_reserved > most:
            kept = ", at least one of them for the answer" if num_reserved else ""
            reason = (
                f"This model's maximum context length is {most} tokens{kept}. "
                f"However, your prompt has {len(prompt)} tokens. Please shorten it."
            )
            raise InvalidRequestError(reason, "prompt", lead=None)
