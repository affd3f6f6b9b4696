"""Models in GGUF files against transformers: each architecture, with quantised matrices."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from engine.models.decoder import Decoder
from engine.models.families import read_spec
from engine.models.formats.gguf import GGUFBlocks
from engine.models.gguf import folder as gguf_folder
from engine.models.hub import resolve_model
from engine.models.matrix import Matrix
from engine.models.shard import Shard
from engine.models.spec import ModelSpec
from quire import LLM, SamplingParams
from tests.models.test_shard import on_ranks
from tests.oracles.families import make_checkpoint, make_prompts, transformers_decode, transformers_logits
from tests.oracles.gguf_files import TEMPLATE, write_gguf
from tests.oracles.paged_runner import decode
from tests.support.loaded import load

NUM_TOKENS = 16
MAX_ERROR = 1e-4
WIDE = {"moe_intermediate_size": 64}  # a multiple of a block's values
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-gqa4-llama3": {},
    "llama-linear": {},
    "llama-biases": {},
    "mixtral": {"sliding_window": None},
    "qwen2": {},
    "qwen2-yarn": {},
    "qwen3": {},
    "qwen2_moe": WIDE | {"shared_expert_intermediate_size": 96},
    "qwen3_moe": WIDE | {"mlp_only_layers": []},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 48},
    "gemma3": {
        "query_pre_attn_scalar": 64,
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    },
    "phi3": {},
    "phi3-long": {},
    "gpt_oss": {},
    "glm4": {},
    "granite": {},
    "granitemoe": {},
    "granitemoeshared": {"shared_intermediate_size": 96},
    "lfm2": {},
    "lfm2_moe": WIDE,
    "qwen3_5": {},
    "qwen3_5_moe": WIDE | {"shared_expert_intermediate_size": 96},
    "qwen3_next": WIDE | {"shared_expert_intermediate_size": 96},
    "gemma3n": {"hidden_size_per_layer_input": 32, "laurel_rank": 32, "activation_sparsity_pattern": [0.9] + [0.0] * 5},
    "gemma4": {},
    "gemma4_moe": WIDE,
    "gemma4_small": {"hidden_size_per_layer_input": 32},
    "nemotron_h": {},
    "nemotron_h-moe": WIDE | {"moe_shared_expert_intermediate_size": 96, "n_group": 1},
    "nemotron_h-latent": WIDE | {"moe_shared_expert_intermediate_size": 96},
    "granitemoehybrid": {"intermediate_size": 64, "shared_intermediate_size": 96},
    "granitemoehybrid-dense": {"shared_intermediate_size": 96},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
}
TYPES = ("Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1", "F16", "BF16", "MXFP4")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache" / "gguf")  # kernels keep theirs


def alike(name: str) -> str:
    """Give each layer's matrices one type, so that fused ones stay as they are."""
    layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
    return "MXFP4" if "exps" in name else TYPES[layer]


def mixed(name: str) -> str:
    return TYPES[sum(map(ord, name)) % len(TYPES)]


def load_packed(folder: Path, spec: ModelSpec, **options: Any) -> Decoder:
    """Not by `pack_weights`: a CPU's products would round activations to eight bits."""
    model = load(folder, spec, max_model_len=256, **options)
    for module in model.modules():
        if isinstance(module, Matrix):
            module.format.pack(module)
    return model


def logits(model: Any, tokens: list[list[int]]) -> torch.Tensor:
    return torch.cat([each.logits for each in decode(model, make_prompts(), NUM_TOKENS, forced=tokens)]).float()


