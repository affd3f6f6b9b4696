"""llama.cpp's server as a peer: a program and a GGUF file of the model."""

from __future__ import annotations

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
