"""The command line, each command as a user runs it: a process, its output, its exit code."""

import contextlib
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.processes import free_port
from server.cli import main as cli
from server.cli.vllm_options import ADVICE
from tests.support.live_server import Live, wait_until

ROOT = Path(__file__).resolve().parents[2]
QUIRE = [sys.executable, "-m", "quire"]
SMALL = ["--device", "cpu", "--num-gpu-blocks-override", "512"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model = runpy.run_path(str(ROOT / "tests" / "support" / "tiny_model.py"))["write_model"]
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def quire(*words: str, stdin: str = "", command: Sequence[str] = QUIRE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *words], cwd=ROOT, env=ENVIRONMENT, input=stdin, capture_output=True, text=True, timeout=250
    )


class Server:
    """A `quire serve` of its own."""

    def __init__(self, *words: str, quire: Sequence[str] = QUIRE) -> None:
        self.process = subprocess.Popen(
            [*quire, "serve", *words],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as `setsid`: a terminal's Ctrl-C is sent by hand here
        )
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors)
        self._reader.start()
        self.lines: list[str] = []
        self.url = ""

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def wait_ready(self) -> "Server":
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.match(r"  API +(http\S+)/v1$", line):
                self.url = match[1]
            if line.startswith(("  chat page", "Ready: tiny at")):
                return self
        raise AssertionError("".join(self.errors))

    def stop(self, *signals: signal.Signals) -> int:
        for number in signals:
            self.process.send_signal(number)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._reader.join(60)
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            self.process.stdout.close()
            self.process.stderr.close()


@contextlib.contextmanager
def serving(model: Path, *words: str, quire: Sequence[str] = QUIRE) -> Iterator[Server]:
    common = ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "0", *SMALL]
    server = Server(str(model), *common, *words, quire=quire)
    try:
        yield server.wait_ready()
    finally:
        if server.process.returncode is None:
            server.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model) as server:
        yield server
        assert server.stop(signal.SIGTERM) == 0


def stream(url: str, finished: list[str], max_tokens: int = 3000) -> threading.Thread:
    """Reads a long completion in a thread; its last two events are left in `finished`. Returns when it has begun."""
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": "a", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            events = []
            for line in response.iter_lines():
                if line.startswith("data:"):
                    events.append(line.removeprefix("data: "))
                    begun.set()
        finished.extend(events[-2:])

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    return thread


# Help and wrong command lines


def test_help_teaches_and_needs_no_torch() -> None:
    result = quire("--help")
    assert result.returncode == 0
    for text in ("quire serve Qwen/Qwen3-0.6B", "quire chat", "quire generate", "quire bench"):
        assert text in result.stdout
    code = "import server.cli.main, sys; assert not {'torch', 'fastapi', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_no_command_is_answered_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "examples:" in captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"quire \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "check", "bench", "top"])
def test_help_of_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert ("examples:" in shown) or command == "bench"
    assert ("--max-model-len" in shown) or command in ("bench", "check", "top")


