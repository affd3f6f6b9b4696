"""What a request asks of the sampler and when it ends. Knows numbers only: no tensors, no text models, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's generation settings, named as vLLM and OpenAI name them.

    `ValueError` names the field, its value and the range when a value is out of range.

    The sampler applies, in this order: `temperature`, `min_p`, `top_k`, `top_p`. `temperature=0` is greedy: the token
    of the highest logit, whatever the others say. With `seed`, the same request gives the same tokens whatever else is
    in the batch.
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
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def check(ok: bool, field: str, value: object, want: str) -> None:
            if not ok:
                raise ValueError(f"{field} must be {want}, got {value!r}")

        def is_int(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def is_number(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool)

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
        check(
            self.logprobs is None or (is_int(self.logprobs) and 0 <= self.logprobs <= 20),
            "logprobs",
            self.logprobs,
            "in [0, 20]",
        )
        stops = [self.stop] if isinstance(self.stop, str) else (self.stop or [])
        check(all(isinstance(s, str) and s for s in stops), "stop", self.stop, "a non-empty string or a list of them")
        check(not stops or self.detokenize, "stop", self.stop, "unset when detokenize=False")
        ids = self.stop_token_ids or []
        check(all(is_int(i) and i >= 0 for i in ids), "stop_token_ids", self.stop_token_ids, "token ids (integers ≥ 0)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def clone(self, **changes: object) -> SamplingParams:
        return replace(self, **changes)  # type: ignore[arg-type]
