"""A GGUF file of mixed types and a tied head with other features: the answers are those of each request alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("gguf")

from engine.models.families import read_spec
from engine.models.gguf.folder import cache_folder
from engine.models.hub import resolve_model
from tests.composition.configurations import REQUESTS, Configuration
from tests.composition.features import CHECKPOINTS
from tests.composition.run import ADAPTERS, alone, differing, together
from tests.oracles.families import make_checkpoint
from tests.oracles.gguf_files import write_gguf
from tests.oracles.random_adapters import write_random_adapter

TYPES = ("Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1")
TOLERANCE = 0.1  # of log-probabilities, where activations are rounded to 8 bits
WITH = {
    "hits, chunks, preemption, drafts": {"prefix cache", "chunked prefill", "preemption", "drafts", "recorded steps"},
    "adapters, host tier, fp8 KV cache": {"LoRA adapters", "host tier", "fp8 KV cache", "async engine"},
    "stages, prefix-cache file": {"pipeline parallel", "prefix-cache file"},
    "int8 weights, sleep": {"int8 weights", "sleep"},
}
SLOW = {"adapters, host tier, fp8 KV cache", "stages, prefix-cache file"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder that stands for the file. The kernels of the user's cache stay in use."""
    folder, cache = tmp_path_factory.mktemp("gguf"), tmp_path_factory.mktemp("cache")
    checkpoint = make_checkpoint("qwen3", folder / "hf", CHECKPOINTS["qwen3"].shape)
    path = write_gguf(checkpoint, folder / "model.gguf", lambda name: TYPES[sum(map(ord, name)) % len(TYPES)])
    for each in cache_folder().parent.glob("*"):
        if each.name != "gguf":
            (cache / each.name).symlink_to(each)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", str(cache))
        found = Path(resolve_model(str(path)))
        for seed, name in enumerate(ADAPTERS):
            write_random_adapter(found / name, folder / "hf", 8, seed)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model / name, found)
    return found


@pytest.fixture(autouse=True)
def own_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(model.parent.parent))


def test_the_file_has_several_types_and_a_tied_head(model: Path) -> None:
    spec = read_spec(model)
    assert spec.quantization is not None
    of_types = [names for names, _ in spec.quantization.schemes if names]
    assert len(of_types) == len(TYPES)
    assert "lm_head" in sum(of_types, ()), "the head reads the embedding's blocks as they are"


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in WITH]
)
def test_answers_are_those_of_each_request_alone(name: str, model: Path, tmp_path: Path) -> None:
    is_async = "async engine" in WITH[name]
    own = REQUESTS - {"beam search"} if is_async else REQUESTS | {"offline"}
    configuration = Configuration("qwen3", frozenset(WITH[name] | own))
    expected = alone(configuration, model)
    for number, got in enumerate(together(configuration, model, tmp_path)):
        assert not differing(expected, got, TOLERANCE), number
