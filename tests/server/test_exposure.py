"""The warning of a server that others reach and that asks them for nothing."""

import argparse
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.flags import Parser
from server.cli import serve
from server.cli.exposure import exposure_warning, reachable_urls
from server.settings import ServerConfig


@contextlib.contextmanager
def bound(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        yield listener


def test_all_addresses_of_the_machine() -> None:
    with bound("0.0.0.0") as listener:
        port = listener.getsockname()[1]
        urls = reachable_urls(listener, "https")
        warning = exposure_warning(ServerConfig(), listener)
        assert urls
        assert all(url.startswith("https://") and url.endswith(f":{port}") for url in urls)
        assert not any("0.0.0.0" in url for url in urls), "an address to go to"
        assert warning is not None
        assert urls[0].removeprefix("https") in warning
        assert "--api-key-file" in warning
        assert "--host 127.0.0.1" in warning


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1"])
def test_this_machine_alone(address: str) -> None:
    try:
        with bound(address) as listener:
            assert exposure_warning(ServerConfig(), listener) is None
    except OSError:
        pytest.skip("the machine has no such address")


def test_a_unix_socket() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        assert exposure_warning(ServerConfig(), listener) is None


def test_keys() -> None:
    with bound("0.0.0.0") as listener:
        assert exposure_warning(ServerConfig(api_key=("sesame",)), listener) is None


@pytest.mark.parametrize("source", ["option", "variable", "file"])
def test_a_key_on_the_command_line_is_warned_of(
    source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def refuse(settings: ServerConfig) -> None:
        assert settings.read_keys() is not None
        raise ConfigError("stop here")

    monkeypatch.setattr(serve, "listen", refuse)
    monkeypatch.setattr(serve, "configure_logging", lambda *_: None)
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "text")  # restored afterwards
    words = ["serve"]
    if source == "option":
        words += ["--api-key", "sesame"]
    elif source == "variable":
        monkeypatch.setenv("QUIRE_API_KEY", "sesame")
    else:
        (tmp_path / "serve.yaml").write_text("api_key: [sesame]\n")
        words += ["--config", str(tmp_path / "serve.yaml")]
    parser = Parser()
    serve.add_parser(parser.add_subparsers())
    args: argparse.Namespace = parser.parse_args(words)
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="stop here"):
        serve.run(args)
    warned = [record.getMessage() for record in caplog.records if "--api-key:" in record.getMessage()]
    assert len(warned) == (source == "option")
    for text in warned:
        assert "--api-key-file" in text
        assert "QUIRE_API_KEY" in text
        assert "sesame" not in text
