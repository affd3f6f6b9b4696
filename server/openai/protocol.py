"""The requests' fields: types, defaults, and which are not supported yet. Knows OpenAI's and vLLM's names; runs nothing."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, create_model, model_validator

from server.http.fields import Body, fields_without_effect, one_message, unsupported_fields, wrong

# For the API reference: where the engine finds a number out of range. None: no limit.
RANGES: dict[str, tuple[float | None, float | None]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, None),
    "min_p": (0, 1),
    "n": (1, 128),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, None),
    "max_completion_tokens": (1, None),
    "max_output_tokens": (1, None),
    "min_tokens": (0, None),
    "dimensions": (1, None),
    "top_logprobs": (0, 20),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 100),
    "typical_p": (0, 1),
    "top_n_sigma": (-1, 100),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
    "dry_allowed_length": (1, 1000),
    "xtc_threshold": (0, 1),
    "xtc_probability": (0, 1),
}
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1000

# Fields of OpenAI's and vLLM's requests that change the answer and are not supported yet, with the values that leave the
# answer as it is. `None` always does.
NOT_YET_IN_BOTH: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "guided_whitespace_pattern": (),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
NOT_YET_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "moderation": (),
    "verbosity": ("medium",),
    "echo": (False,),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}
NOT_YET_IN_EMBEDDINGS: dict[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": ("do_not_pad",),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
NOT_YET_IN_STRUCTURED: dict[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "structural_tag": (),
}
NOT_YET_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",), "prompt_embeds": ()}

# Fields that never change the answer, and the values of them that need no word. None: labels, which ask for nothing.
NO_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "user": None,
    "metadata": None,
    "safety_identifier": None,
    "prompt_cache_key": None,  # prompts that begin alike share their KV anyway
    "prompt_cache_retention": (),
    "prompt_cache_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prediction": (),
    "spaces_between_special_tokens": None,  # our decoding puts none there
    "guided_decoding_backend": None,  # there is one
}


def _base(name: str, *tables: dict[str, tuple[Any, ...]]) -> type[Body]:
    fields: dict[str, Any] = unsupported_fields(*tables) | fields_without_effect(NO_EFFECT)
    return create_model(name, __base__=Body, **fields)


_ChatBase = _base("ChatBase", NOT_YET_IN_BOTH, NOT_YET_IN_CHAT)
_CompletionBase = _base("CompletionBase", NOT_YET_IN_BOTH, NOT_YET_IN_COMPLETIONS)
_EmbeddingBase = _base("EmbeddingBase", NOT_YET_IN_EMBEDDINGS)

TokenIds = list[int]
Prompt = Annotated[
    str | TokenIds | list[str] | list[TokenIds],
    Field(union_mode="left_to_right"),
    one_message("a text, a list of texts, a list of token ids, or a list of such lists"),
]
LogitBias = Annotated[dict[str, float], one_message("an object of token ids, each with a number")]
Stop = Annotated[str | list[str], one_message("a text or a list of texts")]


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send one more chunk at the end, with the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far with every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted; has no effect.")

    NO_EFFECT: ClassVar[Any] = {"include_obfuscation": (False,)}


JsonSchema = Annotated[dict[str, Any] | str, one_message("a JSON schema: an object, or its JSON as a text")]


class NamedSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Left out: any JSON object.")
    strict: bool | None = Field(None, description="Accepted; answers always follow the schema.")


class ResponseFormat(Body):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description='With "json_object": the same, briefly.')

    @model_validator(mode="after")
    def _check_format(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise wrong("response_format.json_schema", "is required")
        return self

    @property
    def asked(self) -> dict[str, Any]:
        """Arguments for the engine's `StructuredOutputs`; none: the answer is free."""
        if self.type == "text":
            return {}
        schema = self.json_schema.schema_ if self.json_schema is not None else self.schema_
        return {"json_object": True} if schema is None else {"json": schema or "{}"}


_structured: dict[str, Any] = unsupported_fields(NOT_YET_IN_STRUCTURED)
_StructuredBase: type[Body] = create_model("StructuredBase", __base__=Body, **_structured)


class StructuredOutputsFields(_StructuredBase):  # type: ignore[misc, valid-type]
    """What the answer has to be: exactly one of these."""

    json_: JsonSchema | None = Field(None, alias="json", description="An instance of this JSON schema.")
    regex: str | None = Field(None, description="A match of this regular expression, as a whole.")
    choice: list[str] | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, description="A sentence of this grammar, in Lark's notation or llama.cpp's.")
    json_object: bool | None = Field(None, description="Any JSON object.")


