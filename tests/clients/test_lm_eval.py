"""lm-eval's `local-completions` against Quire: the same scores and texts as its own run of the model in
transformers.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.clients.table import Client

datasets = pytest.importorskip("datasets")
lm_eval = pytest.importorskip("lm_eval")
ConfigurableTask = pytest.importorskip("lm_eval.api.task").ConfigurableTask

CLIENTS = (Client("lm-evaluation-harness", "lm-eval", "scores and texts equal to those of transformers"),)
pytestmark = pytest.mark.slow

QUESTIONS = [
    ("What colour is the sky?", ["blue", "seven", "a long story about trains"], 0),
    ("What is 2 + 2?", ["3", "4", "5"], 1),
    ("Who was called Zoë in Köln?", ["naïve 👋", "Ελλάδα", "nobody"], 2),
    ("Tell me a story about a fox.", ["Once upon a time there was a fox.", "No.", "\n\n"], 0),
]


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def tasks() -> list[Any]:
    rows = [{"prompt": chat(question), "choices": choices, "right": right} for question, choices, right in QUESTIONS]
    shared: dict[str, Any] = {
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "target_delimiter": "",
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "right"}
    until = {"until": ["<|im_end|>", "\n\n"], "max_gen_toks": 40, "do_sample": False}
    text = {"output_type": "generate_until", "doc_to_target": "{{choices[right]}}", "generation_kwargs": until}
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{prompt}}{{choices[0]}}"}
    named: dict[str, dict[str, Any]] = {"choice": choice, "text": text, "rolling": rolling}
    metrics = {"choice": ["acc", "acc_norm"], "text": ["exact_match"], "rolling": ["word_perplexity", "bits_per_byte"]}
    return [
        ConfigurableTask(
            config={**shared, **own, "task": name, "metric_list": [{"metric": metric} for metric in metrics[name]]}
        )
        for name, own in named.items()
    ]


def evaluate(model: str, args: dict[str, Any]) -> dict[str, Any]:
    return lm_eval.simple_evaluate(model=model, model_args=args, tasks=tasks(), log_samples=True, bootstrap_iters=0)


def test_scores_and_texts_are_those_of_transformers(quire: str, demo_model: Path) -> None:
    served = evaluate(
        "local-completions",
        {
            "model": "demo",
            "base_url": f"{quire}/v1/completions",
            "tokenizer": str(demo_model),
            "num_concurrent": 4,
            "max_length": 2048,
        },
    )
    expected = evaluate("hf", {"pretrained": str(demo_model), "dtype": "float32", "device": "cpu"})
    for task in ("choice", "text", "rolling"):
        values = {k: v for k, v in expected["results"][task].items() if isinstance(v, float)}
        assert values
        for name, value in values.items():
            assert served["results"][task][name] == pytest.approx(value, rel=1e-4), (task, name)
        for mine, theirs in zip(served["samples"][task], expected["samples"][task], strict=True):
            for answers in zip(mine["resps"], theirs["resps"], strict=True):
                if task == "text":
                    assert answers[0] == answers[1]
                else:
                    (score, *greedy), (wanted, *wanted_greedy) = (flat(answer) for answer in answers)
                    assert float(score) == pytest.approx(float(wanted), abs=1e-3)
                    assert greedy == wanted_greedy


def flat(answer: Any) -> list[Any]:
    """[log-likelihood, whether it is the greedy text] of `[[log-likelihood, …]]`, or the first alone."""
    (value,) = answer
    return list(value) if isinstance(value, (list, tuple)) else [value]
