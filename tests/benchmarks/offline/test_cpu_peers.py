"""Quire beside llama.cpp on a CPU: what is started, what is kept, and what fails."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gguf_files, llama_cpp
from benchmarks.model_shapes import SHAPES
from benchmarks.offline import cpu_peers
from engine.errors import ConfigError
from engine.models.families import read_spec
from engine.models.gguf import folder as gguf_folder
from engine.models.hub import resolve_model
from tests.support.loaded import load

BENCH = """#!/bin/sh
case "$*" in *nothing*) echo "no such model" >&2; exit 1;; esac
echo '{"build_number": 7, "build_commit": "abc", "samples_ns": [2000000000, 1000000000]}'
"""
BATCHED = """#!/bin/sh
echo 'a warning'
echo '{"t_pp": 1.0, "t_tg": 3.0}'
echo '{"t_pp": 1.0, "t_tg": 1.0}'
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    quantize = '#!/bin/sh\ncp "$1" "$2"\necho "$3" >> "$(dirname "$0")/asked"\n'
    for name, script in (("llama-bench", BENCH), ("llama-batched-bench", BATCHED), ("llama-quantize", quantize)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return folder


def run(programs: Path, tmp_path: Path, model: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    gguf = tmp_path / f"{model.name}-Q8_0.gguf"
    gguf.touch()
    out = tmp_path / "out.json"
    code = cpu_peers.main(
        ["--llama-cpp", str(programs), "--models", str(model), "--models-dir", str(tmp_path), "--formats", "int8",
         "--threads", "1", "--quick", "--output-json", str(out), *more]
    )  # fmt: skip
    return code, json.loads(out.read_text()), out.with_suffix(".md").read_text()


@pytest.mark.heavy
def test_the_table(programs: Path, tmp_path: Path, tiny_model: Path) -> None:
    code, result, table = run(programs, tmp_path, tiny_model, "--pytorch")
    assert code == 0, result["failures"]
    assert result["versions"].keys() == {"quire", "llama.cpp"}
    best = {(row["engine"], row["work"]): row["tokens_per_second"] for row in result["rows"]}
    assert len(best) == 12
    assert "| tiny · quire by PyTorch int8 | " in table
    theirs = {work: speed for (engine, work), speed in best.items() if engine == "llama.cpp"}
    assert theirs == {"1": 8, "4": 32, "16": 64, "prefill": 512}
    assert table.startswith(f"{result['cpu_isa']}; tok/s")
    row = re.search(r"\| tiny · llama\.cpp Q8_0 \| 8 \(\*\*([\d.]+)\*\*\) \| 32 \(\*\*([\d.]+)\*\*\) \|", table)
    assert row is not None, table
    # The rows are rounded too.
    assert [float(times) for times in row.groups()] == pytest.approx(
        [best["quire", "1"] / 8, best["quire", "4"] / 32], abs=0.02
    )


@pytest.mark.heavy
@pytest.mark.usefixtures("known_machine")
def test_the_second_turn(programs: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quire's turns are measured with the first one cached; llama.cpp's new tokens are computed behind the others."""
    for name, tokens in (("FIRST", 30), ("ANSWER", 10), ("NEXT", 12)):
        monkeypatch.setattr(cpu_peers, name, tokens)
    asked = tmp_path / "asked"
    (programs / "llama-bench").write_text(BENCH.replace("case", f'echo "$*" >> {asked}\ncase', 1))
    code, result, table = run(programs, tmp_path, tiny_model, "--turns")
    assert code == 0, result["failures"]
    best = {(row["engine"], row["work"]): row["tokens_per_second"] for row in result["rows"]}
    assert best.keys() == {(engine, work) for engine in ("quire", "llama.cpp") for work in ("next", "again")}
    assert best["llama.cpp", "next"] == best["llama.cpp", "again"] == 12
    assert "| second turn | second turn, nothing cached |" in table
    behind, whole = asked.read_text().splitlines()
    assert "-p 12 -d 40" in behind
    assert "-p 52" in whole


@pytest.mark.usefixtures("known_machine")
def test_another_checkout_is_measured_beside(
    programs: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process imports its own modules."""
    (other := tmp_path / "before" / "engine").mkdir(parents=True)
    (other / "__init__.py").write_text(
        "__version__ = 'before'\nclass LLM:\n    def __init__(self, **settings): raise SystemExit('the other one')\n"
        "class SamplingParams: ...\n"
    )
    measure = cpu_peers.Comparison.measure
    measured: list[str] = []

    def other_only(self: cpu_peers.Comparison, engine: str, folder: Path, precision: str) -> None:
        measured.append(engine)
        if engine == "other quire":
            measure(self, engine, folder, precision)

    monkeypatch.setattr(cpu_peers.Comparison, "measure", other_only)
    code, result, _ = run(programs, tmp_path, tiny_model, "--other-quire", str(other.parent))
    assert code == 1
    assert measured == ["quire", "llama.cpp", "other quire"]
    assert result["failures"] == ["other quire · tiny · int8: ended with code 1: the other one"]


@pytest.mark.slow
def test_what_fails_is_told(programs: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_peers.Comparison, "_llm", lambda *args: None)
    model = shutil.copytree(tiny_model, tmp_path / "nothing")
    code, result, table = run(programs, tmp_path, model)
    assert code == 1
    assert len(result["failures"]) == 1
    assert result["failures"][0].endswith("no such model")
    assert result["failures"][0] in table
    code, result, _ = run(programs, tmp_path, model, "--time-limit", "1e-9")
    assert result["failures"] == ["no time was left for round 1: nothing · int8"]


def test_flags_are_checked(programs: Path) -> None:
    with pytest.raises(ConfigError, match="llama_cpp must be the folder that holds llama-bench"):
        cpu_peers.Flags(llama_cpp="/nowhere")
    assert cpu_peers.Flags(pytorch=True).llama_cpp == ""
    with pytest.raises(ConfigError, match="formats must be of float32, bfloat16, int8, int4, Q8_0, Q4_K_M, got 'int3'"):
        cpu_peers.Flags(llama_cpp=str(programs), formats=("int3",))


def test_llama_cpp_is_built_for_the_instruction_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cmake = tmp_path / "cmake"
    cmake.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/asked"\n')
    cmake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    programs = llama_cpp.build_programs(tmp_path / "source", tmp_path, "x86-64-v3+avxvnni")
    assert programs == tmp_path / "llama.cpp-x86-64-v3+avxvnni" / "bin"
    configured, built = (tmp_path / "asked").read_text().splitlines()
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX_VNNI=ON", "-DGGML_AVX512=OFF"} <= {*configured.split()}
    assert "--target llama-bench llama-batched-bench llama-quantize" in built
    with pytest.raises(ConfigError, match="options for aarch64 are not known"):
        llama_cpp.build_programs(tmp_path / "source", tmp_path, "aarch64")
    cmake.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match="cannot be built"):
        llama_cpp.build_programs(tmp_path / "source", tmp_path, "x86-64-v4")


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_files_hold_the_model_of_a_configuration(programs: Path, tmp_path: Path, tied: bool) -> None:
    gguf = pytest.importorskip("gguf")
    config = {
        "architectures": ["Qwen3ForCausalLM" if tied else "LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 100,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": tied,
    }  # fmt: skip
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    path = gguf_files.gguf_file(folder, "Q8_0", programs / "llama-quantize", tmp_path)
    assert path == tmp_path / "model-Q8_0.gguf"
    assert (programs / "asked").read_text() == "Q8_0\n"
    shapes = {tensor.name: [int(n) for n in tensor.shape[::-1]] for tensor in gguf.GGUFReader(path).tensors}
    assert len(shapes) == 2 * (11 if tied else 9) + (2 if tied else 3)
    assert shapes["blk.1.ffn_down.weight"] == [64, 96]
    assert shapes["blk.0.attn_k.weight"] == [32, 64]
    assert gguf_files.gguf_file(folder, "Q8_0", programs / "llama-quantize", tmp_path) == path
    assert (programs / "asked").read_text() == "Q8_0\n"


@pytest.mark.parametrize("name", ["lfm2-350m", "qwen3.5-0.8b"])
def test_gguf_files_of_hybrids_are_models_that_quire_reads(
    name: str, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setattr(gguf_folder, "cache_folder", lambda: tmp_path / "cache" / "gguf")
    config = SHAPES[name]
    small = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 300, "layer_types": config["layer_types"][1:4]}
    small |= {"full_attention_interval": 3, "intermediate_size": 96, "block_ff_dim": 256, "head_dim": 32}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | small))
    path = gguf_files.gguf_file(tmp_path / "model", "f32", programs / "llama-quantize", tmp_path)
    folder = resolve_model(str(path))
    load(folder, read_spec(folder), max_model_len=64)


def test_other_architectures_have_no_gguf_files(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MptForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"GGUF files can be made of LlamaForCausalLM, .*, not of MptFor"):
        gguf_files.gguf_file(tmp_path, "f32", tmp_path / "llama-quantize", tmp_path / "out")
