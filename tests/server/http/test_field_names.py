"""Errors of the neutral request in an API's spelling."""

import pytest

from engine.errors import ParameterError
from server.http.errors import APIError, field_name, invalid, spelled

NAMES = {
    "stop": "stop_sequences",
    "format": "output.format",
    "tools[].name": "tools[].function.name",
    "messages[].calls[].arguments": "input[].arguments",
}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ((), ""),
        (("seed",), "seed"),
        (("tools", 3), "tools[3]"),
        (("tools", 3, "strict"), "tools[3].strict"),
        (("stop",), "stop_sequences"),
        (("stop", 1), "stop_sequences"),
        (("format", "json"), "output.format"),
        (("tools", 3, "name"), "tools[3].function.name"),
        (("messages", 2, "calls", 5, "arguments"), "input[2].arguments"),
        (("messages", 2, "content"), "messages[2].content"),
    ],
)
def test_fields_have_the_names_of_the_api(path: tuple[str | int, ...], name: str) -> None:
    assert field_name(path, NAMES) == name


def test_errors_leave_in_the_spelling_of_the_api() -> None:
    with pytest.raises(APIError) as caught, spelled(NAMES):
        raise APIError(400, "must not be empty", "stop", lead=" ")
    assert (caught.value.param, caught.value.message) == ("stop_sequences", "stop_sequences must not be empty")
    with pytest.raises(APIError) as caught, spelled(NAMES):
        raise APIError(404, "stop: there is none", "stop", lead=None)
    assert (caught.value.param, caught.value.message) == ("stop_sequences", "stop: there is none")
    with pytest.raises(APIError) as caught, spelled(NAMES):
        raise APIError(503, "too busy")
    assert (caught.value.param, caught.value.message) == (None, "too busy")


def test_errors_of_the_engine_name_their_field() -> None:
    error = invalid(ParameterError("stop", "must be a text, got 5"))
    assert error.spelled(NAMES).message == "stop_sequences must be a text, got 5"
    assert invalid(ParameterError("stop", "no, got 5", ": ")).message == "stop: no, got 5"
    assert invalid(ParameterError("format.json", "no", ": ")).spelled(NAMES).message == "output.format: no"
    assert invalid(ValueError("stop must be a text")).param is None, "its words are not read"
