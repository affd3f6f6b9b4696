"""Error messages that quote files of others."""

from __future__ import annotations

_BEGINNING, _END = 600, 300  # characters that are kept of a long message


def one_line(text: str) -> str:
    """`text` as one line that a terminal shows as it is, without the middle of what is long."""
    if len(text) > _BEGINNING + _END:
        text = f"{text[:_BEGINNING]} … {text[-_END:]}"
    return "".join(char if char.isprintable() else " " for char in text)
