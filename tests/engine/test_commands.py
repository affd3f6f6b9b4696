"""Commands to the engine process: few messages, however many there are."""

import asyncio
import gc
import time
import weakref

import pytest
import zmq

from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.core.params.structured import Literals, Parameters, StructuredOutputs, Syntax, Tag, Tags
from engine.replicas import engine_process
from engine.replicas.engine_process import EngineProcess
from engine.replicas.messages import Abort, Add, decode_commands, encode


def test_commands_of_one_iteration_of_the_event_loop_are_two_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "ENGINE_MODULE", "this")  # the test is the other side

    async def run() -> list[list[str]]:
        process = EngineProcess()
        with zmq.Context() as context, context.socket(zmq.PULL) as other:
            other.rcvtimeo = 60_000
            other.bind(f"ipc://{process._folder}/commands")
            for number in range(5):
                process.send(Abort(str(number)))
            await asyncio.sleep(0)
            process.send(Abort("later"))
            process.close(kill=False)
            received: list[list[str]] = []
            while received[-1:] != [["Shutdown"]]:
                commands = decode_commands(other.recv())
                received.append([each.request_id if isinstance(each, Abort) else "Shutdown" for each in commands])
        return received

    assert asyncio.run(run()) == [["0"], ["1", "2", "3", "4"], ["later"], ["Shutdown"]]


@pytest.mark.parametrize(
    "syntax",
    [
        None,
        Literals(assign=":", quote="<escape>"),
        Parameters(key="<", value="{kind}>", end="</>", kinds=(("a", "b"),)),
    ],
)
def test_a_request_arrives_as_it_was_sent(syntax: Syntax | None) -> None:
    tags = Tags(trigger="<call>", tags=[Tag(begin="<call>", schema={"type": "object"}, end="</call>", syntax=syntax)])
    params = SamplingParams(structured_outputs=StructuredOutputs(tags=tags))
    request = EngineRequest("a", [1, 2, 3], params)
    (command,) = decode_commands(encode([Add(request)]))
    assert isinstance(command, Add)
    assert command.request == request


def test_a_process_that_is_closed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the next collection of garbage: what listens to it refers to it, and it keeps a file open."""
    monkeypatch.setattr(engine_process, "ENGINE_MODULE", "this")  # ends at once

    async def run() -> weakref.ref[EngineProcess]:
        process = EngineProcess()
        process.listen(lambda message: process.remove_files())
        process.close(kill=True)
        return weakref.ref(process)

    gc.disable()
    try:
        closed, deadline = asyncio.run(run()), time.monotonic() + 60
        while closed() is not None and time.monotonic() < deadline:  # its thread saw it end
            time.sleep(0.01)
        assert closed() is None
    finally:
        gc.enable()
