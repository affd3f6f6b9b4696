"""Errors of request parameters, which name the field at fault."""

from __future__ import annotations


class ParameterError(ValueError):
    """An invalid parameter of a request. Its message is the field's name, `lead` and the reason.

    `field`: its name in the request, with dots for fields of fields: `top_p`, `structured_outputs.regex`.
    """

    def __init__(self, field: str, reason: str, lead: str = " ") -> None:
        super().__init__(field, reason, lead)  # so that copies and pickles are made from the same three
        self.field, self.reason, self.lead = field, reason, lead

    def __str__(self) -> str:
        return f"{self.field}{self.lead}{self.reason}"

    @property
    def path(self) -> tuple[str, ...]:
        """The names that lead to the field."""
        return tuple(self.field.split("."))
