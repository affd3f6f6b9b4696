"""Quoting of foreign text in error messages."""

from __future__ import annotations

_BEGINNING, _END = 600, 300  # characters kept of a long text


def one_line(text: str) -> str:
    """Return `text` as one line of printable characters. The middle of a long text is left out."""
    if len(text) > _BEGINNING + _END:
        text = f"{text[:_BEGINNING]} … {text[-_END:]}"
    return "".join(char if char.isprintable() else " " for char in text)
