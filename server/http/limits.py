"""Limits of request bodies, and which bodies are too large for the event loop."""

from __future__ import annotations

from server.http.errors import APIError

MAX_VALUES = 100_000  # objects, members and lists in a body; numbers and strings in lists do not count
MAX_DEPTH = 100  # nesting of objects and lists
_SMALL_BYTES = 16 << 10
_SMALL_NUM_VALUES = 200
_PART_BYTES = 16 << 10  # of a body, processed without a pause for other threads


def default_body_bytes(max_model_len: int, *, reads_images: bool = False) -> int:
    """Return the default limit of a body: a prompt that fills the context in any encoding fits, or many short ones, or
    some photographs.
    """
    return (4 << 20) + 32 * max_model_len + (32 << 20 if reads_images else 0)


def is_small(body: bytes) -> bool:
    """Return whether a JSON body can be decoded, checked and converted within about a millisecond."""
    return len(body) <= _SMALL_BYTES and _num_values(body) <= _SMALL_NUM_VALUES


def check_body(body: bytes) -> None:
    """Raise `APIError` if a JSON body has too many values. Decoding it would take ten times as long, and block the
    process.
    """
    if _num_values(body) <= MAX_VALUES:
        return
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_values = in_text = 0
    for start in range(0, len(body), _PART_BYTES):
        parts = body[start : start + _PART_BYTES].split(b'"')
        num_values += _num_values(b"".join(parts[in_text::2]))
        in_text ^= (len(parts) - 1) & 1
        if num_values > MAX_VALUES:
            raise _too_many()


def _num_values(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[") + text.count(b":")


def _too_many() -> APIError:
    return APIError(400, f"the body has more than {MAX_VALUES} objects, members and lists")


def check_values(decoded: object) -> None:
    """Raise `APIError` if a decoded body has too many values or is nested too deeply."""
    num_values, depth, level = 0, 0, [decoded]
    while level:
        below: list[object] = []
        for value in level:
            if type(value) is dict:
                num_values += 1 + len(value)
                below += value.values()
            elif type(value) is list:
                num_values += 1
                below += value
            if num_values > MAX_VALUES:
                raise _too_many()
        depth, level = depth + 1, [value for value in below if type(value) is dict or type(value) is list]
        if depth > MAX_DEPTH:
            raise APIError(400, f"the body is nested too deeply: more than {MAX_DEPTH} objects and lists in each other")
