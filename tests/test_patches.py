"""Tests share their process with servers of other tests, so they replace functions of a module under test only."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# A server whose event loop reads a replaced clock computes when to wake up next, and may sleep for ever.
PATCH = re.compile(
    r"""(setattr|patch|patch\.object)\(\s*["']?(time|asyncio|select|selectors|socket|threading)["']?[.,]"""
)


def test_no_test_replaces_what_a_running_event_loop_uses() -> None:
    texts = {path: path.read_text() for path in ROOT.rglob("*.py")}
    assert [
        f"{path.relative_to(ROOT)}: {found[0]}" for path, text in texts.items() for found in PATCH.finditer(text)
    ] == []


def test_a_replaced_clock_is_found() -> None:
    for target in ("time, 'monotonic'", "asyncio, 'sleep'", "'time.sleep'", "\n    time,\n    'monotonic'"):
        assert PATCH.search(f"monkeypatch.setattr({target}, fake)")
    assert not PATCH.search("monkeypatch.setattr(start_times, 'time', fake)")