def test_help_shows_what_is_common_and_help_all_everything(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(option: str) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.main(["serve", option])
        assert caught.value.code == 0
        return capsys.readouterr().out

    brief, full = shown("--help"), shown("--help-all")
    for option in ("--port", "--max-model-len", "--api-key-file"):
        assert option in brief
    for option in ("--debug-checks", "--root-path"):
        assert option not in brief
        assert option in full
    assert len(brief.splitlines()) < 80
    assert re.search(r"\d+ more options: quire serve --help-all\n$", brief)


def test_advice_is_about_options_that_there_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help-all"])
    words = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert not words & ADVICE.keys()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "serve" in script
    assert "max-model-len" in script


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["sreve"], 2, "unknown command 'sreve' (did you mean serve?); choose from serve, chat, generate"),
        (
            ["serve", "m", "--trust_remote_code"],
            2,
            "there is no --trust-remote-code: code that comes with models is never",
        ),
        (
            ["serve", "m", "--max-model-length", "3"],
            2,
            "unknown option --max-model-length (did you mean --max-model-len?)",
        ),
        (["bench", "nothing"], 2, "unknown benchmark 'nothing'; choose from serve, throughput"),
        (["serve", "m", "--port", "70000"], 1, "--port must be an integer at least 0 and at most 65535, got '70000'"),
        (["serve", "m", "--model", "n"], 1, "the model is named twice: 'm' and --model 'n'"),
        (["serve", "m", "--config", "/nowhere.yaml"], 1, "/nowhere.yaml: No such file or directory"),
        (
            ["serve", "m", "--host", "nowhere.invalid"],
            1,
            "error: --host must be an address of this machine, got 'nowhere.invalid'",
        ),
        (["serve", "m", "--block_size", "3"], 1, "error: --block-size must be a power of two, got 3"),
        (
            ["serve", "m", "--no-enable-prefix-caching", "--prefix-cache-file", "x"],
            1,
            "error: --prefix-cache-file needs --enable-prefix-caching",
        ),
        (
            ["chat", "--url", "localhost:8000"],
            1,
            "error: --url must begin with http:// or https://, got 'localhost:8000'",
        ),
        (["generate", "a", "--file", "b"], 1, "the prompt is given twice"),
        (["generate", "--file", "/nowhere.txt"], 1, "/nowhere.txt: No such file or directory"),
        (["generate", "a", "--model", "/nowhere"], 1, "error: /nowhere: there is no such folder"),
        (["generate", "a", "--model", "./some/no/where"], 1, "some/no/where: there is no such folder"),
    ],
)
def test_wrong_command_lines(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found: Any = cli.main(words)
    except SystemExit as exit_:
        found = exit_.code
    captured = capsys.readouterr()
    assert found == code
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


NO_MODEL = """
import sys
from server.cli.main import main
code = main(sys.argv[1:])
assert not {"torch", "uvicorn", "engine.async_engine", "server.app"} & {*sys.modules}, "slow imports"
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("command", "files", "message"),
    [
        ("serve", None, "{}: there is no such folder"),
        ("serve", {"README.md": ""}, "{}: holds no config.json (it holds README.md)"),
        ("chat", {"m-Q4_K_M.gguf": "GGUF"}, "{}/m-Q4_K_M.gguf: damaged GGUF file: it ends within its header"),
        ("chat", {"a.gguf": "GGUF", "b.gguf": ""}, "{}: must hold one GGUF model in the folder, it holds a.gguf, b."),
        ("generate", {"config.json": '{"architectures": ["OddForCausalLM"]}'}, "'OddForCausalLM' is not supported"),
        ("plan", {"config.json": "{"}, "{}/config.json: is not valid JSON"),
    ],
)
def test_a_wrong_model_is_told_before_anything_slow_is_imported(
    command: str, files: dict[str, str] | None, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    for name, text in (files or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    words = [sys.executable, "-c", NO_MODEL, command, "--model", str(folder)]
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, input="", capture_output=True, text=True, timeout=250)
    assert done.returncode == 1, done.stderr
    assert message.format(folder) in done.stderr
    assert done.stderr.count("\n") == 1


# Serving


def test_serve_says_where_it_is(server: Server) -> None:
    shown = "".join(server.lines)
    assert re.search(r"^Quire \S+ · tiny · float32 · CPU, \d+ threads? · attention by \S+$", shown, re.MULTILINE)
    assert re.search(r"KV cache 8,192 tokens \(512 blocks, .*\): --num-gpu-blocks-override$", shown, re.MULTILINE)
    assert "context 4,096 · up to 256 requests at once · ready in" in shown
    assert f"Ready: tiny\n  API        {server.url}/v1\n  chat page  {server.url}/\n" in shown
    for path in re.findall(rf"  {server.url}(/\S+)$", shown, re.MULTILINE):
        assert httpx.get(server.url + path, timeout=60).status_code == (404 if path == "/v1" else 200), path
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    assert "<html" in httpx.get(server.url, timeout=60).text
    models = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in models] == [("tiny", 4096)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_api_process_loads_no_torch(server: Server) -> None:
    """It would take a second of the start, before the engine process begins to load it."""
    body = {"prompt": "a", "max_tokens": 2, "guided_choice": ["a", "b"]}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    loaded = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "/uvloop/" in loaded
    assert "/torch/" not in loaded


def test_client_that_hangs_up_ends_its_request(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    end = time.monotonic() + 60
    while "vllm:num_requests_running{" not in (
        text := httpx.get(f"{server.url}/metrics", timeout=60).text
    ) or not re.search(r"vllm:num_requests_running\{.*\} 0\.0\n", text):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_port_in_use_is_seen_before_the_model_is(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    result = quire("serve", "no/where", "--host", "127.0.0.1", "--port", port)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"quire serve: error: --port {port} is in use: stop the program on 127.0.0.1:{port}, or choose another --port\n"
    )


INTERRUPTED_IMPORT = """
import os, signal, sys
class CtrlC:
    def find_spec(name, *rest):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, CtrlC)
