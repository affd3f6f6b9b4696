"""The offline API, as scripts written for vLLM use it."""

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import engine as vllm
from engine import LLM, SamplingParams
from engine.errors import ConfigError, EngineDeadError, EngineError
from engine.models.errors import ModelError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(model=str(tiny_model), device="cpu", num_gpu_blocks_override=512)
    yield llm
    llm.close()


@pytest.fixture(autouse=True)
def nothing_left(llm: LLM) -> Iterator[None]:
    """After each test the engine is empty."""
    yield
    stats = llm._engine.stats()
    assert not llm._engine.has_work()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


def test_results_in_order_with_all_fields(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"text {i} " * (i + 1) for i in range(6)]
    lengths = [9, 3, 7, 1, 5, 4]
    results = llm.generate(texts, [GREEDY.clone(max_tokens=n) for n in lengths])
    assert [r.prompt for r in results] == texts
    assert [len(r.outputs[0].token_ids) for r in results] == lengths
    assert len({r.request_id for r in results}) == 6
    tokenizer = llm.get_tokenizer()
    for result in results:
        (answer,) = result.outputs
        assert result.finished
        assert result.prompt_token_ids == tokenizer.encode(result.prompt or "")
        assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
        assert answer.finished()
        assert answer.text == tokenizer.decode(answer.token_ids)
        assert answer.logprobs is None
        assert result.metrics is not None
        assert result.metrics.num_generation_tokens == len(answer.token_ids)
        assert result.metrics.first_token_latency > 0
    shown = capsys.readouterr().err
    assert "6/6" in shown
    assert "tokens/s" in shown


def test_all_spellings_of_a_prompt(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    ids = llm.get_tokenizer().encode("abc")
    ways: list[Any] = [
        "abc",
        {"prompt": "abc"},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": ids, "prompt": "abc"},
        ids,
    ]
    results = [llm.generate(way, GREEDY, use_tqdm=False) for way in ways]
    results += [llm.generate([way], GREEDY, use_tqdm=False) for way in ways]
    assert all(len(r) == 1 for r in results)
    assert len({tuple(r[0].outputs[0].token_ids) for r in results}) == 1
    assert [r[0].prompt for r in results[:5]] == ["abc", "abc", None, "abc", None]
    assert capsys.readouterr().err == ""
    assert llm.generate([], GREEDY) == []


def test_several_answers(llm: LLM) -> None:
    sampling = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=8, ignore_eos=True, logprobs=2)
    (result,) = llm.generate("abc", sampling, use_tqdm=False)
    assert [answer.index for answer in result.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in result.outputs}) == 3
    (alone,) = llm.generate("abc", sampling.clone(n=1, seed=12), use_tqdm=False)
    assert alone.outputs[0].token_ids == result.outputs[1].token_ids
    for answer in result.outputs:
        assert answer.logprobs is not None
        assert answer.cumulative_logprob == pytest.approx(
            sum(position[i].logprob for i, position in zip(answer.token_ids, answer.logprobs, strict=True))
        )
        for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True):
            assert 2 <= len(position) <= 3
            assert position[token_id].decoded_token == llm.get_tokenizer().token_text(token_id)


def test_logprobs_of_certain_tokens(llm: LLM) -> None:
    sampling = GREEDY.clone(max_tokens=5, logprobs=20)
    (everything,) = llm.generate("abc", sampling, use_tqdm=False)
    known = everything.outputs[0].logprobs
    assert known is not None
    asked = [[*known[0]][3], [*known[0]][1], 5]
    (result, plain) = llm.generate(["abc", "abc"], [sampling.clone(logprob_token_ids=asked), sampling], use_tqdm=False)
    (answer,) = result.outputs
    assert answer.logprobs is not None
    assert plain.outputs[0].logprobs == known, "the request beside it gets what it asked for"
    assert answer.token_ids == everything.outputs[0].token_ids
    for token_id, found, likely in zip(answer.token_ids, answer.logprobs, known, strict=True):
        assert found.keys() == {token_id, *asked}
        assert {i: each.logprob for i, each in found.items() if i in likely} == pytest.approx(
            {i: likely[i].logprob for i in found.keys() & likely.keys()}
        )
    assert SamplingParams(logprob_token_ids=[1]).logprobs == 0
    for wrong in ([-1], [10**6], [1] * 129):
        with pytest.raises(ValueError, match="logprob_token_ids"):
            llm.generate("abc", sampling.clone(logprob_token_ids=wrong), use_tqdm=False)


