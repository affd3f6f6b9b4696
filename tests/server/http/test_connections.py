"""Connections: what is too long, too late or too many ends; all else goes on. Raw sockets on loopback."""

import gc
import http.client
import resource
import socket
import threading

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.http.connections import _BODY_PART, Connection, default_max_connections, raise_open_files
from server.settings import ServerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import Live, Serve, wait_until

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LATE = 0.05  # seconds; nothing in a test depends on what happens before


def connect(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=60)


def until_closed(connection: socket.socket) -> bytes:
    """Bytes that still come."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def status(connection: socket.socket) -> int:
    """Status of the next response, which is read to its end."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


def send_all(connection: socket.socket, pieces: list[bytes]) -> None:
    """Until the server closes."""
    try:
        for piece in pieces:
            connection.sendall(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 5000 + b"\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\n"] + [b"X: %b\r\n" % (b"x" * 100)] * 5000,
        [b"GET /health HTTP/1.1\r\nX: "] + [b"x" * 1000] * 1000,
        [b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n"],
        [CHUNKED] + [b"1" + b";x" * 500 + b"\r\n{\r\n"] * 1000,
        [CHUNKED, b"0\r\n"] + [b"X: %b\r\n" % (b"x" * 100)] * 5000,
    ],
    ids=["one header", "many headers", "endless header", "path", "extensions of chunks", "trailers"],
)
def test_headers_that_are_too_large(serve: Serve, pieces: list[bytes]) -> None:
    live = serve(FakeEngine(), ServerConfig(max_header_bytes=4096))
    with connect(live) as connection:
        send_all(connection, pieces)
        data = until_closed(connection)
    assert data == b"" or (data.startswith(b"HTTP/1.1 431 ") and b"at most 4096 bytes" in data)
    assert live.http.get("/health", headers={"X": "x" * 3000}).status_code == 200


def test_requests_leave_no_garbage_for_the_collector(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig())
    body = b'{"prompt": "a", "max_tokens": 1%b}'
    ended = b"Connection: close\r\n"

    def ask() -> None:
        for more in (b"", b', "stream": true', b', "temperature": -1'):
            each = body % more
            with connect(live) as connection:
                connection.sendall(POST + ended + b"Content-Length: %d\r\n\r\n" % len(each) + each)
                until_closed(connection)

    def living() -> list[object]:
        return [each for each in gc.get_objects() if type(each) in (Connection, RequestResponseCycle)]

    ask()  # what the first requests make stays
    gc.disable()
    try:
        before = living()
        ask()
        wait_until(lambda: len(living()) == len(before))
    finally:
        gc.enable()


def test_bodies_are_no_headers(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(max_header_bytes=1000))
    body = b'{"prompt": "a"}'.ljust(100_000)
    with connect(live) as connection:
        for _ in range(2):
            connection.sendall(CHUNKED)
            connection.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
            assert status(connection) == 200
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert status(connection) == 200


@pytest.mark.parametrize(
    "data",
    [b"", b"GET", b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"\r\n\r\n", HEALTH + b"\r\n", HEALTH + b"GET"],
)
def test_requests_that_do_not_arrive(serve: Serve, data: bytes) -> None:
    live = serve(FakeEngine(), ServerConfig(header_timeout=LATE, keep_alive_timeout=LATE))
    with connect(live) as connection:
        send_all(connection, [data])
        until_closed(connection)


@pytest.mark.parametrize("path", [b"/nothing", b"/ping"])
def test_bodies_that_nothing_reads_do_not_keep_a_connection(serve: Serve, path: bytes) -> None:
    live = serve(FakeEngine(), ServerConfig(header_timeout=LATE))
    with connect(live) as connection:
        send_all(connection, [b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nx" % path])
        until_closed(connection)


def test_idle_connections_are_closed_in_time(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(keep_alive_timeout=LATE))
    with connect(live) as connection:
        connection.sendall(HEALTH)
        assert until_closed(connection).startswith(b"HTTP/1.1 200 ")


def test_a_long_answer_outlives_all_time_outs(serve: Serve) -> None:
    live = serve(FakeEngine(delay=0.02), ServerConfig(keep_alive_timeout=LATE, send_timeout=LATE))
    assert len(live.complete(max_tokens=20).json()["choices"][0]["text"]) > 0


def test_requests_one_behind_the_other(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(max_connections=1))
    body = b'{"prompt": "a", "max_tokens": 1}'
    with connect(live) as connection:
        connection.sendall((POST + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 2 + HEALTH)
        data = b""
        while data.count(b"HTTP/1.1 200 ") < 3:
            data += connection.recv(65536)


def test_few_of_many_requests_one_behind_the_other_are_parsed_at_a_time(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers_complete, waiting = Connection.on_headers_complete, list[int]()

    def counted(self: Connection) -> None:
        headers_complete(self)
        waiting.append(len(self.pipeline))

    monkeypatch.setattr(Connection, "on_headers_complete", counted)
    first = POST + b"Content-Length: 3000\r\n\r\n" + b" " * 3000
    with connect(live) as connection:
        sending = threading.Thread(target=send_all, args=(connection, [HEALTH * 1000 + first + HEALTH * 1000]))
        sending.start()
        answers = connection.makefile("rb")
        statuses = []
        for _ in range(2001):
            statuses.append(answers.readline().split()[1])
            length = 0
            while (line := answers.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            answers.read(length)
        sending.join()
    assert statuses == [b"200"] * 1000 + [b"400"] + [b"200"] * 1000
    assert max(waiting) <= _BODY_PART // len(HEALTH) + 1


def test_an_upgrade_is_not_made(live: Live) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "a"}
    assert live.http.get("/health", headers=upgrade).status_code == 200


def test_idle_connections_make_room(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(max_connections=20))
    idle = [connect(live) for _ in range(60)]  # as many as the server has room for, three times
    try:
        for connection in idle[:40]:
            assert until_closed(connection) == b""
        idle[-2].sendall(HEALTH)
        assert status(idle[-2]) == 200
        idle.append(connect(live))
        idle[-1].sendall(HEALTH)
        assert status(idle[-1]) == 200
    finally:
        for connection in idle:
            connection.close()


def test_connections_at_work_are_kept(serve: Serve) -> None:
    live = serve(FakeEngine(), ServerConfig(max_connections=2))
    live.engine.holds_after = 3
    live.http.close()
    body = b'{"prompt": "a", "max_tokens": 500, "ignore_eos": true}'
    with connect(live) as first, connect(live) as second:
        for connection in (first, second):
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: len(live.engine.active) == 2)
        with connect(live) as third:
            assert until_closed(third).startswith(b"HTTP/1.1 503 ")
        first.close()
        wait_until(lambda: len(live.engine.active) == 1)
        with connect(live) as third:
            third.sendall(HEALTH)
            assert status(third) == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_ends_its_request(serve: Serve, stream: bool) -> None:
    engine = FakeEngine(max_model_len=200_000)
    live = serve(engine, ServerConfig(send_timeout=LATE), send_buffer=4096)
    num_tokens = 100_000 if stream else 50
    body = b'{"prompt": "%b", "max_tokens": %d, "ignore_eos": true, "echo": true, "stream": %b}' % (
        b"a" * (100 if stream else 150_000),
        num_tokens,
        b"true" if stream else b"false",
    )
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", live.port))
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: bool(engine.ended) and len(live.connections) == 0)
        assert (engine.ended.popitem()[1] < num_tokens) == stream


def test_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        assert raise_open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [default_max_connections(n) for n in (100, 1024, 1 << 18)] == [50, 768, 16_384]
