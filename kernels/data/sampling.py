"""Data types of sampling."""

from __future__ import annotations

import enum

NOT_FINITE, NOTHING_ALLOWED = -1, -2  # in place of a token: a logit is NaN or inf; every logit is -inf


class Part(enum.Enum):
    """The rows that a call samples."""

    ALL = 0
    PLAIN = 1  # those without top_k, top_p and min_p
    REST = 2  # the others, and those with a mask
