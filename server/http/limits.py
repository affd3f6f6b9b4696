"""How large a request may be, and what of it is too much for the event loop."""

from __future__ import annotations

from server.http.errors import APIError

MAX_VALUES = 100_000  # objects, their members, and lists of a body; numbers and texts in lists are not counted
MAX_DEPTH = 100  # of objects and lists within each other
MAX_ANSWERS = 2048  # prompts × n; texts to be embedded
_SMALL_BYTES = 16 << 10
_SMALL_NUM_VALUES = 200
_PART_BYTES = 16 << 10  # of a body, looked at without a pause for other threads


def default_body_bytes(max_model_len: int) -> int:
    """Room for a prompt that fills the context, in any spelling, and for many short ones."""
    return (4 << 20) + 32 * max_model_len


def is_small(body: bytes) -> bool:
    """Whether a JSON body is read, checked and converted within about a millisecond."""
    return len(body) <= _SMALL_BYTES and _num_values(body) <= _SMALL_NUM_VALUES


def check_body(body: bytes) -> None:
    """`APIError` for a JSON body that has more values than allowed. To decode it would take ten times as long, in which nothing
    else of this process runs.
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
    """`APIError` for a body that has more or deeper values than allowed, before anything is made of them."""
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