class _Request(Body):
    """What every request to the engine may say."""

    model: str | None = Field(None, description="A name that /v1/models lists.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep only so many last tokens of the prompt; -1: as many as fit."
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Only prompts of the same salt share their KV cache."
    )
    add_special_tokens: bool | None = Field(None, description="Begin the prompt with the tokenizer's special tokens.")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="Requests of lower ones come first.")
    request_id: str | None = Field(
        None, pattern=r"^[\w.:-]{1,128}$", description="The end of the answer's id, by which it can be aborted."
    )


class _Sampling(_Request):
    """What both kinds of request say about sampling. `None` takes the model's default, else OpenAI's."""

    temperature: float | None = Field(None, description="0: always the likeliest token; up to 100.")
    top_p: float | None = Field(None, description="Sample from the likeliest tokens of this total probability.")
    top_k: int | None = Field(None, description="Sample from this many likeliest tokens; 0 or -1: from all.")
    min_p: float | None = Field(None, description="Leave out tokens less likely than this share of the likeliest's.")
    n: int | None = Field(None, description="Number of answers, up to 128.")
    seed: int | None = Field(None, description="The same seed gives the same tokens, whatever else is in the batch.")
    max_tokens: int | None = Field(None, description="Most tokens of the answer.")
    min_tokens: int | None = Field(None, description="No end before this many tokens.")
    stop: Stop | None = Field(None, description="Texts that end the answer.")
    stop_token_ids: list[int] | None = Field(None, description="Tokens that end the answer, besides the model's own.")
    include_stop_str_in_output: bool | None = Field(None, description="Keep the text that ended the answer.")
    ignore_eos: bool | None = Field(None, description="Go on after an end-of-text token.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text; so by default.")
    presence_penalty: float | None = Field(None, description="Taken from the logit of every token that was generated.")
    frequency_penalty: float | None = Field(None, description="The same, as often as it was generated.")
    repetition_penalty: float | None = Field(
        None, description="Divides the logits of tokens in prompt and answer; multiplies negative ones."
    )
    logit_bias: LogitBias | None = Field(None, description="Token id to what is added to its logit, from -100 to 100.")
    allowed_token_ids: list[int] | None = Field(None, description="No other token is ever sampled.")
    bad_words: list[str] | None = Field(None, description="Texts that are never generated.")
    typical_p: float | None = Field(
        None, description="Sample from the tokens whose surprise is nearest to the expected one, of this probability."
    )
    top_n_sigma: float | None = Field(
        None, description="Leave out tokens whose logits are so many standard deviations below the highest."
    )
    dry_multiplier: float | None = Field(None, description="Don't repeat yourself: how strongly; 0 is off.")
    dry_base: float | None = Field(None, description="How much stronger for each further token.")
    dry_allowed_length: int | None = Field(None, description="Repetitions up to this length are free.")
    dry_sequence_breakers: list[str | int] | None = Field(None, description="Texts or token ids that end a repetition.")
    xtc_threshold: float | None = Field(None, description="Exclude top choices: tokens at least this likely ...")
    xtc_probability: float | None = Field(None, description="... are dropped this often, all but the least likely.")
    prompt_logprobs: int | None = Field(
        None, description="Log-probabilities of the prompt's tokens too, and of so many likeliest ones."
    )
    return_token_ids: bool | None = Field(None, description="Give the token ids of prompt and answer.")
    return_tokens_as_token_ids: bool | None = Field(None, description='Log-probabilities name tokens "token_id:1".')
    stream: bool | None = Field(None, description="Send the answer as it comes.")
    stream_options: StreamOptions | None = Field(None, description="What a stream tells besides.")
    response_format: ResponseFormat | None = Field(None, description="What the answer has to be.")
    structured_outputs: StructuredOutputsFields | None = Field(None, description="The same, with more to choose from.")
    guided_json: JsonSchema | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="The older name of structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="The older name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="The older name of structured_outputs.grammar.")

    @model_validator(mode="after")
    def _check_together(self) -> _Sampling:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "needs stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("prompt_logprobs", "is not given in streams")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_LENGTH for text in stop):
            raise wrong("stop", f"must be at most {MAX_STOP_STRINGS} texts of at most {MAX_STOP_LENGTH} characters")
        if len(self.asked) > 1:
            first, second, *_ = self.asked
            raise wrong(second, f"cannot be given together with {first}")
        return self

    @property
    def asked(self) -> dict[str, dict[str, Any]]:
        """What the answer has to be: the field that says so, with arguments for the engine's `StructuredOutputs`."""
        found = {}
        if self.response_format is not None and (format := self.response_format.asked):
            found["response_format"] = format
        if (given := self.structured_outputs) is not None:
            names = ("regex", "choice", "grammar")
            found["structured_outputs"] = {"json": given.json_} | {name: getattr(given, name) for name in names}
            found["structured_outputs"]["json_object"] = bool(given.json_object)
        for name in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                found[f"guided_{name}"] = {name: value}
        return found


