"""Grammars in the engine's loop: guided answers obey, others do not change, and errors end their own request only."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.batch import EngineOutput
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.params.structured import StructuredOutputs
from engine.engine import Engine
from engine.offline.llm import LLM
from engine.processing.input_processor import InputProcessor
from engine.structured import grammar_manager

pytestmark = pytest.mark.usefixtures("forked_engines")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json": json.dumps(SCHEMA)},
    {"json_object": True},
    {"regex": r"[a-c]{5}-\d{3}"},
    {"choice": ["apple", "pear", "plum and more"]},
    {"grammar": 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]{1,4}/'},
    {"grammar": 'root ::= "(" [a-z]+ ")"'},
]


def params(**fields: Any) -> SamplingParams:
    structured = {name: fields.pop(name) for name in list(fields) if name in StructuredOutputs.__slots__}
    defaults = {"temperature": 1.5, "max_tokens": 600, **fields}
    return SamplingParams(structured_outputs=StructuredOutputs(**structured), **defaults)


class Loop:
    """An engine, stepped by hand."""

    def __init__(self, model: Path, **settings: Any) -> None:
        config = EngineConfig(model=str(model), device="cpu", max_model_len=1024, **settings)
        self.input_processor = InputProcessor.load(config)
        self.engine = Engine(config, eos_token_ids=self.input_processor.eos_token_ids)
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(self, request_id: str, sampling: SamplingParams, prompt: list[int] | None = None) -> None:
        prompt = prompt or [1, 2, 3]
        self.outputs[request_id] = []
        self.engine.add_request(self.input_processor.check(EngineRequest(request_id, prompt, sampling)))

    def run(self, steps: int = 10**9) -> dict[str, list[int]]:
        while steps and self.engine.has_work():
            steps -= 1
            for output in self.engine.step():
                self.outputs[output.request_id].append(output)
        self.engine.scheduler.check()
        return {name: [t for output in own for t in output.new_token_ids] for name, own in self.outputs.items()}

    def text(self, request_id: str) -> str:
        assert self.input_processor.tokenizer is not None
        return self.input_processor.tokenizer.decode([t for o in self.outputs[request_id] for t in o.new_token_ids])

    def ended(self, request_id: str) -> str | None:
        return self.outputs[request_id][-1].finish_reason


def obeys(asked: dict[str, Any], text: str) -> bool:
    match asked:
        case {"json": _}:
            found = json.loads(text)
            return list(found) == ["name", "age"] and len(found["name"]) <= 8 and 0 <= found["age"] <= 99
        case {"json_object": _}:
            return isinstance(json.loads(text), dict)
        case {"regex": pattern}:
            return re.fullmatch(pattern, text) is not None
        case {"choice": choices}:
            return text in choices
        case {"grammar": grammar}:
            return re.fullmatch(r"\([a-z]+\)" if "::=" in grammar else r"<[a-z]{1,4}(,[a-z]{1,4})*>", text) is not None
    return False


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"num_gpu_blocks_override": 256, "block_size": 4}],
)
def test_guided_answers_obey_and_others_do_not_change(tiny_model: Path, settings: dict[str, Any]) -> None:
    plain = [SamplingParams(max_tokens=400, seed=i, ignore_eos=True, logprobs=1) for i in range(4)]
    alone = Loop(tiny_model)
    for i, sampling in enumerate(plain):
        alone.add(f"plain {i}", sampling)
    expected = alone.run()
    loop = Loop(tiny_model, **settings)
    for seed in range(3):
        for i, asked in enumerate(ASKED):
            loop.add(f"{i} {seed}", params(**asked, seed=seed), [i + 1] * (5 + i))
        if seed == 0:
            loop.run(steps=5)
    for i, sampling in enumerate(plain):
        loop.add(f"plain {i}", sampling)
    tokens = loop.run()
    for i in range(len(plain)):
        assert tokens[f"plain {i}"] == expected[f"plain {i}"]
    finished = 0
    for i, asked in enumerate(ASKED):
        for seed in range(3):
            if loop.ended(f"{i} {seed}") == "stop":
                finished += 1
                assert obeys(asked, loop.text(f"{i} {seed}")), loop.text(f"{i} {seed}")
    assert finished >= 3 * len(ASKED) - 3
    if "block_size" in settings:
        assert loop.engine.stats().num_preemptions > 0
    assert loop.engine._guided.grammars.num_held == loop.engine._guided.grammars.num_followed == 0
    assert not loop.engine._guided.grammars._weights


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 256, "block_size": 4}]
)
def test_deferred_requests_get_the_same_answers_later(
    tiny_model: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If masks take longer than the device, requests without a mask are deferred, and no others are."""

    def run(**settings: Any) -> tuple[dict[str, list[int]], int, int]:
        loop = Loop(tiny_model, **settings)
        for i in range(12):
            loop.add(f"plain {i}", SamplingParams(max_tokens=90, seed=i, ignore_eos=True))
        for i, asked in enumerate(ASKED * 2):
            extra = {"presence_penalty": 0.5, "logprobs": 2} if i % 3 == 0 else {}
            loop.add(str(i), params(**asked, seed=i, max_tokens=40, **extra), [i + 1] * (1 + i))
        steps = 0
        while not all(loop.outputs[f"plain {i}"] and loop.ended(f"plain {i}") for i in range(12)):
            loop.run(steps=1)
            steps += 1
        return loop.run(), steps, loop.engine.stats().num_preemptions

    expected, steps, _ = run()
    deferred = []
    fill = grammar_manager.GrammarManager.fill

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = fill(*args, **kwargs)
        deferred.extend(found[0])
        return found

    monkeypatch.setattr(grammar_manager, "LEAST", 1)
    monkeypatch.setattr(grammar_manager._Filler, "number_in", lambda filler, seconds: 0)
    monkeypatch.setattr(grammar_manager.GrammarManager, "fill", watched)
    tokens, steps_when_deferred, num_preemptions = run(**settings)
    assert tokens == expected
    assert len(deferred) > 20
    if settings:
        assert num_preemptions > 0
    else:
        assert steps_when_deferred <= 1.1 * steps, "other requests waited"


