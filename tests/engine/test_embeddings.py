"""Embeddings: the model's own hidden states, however prompts are cut and whatever runs beside them; and Hugging
Face's.
"""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, AsyncEngine, EngineConfig, PoolingParams, SamplingParams
from engine.core.batch import EngineOutput
from engine.core.engine_request import EngineRequest
from engine.core.params.pooling import UNSAMPLED
from engine.engine import Engine
from engine.errors import ConfigError
from engine.models.files import silent
from engine.worker.cuda_graphs import DecodeGraphs

pytestmark = pytest.mark.usefixtures("forked_engines")

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
LENGTHS = (1, 2, 15, 16, 17, 90, 33, 200, 1)
PROMPTS = [[(i * 31 + k * k * 7) % 250 for k in range(n)] for i, n in enumerate(LENGTHS)]
PROMPTS += [PROMPTS[5][:64] + [7] * 9]  # a beginning that another has too
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def hidden_states(model: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """[tokens, hidden] of each prompt, after the final norm, from Hugging Face's model."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model
    with torch.inference_mode():
        return [reference(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


def pooled(states: torch.Tensor, params: PoolingParams) -> torch.Tensor:
    vector = states[-1] if params.pooling == "last" else states.double().mean(0).float()
    vector = vector[: params.dimensions]
    return vector / vector.norm() if params.normalize else vector


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[torch.Tensor]:
    return hidden_states(tiny_model, PROMPTS)


KINDS = [
    PoolingParams(),
    PoolingParams(pooling="mean"),
    PoolingParams(normalize=False, dimensions=5),
    PoolingParams(pooling="mean", dimensions=40),
]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 50, "max_num_seqs": 7},
        {"num_gpu_blocks_override": 70, "block_size": 4, "max_num_batched_tokens": 50},
    ],
)
def test_among_requests_that_generate(tiny_model: Path, expected: list[torch.Tensor], settings: dict[str, Any]) -> None:
    """Every embedding is Hugging Face's, and every answer the one that it is without embeddings beside it."""
    engine = Engine(EngineConfig(model=str(tiny_model), device="cpu", max_model_len=256, **settings))
    asked: dict[str, tuple[list[int], SamplingParams, PoolingParams | None]] = {}
    for i, prompt in enumerate(PROMPTS):
        for k, kind in enumerate(KINDS):
            asked[f"embed-{i}-{k}"] = prompt, UNSAMPLED, kind
        asked[f"answer-{i}"] = prompt, GREEDY, None

    def run(ids: list[str]) -> dict[str, list[EngineOutput]]:
        outputs: dict[str, list[EngineOutput]] = {request_id: [] for request_id in ids}
        for request_id in ids:
            prompt, sampling, pooling = asked[request_id]
            engine.add_request(EngineRequest(request_id, prompt, sampling, pooling=pooling))
        while engine.has_work():
            for output in engine.step():
                outputs[output.request_id].append(output)
        return outputs

    def tokens(outputs: list[EngineOutput]) -> list[int]:
        return [token for output in outputs for token in output.new_token_ids]

    alone = run([request_id for request_id in asked if request_id.startswith("answer")])
    before = engine.stats()
    together = run(list(asked))
    for i, states in enumerate(expected):
        assert tokens(together[f"answer-{i}"]) == tokens(alone[f"answer-{i}"])
        for k, kind in enumerate(KINDS):
            (output,) = together[f"embed-{i}-{k}"]
            assert (output.new_token_ids, output.finish_reason) == ([], "stop")
            assert output.embedding is not None
            found, want = torch.tensor(array("f", output.embedding)), pooled(states, kind)
            torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
            if kind.pooling == "mean":
                assert output.num_cached_tokens == 0
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.generation_tokens - before.generation_tokens == 30 * len(PROMPTS)
    assert ("num_gpu_blocks_override" in settings) == (stats.num_preemptions > 0)
    cached = [
        outputs[0].num_cached_tokens for request_id, outputs in together.items() if request_id.startswith("embed-5")
    ]
    assert any(cached) == settings.get("enable_prefix_caching", True)
    engine.close()


def test_steps_with_embeddings_take_no_cuda_graph(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even when they look like decodes: a graph gives no hidden states. An answer would take one."""

    class Graph:
        def replay(self) -> None:
            raise RuntimeError("a graph")

    work: Any = SimpleNamespace(is_last=False, run=lambda packed, *size: (packed,))
    device: Any = SimpleNamespace(capture=lambda work, shared: (Graph(), work()))
    engine = Engine(EngineConfig(model=str(tiny_model), device="cpu", max_model_len=256))
    graphs = DecodeGraphs(device, work, torch.zeros(1000, dtype=torch.int32), [1], silent)
    monkeypatch.setattr(engine.runner, "executors", [graphs])
    engine.add_request(EngineRequest("embed", [1], UNSAMPLED, pooling=PoolingParams()))
    (output,) = [*engine.step(), *engine.step()]
    assert output.embedding is not None
    engine.add_request(EngineRequest("answer", [1], GREEDY))
    (output,) = [*engine.step(), *engine.step()]  # it runs once more
    assert output.finish_reason == "error"
    assert "RuntimeError: a graph" in caplog.text
    engine.close()


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(model=str(tiny_model), device="cpu", max_model_len=256, num_gpu_blocks_override=64)
    yield llm
    llm.close()


def test_offline(llm: LLM, expected: list[torch.Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    results = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], pooling="mean")
    assert "Embedding" in capsys.readouterr().err
    assert [result.prompt_token_ids for result in results] == PROMPTS
    assert len({result.request_id for result in results}) == len(PROMPTS)
    for result, states in zip(results, expected, strict=True):
        assert result.finished
        assert result.outputs.hidden_size == len(result.outputs.embedding) == 64
        want = pooled(states, PoolingParams(pooling="mean"))
        torch.testing.assert_close(torch.tensor(result.outputs.embedding), want, atol=1e-5, rtol=1e-5)
    (result,) = llm.embed("abc", use_tqdm=False)
    assert result.prompt == "abc"
    assert result.prompt_token_ids == llm.get_tokenizer().encode("abc")
    assert np.linalg.norm(result.outputs.embedding) == pytest.approx(1)
    (short,) = llm.embed("abc", dimensions=8, normalize=False, use_tqdm=False)
    ratio = np.array(short.outputs.embedding) / np.array(result.outputs.embedding[:8])
    assert ratio == pytest.approx(ratio[0], rel=1e-4)
    assert llm.embed([]) == []
    assert llm._engine.stats().generation_tokens == 0


def test_a_prompt_may_fill_the_context(llm: LLM) -> None:
    for pooling in ("last", "mean"):
        (result,) = llm.embed([1] * 256, pooling=pooling, use_tqdm=False)
        assert len(result.outputs.embedding) == 64
    with pytest.raises(
        ValueError, match=r"prompts\[1\]: the prompt has 257 tokens, but the context holds 256: shorten"
    ):
        llm.embed([[1], [1] * 257])


def test_what_cannot_be(llm: LLM) -> None:
    for wrong, message in (
        ({"pooling": "max"}, r"pooling must be last, mean or cls, got 'max'"),
        ({"pooling": "cls"}, r"pooling must be last or mean, since the model is no encoder, got 'cls'"),
        ({"pooling": "all"}, r"pooling must be last or mean, since the model is no encoder, got 'all'"),
        ({"dimensions": 0}, r"dimensions must be at least 1, got 0"),
        ({"dimensions": 65}, r"prompts\[0\]: dimensions must be at most 64, the model's own, got 65"),
        ({"priority": [1, 2]}, r"priority must be one for each prompt \(1\), got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.embed("abc", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pooling must be"):
        EngineConfig(model="m", pooling="max")


def test_the_default_is_the_models(llm: LLM, tiny_model: Path) -> None:
    other = LLM(model=str(tiny_model), device="cpu", max_model_len=256, num_gpu_blocks_override=64, pooling="mean")
    (by_default,), (asked) = (
        other.embed("abc def", use_tqdm=False),
        llm.embed("abc def", pooling="mean", use_tqdm=False),
    )
    assert by_default.outputs == asked[0].outputs != llm.embed("abc def", use_tqdm=False)[0].outputs
    other.close()


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_embedding_models(architecture: str, tmp_path: Path) -> None:
    """Folders as sentence-transformers keeps them: flat names, no output head though config.json ties none, pooling
    beside.
    """
    from transformers import AutoModel, Qwen3Config

    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=300, max_position_embeddings=256, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    reference = AutoModel.from_config(config)
    reference.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"architectures": [architecture]}))
    if architecture == "Qwen3ForCausalLM":
        modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Normalize")]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    llm = LLM(model=str(tmp_path), device="cpu", skip_tokenizer_init=True)
    prompts = [[1, 2, 3], [7] * 50]
    for result, prompt in zip(llm.embed(prompts, use_tqdm=False), prompts, strict=True):
        with torch.inference_mode():
            states = reference(torch.tensor([prompt])).last_hidden_state[0]
        want = pooled(states, PoolingParams(pooling="mean"))
        torch.testing.assert_close(torch.tensor(result.outputs.embedding), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="is an embedding model: it cannot generate text"):
        llm.generate([1, 2], GREEDY)
    llm.close()


def test_story_as_with_hugging_face(story_model: Path) -> None:
    stories = json.loads((story_model / "expected_greedy.json").read_text())
    prompts = [(e["prompt_ids"] + e["output_ids"])[:256] for e in stories]
    llm = LLM(model=str(story_model), device="cuda" if ON_GPU else "cpu", dtype="float32", max_num_batched_tokens=100)
    for pooling in ("last", "mean"):
        results = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], pooling=pooling, use_tqdm=False)
        for result, states in zip(results, hidden_states(story_model, prompts), strict=True):
            want = pooled(states, PoolingParams(pooling=pooling))
            tolerance = 1e-4 if ON_GPU else 1e-5
            torch.testing.assert_close(torch.tensor(result.outputs.embedding), want, atol=tolerance, rtol=tolerance)
    llm.close()


def mean(request_id: str, i: int) -> EngineRequest:
    return EngineRequest(request_id, PROMPTS[i], pooling=PoolingParams(pooling="mean"))


def test_in_a_process_of_its_own(tiny_model: Path, expected: list[torch.Tensor]) -> None:
    async def test() -> None:
        config = EngineConfig(
            model=str(tiny_model),
            device="cpu",
            max_model_len=256,
            num_gpu_blocks_override=64,
            max_num_batched_tokens=64,
        )
        engine = await AsyncEngine.start(config)
        long = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)
        generating = engine.generate(EngineRequest("long", [1], long))
        await anext(generating)

        async def embed(i: int) -> None:
            (update,) = [update async for update in engine.generate(mean(str(i), i))]
            assert (update.finish_reason, update.text, update.token_ids) == ("stop", "", [])
            assert update.timings.scheduled_ts >= update.timings.queued_ts > 0
            assert update.embedding is not None
            want = pooled(expected[i], PoolingParams(pooling="mean"))
            torch.testing.assert_close(torch.tensor(array("f", update.embedding)), want, atol=1e-5, rtol=1e-5)

        await asyncio.gather(*map(embed, range(len(PROMPTS))))
        with pytest.raises(ValueError, match="dimensions must be at most 64"):
            engine.generate(EngineRequest("a", [1], pooling=PoolingParams(dimensions=100)))
        assert engine.model.default_pooling == "last"
        tasks = [asyncio.ensure_future(anext(engine.generate(mean(f"gone-{i}", 7)))) for i in range(5)]
        await asyncio.sleep(0)
        await engine.abort("gone-4")
        assert (await tasks[4]).finish_reason == "abort"
        for task in tasks[:4]:
            task.cancel()
        await asyncio.gather(*tasks[:4], return_exceptions=True)
        await generating.aclose()
        assert engine.num_requests == 0
        while engine.stats is None or engine.stats.num_free_blocks < engine.stats.num_blocks:
            await asyncio.sleep(0.01)
        engine.close()

    asyncio.run(asyncio.wait_for(test(), 200))