from server.cli.main import main
sys.exit(main(["generate", "--model", "configs/demo", "Once"]))
"""


@pytest.mark.parametrize(
    "name", ["engine", "engine.flags", "server.cli.common", "server.cli.generate", "engine.async_engine"]
)
def test_ctrl_c_while_python_imports_is_quiet(name: str) -> None:
    words = [sys.executable, "-c", INTERRUPTED_IMPORT, name]
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_signal_ends_streams_and_clients_that_do_nothing_and_exits_with_0(model: Path, quick_quire: list[str]) -> None:
    """Uploads that do not go on, answers that are not read, connections without a request."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b'{"prompt": "a", "ignore_eos": true, "max_tokens": 1000, "stream": true, "logprobs": 5}'
    with serving(model, "--shutdown-timeout", "0.1", quire=quick_quire) as server, contextlib.ExitStack() as stack:
        finished: list[str] = []
        threads = [stream(server.url, finished) for _ in range(3)]
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        for data in (
            b"",
            b"POST",
            head + b"Content-Length: 100\r\n\r\n{",
            head + b"Transfer-Encoding: chunked\r\n\r\n",
        ):
            stack.enter_context(socket.create_connection(address)).sendall(data)
        for _ in range(3):
            unread = stack.enter_context(socket.create_connection(address))
            unread.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            assert unread.recv(10)
        assert server.stop(signal.SIGTERM) == 0
        for thread in threads:
            thread.join(60)
        assert [event == "[DONE]" for event in finished] == [False, True] * 3
        assert {json.loads(e)["choices"][0]["finish_reason"] for e in finished[::2]} == {"abort"}
        assert "Traceback" not in "".join(server.errors)


def test_second_signal_ends_the_patience(model: Path, quick_quire: list[str]) -> None:
    with serving(model, "--shutdown-timeout", "100", quire=quick_quire) as server:
        finished: list[str] = []
        thread = stream(server.url, finished)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{server.url}/readyz", timeout=60).json()["phase"] == "draining")
        assert server.process.poll() is None
        assert server.stop(signal.SIGINT) == 0
        assert "stopping: 1 request may take up to 100 s to finish" in "".join(server.errors)
        thread.join(60)
        assert json.loads(finished[0])["choices"][0]["finish_reason"] == "abort"
        assert "Traceback" not in "".join(server.errors)


def test_replicas_are_restarted_one_after_the_other(model: Path, quick_quire: list[str]) -> None:
    with serving(model, "--data-parallel-size", "2", "--shutdown-timeout", "100", quire=quick_quire) as server:
        finished: list[str] = []
        threads = [stream(server.url, finished, max_tokens=20) for _ in range(4)]
        server.process.send_signal(signal.SIGHUP)
        for thread in threads:
            thread.join(60)
        reasons = {json.loads(event)["choices"][0]["finish_reason"] for event in finished if event != "[DONE]"}
        assert reasons == {"length"}, "a restart ends no request"
        end, num_restarts = time.monotonic() + 60, 0
        engines: list[str] = []
        while num_restarts < 2 or engines != ["0", "1"]:
            assert time.monotonic() < end, "the replicas were not restarted"
            ready = httpx.get(f"{server.url}/readyz", timeout=60)
            assert ready.status_code == 200, "one of them takes requests"
            num_restarts = ready.json()["num_restarts"]
            metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
            engines = re.findall(r'vllm:num_requests_running\{engine="(\d)"', metrics)
            time.sleep(0.05)
        assert server.stop(signal.SIGTERM) == 0


def test_engine_that_is_gone_for_good_ends_the_server(model: Path) -> None:
    with serving(model, "--engine-restarts", "0") as server:
        finished: list[str] = []
        thread = stream(server.url, finished)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        (engine,) = (c for c in children if b"engine.replicas.process" in Path(f"/proc/{c}/cmdline").read_bytes())
        os.kill(int(engine), signal.SIGKILL)
        thread.join(60)
        assert "error" in json.loads(finished[0])
        assert finished[1] == "[DONE]"
        assert server.stop() == 1