def test_stop_strings_and_tokens(llm: LLM) -> None:
    (whole,) = llm.generate("abc", GREEDY.clone(max_tokens=40), use_tqdm=False)
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    (result,) = llm.generate("abc", GREEDY.clone(max_tokens=40, stop=text[5:8]), use_tqdm=False)
    (answer,) = result.outputs
    assert answer.text == text[: text.index(text[5:8])]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", text[5:8])
    assert answer.token_ids == ids[: len(answer.token_ids)]
    assert len(answer.token_ids) < 40
    (result,) = llm.generate("abc", GREEDY.clone(stop_token_ids=[ids[4]]), use_tqdm=False)
    (answer,) = result.outputs
    assert answer.token_ids == ids[: ids.index(ids[4]) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", ids[4])


def test_detokenize_off(llm: LLM) -> None:
    (result,) = llm.generate("abc", GREEDY.clone(detokenize=False), use_tqdm=False)
    assert result.outputs[0].text == ""
    assert len(result.outputs[0].token_ids) == 12


def test_defaults_are_the_models(llm: LLM) -> None:
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k, default.max_tokens) == (0.5, 40, 16)
    (result,) = llm.generate("abc", use_tqdm=False)
    assert len(result.outputs[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", {"prompt_token_ids": []}], r"prompts\[1\]: the prompt is empty"),
        (["a", "b" * 5000], r"prompts\[1\]: the prompt has 5000 tokens, but the context holds 4096"),
        (["a", {"prompt_token_ids": [1, 400]}], r"prompts\[1\]: prompt token ids must be from 0 to 299, got 400"),
        (["a", {"prompt_token_ids": ["1"]}], r"prompts\[1\]: 'prompt_token_ids' must be a list of integers"),
        (["a", {"promt": "x"}], r"prompts\[1\]: a prompt may have .*, got 'promt'"),
        (["a", {}], r"prompts\[1\]: a prompt must have 'prompt' or 'prompt_token_ids'"),
        (["a", 3], r"prompts\[1\]: 'prompt_token_ids' must be a list of integers, got int"),
        ({"prompt": 3}, r"prompts\[0\]: 'prompt' must be a text, got int"),
        (3, r"prompts must be a text, token ids, or a list of prompts, got int"),
        (None, r"prompts must be a text, token ids, or a list of prompts, got NoneType"),
    ],
)
def test_bad_prompts_are_named_and_nothing_runs(llm: LLM, prompts: Any, message: str) -> None:
    before = llm._engine.stats().generation_tokens
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm._engine.stats().generation_tokens == before


def test_generation_config_at_the_edge_and_beyond(tiny_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": str(tiny_model), "device": "cpu", "generation_config": str(tmp_path)}
    (tmp_path / "generation_config.json").write_text('{"top_p": 0, "temperature": 0.6}')
    llm = LLM(**settings, num_gpu_blocks_override=64)
    assert llm.get_default_sampling_params().top_p < 1e-6  # the most probable token alone
    assert llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids
    llm.close()
    (tmp_path / "generation_config.json").write_text('{"top_p": 2}')
    with pytest.raises(ConfigError, match=f"{tmp_path}/generation_config.json: top_p must be"):
        LLM(**settings)


def test_bad_parameters(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"one for each prompt \(3\), got 2"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(TypeError, match=r"no setting 'max_model_length' \(did you mean max_model_len\?\)"):
        LLM(model="m", max_model_length=3)
    with pytest.raises(ModelError, match="nowhere"):
        LLM(model="nowhere")


def test_chat(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    (result,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert result.prompt == "[system] Be brief.\n[user] Hi!\n[assistant] "
    assert result.prompt_token_ids == llm.get_tokenizer().encode(result.prompt, add_special_tokens=False)
    several = llm.chat([messages, messages[1:]], GREEDY, use_tqdm=False)
    assert several[0].outputs[0].token_ids == result.outputs[0].token_ids
    assert several[1].prompt == "[user] Hi!\n[assistant] "
    messages.append({"role": "assistant", "content": "Hel"})
    (result,) = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert (result.prompt or "").endswith("[assistant] Hel")
    (result,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ messages | length }}")
    assert result.prompt == "3"
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        llm.chat(messages, continue_final_message=True)
    with pytest.raises(ValueError, match="at least one message"):
        llm.chat([])
    wrong: list[Any] = ["Hi!", ["Hi!"], [{"content": "Hi!"}], [messages, "Hi!"], [messages, [{"content": "Hi!"}]]]
    for conversation in wrong:
        with pytest.raises(ValueError, match="messages must be dicts with 'role' and 'content', got "):
            llm.chat(conversation)


def test_prefix_cache(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": list(range(100))}
    hits = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert hits == [0, 96]
    salted = {**prompt, "cache_salt": "mine"}
    assert [llm.generate(salted, GREEDY, use_tqdm=False)[0].num_cached_tokens for _ in range(2)] == [0, 96]
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_interrupted_llm_can_be_used_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    long = SamplingParams(max_tokens=3000, ignore_eos=True, n=2)
    before = signal.getsignal(signal.SIGINT)
    step, num_steps = llm._engine.step, itertools.count(1)

    def interrupted() -> Any:
        if next(num_steps) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm._engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], long, use_tqdm=False)
    assert 20 <= next(num_steps) < 100
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    assert not llm._engine.has_work()
    assert len(llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_other_threads_may_generate(llm: LLM) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate("abc", GREEDY, use_tqdm=False)))
    thread.start()
    thread.join()
    assert len(results) == 1


def test_forked_process_is_told_to_make_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(EngineDeadError, match="forked"):
            llm.generate("abc", GREEDY, use_tqdm=False)


def test_failed_step_ends_its_request_and_a_broken_device_the_llm(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = LLM(model=str(tiny_model), device="cpu", num_gpu_blocks_override=512, disable_log_stats=True)
    assert other.generate("abc", GREEDY, use_tqdm=False)[0].metrics is None
    with monkeypatch.context() as failing:
        failing.setattr(other._engine.runner, "launch", lambda output: 1 / 0)
        assert other.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "error"
    assert other.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"
    monkeypatch.setattr(other._engine.runner, "launch", lambda output: 1 / 0)
    monkeypatch.setattr(other._engine.runner.batch, "clear", lambda: 1 / 0)  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        other.generate("abc", GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError):
        other.generate("abc", GREEDY, use_tqdm=False)


def test_a_vllm_benchmark_script_runs(tiny_model: Path, tmp_path: Path) -> None:
    """Random weights, no tokenizer, token ids in and out."""
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    assert vllm.__version__
    llm = LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, dtype="bfloat16",
        gpu_memory_utilization=0.85, enable_prefix_caching=False, disable_log_stats=True, seed=0,
        enforce_eager=True, device="cpu", num_gpu_blocks_override=256,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [i, i + 1]} for i in range(5)]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False) for n in range(1, 6)]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [len(r.outputs[0].token_ids) for r in results] == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"prompts\[0\]: .*prompt_token_ids"):
        llm.generate("text", params[0])
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.get_tokenizer()
    llm.close()


