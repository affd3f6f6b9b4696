"""Answers of an engine, run step by step in the test's process."""

from collections.abc import Sequence

from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine


def greedy_answers(engine: Engine, prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    """Greedy tokens, `length` for each of the prompts, which run at once."""
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        engine.add_request(EngineRequest(str(i), prompt, sampling))
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work():
        for output in engine.step():
            found[output.request_id] += output.new_token_ids
    return list(found.values())


def two_turns(engine: Engine, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Greedy tokens of two turns of each conversation, in turn. The second prompt holds the first answer."""
    found = []
    for _ in range(2):
        answers = [greedy_answers(engine, [prompt], length)[0] for prompt in prompts]
        found += answers
        prompts = [[*prompt, *answer, 1, 2, 3] for prompt, answer in zip(prompts, answers, strict=True)]
    return found
