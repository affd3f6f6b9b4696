"""States that the engine reports."""

import asyncio

import pytest

from engine.replicas.state import EngineState, StateHolder


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_start_tells_its_phase_and_how_long_that_takes() -> None:
    clock = Clock()
    states = StateHolder(clock)
    assert states.state == EngineState("starting", None, None, 0, "")
    assert not states.state.is_ready
    states.advance("loading", 0.0)
    assert states.state == EngineState("loading", 0.0, None)
    clock.now += 3
    states.advance("loading", 0.25)
    assert states.state == EngineState("loading", 0.25, 9.0)
    states.advance("compiling", None)
    assert states.state == EngineState("compiling", None, None)
    states.enter("ready")
    assert states.state == EngineState("ready")
    assert states.state.is_ready


def test_a_restart_knows_how_long_the_start_took() -> None:
    clock = Clock()
    states = StateHolder(clock)
    clock.now += 20
    assert not states.has_been_ready
    states.enter("ready")
    assert states.has_been_ready
    clock.now += 500
    states.enter("restarting", reason="it was killed")
    assert states.state == EngineState("restarting", None, 20.0, 1, "it was killed")
    clock.now += 5
    states.advance("loading", 0.5)
    assert states.state == EngineState("loading", 0.5, 15.0, 1, "it was killed")
    clock.now += 100
    states.advance("loading", 0.9)
    assert states.state.seconds_left == 0.0
    states.enter("ready")
    assert states.state == EngineState("ready", None, None, 1, "it was killed")


def test_a_start_that_is_remembered_tells_how_long_this_one_takes() -> None:
    clock = Clock()
    states = StateHolder(clock, 60.0)
    clock.now += 5
    states.advance("downloading", 0.0)
    assert states.state.seconds_left is None, "what is remembered is without download"
    clock.now += 100
    states.advance("loading", 0.0)
    assert states.state.seconds_left == 55.0
    clock.now += 15
    states.advance("compiling", None)
    assert states.state.seconds_left == 40.0
    clock.now += 30
    states.advance("capturing", 0.5)
    assert states.state.seconds_left == 10.0
    clock.now += 20
    states.advance("capturing", 0.8)
    assert states.state.seconds_left == pytest.approx(5), "it takes longer this time: by what is done of the phase"
    states.enter("ready")
    assert states.start_seconds == 70.0


def test_an_estimate_ages() -> None:
    clock = Clock()
    states = StateHolder(clock, 60.0)
    clock.now += 10
    states.enter("loading")
    state = states.state
    assert state.seconds_left == 50.0
    assert state.seconds_left_at(clock.now + 20) == 30.0
    assert state.seconds_left_at(clock.now + 50) is None
    states.enter("ready")
    assert states.state.seconds_left_at(clock.now) is None


def test_a_silence_is_no_start() -> None:
    clock = Clock()
    states = StateHolder(clock)
    clock.now += 20
    states.enter("ready")
    clock.now += 300
    states.enter("unresponsive")
    clock.now += 10
    states.enter("ready")
    states.enter("restarting")
    assert states.state.seconds_left == 20.0


def test_changes_can_be_waited_for_and_none_is_missed() -> None:
    async def main() -> None:
        states = StateHolder()
        first = states.state
        waiting = [asyncio.create_task(states.change(first)) for _ in range(2)]
        cancelled = asyncio.create_task(states.change(first))
        await asyncio.sleep(0)
        cancelled.cancel()
        states.enter("ready")
        assert [(await task).phase for task in waiting] == ["ready", "ready"]
        assert (await states.change(first)).phase == "ready", "at once: it has changed already"

    asyncio.run(main())
