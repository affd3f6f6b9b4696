"""Models on several GPUs: what ranks and pipeline stages answer, and find in their prefix cache files, beside one
process.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import random
import string
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine import LLM, SamplingParams
from engine.core.params.structured import StructuredOutputs
from tests.gpu.checks import Checks
from tests.gpu.models import story_folder
from tests.oracles.families import VOCAB, make_checkpoint

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
TEXT = "once upon a time the little fox saw old king castle river what is quire write story about why how many"
NUM_GREEDY, NUM_SAMPLED, NUM_TOKENS = 200, 50, 48
NUM_PROMPTS = NUM_GREEDY + 2 * NUM_SAMPLED
KINDS = {
    "greedy": slice(0, NUM_GREEDY),
    "sampled": slice(NUM_GREEDY, NUM_GREEDY + NUM_SAMPLED),
    "random": slice(NUM_GREEDY + NUM_SAMPLED, None),
}
LAYOUTS: dict[str, dict[str, Any]] = {  # tensor and pipeline parallel sizes
    "2 ranks": {"tensor_parallel_size": 2},
    "2 stages": {"pipeline_parallel_size": 2},
    "4 ranks": {"tensor_parallel_size": 4},
    "2 stages of 2 ranks": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
STAGES = {f"{stages} stages": {"pipeline_parallel_size": stages} for stages in (2, 3, 4)}
GUIDED_LETTERS, GUIDED_LENGTH, GUIDED_ROUNDS = string.ascii_lowercase, 24, 3
RANDOM_FAMILIES = ("olmo2",)  # whose ranks compute norms over the heads of all
STUCK_SECONDS = 60  # after which the stacks of all threads are printed
BF16_DIFFERING = 0.75  # of texts: sums of bfloat16 in another order decide near-ties otherwise; some half do so
RANDOM_DIFFERING = 0.05  # of float32 texts of a model with random weights, which has more near-ties than a trained one


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with 200 greedy requests, then sampled ones, with filters and without: the same for any layout."""

    name: str
    folder: Path
    prompts: list[Any]
    settings: dict[str, Any]

    @classmethod
    def trained(cls, folder: Path) -> Subject:
        chance = random.Random(0)
        words = TEXT.split()
        prompts = [" ".join(chance.choices(words, k=chance.randint(2, 40))).capitalize() for _ in range(NUM_PROMPTS)]
        return cls(folder.name, folder, prompts, {})

    @classmethod
    def with_random_weights(cls, family: str, folder: Path) -> Subject:
        make_checkpoint(family, folder)
        chance = random.Random(0)
        ids = [[chance.randrange(VOCAB) for _ in range(chance.randint(2, 80))] for _ in range(NUM_PROMPTS)]
        prompts = [{"prompt_token_ids": each} for each in ids]
        return cls(f"random {family}", folder, prompts, {"skip_tokenizer_init": True, "max_model_len": 200})

    def start(self, layout: dict[str, Any], dtype: str, device: str, **settings: Any) -> LLM:
        return LLM(
            str(self.folder), device=device, dtype=dtype, max_num_seqs=64, max_num_batched_tokens=256,
            kv_cache_memory_bytes=64 << 20, **self.settings, **layout, **settings,
        )  # fmt: skip

    def answers(self, layout: dict[str, Any], dtype: str, device: str) -> list[list[int]]:
        greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        sampled = [greedy.clone(temperature=0.8, top_p=0.9, seed=i, logprobs=2) for i in range(NUM_SAMPLED)]
        random_ones = [greedy.clone(temperature=0.8, seed=i) for i in range(NUM_SAMPLED)]
        begin = time.perf_counter()
        llm = self.start(layout, dtype, device)
        ready = time.perf_counter()
        faulthandler.dump_traceback_later(STUCK_SECONDS)
        answers = llm.generate(self.prompts, [greedy] * NUM_GREEDY + sampled + random_ones, use_tqdm=False)
        done = time.perf_counter()
        llm.close()
        faulthandler.cancel_dump_traceback_later()
        closed = time.perf_counter() - done
        times = f"start {ready - begin:.1f} s, texts {done - ready:.1f} s, end {closed:.1f} s"
        print(f"{self.name} model, {layout or 'one process'}, {dtype}: {times}", flush=True)
        return [answer.outputs[0].token_ids for answer in answers]


