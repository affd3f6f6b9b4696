"""Roles of messages: those of OpenAI's API, those that a chat template names, and others that it may write as they are.

Many templates write any role, and models are trained with roles of their own. So only a role that looks like a
misspelling of a known one is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from server.generation.errors import InvalidRequestError
from server.generation.request import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_LIKENESS = 0.8  # of `difflib`: "usr", "asistant" and "users" have it, "query" and "bot" do not


def check_roles(messages: Sequence[Message], template: str) -> None:
    """Raise `InvalidRequestError` for a role that only looks like a known one. `template`: the chat template's source,
    whose roles are all those that it has in quotes.
    """
    for index, message in enumerate(messages):
        role = message.role
        if role in ROLES or not role.isalpha() or any(f"{quote}{role}{quote}" in template for quote in "'\""):
            continue
        if near := difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=_LIKENESS):
            known = f"the roles are {', '.join(ROLES)} and those of the model's chat template"
            raise InvalidRequestError(f"did you mean {near[0]}? {known}", "messages", index, "role")
