"""Tests the demo model on held-out questions, as Quire runs it, and writes the scores into its card.

python -m demo.score configs/demo
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from demo.chat import Chat, Persona, Turn
from demo.data import FOLDER, Encoder, evaluation, is_right
from demo.model import write_json
from demo.tables import load
from engine import LLM, SamplingParams

CARD_BEGIN, CARD_END = "<!-- scores -->", "<!-- end of scores -->"

# (system prompt, messages) of conversations that are printed after the training.
SAMPLES: list[tuple[str, list[str]]] = load("prompts")["samples"]


def score(llm: LLM, encoder: Encoder, per_skill: int) -> tuple[dict[str, Any], list[str]]:
    """Count right answers to held-out questions by skill; collect the wrong answers to look at."""
    cases = evaluation(seed=12345, per_skill=per_skill)
    answers = answer(llm, [encoder.prompt(chat, index) for _, chat, index in cases])
    asked: dict[str, int] = defaultdict(int)
    right: dict[str, int] = defaultdict(int)
    wrong = []
    for (skill, chat, index), text in zip(cases, answers, strict=True):
        turn = chat.turns[index]
        asked[skill] += 1
        if is_right(turn, text) and (not chat.persona.style or chat.persona.shows(text)):
            right[skill] += 1
        else:
            wrong.append(f"[{skill}] {turn.user!r}\n    expected {turn.expect}\n    got      {text!r}")
    return {skill: {"right": right[skill], "asked": asked[skill]} for skill in sorted(asked)}, wrong


def answer(llm: LLM, prompts: list[list[int]]) -> list[str]:
    """Greedy answers."""
    params = SamplingParams(temperature=0, max_tokens=256)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=len(prompts) > 1)
    return [result.outputs[0].text for result in results]


def talk(llm: LLM, encoder: Encoder) -> list[str]:
    """Greedy conversations for a reader."""
    lines = []
    for system, messages in SAMPLES:
        chat = Chat(random.Random(0), persona=Persona(system))
        lines += ["-" * 60, *([f"system: {system}"] if system else [])]
        for message in messages:
            chat.turns.append(Turn(message, ""))
            (text,) = answer(llm, [encoder.prompt(chat, len(chat.turns) - 1)])
            chat.turns[-1] = Turn(message, text)
            lines += [f"user: {message}", f"model: {text}"]
    return lines


def write_card(folder: Path, scores: dict[str, Any], measured: dict[str, Any]) -> None:
    """The model card with the scores between its marks."""
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    table = ["", "| skill | right | asked |", "|---|---:|---:|"]
    table += [
        f"| {skill} | {value['right'] / value['asked']:.0%} | {value['asked']} |" for skill, value in scores.items()
    ]
    asked, right = (sum(value[key] for value in scores.values()) for key in ("asked", "right"))
    table += ["", f"Of all, {right / asked:.1%}. The training:", "", *runs(measured), ""]
    head, rest = card.split(CARD_BEGIN)
    tail = rest.split(CARD_END)[1]
    (folder / "README.md").write_text(head + CARD_BEGIN + "\n".join(table) + CARD_END + tail)


def runs(measured: dict[str, Any]) -> list[str]:
    """A line for each run of the training, the first one first."""
    earlier = runs(measured["before"]) if "before" in measured else []
    minutes, millions = measured["seconds"] / 60, measured["tokens_read"] / 1e6
    line = f"{measured['steps']:,} steps in {minutes:.1f} minutes on one {measured['device']}"
    return [*earlier, f"{len(earlier) + 1}. {line}: {millions:,.1f} million tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="its folder")
    parser.add_argument("--per-skill", type=int, default=100, help="questions of each skill")
    parser.add_argument(
        "--out", type=Path, help="where to write eval.json, samples.txt and README.md, else beside the model"
    )
    args = parser.parse_args()
    out = args.out or args.model
    out.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(Tokenizer.from_file(str(args.model / "tokenizer.json")))
    llm = LLM(str(args.model), generation_config="vllm")
    scores, wrong = score(llm, encoder, args.per_skill)
    conversations = talk(llm, encoder)
    llm.close()
    for skill, value in scores.items():
        print(f"{skill:24s} {value['right']:4d} of {value['asked']}")
    print("\n".join(conversations))
    measured = json.loads((args.model / "eval.json").read_text())["training"]
    write_json(out / "eval.json", {"scores": scores, "training": measured})
    (out / "samples.txt").write_text("\n".join([*conversations, "", "WRONG ANSWERS", *wrong]) + "\n")
    write_card(out, scores, measured)


if __name__ == "__main__":
    main()
