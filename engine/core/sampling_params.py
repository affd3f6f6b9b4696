"""What a request asks of the sampler and when it ends. Knows numbers only: no tensors, no text models, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.core.structured_outputs import StructuredOutputs

_RANGES = (
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("top_n_sigma", -1.0, 100.0),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 1.0, 100.0),
    ("xtc_threshold", 0.0, 1.0),
    ("xtc_probability", 0.0, 1.0),
)
_LENGTHS = (("logit_bias", 1024), ("bad_words", 512), ("dry_sequence_breakers", 512))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's generation settings, named as vLLM and OpenAI name them.

    `ValueError` names the field, its value and the range when a value is out of range.

    The sampler applies, in this order: `logit_bias`, `min_tokens` and `bad_words`, `repetition_penalty`,
    `frequency_penalty`, `presence_penalty`, DRY, `allowed_token_ids`, the grammar of `structured_outputs`,
    `top_n_sigma`, `temperature`, `min_p`, `top_k`, `top_p`, `typical_p`, XTC. `temperature=0` is greedy: the token of
    the highest logit once all up to the grammar is done, whatever the rest says. With `seed`, the same request gives
    the same tokens whatever else is in the batch. Log-probabilities are those of the model's own logits, before any of
    this.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the model's context length
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # 0: the sampled token's; n: and the n most likely
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt, the first excepted
    detokenize: bool = True
    skip_special_tokens: bool = True

    presence_penalty: float = 0.0  # taken from the logit of every token generated so far
    frequency_penalty: float = 0.0  # the same, as often as it was generated
    repetition_penalty: float = 1.0  # divides the logits of tokens in prompt and answer; multiplies negative ones
    logit_bias: dict[int, float] | None = None  # token id → what is added to its logit
    allowed_token_ids: list[int] | None = None  # no other token is ever sampled
    bad_words: list[str | list[int]] | None = None  # never generated: texts, which a front end makes into token ids
    typical_p: float = 1.0  # least mass of the tokens whose surprise is nearest to the expected one
    top_n_sigma: float = 0.0  # logits this many standard deviations below the highest are dropped; 0 or -1: none
    structured_outputs: StructuredOutputs | None = None
    dry_multiplier: float = 0.0  # "don't repeat yourself": 0 is off
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # a repeated sequence of `length` ≥ this: penalty multiplier * base ** (length - this)
    dry_sequence_breakers: list[str | int] | None = None  # tokens, or texts for front ends; None: newline : " and *
    xtc_threshold: float = 0.1  # "exclude top choices": tokens at least this likely, the least likely one excepted …
    xtc_probability: float = 0.0  # … are dropped this often

    def __post_init__(self) -> None:
        def check(ok: bool, field: str, value: object, want: str) -> None:
            if not ok:
                raise ValueError(f"{field} must be {want}, got {value!r}")

        def is_int(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def is_number(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool)

        def is_id(value: object) -> bool:
            return is_int(value) and value >= 0  # type: ignore[operator]

        check(is_int(self.n) and 1 <= self.n <= 128, "n", self.n, "an integer from 1 to 128")
        check(
            is_number(self.temperature) and 0 <= self.temperature <= 100, "temperature", self.temperature, "in [0, 100]"
        )
        check(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        check(is_int(self.top_k) and -1 <= self.top_k < 2**31, "top_k", self.top_k, "-1 or 0 (all), or at least 1")
        check(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        check(
            self.seed is None or (is_int(self.seed) and -(2**63) <= self.seed < 2**63),
            "seed",
            self.seed,
            "a 64-bit int",
        )
        check(
            self.max_tokens is None or (is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            self.max_tokens,
            "at least 1",
        )
        check(is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None:
            check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"at most max_tokens={self.max_tokens}",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or (is_int(value) and 0 <= value <= 20), name, value, "in [0, 20]")
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        check(all(isinstance(s, str) and s for s in stops), "stop", self.stop, "a non-empty string or a list of them")
        check(not stops or self.detokenize, "stop", self.stop, "unset when detokenize=False")
        ids = self.stop_token_ids or []
        check(all(map(is_id, ids)), "stop_token_ids", self.stop_token_ids, "token ids (integers ≥ 0)")

        for name, lowest, highest in _RANGES:
            value = getattr(self, name)
            if not (is_number(value) and lowest <= value <= highest):
                raise ValueError(f"{name} must be in [{lowest:g}, {highest:g}], got {value!r}")
        for name, highest in (("repetition_penalty", 100), ("typical_p", 1)):
            value = getattr(self, name)
            check(is_number(value) and 0 < value <= highest, name, value, f"in (0, {highest}]")
        length = self.dry_allowed_length
        check(is_int(length) and 1 <= length <= 1000, "dry_allowed_length", length, "an integer from 1 to 1000")
        grammar = self.structured_outputs
        check(
            grammar is None or isinstance(grammar, StructuredOutputs),
            "structured_outputs",
            grammar,
            "StructuredOutputs",
        )
        for token_id, bias in (self.logit_bias or {}).items():
            check(
                is_id(token_id) and is_number(bias) and -100 <= bias <= 100,
                "logit_bias",
                {token_id: bias},
                "token ids with numbers in [-100, 100]",
            )
        if self.allowed_token_ids is not None:
            allowed = self.allowed_token_ids
            check(bool(allowed) and all(map(is_id, allowed)), "allowed_token_ids", allowed, "at least one token id")
        for name, most in _LENGTHS:
            value = getattr(self, name)
            if value is not None and len(value) > most:
                raise ValueError(f"{name} must be at most {most} entries, got {str(len(value))!r}")
        for word in self.bad_words or ():
            ok = isinstance(word, str) or all(map(is_id, word))
            check(ok and 0 < len(word) <= 100, "bad_words", word, "texts or lists of token ids, of 1 to 100")
        for breaker in self.dry_sequence_breakers or ():
            ok = breaker != "" if isinstance(breaker, str) else is_id(breaker)
            check(ok, "dry_sequence_breakers", breaker, "non-empty texts or token ids")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def clone(self, **changes: object) -> SamplingParams:
        return replace(self, **changes)  # type: ignore[arg-type]