class TextPart(Body):
    type: Literal["text", "input_text", "output_text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: Any = None  # a JSON object as text, as the API has it, or the object itself


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn. Fields that the answer's message has and that say nothing may come back as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[TextPart] | None, one_message("a text or a list of text parts; other parts are not supported")
    ] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    NO_EFFECT: ClassVar[Any] = {"annotations": ([],)}


class Function(Body):
    """What a tool is, for the model; further fields go to the chat template."""

    name: str = Field(pattern=r'^[^\s"\\<>{}\[\]]{1,256}$')
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; none: there are no arguments.")
    strict: bool | None = Field(None, description="True: refuse a schema that cannot be enforced, not just say so.")


class Tool(Body):
    """Something that the model may call; further fields go to the chat template."""

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


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    one_message(
        '"none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    ),
]


class _Conversation(Body):
    """What goes into a chat template."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    add_generation_prompt: bool | None = Field(None, description="Let the chat template open an answer; so by default.")
    continue_final_message: bool | None = Field(None, description="Continue the last message instead of beginning one.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the chat template.")
    documents: list[dict[str, Any]] | None = Field(None, description="For chat templates that show documents.")

    @model_validator(mode="after")
    def _check_conversation(self) -> _Conversation:
        if self.add_generation_prompt and self.continue_final_message:
            raise wrong("continue_final_message", "cannot be true together with add_generation_prompt")
        if reserved := RESERVED_TEMPLATE_VARIABLES & (self.chat_template_kwargs or {}).keys():
            raise wrong("chat_template_kwargs", f"must not hold {min(reserved)}, which has its own field")
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                raise wrong(f"messages[{index}].content", "is required")
        names = [tool.function.name for tool in self.tools or ()]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise wrong(f"tools[{index}].function.name", f"there are two tools of the name {name!r}")
        return self

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the header of a new message."""
        given = self.add_generation_prompt
        return given if given is not None else not self.continue_final_message

    def template_options(self) -> dict[str, Any]:
        """Arguments for `ChatTemplate.render` beside the messages."""
        return {
            **(self.chat_template_kwargs or {}),
            "tools": [tool.model_dump(exclude_unset=True) for tool in self.tools or ()] or None,
            "documents": self.documents,
            "add_generation_prompt": self.adds_generation_prompt,
            "continue_final_message": bool(self.continue_final_message),
        }


RESERVED_TEMPLATE_VARIABLES = frozenset(
    ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"]
)


class ChatCompletionRequest(_Conversation, _Sampling, _ChatBase):  # type: ignore[misc, valid-type]
    """A conversation to be continued."""

    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Give the log-probabilities of the sampled tokens.")
    top_logprobs: int | None = Field(None, description="And those of so many likeliest tokens, up to 20.")
    tool_choice: ToolChoice | None = Field(None, description='Without tools "none", else "auto".')
    parallel_tool_calls: bool | None = Field(None, description="False: at most one tool call.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description='For the chat template; "none" turns reasoning off.'
    )
    enable_thinking: bool | None = Field(None, description="For the chat template: whether to reason first.")
    include_reasoning: bool | None = Field(None, description="False: leave the reasoning out of the answer.")

    NO_EFFECT: ClassVar[Any] = NO_EFFECT

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "needs logprobs=true")
        names = {tool.function.name for tool in self.tools or ()}
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise wrong("tool_choice", "needs tools")
        if unknown := [name for name in self.chosen_tools if name not in names]:
            raise wrong("tool_choice", f"there is no tool of the name {unknown[0]!r}")
        return self

    @property
    def call_mode(self) -> Literal["none", "auto", "required"]:
        """Whether the answer may or must call tools."""
        match self.tool_choice:
            case _ if not self.tools:
                return "none"
            case None:
                return "auto"
            case NamedTool():
                return "required"
            case AllowedTools(allowed_tools=subset):
                return subset.mode
            case mode:
                return mode

    @property
    def chosen_tools(self) -> list[str]:
        """The tools that `tool_choice` names; none: all of them may be called."""
        match self.tool_choice:
            case NamedTool(function=tool):
                return [tool.name]
            case AllowedTools(allowed_tools=subset):
                return [tool.function.name for tool in subset.tools]
        return []

    @property
    def thinking_options(self) -> dict[str, Any]:
        """Variables for the chat template, by the names that different families have for the same."""
        options: dict[str, Any] = {}
        thinks = self.enable_thinking
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
            thinks = self.reasoning_effort != "none" if thinks is None else thinks
        if thinks is not None:
            options |= {"enable_thinking": thinks, "thinking": thinks}
        return options

    def template_options(self) -> dict[str, Any]:
        return self.thinking_options | super().template_options()