def test_the_same_answer_in_any_company(tiny_model: Path) -> None:
    alone, together = Loop(tiny_model, max_num_seqs=1), Loop(tiny_model)
    for loop in (alone, together):
        for i, asked in enumerate(ASKED):
            loop.add(str(i), params(**asked, seed=i, presence_penalty=0.5, logprobs=2))
    assert alone.run() == together.run()
    logprobs = [found for output in together.outputs["3"] for found in output.logprobs or ()]
    assert any(found.rank > 20 for found in logprobs), "they are the model's own, whatever the grammar says"


def test_other_wishes_give_way_to_the_grammar(tiny_model: Path) -> None:
    loop = Loop(tiny_model)
    loop.add("min_tokens", params(choice=["ab"], min_tokens=50))
    loop.add("bans", params(regex="a{10}", bad_words=["a", "aa"], repetition_penalty=3.0))
    loop.add("allowed", params(regex="a{10}", allowed_token_ids=[5]))
    loop.add("greedy", params(regex="[ab]{10}", temperature=0))
    loop.add("filters", params(regex="[ab]{10}", top_n_sigma=1.0, xtc_probability=1.0, typical_p=0.5, top_k=3))
    loop.add("ignore_eos", params(choice=["ab"], ignore_eos=True, max_tokens=9))
    loop.run()
    assert loop.text("min_tokens") == "ab"
    assert loop.text("bans") == loop.text("allowed") == "a" * 10
    assert re.fullmatch("[ab]{10}", loop.text("greedy"))
    assert re.fullmatch("[ab]{10}", loop.text("filters"))
    assert (loop.text("ignore_eos"), loop.ended("ignore_eos")) == ("ab", "length")


def test_aborts_at_every_stage(tiny_model: Path) -> None:
    for steps in range(8):
        loop = Loop(tiny_model)
        loop.add("a", params(regex="[ab]{30}"))
        loop.add("b", params(regex="[ab]{30}"))
        loop.run(steps)
        assert loop.engine.abort("a")
        assert not loop.engine.abort("a")
        loop.run()
        assert re.fullmatch("[ab]{30}", loop.text("b"))
        assert not loop.engine._guided.grammars._weights
        assert loop.engine.stats().num_free_blocks == loop.engine.stats().num_blocks


def test_grammars_wait_for_room(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_manager, "MAX_WEIGHT", 200)
    loop = Loop(tiny_model)
    for i in range(6):
        loop.add(str(i), params(choice=["x" * 70, "y" * 90]))
    assert sum(held.matcher is None for held in loop.engine._guided.grammars._held.values()) >= 4
    loop.run()
    assert all(len(set(loop.text(str(i)))) == 1 for i in range(6))


def test_what_cannot_be_compiled_or_followed_ends_in_an_error(tiny_model: Path) -> None:
    loop = Loop(tiny_model)
    broken = StructuredOutputs(regex="x", compiled='{"grammars": [{"lark_grammar": "start: nowhere"}]}')
    loop.outputs["broken"] = []
    loop.engine.add_request(EngineRequest("broken", [1], SamplingParams(structured_outputs=broken)))
    loop.add("plain", SamplingParams(max_tokens=20, ignore_eos=True))
    loop.add("complex", params(regex="[ab]{50}"))
    while "complex" not in loop.engine._guided.grammars._followed:  # its grammar is being compiled
        loop.run(steps=1)
    loop.run(steps=2)
    loop.engine._guided.grammars._followed["complex"].matcher.consume_token(5)  # as if its limits were reached
    loop.run()
    assert loop.ended("broken") == "error"
    assert loop.ended("complex") == "error"
    for request_id in ("broken", "complex"):
        output = loop.outputs[request_id][-1]
        assert output.is_refused, "the request is to blame, not the server"
        assert output.error.startswith("its grammar cannot be ")
    assert len(loop.run()["plain"]) == 20


