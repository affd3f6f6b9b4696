"""`quire check --deterministic`: what it says of a server that keeps the promise, and of one that does not."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from server.cli import main as cli
from server.cli.checks import determinism
from server.cli.checks.runner import AbsentError, Server


class Fake:
    """A server of one made-up log-probability per token; with others, that of a request `wrong` differs."""

    def __init__(self, wrong: str = "", rescored: float = 0.0) -> None:
        self.http, self.url, self.model = self, "http://fake", "toy"
        self._wrong, self._rescored, self._lock, self._running, self.seen = wrong, rescored, threading.Lock(), 0, 0

    def close(self) -> None:
        pass

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        with self._lock:
            self.seen += 1
            others = self.seen > 2 * determinism.COUNT and not body.get("echo")
        words = body["prompt"].split()
        values = [-len(word) / 7 for word in words]
        if body.get("echo"):
            values = [value + self._rescored for value in values]
            return {"choices": [{"text": body["prompt"], "logprobs": self._logprobs(words, values)}]}
        new, found = words[:3], values[:3]
        if others and self._wrong and body["prompt"].startswith(self._wrong):
            found[1] += 1e-7
        return {"choices": [{"text": " " + " ".join(new), "logprobs": self._logprobs(new, found)}]}

    def _logprobs(self, tokens: list[str], values: list[float]) -> dict[str, Any]:
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": [], "text_offset": []}


def compared(fake: Fake) -> tuple[list[determinism.Comparison], list[str]]:
    rows: list[str] = []
    server: Any = fake
    return determinism.run(server, rows.append), rows


def test_a_server_that_keeps_the_promise() -> None:
    found, rows = compared(Fake())
    assert [each.name for each in found] == list(determinism.NAMES)
    assert all(each.is_good and each.num_all for each in found)
    assert rows[0] == "http://fake · toy\n\nsame request, same bytes"
    assert rows[1] == "  ✓ alone, again       12 of 12"


def test_a_last_bit_that_others_change_is_shown() -> None:
    wrong = determinism.bodies()[4]["prompt"]
    found, rows = compared(Fake(wrong))
    assert [each.num_same for each in found] == [12, 11, 11, 11, 12]
    assert "✗ among 7 others" in rows[3]
    assert "request 5, token 2: log-probability" in rows[3]


def test_scores_that_differ_from_those_of_generation_are_shown() -> None:
    found, _ = compared(Fake(rescored=1e-7))
    assert [each.is_good for each in found] == [True, True, True, True, False]
    assert found[-1].num_same == 0


def test_the_exit_code_and_the_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for fake, code in ((Fake(), 0), (Fake(rescored=1e-7), 1)):
        monkeypatch.setattr("server.cli.checks.runner.Server", lambda *_, fake=fake, **__: fake)
        assert cli.main(["check", "http://fake", "--model", "toy", "--deterministic", "--json"]) == code
        body = json.loads(capsys.readouterr().out)
        assert [row["way"] for row in body["deterministic"]] == list(determinism.NAMES)
    assert cli.main(["check", "http://fake", "--model", "toy", "--deterministic"]) == 1
    assert capsys.readouterr().out.endswith("48 of 60 are the same bytes\n")


def test_a_server_without_log_probabilities_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AbsentError("status 404")

    monkeypatch.setattr(Server, "ask", refuse)
    assert cli.main(["check", "http://127.0.0.1:9", "--model", "toy", "--deterministic"]) == 1
    assert "/v1/completions: status 404" in capsys.readouterr().err