def check_ranks(checks: Checks) -> None:
    """Texts in float32 must not depend on how a trained model is divided; those in bfloat16 rarely."""
    layouts = _layouts(checks)
    if not layouts:
        print("left out: several ranks (there is one GPU)")
        return
    for folder in filter(None, (DEMO, story_folder())):
        subject = Subject.trained(folder)
        _check_texts(checks, subject, layouts, "float32", 0.0)
        _check_texts(checks, subject, layouts, "bfloat16", BF16_DIFFERING)
    if importlib.util.find_spec("transformers") is None:
        print("left out: random models on several ranks (transformers is not installed)")
        return
    for family in RANDOM_FAMILIES:
        with tempfile.TemporaryDirectory() as temporary:
            _check_texts(
                checks, Subject.with_random_weights(family, Path(temporary)), layouts, "float32", RANDOM_DIFFERING
            )


def check_rank_files(checks: Checks) -> None:
    """A second engine finds prompts in the prefix cache files that the first one has left, one of each rank."""
    subject = Subject.trained(DEMO)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for name, layout in _layouts(checks).items():
        full = f"{subject.name} model, {name}, prefix cache files"
        if not checks.wants(f"{full}: texts differ") and not checks.wants(f"{full}: found"):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            texts, cached = [], 0
            for _ in range(2):
                llm = subject.start(layout, "float32", checks.device, prefix_cache_file=str(Path(temporary, "file")))
                found = llm.generate(subject.prompts[:20], params, use_tqdm=False)
                llm.close()
                texts.append([answer.outputs[0].token_ids for answer in found])
                cached = sum(answer.num_cached_tokens for answer in found)
            num_tokens = sum(len(answer.prompt_token_ids) for answer in found)
        checks.saw(f"{full}: found", cached > num_tokens / 4, f"{cached} of {num_tokens} prompt tokens")
        checks.add(f"{full}: texts differ", sum(a != b for a, b in zip(*texts, strict=True)) / 20, 0.0)


def check_guided_stages(checks: Checks) -> None:
    """Requests that must each repeat a letter of their own do so while several steps are in the pipeline."""
    texts = [letter * GUIDED_LENGTH for letter in GUIDED_LETTERS] * 4
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=2 * GUIDED_LENGTH,
            structured_outputs=StructuredOutputs(regex=f"{text[0]}{{{GUIDED_LENGTH}}}"),
        )
        for text in texts
    ]
    subject = Subject.trained(DEMO)
    for name, layout in _layouts(checks, STAGES).items():
        full = f"{subject.name} model, {name}, float32: guided texts differ"
        if not checks.wants(full):
            continue
        llm = subject.start(layout, "float32", checks.device)
        wrong = 0
        for _ in range(GUIDED_ROUNDS):
            answers = llm.generate(subject.prompts[: len(texts)], params, use_tqdm=False)
            wrong += sum(answer.outputs[0].text != text for answer, text in zip(answers, texts, strict=True))
        llm.close()
        checks.add(full, wrong / (GUIDED_ROUNDS * len(texts)), 0.0)


def _layouts(checks: Checks, layouts: dict[str, dict[str, Any]] = LAYOUTS) -> dict[str, dict[str, Any]]:
    """Those for which there are GPUs, or four processes on a CPU."""
    most = 4 if checks.device == "cpu" else torch.cuda.device_count()
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    return {n: layout for n, layout in layouts.items() if layout.get(sizes[0], 1) * layout.get(sizes[1], 1) <= most}


def _check_texts(
    checks: Checks, subject: Subject, layouts: dict[str, dict[str, Any]], dtype: str, limit: float
) -> None:
    expected: list[list[int]] = []
    for name, layout in layouts.items():
        names = {what: f"{subject.name} model, {name}, {dtype}: {what} texts differ" for what in KINDS}
        if not any(map(checks.wants, names.values())):
            continue
        expected = expected or subject.answers({}, dtype, checks.device)
        found = subject.answers(layout, dtype, checks.device)
        for what, part in KINDS.items():
            pairs = list(zip(found[part], expected[part], strict=True))
            checks.add(names[what], sum(a != b for a, b in pairs) / len(pairs), limit)
