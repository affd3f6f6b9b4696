"""The display of `quire top`: a screen for terminals, lines for files."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from server.cli.top_view.metrics import Snapshot, busiest

MAX_KEYS = 10
_COLOURS = {"ready": "green", "dead": "red", "unresponsive": "red", "no answer": "red"}


def line(snapshot: Snapshot) -> str:
    """Return a snapshot as one line."""
    s = snapshot
    return (
        f"{phase(s.state)} · running {s.running:.0f} · waiting {s.waiting:.0f} · KV {s.kv_cache:.0%} · "
        f"prompt {s.prompt_tokens:,.0f} tok/s · generated {s.generated_tokens:,.0f} tok/s · "
        f"first token {seconds(s.first_token[0])} · refused {s.refused:.1f}/s · failed {s.failed:.1f}/s"
    )


def screen(snapshot: Snapshot, url: str) -> RenderableType:
    """Return a snapshot as a screen."""
    parts: list[RenderableType] = [_head(snapshot, url), _numbers(snapshot)]
    if any(row.name != "anonymous" for row in snapshot.keys):
        parts.append(_keys(snapshot))
    if snapshot.processes:
        parts.append(_processes(snapshot))
    return Group(*parts)


def phase(state: dict[str, Any]) -> str:
    """Describe the engine's phase."""
    words = str(state.get("phase", "unknown"))
    if state.get("fraction") is not None:
        words += f" {state['fraction']:.0%}"
    if state.get("seconds_left") is not None:
        words += f", about {state['seconds_left']:.0f} s left"
    return words


def seconds(value: float) -> str:
    """Format a time with its unit; – for NaN."""
    if math.isnan(value):
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _head(s: Snapshot, url: str) -> RenderableType:
    text = Text.assemble(
        (s.model or "no model yet", "bold"),
        f"  {url}  ",
        (phase(s.state), _COLOURS.get(s.state.get("phase", ""), "yellow")),
    )
    if restarts := s.state.get("num_restarts"):
        text.append(f"  {restarts} restarts", "yellow")
    bar = ProgressBar(total=1.0, completed=s.kv_cache, width=30)
    row = Table.grid(padding=(0, 1))
    row.add_row(
        "KV cache", bar, f"{s.kv_cache:.0%}", f"prefix hits {'–' if math.isnan(s.hit_rate) else f'{s.hit_rate:.0%}'}"
    )
    return Panel(Group(text, row), title="quire top", title_align="left")


def _numbers(s: Snapshot) -> Table:
    table = Table.grid(padding=(0, 3), expand=True)
    deferred = f" ({s.deferred:.0f} for grammars)" if s.deferred else ""
    oldest = f", the longest {seconds(s.oldest_waiting)}" if s.oldest_waiting else ""
    cells = [
        ("running", f"{s.running:.0f}"),
        ("waiting", f"{s.waiting:.0f}{deferred}{oldest}"),
        ("generated", f"{s.generated_tokens:,.0f} tok/s"),
        ("prompts", f"{s.prompt_tokens:,.0f} tok/s"),
        ("finished", f"{s.finished:.1f}/s"),
        ("refused", f"{s.refused:.1f}/s"),
        ("failed", f"{s.failed:.1f}/s"),
        ("preempted", f"{s.preempted:.1f}/s"),
        ("first token", _both(s.first_token)),
        ("between tokens", _both(s.between_tokens)),
        ("in the queue", _both(s.queue)),
        ("event loop", f"p99 {seconds(s.lag)}"),
    ]
    for first in range(0, len(cells), 4):
        table.add_row(
            *(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in cells[first : first + 4])
        )
    return table


def _both(times: tuple[float, float]) -> str:
    return f"{seconds(times[0])}, p99 {seconds(times[1])}"


def _keys(s: Snapshot) -> Table:
    table = Table("key", "running", "requests/s", "prompt tok/s", "generated tok/s", expand=True)
    for row in busiest(s.keys, MAX_KEYS):
        table.add_row(
            row.name,
            f"{row.running:.0f}",
            f"{row.requests:.1f}",
            f"{row.prompt_tokens:,.0f}",
            f"{row.generated_tokens:,.0f}",
        )
    if len(s.keys) > MAX_KEYS:
        table.caption = f"and {len(s.keys) - MAX_KEYS} more"
    return table


def _processes(s: Snapshot) -> Table:
    table = Table("process", "memory", "cores", "open files", expand=True)
    for row in s.processes:
        table.add_row(row.name, f"{row.memory / 2**20:,.0f} MiB", f"{row.cores:.2f}", f"{row.files:.0f}")
    return table
