"""Error of weight formats in a model's outputs, beside float32.

    python -m benchmarks.offline.accuracy configs/demo

The model samples texts in float32; then each format computes the log-probability of every token of them, and the
most likely token in its place. Needs no data, and says how far a format's distribution is from the model's own.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any, NamedTuple

from engine import LLM, SamplingParams

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


class Scores(NamedTuple):
    """Scores of each token but the first of each text."""

    logprobs: list[float]
    top_tokens: list[int]  # the token that greedy sampling would have taken in its place

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


class Difference(NamedTuple):
    """Difference of a format from another."""

    logprob: float  # mean, of the absolute values
    agreement: float  # share of equal most likely tokens

    @classmethod
    def of(cls, scores: Scores, exact: Scores) -> Difference:
        count = len(exact.logprobs)
        logprob = sum(abs(a - b) for a, b in zip(scores.logprobs, exact.logprobs, strict=True)) / count
        same = sum(a == b for a, b in zip(scores.top_tokens, exact.top_tokens, strict=True))
        return cls(logprob, same / count)


def sample(llm: LLM, prompt: str, num_texts: int, num_tokens: int) -> list[list[int]]:
    """Token ids of texts, their prompt included."""
    params = SamplingParams(temperature=1.0, n=num_texts, seed=0, max_tokens=num_tokens)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return [[*output.prompt_token_ids, *answer.token_ids] for answer in output.outputs]


def score(llm: LLM, texts: list[list[int]]) -> Scores:
    prompts: list[Any] = [{"prompt_token_ids": text} for text in texts]
    scores = Scores([], [])
    for output in llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False):
        assert output.prompt_logprobs is not None
        for token_id, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None
            scores.logprobs.append(found[token_id].logprob)
            scores.top_tokens.append(next(token for token, each in found.items() if each.rank == 1))
    return scores


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offline.accuracy", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders, or Hugging Face ids")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS, metavar="NAME")
    parser.add_argument("--prompt", default="Once upon a time", help="how every text begins (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=64, help="how many texts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each text, at most (default: %(default)s)")
    args = parser.parse_args(argv)
    print("| model | weights | perplexity | most likely token as in float32 | mean change of a log-probability |")
    print("|---|---|---:|---:|---:|")
    for model in args.models:
        exact: Scores | None = None
        texts: list[list[int]] = []
        for name in dict.fromkeys(["float32", *args.formats]):
            llm = LLM(model, max_model_len=args.tokens + 64, max_num_seqs=64, **FORMATS[name])
            texts = texts or sample(llm, args.prompt, args.texts, args.tokens)
            scores = score(llm, texts)
            exact = exact or scores
            change = Difference.of(scores, exact)
            cells = f"{scores.perplexity:.3f} | {change.agreement:.1%} | {change.logprob:.4f}"
            print(f"| {model.rstrip('/').rpartition('/')[2]} | {name} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