def test_stopped_while_starting(model: Path) -> None:
    server = Server(str(model), "--port", "0", *SMALL)
    time.sleep(1)
    assert server.stop(signal.SIGTERM) in (128 + signal.SIGTERM, -signal.SIGTERM, 0)  # 0: it was ready already
    assert "Traceback" not in "".join(server.errors)


def test_unix_socket(model: Path, tmp_path: Path, quick_quire: list[str]) -> None:
    path = tmp_path / "quire.sock"
    with serving(model, "--uds", str(path), quire=quick_quire) as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
            assert client.get("http://quire/health").status_code == 200
        taken = quire("serve", str(model), "--uds", str(path))
        assert (taken.returncode, f"uds {path} is in use" in taken.stderr) == (1, True)
        assert server.stop(signal.SIGTERM) == 0
    assert not path.exists()


def test_model_that_cannot_start_is_one_line(model: Path, quick_quire: list[str]) -> None:
    words = ["serve", str(model), "--port", "0", "--device", "cpu", "--num-gpu-blocks-override", "2"]
    result = quire(*words, command=quick_quire)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("quire serve: error: the KV cache has room for 32 tokens")
    assert "--max-model-len 32" in last
    assert "Traceback" not in result.stderr


def test_yaml_and_environment_reach_a_server_that_answers_at_once_and_finishes_before_it_stops(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port answers from the first moment on, and its requests finish after SIGTERM."""
    file, port = tmp_path / "serve.yaml", free_port()
    file.write_text(f"model: {model}\nmax-model-len: 1k\nport: {port}\nshutdown-timeout: 100\n")
    monkeypatch.setitem(ENVIRONMENT, "QUIRE_MAX_MODEL_LEN", "512")
    monkeypatch.setitem(ENVIRONMENT, "QUIRE_HOST", "127.0.0.1")
    server = Server("--config", str(file), *SMALL)
    try:
        phases: list[str] = []
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=250) as client:
            deadline = time.monotonic() + 120
            while not phases and time.monotonic() < deadline:
                time.sleep(0.01)
                with contextlib.suppress(httpx.ConnectError):
                    events = client.get("/readyz", headers={"Accept": "text/event-stream"}).text
                    phases = re.findall(r'"phase": "(\w+)"', events)
            assert "starting" in phases or "loading" in phases
            assert phases[-1] == "ready"
            assert client.get("/health").status_code == 200
        server.wait_ready()
        assert "context 512" in "".join(server.lines)
        finished: list[str] = []
        thread = stream(server.url, finished, max_tokens=20)
        assert server.stop(signal.SIGTERM) == 0
        thread.join(60)
        assert json.loads(finished[0])["choices"][0]["finish_reason"] == "length"
    finally:
        server.stop()


# Generating and chatting


def test_generate_from_argument_file_and_standard_input(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["generate", "--model", str(model), *SMALL, "--temperature", "0", "--max-tokens", "10"]
    given = quire(*common, "Once")
    assert given.returncode == 0
    assert len(given.stdout) > 1
    assert "KV cache" in given.stderr
    file = tmp_path / "prompt.txt"
    file.write_text("Once\n")
    assert cli.main([*common, "--file", str(file)]) == 0
    assert capsys.readouterr().out == given.stdout
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once\n")))
    assert cli.main(common) == 0
    assert capsys.readouterr().out == given.stdout


def test_generate_wants_a_text() -> None:
    environment = {**ENVIRONMENT, "LC_ALL": "C"}
    words = [*QUIRE, "generate", "--model", "any"]
    result = subprocess.run(words, cwd=ROOT, env=environment, input=b"\xff", capture_output=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr == b"quire generate: error: the prompt in standard input is not UTF-8 text\n"
    result = subprocess.run(words, cwd=ROOT, env=environment, input=b"\n", capture_output=True, timeout=60)
    assert result.returncode == 1
    assert b"error: there is no prompt: standard input is empty. Give a text: quire generate " in result.stderr


def test_chat_with_a_server(server: Server) -> None:
    words = ["chat", "--url", server.url, "--max-tokens", "8", "--temperature", "0"]
    result = quire(*words, stdin="Hi\n/new\nHi\n/system Be brief.\n/help\nHi\n/quit\nnot read\n")
    assert (result.returncode, result.stderr) == (0, "")
    first = quire(*words, stdin="Hi\n").stdout
    assert result.stdout.startswith(first + "A new conversation.\n" + first)
    assert "with the system prompt: Be brief." in result.stdout
    assert "/quit" in result.stdout


def test_chat_goes_on_after_a_refusal(server: Server) -> None:
    result = quire("chat", "--url", server.url, "--max-tokens", "4", stdin=f"{'x' * 5000}\nHi\n")
    assert result.returncode == 0
    assert "maximum context length is 4096" in result.stdout
    assert "/new starts a new conversation" in result.stdout


def test_chat_in_process(model: Path, server: Server) -> None:
    words = ["--max-tokens", "8", "--temperature", "0"]
    own = quire("chat", "--model", str(model), *SMALL, *words, stdin="Hi\nAnd?\n")
    assert own.returncode == 0
    assert own.stdout == quire("chat", "--url", server.url, *words, stdin="Hi\nAnd?\n").stdout


def test_ctrl_c_stops_the_answer_not_the_chat(live: Live) -> None:
    live.engine.delay, live.engine.answer = 0.05, "and so on " * 500
    with subprocess.Popen(
        [*QUIRE, "chat", "--url", f"http://127.0.0.1:{live.port}", "--max-tokens", "400"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as chat:  # fmt: skip
        try:
            assert chat.stdin is not None
            assert chat.stdout is not None
            chat.stdin.write(b"Hi\n")
            chat.stdin.flush()
            assert chat.stdout.read(1)
            chat.send_signal(signal.SIGINT)
            out, err = chat.communicate(b"/system x\n/quit\n", timeout=60)
        finally:
            chat.kill()
    assert b"[stopped]" in out
    assert b"with the system prompt: x" in out
    assert (chat.returncode, err) == (0, b"")
    live.wait_idle()


def test_chat_needs_a_server_or_a_template(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "no server answers at http://127.0.0.1" in capsys.readouterr().err
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert cli.main(["chat", "--model", str(tmp_path), *SMALL]) == 1
    assert "has no chat template: it cannot chat; try quire generate" in capsys.readouterr().err


# Benchmarks


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: str) -> Path:
        (tmp_path / name).write_text(content)
        return tmp_path / name

    return write


def test_bench_throughput(
    model: Path, in_folder: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "throughput", "--model", str(model), *SMALL, "--num-runs", "1"]
    sizes = ["--num-prompts", "4", "--input-len", "10", "--output-len", "5"]
    assert cli.main([*words, *sizes]) == 0
    assert "output tokens/s" in capsys.readouterr().out
    result = json.loads(Path("out/bench/throughput-tiny-random.json").read_text())
    assert (result["num_requests"], result["num_prompt_tokens"], result["num_output_tokens"]) == (4, 40, 20)
    assert result["environment"]["torch"]
    assert result["engine_settings"]["num_gpu_blocks_override"] == 512

    file = in_folder("mine.jsonl", '{"prompt": "abc", "output_len": 3}\n\n{"prompt": "d"}\n')
    assert cli.main([*words, *sizes, "--dataset-path", str(file), "--output-json", "mine.json"]) == 0
    result = json.loads(Path("mine.json").read_text())
    assert (result["num_prompt_tokens"], result["num_output_tokens"]) == (8, 16)


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ('{"prompt": "a"}\n{"promt": "a"}', [], "line 2: must be"),
        ('{"prompt": "a", "output_len": 0}', [], "line 1: must be"),
        ("", [], "holds no prompt"),
        (None, [], "No such file"),
        (
            '{"prompt": "a"}',
            ["--output-len", "5000"],
            "prompt 0 has 1 tokens and asks for 5000, but the context holds 4096",
        ),
    ],
)
def test_bench_refuses_before_it_runs(
    model: Path,
    in_folder: Callable[[str, str], Path],
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    words: list[str],
    message: str,
) -> None:
    if content is not None:
        in_folder("prompts.jsonl", content)
    assert cli.main(["bench", "throughput", "--model", str(model), "--dataset-path", "prompts.jsonl", *words]) == 1
    assert message in capsys.readouterr().err


def test_what_the_api_process_imports() -> None:
    """Nothing that takes long and that it can do without."""
    modules = "engine.async_engine, engine.processing.input_processor, server.app, server.cli.serve, uvicorn, uvloop"
    heavy = "{'httpx', 'huggingface_hub', 'numpy', 'torch', 'transformers', 'triton'}"
    code = f"import sys; import {modules}; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_commands_begin_without_the_web_framework() -> None:
    """It takes a quarter of a second to import, and most commands never need it."""
    code = (
        "import sys; from server.cli import bench, chat, generate, serve; print({'fastapi', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
