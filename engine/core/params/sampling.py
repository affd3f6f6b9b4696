"""The parameters of sampling and of stopping."""

# ruff: noqa: RUF009 (`parameter` declares a field)
from __future__ import annotations

from dataclasses import dataclass, replace

from engine.core.params.declare import NumberChecks, parameter, parameters_of
from engine.core.params.errors import ParameterError
from engine.core.params.structured import StructuredOutputs

MAX_TEXT_LENGTH = 100  # characters of a text that stands for tokens, or tokens of a list
# The parameters that `checked` covers: token ids, and texts that are converted to token ids.
_TOKEN_FIELDS = frozenset(
    [
        "stop_token_ids",
        "logit_bias",
        "allowed_token_ids",
        "logprob_token_ids",
        "bad_words",
        "dry_sequence_breakers",
        "dry_multiplier",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The generation parameters of one request, under the names of vLLM and OpenAI.

    Raises `ParameterError` with the value and the range for a value out of range.

    The sampler applies, in this order: `logit_bias`, `min_tokens` and `bad_words`, `repetition_penalty`,
    `frequency_penalty`, `presence_penalty`, DRY, `allowed_token_ids`, `thinking_token_budget`, the grammar of
    `structured_outputs`, `top_n_sigma`, `temperature`, `min_p`, `top_k`, `top_p`, `typical_p`, XTC. `temperature=0` is
    greedy: it takes the token with the highest logit after the steps up to the grammar, and ignores the later ones.
    With `seed`, the same request gives the same tokens whatever else is in the batch. Log probabilities are computed
    from the model's raw logits, before any of these steps.
    """

    n: int = parameter(1, "number of answers to each prompt", at_least=1, at_most=128)
    temperature: float = parameter(
        1.0, "randomness of sampling; 0: always the most likely token", at_least=0, at_most=2
    )
    top_p: float = parameter(
        1.0,
        "sample from the most likely tokens whose probabilities add up to this; 0: the most likely token",
        at_least=0,
        at_most=1,
    )
    top_k: int = parameter(
        0,
        "sample from this many of the most likely tokens; 0 or -1: from all",
        at_least=-1,
        at_most=2**31 - 1,
        wanted="-1 or 0 (all), or at least 1",
        unset="all",
    )
    min_p: float = parameter(
        0.0,
        "exclude tokens less likely than this fraction of the highest token probability",
        at_least=0,
        at_most=1,
    )
    typical_p: float = parameter(
        1.0,
        "locally typical sampling: sample from the tokens whose surprise is closest to the entropy, up to this "
        "probability",
        above=0,
        at_most=1,
    )
    top_n_sigma: float = parameter(
        0.0,
        "exclude tokens whose logits are more than this many standard deviations below the highest; 0 or -1: none",
        at_least=-1,
        at_most=100,
    )
    seed: int | None = parameter(
        None,
        "random seed: the same seed gives the same tokens, whatever else is in the batch; -1: none",
        at_least=-(2**63),
        at_most=2**63 - 1,
        wanted="a 64-bit int",
        unset="a random one",
    )
    # None: up to the model's context length.
    max_tokens: int | None = parameter(16, "maximum number of tokens of the answer", at_least=1)
    min_tokens: int = parameter(0, "minimum number of tokens before the answer may end", at_least=0)
    thinking_token_budget: int | None = parameter(
        None, "maximum number of tokens of the reasoning, which is closed there", at_least=0, unset="no limit"
    )
    stop: str | list[str] | None = parameter(None, "a string, or a list of strings, at which the answer ends")
    stop_token_ids: list[int] | None = parameter(
        None, "token ids at which the answer ends, in addition to the model's own", max_length=1024
    )
    include_stop_str_in_output: bool = parameter(False, "include the stop string in the answer")
    ignore_eos: bool = parameter(False, "continue after an end-of-sequence token")
    skip_special_tokens: bool = parameter(True, "remove special tokens from the text")
    presence_penalty: float = parameter(
        0.0, "subtracted from the logit of every token that has been generated", at_least=-2, at_most=2
    )
    frequency_penalty: float = parameter(
        0.0, "subtracted from a token's logit once for each time the token has been generated", at_least=-2, at_most=2
    )
    repetition_penalty: float = parameter(
        1.0,
        "divides the positive logits, and multiplies the negative logits, of tokens in the prompt or the answer so far",
        at_least=0.01,
        at_most=100,
    )
    logit_bias: dict[int, float] | None = parameter(
        None, "a map from token ids to values, from -100 to 100, that are added to their logits", max_length=1024
    )
    allowed_token_ids: list[int] | None = parameter(None, "sample only these tokens", max_length=16_384, unset="all")
    bad_words: list[str | list[int]] | None = parameter(None, "strings that are never generated", max_length=512)
    dry_multiplier: float = parameter(
        0.0, 'strength of the DRY ("don\'t repeat yourself") penalty; 0: none', at_least=0, at_most=100
    )
    dry_base: float = parameter(
        1.75,
        "base of the DRY penalty, which grows by this factor with each further repeated token",
        at_least=1,
        at_most=100,
    )
    dry_allowed_length: int = parameter(2, "repetitions shorter than this get no DRY penalty", at_least=1, at_most=1000)
    dry_sequence_breakers: list[str | int] | None = parameter(
        None, "strings or token ids that end a DRY repetition", max_length=512, unset='newline `:` `"` `*`'
    )
    xtc_threshold: float = parameter(
        0.1,
        'XTC ("exclude top choices"): exclude all tokens with at least this probability, except the least likely of '
        "them",
        at_least=0,
        at_most=1,
    )
    xtc_probability: float = parameter(
        0.0, "probability that XTC is applied to a token; 0: never", at_least=0, at_most=1
    )
    logprobs: int | None = parameter(
        None,
        "return log probabilities of the sampled tokens and of this many most likely tokens; "
        "-1: of all, up to --max-logprobs",
        at_least=-1,
        at_most=20,
        wanted="-1 or in [0, 20]",
    )
    prompt_logprobs: int | None = parameter(
        None,
        "return log probabilities of the prompt's tokens and of this many most likely tokens; -1: of all, up to "
        "--max-logprobs; not in streams",
        at_least=-1,
        at_most=20,
        wanted="-1 or in [0, 20]",
    )
    logprob_token_ids: list[int] | None = parameter(
        None,
        "with `logprobs`: return the log probabilities of exactly these tokens instead of the most likely ones",
        max_length=128,
        unset="the most likely",
    )
    thinking_marks: tuple[int, int] | None = (
        None  # token ids of the marks that open the reasoning (-1: the prompt opens it) and close it
    )
    # The text that the answer is expected to be, or its tokens: drafts, which change no answer.
    prediction: str | list[int] | None = None
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    checked: bool = False  # set by an input processor once texts are token ids and all ids are valid

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if self.top_p == 0:
            object.__setattr__(self, "top_p", _LEAST_TOP_P)
        if self.logprob_token_ids and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.stop is not None:
            stops = self.stop_strings
            if not all(isinstance(text, str) and text for text in stops):
                raise _wrong("stop", self.stop, "a non-empty string or a list of them")
            if stops and not self.detokenize:
                raise _wrong("stop", self.stop, "unset when detokenize=False")
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise _wrong("structured_outputs", self.structured_outputs, "StructuredOutputs")
        if self.prediction is not None and not isinstance(self.prediction, str | list):
            raise _wrong("prediction", self.prediction, "a text or a list of token ids")
        if not self.checked:
            self._check_tokens()

    def _check_tokens(self) -> None:
        for name, most in _MAX_LENGTHS:
            if (value := getattr(self, name)) is not None and len(value) > most:
                raise _wrong(name, str(len(value)), f"at most {most} entries")
        for name in ("stop_token_ids", "logprob_token_ids"):
            if not all(map(_is_id, getattr(self, name) or ())):
                raise _wrong(name, getattr(self, name), "token ids (integers ≥ 0)")
        if self.logit_bias is not None:
            for token_id, bias in self.logit_bias.items():
                if not (_is_id(token_id) and _is_number(bias) and -100 <= bias <= 100):
                    raise _wrong("logit_bias", {token_id: bias}, "token ids with numbers in [-100, 100]")
        if (allowed := self.allowed_token_ids) is not None and not (allowed and all(map(_is_id, allowed))):
            raise _wrong("allowed_token_ids", allowed, "at least one token id")
        for word in self.bad_words or ():
            if not ((isinstance(word, str) or all(map(_is_id, word))) and 0 < len(word) <= MAX_TEXT_LENGTH):
                raise _wrong("bad_words", word, f"texts or lists of token ids, of 1 to {MAX_TEXT_LENGTH}")
        for breaker in self.dry_sequence_breakers or ():
            if not (0 < len(breaker) <= MAX_TEXT_LENGTH if isinstance(breaker, str) else _is_id(breaker)):
                wanted = f"non-empty texts or token ids, the texts of at most {MAX_TEXT_LENGTH} characters"
                raise _wrong("dry_sequence_breakers", breaker, wanted)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def clone(self, **changes: object) -> SamplingParams:
        """Return a copy with changes. It stays `checked` unless a change concerns token ids."""
        if self.checked and not _TOKEN_FIELDS.isdisjoint(changes):
            changes = {"checked": False, **changes}
        return replace(self, **changes)  # type: ignore[arg-type]


_LEAST_TOP_P = 1e-9  # less than the probability of the most likely token
_check_numbers = NumberChecks(SamplingParams)
_MAX_LENGTHS = [
    (name, each.declaration.max_length)
    for name, each in parameters_of(SamplingParams).items()
    if each.declaration.max_length is not None
]


def _wrong(name: str, value: object, wanted: str) -> ParameterError:
    shown = repr(value)
    return ParameterError(name, f"must be {wanted}, got {shown if len(shown) <= 200 else shown[:200] + '…'}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
