"""llama.cpp's server as a peer: a program and a GGUF file of the model."""

from __future__ import annotations

import subprocess
from pathlib import Path

from engine.errors import ConfigError

NAME = "llama.cpp"
MOST_SEQS = 64  # at once; further requests wait


def check_server(llama_server: str | None, gguf: str | None) -> None:
    """`ConfigError` unless both files are there."""
    for name, file in (("llama_server", llama_server), ("gguf", gguf)):
        if file is None or not Path(file).is_file():
            raise ConfigError(f"engine {NAME} needs {name}, a file, got {file!r}")


def server_command(llama_server: str, gguf: str, *, port: int, context: int, max_num_seqs: int, name: str) -> list[str]:
    """The server as it comes, with room for `max_num_seqs` requests of `context` tokens each."""
    options = {"-m": gguf, "--host": "127.0.0.1", "--port": port, "-c": context * max_num_seqs, "-np": max_num_seqs}
    words = [str(word) for option in options.items() for word in option]
    return [llama_server, *words, "--alias", name, "--offline", "--cache-ram", "0"]


_AVX2 = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
# What llama.cpp's build calls the parts of an instruction set (see kernels/cpu/instruction_set.py).
_PARTS = {
    "x86-64": (), "x86-64-v2": ("SSE42",), "x86-64-v3": _AVX2, "x86-64-v4": (*_AVX2, "AVX512"),
    "avxvnni": ("AVX_VNNI",), "avx512vnni": ("AVX512_VNNI",), "avx512bf16": ("AVX512_BF16",),
    "amx": ("AMX_TILE", "AMX_INT8", "AMX_BF16"),
}  # fmt: skip


def build_programs(source: Path, into: Path, instruction_set: str) -> Path:
    """Build llama.cpp's benchmarks for an instruction set of an x86 CPU, unless they are there; return their folder."""
    programs = into / f"llama.cpp-{instruction_set}" / "bin"
    parts = instruction_set.split("+")
    if unknown := [part for part in parts if part not in _PARTS]:
        raise ConfigError(f"llama.cpp's options for {unknown[0]} are not known: build it, and name its folder")
    used = {option for part in parts for option in _PARTS[part]}
    options = [f"-DGGML_{option}={'ON' if option in used else 'OFF'}" for known in _PARTS.values() for option in known]
    names = ("llama-bench", "llama-batched-bench", "llama-quantize")
    for command in (
        ["cmake", "-S", str(source), "-B", str(programs.parent), "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF",
         "-DLLAMA_CURL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", *dict.fromkeys(options)],
        ["cmake", "--build", str(programs.parent), "--parallel", "--target", *names],
    ):  # fmt: skip
        if not all((programs / name).is_file() for name in names) and subprocess.run(command).returncode:
            raise ConfigError(f"llama.cpp cannot be built: {' '.join(command)}")
    return programs
