"""Downloads of images: only from allowed hosts at public addresses, whatever names and redirects say; bounded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from engine.vision import decode as decoding
from engine.vision import download as downloading
from engine.vision.decode import ImageError
from engine.vision.download import download, is_public
from engine.vision.sources import ImageSource, Media

PUBLIC = "93.184.215.14"
ADDRESSES = {
    "pictures.example.org": [PUBLIC],
    "other.example.org": [PUBLIC],
    "inside.example.org": ["10.0.0.7"],
    "both.example.org": [PUBLIC, "127.0.0.1"],
    "six.example.org": ["::ffff:127.0.0.1"],
    "169.254.169.254": ["169.254.169.254"],
}
Answer = bytes | Callable[[socket.socket], None]


class Web:
    """Names, addresses and answers of a web in which every public address is one server of this process."""

    def __init__(self) -> None:
        self.answers: dict[bytes, Answer] = {}  # by path
        self.connected: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                asked = connection.recv(10_000)
                answer = self.answers[asked.split(b" ")[1]]
                if isinstance(answer, bytes):
                    connection.sendall(answer)
                else:
                    answer(connection)

    def resolve(self, host: str, port: int, **_: Any) -> list[Any]:
        if host not in ADDRESSES:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ADDRESSES[host]]

    def connect(self, address: tuple[str, int], timeout: float) -> socket.socket:
        self.connected.append(address[0])
        connected = socket.socket()
        connected.settimeout(timeout)
        connected.connect(self.listener.getsockname())
        return connected


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    found = Web()
    monkeypatch.setattr(downloading, "getaddrinfo", found.resolve)
    monkeypatch.setattr(downloading, "create_connection", found.connect)
    with closing(found.listener):
        yield found
    found.ended.set()


def answer(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


DOMAINS = ("pictures.example.org", "inside.example.org", "both.example.org", "six.example.org")


def test_a_file_of_an_allowed_host(web: Web) -> None:
    web.answers = {
        b"/a.png?x=1": answer(b"pixels"),
        b"/old": answer(b"", "302 Found", Location="/a.png?x=1"),
    }
    media = Media(DOMAINS)
    assert media.read(ImageSource("http://pictures.example.org/a.png?x=1")) == b"pixels"
    assert media.read(ImageSource("HTTP://Pictures.Example.org./old")) == b"pixels"
    assert download("http://other.example.org/a.png?x=1", ("*.example.org",)) == b"pixels"
    assert set(web.connected) == {PUBLIC}, "by the address that was checked"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://other.example.org/a", "not among"),
        ("http://pictures.example.org.evil.org/a", "not among"),
        ("http://169.254.169.254/latest/meta-data", "not among"),
        ("http://2852039166/", "not among"),
        ("http://pictures.example.org@169.254.169.254/", "no user name"),
        ("http://pictures.example.org:8080/", "no port but"),
        ("http://pictures.example.org:99999/", "not valid"),
        ("http:///a", "not valid"),
        ("http://pictures.example.org/a\r\nHost: x", "not valid"),
        ("http://pictures.example.org/ü", "not valid"),
        ("http://inside.example.org/", "no public address"),
        ("http://both.example.org/", "no public address"),
        ("http://six.example.org/", "no public address"),
    ],
)
def test_what_is_never_asked(web: Web, url: str, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        download(url, DOMAINS)
    assert web.connected == []


@pytest.mark.parametrize(
    ("to", "reason"),
    [
        ("http://169.254.169.254/", "not among"),
        ("http://inside.example.org/", "no public address"),
        ("file:///etc/passwd", "not valid"),
        ("//other.example.org/", "not among"),
        ("/again", "more than 3 times"),
    ],
)
def test_redirects_are_checked_again(web: Web, to: str, reason: str) -> None:
    web.answers = {b"/": answer(b"", "302 Found", Location=to), b"/again": answer(b"", "307 X", Location="/again")}
    with pytest.raises(ImageError, match=reason):
        download("http://pictures.example.org/", DOMAINS)
    assert set(web.connected) == {PUBLIC}


def test_bounds(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_BYTES", 1000)
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(5000)
    web.answers = {
        b"/large": endless,
        b"/missing": answer(b"secret words", "404 Not Found"),
        b"/no-http": b"\x00\x01" * 50,
        b"/cut": answer(b"pixels")[:-3],
    }
    for path, reason in (
        ("large", "more than"),
        ("missing", "status 404"),
        ("no-http", "cannot be read"),
        ("cut", "ended the file early"),
    ):
        with pytest.raises(ImageError, match=reason) as error:
            download(f"http://pictures.example.org/{path}", DOMAINS)
        assert "secret" not in str(error.value)
    monkeypatch.setattr(downloading, "MAX_SECONDS", 0.3)

    def dribble(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while not web.ended.wait(0.05):
            try:
                connection.sendall(b"x: y\r\n")
            except OSError:
                return

    web.answers = {b"/slow": dribble}
    with pytest.raises(ImageError, match=r"takes more than|cannot be read"):
        download("http://pictures.example.org/slow", DOMAINS)


@pytest.mark.parametrize(
    "address",
    """127.0.0.1 0.0.0.0 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 224.0.0.1 255.255.255.255 240.0.0.1
    ::1 :: fe80::1%eth0 fc00::1 ff02::1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: 2001:0:7f00:1::80ff:fffe
    not-an-address""".split(),  # noqa: SIM905
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_addresses_that_are_public() -> None:
    assert is_public(PUBLIC)
    assert is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")
    assert is_public("64:ff9b::5db8:d70e")
