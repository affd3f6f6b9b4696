"""Models that draft on the device: their texts, their guesses beside a CPU's, and the time that they take."""

from __future__ import annotations

import importlib.util
import itertools
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.model_shapes import model_folder
from engine import LLM, SamplingParams
from engine.worker.proposers import model_proposer
from tests.gpu.checks import Checks
from tests.oracles.block_drafters import make_block_drafter
from tests.oracles.drafters import make_eagle3, make_mtp_checkpoint
from tests.oracles.families import VOCAB, make_checkpoint
from tests.support.drafters import Drafted

NUM, NUM_OF_BLOCKS = 3, 7  # tokens that a drafter proposes
MTP_FAMILIES = ("glm4_moe", "glm4_moe_lite", "qwen3_5")
KINDS_OF_BLOCKS = ("dflash", "windows", "dflash2", "dspark")
KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "filters": {"temperature": 0.9, "top_p": 0.9}}
SHAPE, STREAMS, NUM_TOKENS = "qwen3-8b", (1, 8), 100
DRAFTER_SHAPES = {"draft_model": "qwen3-0.6b", "eagle3": "qwen3-8b-eagle3", "dflash": "qwen3-8b-dflash"}
NUM_PROMPTS = 16
LEAST_ALIKE = 0.95  # of guesses on a GPU and on a CPU; rounding decides between two that are almost equally likely


def check_drafter_texts(checks: Checks) -> None:
    """Float32: texts with each drafter are those without, and guesses are those of the same engine on a CPU."""
    if importlib.util.find_spec("transformers") is None:
        print("left out: drafters (transformers is not installed)")
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        def itself() -> tuple[Path, Path | None]:
            make_checkpoint("qwen3", root / "qwen3")
            return root / "qwen3", root / "qwen3"

        def head() -> tuple[Path, Path | None]:
            target = make_checkpoint("qwen3", root / "qwen3")
            make_eagle3(root / "head", target, vocab=90, norm_before_fc=True)
            return root / "qwen3", root / "head"

        def block(kind: str) -> Callable[[], tuple[Path, Path | None]]:
            def make() -> tuple[Path, Path | None]:
                make_block_drafter(kind, root / kind, make_checkpoint("qwen3", root / "qwen3"))
                return root / "qwen3", root / kind

            return make

        def layer(name: str) -> Callable[[], tuple[Path, Path | None]]:
            def make() -> tuple[Path, Path | None]:
                make_mtp_checkpoint(name, root / name)
                return root / name, None

            return make

        cases: dict[str, tuple[str, Callable[[], tuple[Path, Path | None]]]] = {
            "draft_model, itself": ("draft_model", itself),
            "eagle3": ("eagle3", head),
            **{f"mtp of {name}": ("mtp", layer(name)) for name in MTP_FAMILIES},
            **{f"block, {kind}": ("dflash", block(kind)) for kind in KINDS_OF_BLOCKS},
        }
        for case, (method, make) in cases.items():
            for kind in ("eager", "graphs", "captured guesses"):
                name = f"drafter {case}, {kind}"
                if checks.wants(name):
                    captures = mock.patch.object(model_proposer, "CAPTURES", kind == "captured guesses")
                    with captures:
                        _check_texts(checks, name, method, *make(), eager=kind == "eager")


def _check_texts(checks: Checks, name: str, method: str, model: Path, draft: Path | None, *, eager: bool) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(2, 60))] for _ in range(NUM_PROMPTS)]
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 300}
    guesses: list[dict[tuple[int, ...], list[int]]] = []
    for device in dict.fromkeys((checks.device, "cpu")):
        drafted = Drafted(model, method, draft, NUM, device=device, enforce_eager=eager, **settings)
        for kind, fields in KINDS.items():
            params = SamplingParams(max_tokens=48, seed=6, ignore_eos=True, detokenize=False, **fields)
            if device != checks.device and kind != "greedy":
                continue
            expected = drafted.answers(params, drafts=False, prompts=prompts)
            drafted.llm.reset_prefix_cache()
            drafted.proposed.clear()
            before = drafted.counts
            got = drafted.answers(params, prompts=prompts)
            tried, accepted = (after - each for after, each in zip(drafted.counts, before, strict=True))
            differing = sum(a != b for a, b in zip(expected, got, strict=True)) / len(prompts)
            if device == checks.device:
                checks.add(f"{name}, {kind}: texts differ", differing, 0.0)
                right = accepted == tried if "itself" in name else True
                checks.saw(f"{name}, {kind}: accepted", tried > 50 and right, f"{accepted} of {tried}")
            if kind == "greedy":
                guesses.append({tuple(known): proposed for known, proposed in drafted.proposed})
        drafted.llm.close()
    if len(guesses) == 2:
        here, there = guesses
        alike = [here[known] == there[known] for known in here.keys() & there.keys()]
        part = sum(alike) / max(len(alike), 1)
        # Steps with and without drafts differ, so only guesses that follow the same tokens on both are compared.
        checks.saw(
            f"{name}: guesses as on a CPU", len(alike) > 50 and part >= LEAST_ALIKE, f"{part:.1%} of {len(alike)}"
        )


def check_drafter_speed(checks: Checks) -> None:
    """A model's shape in bfloat16 with dummy weights: seconds of a step without drafts, and with a drafter."""
    if checks.device == "cpu":
        print("left out: time of drafters (there is no GPU)")
        return
    for method, captures in itertools.product(DRAFTER_SHAPES, (True, False)):
        name = f"drafter's time, {method}, {'captured' if captures else 'not captured'}"
        if not checks.wants(name):
            continue
        captured = mock.patch.object(model_proposer, "CAPTURES", captures)
        with tempfile.TemporaryDirectory() as folder, captured:
            target, draft = (model_folder(each, Path(folder)) for each in (SHAPE, DRAFTER_SHAPES[method]))
            _check_time(checks, name, method, target, draft)


def _check_time(checks: Checks, name: str, method: str, target: Path, draft: Path) -> None:
    number = NUM_OF_BLOCKS if method == "dflash" else NUM
    drafted = Drafted(
        target, method, draft, number, device=checks.device, dtype="bfloat16", load_format="dummy", max_model_len=1024,
        max_num_seqs=8, enforce_eager=False, debug_checks=False, max_num_batched_tokens=8192,
    )  # fmt: skip
    rng = random.Random(7)
    for num in STREAMS:
        prompts = [[rng.randrange(1, 30_000) for _ in range(64)] for _ in range(num)]
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
        seconds: dict[bool, float] = {}
        before = drafted.counts
        steps: dict[bool, int] = {}
        for drafts in (False, True, False, True):
            begin, first = time.perf_counter(), _num_steps(drafted.llm)
            drafted.answers(params, drafts=drafts, prompts=prompts)
            seconds[drafts], steps[drafts] = time.perf_counter() - begin, _num_steps(drafted.llm) - first
        tried, accepted = (after - each for after, each in zip(drafted.counts, before, strict=True))
        plain, with_drafts = (1e3 * seconds[each] / steps[each] for each in (False, True))
        what = f"{with_drafts:.2f} ms a step, plain {plain:.2f}; {accepted} of {tried} accepted"
        checks.saw(f"{name}, {num} streams, {number} tokens", with_drafts > 0, what)
    drafted.llm.close()


def _num_steps(llm: LLM) -> int:
    return llm._engine.scheduler._step