@pytest.mark.parametrize("name", CASES)
def test_architecture_equals_transformers(name: str, tmp_path: Path) -> None:
    model = make_checkpoint(name, tmp_path / "hf", CASES[name])
    kind = alike if len(name) % 2 else mixed
    folder = resolve_model(str(write_gguf(model, tmp_path / "model.gguf", kind)))
    spec = read_spec(folder)
    exact = decode(load(folder, replace(spec, quantization=None), max_model_len=256), make_prompts(), NUM_TOKENS)
    tokens = [each.token_ids for each in exact]
    expected = [transformers_logits(model, *fed) for fed in zip(make_prompts(), tokens, strict=True)]
    assert [each[-NUM_TOKENS:].argmax(-1).tolist() for each in expected] == tokens
    want = torch.cat(expected)
    assert (torch.cat([each.logits for each in exact]) - want).abs().max().item() <= MAX_ERROR
    assert spec.quantization is not None
    kept = load_packed(folder, spec)
    assert (logits(kept, tokens) - want).abs().max().item() <= MAX_ERROR


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe"])
def test_equals_what_transformers_reads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file as transformers reads it with `gguf_file`."""
    import transformers

    model = make_checkpoint(name, tmp_path / "hf", CASES[name])
    path = write_gguf(model, tmp_path / "model.gguf", mixed)
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_, **__: True)  # it is not used
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    folder = resolve_model(str(path))
    model = load(folder, replace(read_spec(folder), quantization=None), max_model_len=256)
    ours = decode(model, make_prompts(), NUM_TOKENS)
    fed = [(prompt, each.token_ids) for prompt, each in zip(make_prompts(), ours, strict=True)]
    expected = torch.cat([transformers_logits(theirs.eval(), *each) for each in fed])
    assert (torch.cat([each.logits for each in ours]) - expected).abs().max().item() <= MAX_ERROR


@pytest.mark.parametrize("name", ["llama-gqa4-llama3", "qwen3_moe", "gemma3", "gpt_oss"])
def test_two_ranks_equal_one(name: str, tmp_path: Path) -> None:
    """Each reads its part of the file's blocks, whose permutations, norms and mixed types are those of one rank."""
    model = make_checkpoint(name, tmp_path / "hf", CASES[name])
    folder = resolve_model(str(write_gguf(model, tmp_path / "model.gguf", alike if len(name) % 2 else mixed)))
    spec, prompts = read_spec(folder), make_prompts()[:2]
    one = decode(load_packed(folder, spec), prompts, 4)
    forced = [each.token_ids for each in one]

    def on_rank(shard: Shard, communicator: Any) -> torch.Tensor:
        part = load_packed(folder, spec, shard=shard, communicator=communicator)
        return torch.cat([each.logits for each in decode(part, prompts, 4, forced=forced)])

    want = torch.cat([each.logits for each in one])
    for found in on_ranks(2, on_rank):
        assert (found - want).abs().max() <= 1e-4 * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_a_tied_head_stays_quantised(tmp_path: Path, family: str) -> None:
    """Each step reads it; the embedding, of which a step reads a few rows, becomes floats."""
    model = make_checkpoint(family, tmp_path / "hf", {"tie_word_embeddings": True})
    folder = resolve_model(str(write_gguf(model, tmp_path / "model.gguf", lambda name: "Q8_0")))
    ours = load(folder, read_spec(folder), max_model_len=256)
    heads = [module for name, module in ours.named_modules() if "lm_head" in name and isinstance(module, Matrix)]
    assert [head.num_rows for head in heads] == [model.config.vocab_size]
    assert isinstance(heads[0].format, GGUFBlocks)


def test_generation_from_a_file(tmp_path: Path) -> None:
    """Tokenizer, template and name are the file's; float32 is exact; `--quantization` reads the file too."""
    model = make_checkpoint("qwen3", tmp_path / "hf")
    path = write_gguf(model, tmp_path / "tiny-Q8_0.gguf", lambda name: "Q8_0", tokenizer=True)
    llm = LLM(str(path), dtype="float32", max_model_len=256)
    prompt = llm.get_tokenizer().encode("the the a")
    assert prompt[0] == 1
    outputs = llm.generate(["the the a"], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert outputs[0].prompt_token_ids == prompt
    want = transformers_decode(model, prompt, 20).token_ids
    assert list(outputs[0].outputs[0].token_ids) == want
    assert llm.get_tokenizer().chat_template == TEMPLATE
    llm.close()
    for quantization in (None, "int8"):
        llm = LLM(str(path), dtype="bfloat16", quantization=quantization, max_model_len=256)
        outputs = llm.generate(["the the a"], SamplingParams(temperature=0, max_tokens=1, logprobs=20))
        assert want[0] in (outputs[0].outputs[0].logprobs or [{}])[0]
        llm.close()


# Published files, which tests do not download
LONG_TEXT = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")[:3000]


def real(variable: str) -> list[Path]:
    """Return the files that an environment variable names; else the test is skipped."""
    names = os.environ.get(variable, "").split(os.pathsep)
    if not any(names):
        pytest.skip(f"{variable} names no files")
    return [Path(name) for name in names]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_published_files_equal_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 greedy tokens and the log-probability of a long text in float32, of the GGUF files in QUIRE_TEST_GGUF.
    `test_published_vocabularies` tests prompts.

    transformers converts Gemma's vocabulary to one that gives other ids than the original.
    """
    import transformers

    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda *_, **__: True)  # it is not used
    prompts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a  village\n\nthere lived"]
    for path in real("QUIRE_TEST_GGUF"):
        llm = LLM(str(path), dtype="float32", max_model_len=1024)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        (read,) = llm.generate([LONG_TEXT], SamplingParams(max_tokens=1, prompt_logprobs=0))
        llm.close()
        options = {"gguf_file": path.name, "dtype": torch.float32}
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
        for output in outputs:
            ids = list(output.prompt_token_ids)
            assert list(output.outputs[0].token_ids) == transformers_decode(model, ids, 200).token_ids
        ids = list(read.prompt_token_ids)
        with torch.inference_mode():
            known = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        want = known[range(len(ids) - 1), ids[1:]].mean().item()
        rows = zip((read.prompt_logprobs or [])[1:], ids[1:], strict=True)
        found = [row[token].logprob for row, token in rows if row is not None]
        assert len(found) > 300
        assert sum(found) / len(found) == pytest.approx(want, abs=1e-4)
