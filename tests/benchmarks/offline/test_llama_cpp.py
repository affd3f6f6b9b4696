"""llama.cpp as a peer, by a program that answers as its server does."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.offline import engines, one_engine
from benchmarks.offline.engines import EnginesFlags, Job
from benchmarks.serving import servers
from benchmarks.serving.servers import ServersFlags
from engine.errors import ConfigError

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
words = sys.argv[1:]
assert words[words.index("-np") + 1] == "2" and words[words.index("-c") + 1] == "200", words
class Handler(BaseHTTPRequestHandler):
    def answer(self, content):
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.answer({"status": "ok"})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["ignore_eos"] and not body["cache_prompt"] and body["temperature"] == 0.6
        self.answer({"tokens_predicted": body["n_predict"] * (body["prompt"][0] == 7)})
    def log_message(self, *_):
        pass
ThreadingHTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(f"#!{sys.executable}\n{SERVER}")
    path.chmod(0o755)
    return path


def test_its_server_computes_the_work(program: Path) -> None:
    settings = {"llama_server": str(program), "gguf": "m.gguf", "context": 100, "max_num_seqs": 2}
    peer = one_engine.build("llama.cpp", "m", settings, 0.6)
    try:
        peer.start()
        assert peer.generate([[7, 8], [7], [7]], [3, 4, 5]) == 12
        peer.reset()
    finally:
        peer.process.kill()
        peer.process.wait()


def test_a_server_that_ends(program: Path) -> None:
    program.write_text("#!/bin/sh\nexit 3\n")
    settings = {"llama_server": str(program), "gguf": "m.gguf", "context": 100, "max_num_seqs": 2}
    with pytest.raises(RuntimeError, match="llama-server ended with code 3"):
        one_engine.build("llama.cpp", "m", settings, 0.6).start()


def test_what_it_is_started_with(program: Path, tmp_path: Path) -> None:
    files: dict[str, Any] = {"llama_server": str(program), "gguf": str(program)}
    flags = EnginesFlags(engines=("quire,llama.cpp",), work=("4x8x8",), models_dir=str(tmp_path), **files)
    (pair,) = engines.plan(flags, has_gpu=False)
    assert [job.engine for job in pair] == ["quire", "llama.cpp"]
    assert pair[1].settings == files | {"context": 4096, "max_num_seqs": 4}
    assert ServersFlags(engines=("quire", "llama.cpp"), **files).offline == ("quire",)
    words = servers.server_command(Job("llama.cpp", "m", tmp_path, pair[1].settings, ()), 9000)
    assert words[:3] == [str(program), "-m", str(program)]
    assert "--port 9000 -c 16384 -np 4 --alias m" in " ".join(words)


def test_it_needs_its_files(program: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine llama.cpp needs llama_server, a file, got None"):
        EnginesFlags(engines=("llama.cpp",))
    with pytest.raises(ConfigError, match=r"engine llama.cpp needs gguf, a file, got '/no/file'"):
        ServersFlags(engines=("llama.cpp",), llama_server=str(program), gguf="/no/file")
    with pytest.raises(ConfigError, match=r"engine 'lama.cpp' must be one of .*did you mean llama\.cpp"):
        EnginesFlags(engines=("lama.cpp",))