def test_the_bar_moves_with_prefill_and_is_full_at_the_end(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    class Bar:
        def __init__(self, *, total: int, **_: object) -> None:
            self.total, self.n, self.shown, self.closed = total, 0, [(0, "")], False
            bars.append(self)

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            self.text = text

        def update(self, more: int) -> None:
            assert more >= 0
            self.n += more

        def refresh(self) -> None:
            self.shown.append((self.n, self.text.partition(",")[0]))

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("engine.offline.job_runner._BAR_SECONDS", 0)
    llm = LLM(str(tiny_model), device="cpu", max_num_batched_tokens=16, num_gpu_blocks_override=64)
    prompts = [[1 + i] * 100 for i in range(3)]
    for _ in range(2):  # the second time from the prefix cache
        llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0, stop_token_ids=[]), use_tqdm=Bar)
    llm.generate("abc", SamplingParams(), use_tqdm=Bar)
    for bar in bars:
        assert bar.n == bar.total
        assert bar.closed
        assert all(n < bar.total for n, _ in bar.shown[:-1])
    assert bars[0].total == 3 * (100 + 4 * 6)
    assert bars[0].shown[-1][1] == "3/3 requests"
    reading = [n for n, text in bars[0].shown if text == "0/3 requests"]
    assert len(set(reading)) >= 8
    llm.close()


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 16}, {"num_gpu_blocks_override": 32, "max_num_seqs": 64}]
)
def test_story_is_told_token_for_token(story_model: Path, settings: dict[str, int]) -> None:
    expected = json.loads((story_model / "expected_greedy.json").read_text())
    llm = LLM(model=str(story_model), device="cpu", **settings)
    sampling = [SamplingParams(temperature=0, max_tokens=len(e["output_ids"])) for e in expected]
    others = [{"prompt_token_ids": [1 + i] * (5 + 3 * i)} for i in range(20)]
    results = llm.generate(
        [e["prompt"] for e in expected] + others,
        sampling + [SamplingParams(max_tokens=60, ignore_eos=True)] * 20,
        use_tqdm=False,
    )
    assert [r.outputs[0].token_ids for r in results[: len(expected)]] == [e["output_ids"] for e in expected]
    llm.close()


def test_a_context_that_the_cache_does_not_hold_is_shortened(tiny_model: Path) -> None:
    llm = LLM(str(tiny_model), device="cpu", num_gpu_blocks_override=100)
    with pytest.raises(ValueError, match="the context holds 1600"):
        llm.generate([[1] * 1601])
    with pytest.raises(EngineError, match="room for 1600 tokens"):
        LLM(str(tiny_model), device="cpu", num_gpu_blocks_override=100, max_model_len=2048)
