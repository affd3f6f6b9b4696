"""Weights rounded while they are loaded, and bfloat16: about the same text as in float32, with and without a
compiler.
"""

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from kernels.cpu import build, library

STORY = "Once upon a time, there was a friendly boy named Jonas. One day Jonas found a map with a red cross on it."


def logprobs(model: Path, **options: Any) -> list[float]:
    """Log-probabilities of each token of a text, and of a greedy answer to it."""
    llm = LLM(model=str(model), device="cpu", max_model_len=128, max_num_seqs=2, **options)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    (output,) = llm.generate([STORY], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [next(iter(each.values())).logprob for each in found if each]


@pytest.fixture(scope="module")
def exact(demo_model: Path) -> list[float]:
    return logprobs(demo_model, dtype="float32")


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"dtype": "bfloat16"}, 0.05),
        ({"dtype": "bfloat16", "quantization": "int8"}, 0.1),
        ({"dtype": "float32", "quantization": "int8"}, 0.1),
        ({"dtype": "bfloat16", "quantization": "int4"}, 0.5),
    ],
)
@pytest.mark.parametrize("compiler", [True, False])
def test_the_text_is_about_as_likely(
    demo_model: Path,
    exact: list[float],
    monkeypatch: pytest.MonkeyPatch,
    compiler: bool,
    options: dict[str, Any],
    bound: float,
) -> None:
    if not compiler:
        monkeypatch.setattr(build, "find_compiler", lambda: None)
    library.library.cache_clear()
    try:
        got = logprobs(demo_model, **options)
    finally:
        library.library.cache_clear()
    assert len(got) == len(exact)
    assert got != exact
    assert sum(abs(a - b) for a, b in zip(got, exact, strict=True)) / len(exact) < bound