class CompletionRequest(_Sampling, _CompletionBase):  # type: ignore[misc, valid-type]
    """Text to be continued."""

    prompt: Prompt
    logprobs: int | None = Field(None, description="Log-probabilities, and those of so many likeliest tokens.")
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")

    NO_EFFECT: ClassVar[Any] = NO_EFFECT

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        given = self.prompt
        if not given or (not isinstance(given[0], int) and not all(given)):  # a text's characters are never empty
            raise wrong("prompt", "must not be empty")
        if self.scores_prompts and self.stream and (self.n or 1) > 1:
            raise wrong("echo", "with logprobs and several answers is not possible in a stream")
        return self

    @property
    def scores_prompts(self) -> bool:
        """Whether the log-probabilities are those of the prompt too."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is to be generated."""
        return bool(self.echo) and self.max_tokens == 0


class TokenizeTextRequest(Body):
    """A text to be turned into token ids."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = Field(None, description="Begin the prompt with the tokenizer's special tokens.")
    return_token_strs: bool | None = Field(None, description="Give the vocabulary's spelling of each token too.")


class TokenizeChatRequest(_Conversation):
    """A conversation to be turned into token ids."""

    model: str | None = None
    add_special_tokens: bool | None = Field(None, description="Begin the prompt with the tokenizer's special tokens.")
    return_token_strs: bool | None = Field(None, description="Give the vocabulary's spelling of each token too.")
    prompt: Annotated[None, one_message("left out where there are messages")] = None


TokenizeRequest = Annotated[
    Annotated[TokenizeTextRequest, Tag("<text>")] | Annotated[TokenizeChatRequest, Tag("<chat>")],
    Discriminator(lambda body: "<chat>" if isinstance(body, dict) and "messages" in body else "<text>"),
]


class DetokenizeRequest(Body):
    """Token ids to be turned into text."""

    model: str | None = None
    tokens: list[int]


class _Embedding(_Request, _EmbeddingBase):  # type: ignore[misc, valid-type]
    """What a request for embeddings says besides its text."""

    encoding_format: Literal["float", "base64"] | None = Field(
        None, description='"base64": of float32 values; smaller, quicker, and what OpenAI\'s clients ask for.'
    )
    dimensions: int | None = Field(
        None, description="Only so many first values; for models that were trained for it (Matryoshka)."
    )
    pooling: Literal["last", "mean"] | None = Field(
        None, description="Of the last token's hidden state, or of the mean of all; else as the server was told."
    )
    normalize: bool | None = Field(None, description="To length 1; so by default.")
    use_activation: bool | None = Field(None, description="vLLM's newer name of normalize.")
    truncation_side: Literal["left", "right"] | None = Field(
        None, description='"right": truncate_prompt_tokens keeps the first ones instead.'
    )

    NO_EFFECT: ClassVar[Any] = NO_EFFECT

    @model_validator(mode="after")
    def _check_names(self) -> _Embedding:
        if self.normalize is not None and self.use_activation not in (None, self.normalize):
            raise wrong("use_activation", "is another name of normalize, and differs from it")
        return self

    @property
    def normalizes(self) -> bool:
        return self.normalize is not False and self.use_activation is not False


class EmbeddingTextRequest(_Embedding):
    """Texts to be embedded."""

    input: Prompt

    @model_validator(mode="after")
    def _check_input(self) -> EmbeddingTextRequest:
        if self.input in ("", []) or (isinstance(self.input, list) and any(item in ("", []) for item in self.input)):
            raise wrong("input", "must not be empty")
        return self


class EmbeddingChatRequest(_Conversation, _Embedding):
    """A conversation to be embedded."""

    input: Annotated[None, one_message("left out where there are messages")] = None

    @property
    def adds_generation_prompt(self) -> bool:
        return bool(self.add_generation_prompt)  # nobody is to answer


EmbeddingRequest = EmbeddingTextRequest | EmbeddingChatRequest
EmbeddingBody = Annotated[
    Annotated[EmbeddingTextRequest, Tag("<text>")] | Annotated[EmbeddingChatRequest, Tag("<chat>")],
    Discriminator(lambda body: "<chat>" if isinstance(body, dict) and "messages" in body else "<text>"),
]
