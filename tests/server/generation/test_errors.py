"""Errors of the neutral request in an API's spelling."""

import pytest

from engine.errors import ParameterError
from server.generation.errors import (
    BusyError,
    InvalidRequestError,
    NotFoundError,
    RequestError,
    TimedOutError,
    field_name,
    invalid,
    spelled,
)
from server.http.errors import STATUSES, APIError, with_status

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
    with pytest.raises(RequestError) as caught, spelled(NAMES):
        raise InvalidRequestError("must not be empty", "stop", lead=" ")
    assert (caught.value.param, caught.value.message) == ("stop_sequences", "stop_sequences must not be empty")
    with pytest.raises(RequestError) as caught, spelled(NAMES):
        raise NotFoundError("stop: there is none", "stop", lead=None)
    assert (caught.value.param, caught.value.message) == ("stop_sequences", "stop: there is none")
    with pytest.raises(RequestError) as caught, spelled(NAMES):
        raise BusyError("too busy", 5)
    assert (caught.value.param, caught.value.message) == (None, "too busy")


def test_errors_of_the_engine_name_their_field() -> None:
    error = invalid(ParameterError("stop", "must be a text, got 5"))
    assert error.spelled(NAMES).message == "stop_sequences must be a text, got 5"
    assert invalid(ParameterError("stop", "no, got 5", ": ")).message == "stop: no, got 5"
    assert invalid(ParameterError("format.json", "no", ": ")).spelled(NAMES).message == "output.format: no"
    assert invalid(ValueError("stop must be a text")).param is None, "its words are not read"


def test_each_error_has_a_status() -> None:
    busy = with_status(BusyError("too busy", 7))
    assert (busy.status, busy.message, busy.headers) == (503, "too busy", {"Retry-After": "7"})
    late = with_status(TimedOutError("too late", "timeout_ms").spelled({"timeout_ms": "options.timeout"}))
    assert (late.status, late.message, late.param) == (504, "options.timeout: too late", "options.timeout")
    assert with_status(APIError(418, "no")).status == 418

    def below(cls: type[RequestError]) -> set[type[RequestError]]:
        return {cls}.union(*map(below, cls.__subclasses__()))

    assert STATUSES.keys() == below(RequestError) - below(APIError) - {RequestError}