def test_requests_that_can_never_run_are_refused_at_once(tiny_model: Path) -> None:
    loop = Loop(tiny_model)
    loop.add("a", params(choice=["a"]))
    with pytest.raises(ValueError, match="the prompt has 1024 tokens"):
        loop.engine.add_request(EngineRequest("b", [1] * 1024, loop.input_processor.prepare(params(choice=["a"]))))
    with pytest.raises(ValueError, match="in use"):
        loop.add("a", params(choice=["a"]))
    loop.run()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"not": {"multipleOf": 3}}}, r"structured_outputs.json: Unimplemented keys: \[\"not\"\]"),
        ({"json": "{"}, "structured_outputs.json: the JSON Schema is not valid JSON"),
        ({"regex": "(?=a)"}, "structured_outputs.regex: look-ahead and look-behind are not supported"),
        ({"regex": "("}, "structured_outputs.regex: .*unclosed group"),
        ({"grammar": "start: x"}, 'structured_outputs.grammar: .*unknown name: "x"'),
        ({"choice": ["a" * 20_000]}, "structured_outputs.choice: a choice may have at most 10000 characters"),
    ],
)
def test_bad_grammars_are_named_in_the_front_end(tiny_model: Path, fields: dict[str, Any], message: str) -> None:
    input_processor = InputProcessor.load(EngineConfig(model=str(tiny_model), device="cpu"))
    with pytest.raises(ValueError, match=message):
        input_processor.check(EngineRequest("a", [1], params(**fields)))
    bare = InputProcessor.load(EngineConfig(model=str(tiny_model), device="cpu", skip_tokenizer_init=True))
    with pytest.raises(ValueError, match="structured_outputs need a tokenizer"):
        bare.check(EngineRequest("a", [1], params(choice=["a"])))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "one of json, regex, choice, grammar, json_object, got none"),
        ({"json": {"a": 1}, "regex": "x"}, "got json, regex"),
        ({"json": ""}, "structured_outputs.json must not be empty"),
        ({"json": 3}, "structured_outputs.json must .*int"),
        ({"choice": []}, "structured_outputs.choice must not be empty"),
        ({"choice": ["a", ""]}, "structured_outputs.choice must be a list of non-empty texts"),
        ({"regex": ""}, "structured_outputs.regex must not be empty"),
    ],
)
def test_exactly_one_thing_is_asked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**fields)
    with pytest.raises(ValueError, match="structured_outputs must be StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_several_answers_and_vllms_face(tiny_model: Path) -> None:
    llm = LLM(model=str(tiny_model), device="cpu", max_model_len=1024)
    (result,) = llm.generate("abc", params(choice=["red", "green", "blue"], n=8, seed=1), use_tqdm=False)
    assert {answer.text for answer in result.outputs} <= {"red", "green", "blue"}
    assert len({answer.text for answer in result.outputs}) > 1
    with pytest.raises(ValueError, match=r"prompts\[0\]: structured_outputs.regex"):
        llm.generate("abc", params(regex="(?<=a)b"), use_tqdm=False)
    llm.close()


def test_in_another_process(tiny_model: Path) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(EngineConfig(model=str(tiny_model), device="cpu", max_model_len=1024))
        try:

            async def answer(name: str, sampling: SamplingParams) -> tuple[str, str | None]:
                sampling = await engine.prepare(sampling)
                text, reason = "", None
                async for update in engine.generate(EngineRequest(name, [1, 2, 3], sampling)):
                    text, reason = text + update.text, update.finish_reason
                return text, reason

            plain = SamplingParams(max_tokens=5, ignore_eos=True)
            asked = [answer(str(i), params(**asked, seed=i)) for i, asked in enumerate(ASKED)]
            *texts, other = await asyncio.gather(*asked, answer("plain", plain))
            assert other[1] == "length"
            for (text, reason), wanted in zip(texts, ASKED, strict=True):
                assert reason == "length" or obeys(wanted, text)
            assert await engine.prepare(plain) is plain
            with pytest.raises(ValueError, match="oneOf"):
                await engine.prepare(params(json={"oneOf": [{"type": "integer"}, {"type": "number"}]}))
            for count in range(4999, 4900, -1):
                slow = asyncio.create_task(engine.prepare(params(regex="a*" * count)))
                ticks = 0
                while not slow.done():
                    ticks += 1
                    await asyncio.sleep(0.001)
                await slow
                if ticks > 10:  # fewer when the machine has no time for this process
                    break
            assert ticks > 10, "the event loop waits for a grammar"
        finally:
            engine.close()

    asyncio.run(main())
