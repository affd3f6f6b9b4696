"""Turns in the event loop."""

from __future__ import annotations

import asyncio
import itertools

from engine.core.batch import EngineOutput
from engine.core.engine_request import EngineRequest
from engine.core.params.sampling import SamplingParams
from engine.processing.output_collector import OutputCollector
from engine.replicas.streams import Pace, Stream
from engine.utils.fair_tasks import LONG_SECONDS, FairTasks

AT_ONCE = 4


async def _begin(fair: FairTasks, owner: str, begun: list[str]) -> None:
    await fair.wait(owner)
    begun.append(owner)


def test_one_request_does_not_wait() -> None:
    async def run() -> None:
        fair, begun = FairTasks(AT_ONCE, clock=lambda: 0.0), list[str]()
        for _ in range(3):
            waiting = _begin(fair, "a", begun)
            try:
                waiting.send(None)
            except StopIteration:
                continue
            raise AssertionError("it waited")
        assert begun == ["a"] * 3

    asyncio.run(run())


def test_a_burst_begins_a_few_at_a_time_and_another_owner_among_the_first() -> None:
    async def run() -> None:
        fair, begun = FairTasks(AT_ONCE, clock=lambda: 0.0), list[str]()
        burst = [asyncio.create_task(_begin(fair, "a", begun)) for _ in range(100)]
        await asyncio.sleep(0)
        assert begun == ["a"] * AT_ONCE
        other = asyncio.create_task(_begin(fair, "b", begun))
        while not other.done():
            before = len(begun)
            await asyncio.sleep(0)
            assert len(begun) - before <= AT_ONCE
        assert begun.index("b") <= 4 * AT_ONCE
        await asyncio.gather(*burst)
        assert begun.count("a") == 100

    asyncio.run(run())


def test_fewer_go_on_at_once_where_each_takes_long() -> None:
    async def run() -> None:
        now = 0.0
        fair = FairTasks(AT_ONCE, clock=lambda: now)

        async def work(seconds: float) -> None:
            nonlocal now
            await fair.wait("a")
            now += seconds

        async def most_at_once(seconds: float) -> int:
            tasks, numbers = [asyncio.create_task(work(seconds)) for _ in range(40)], [0]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                numbers.append(sum(task.done() for task in tasks))
            return max(after - before for before, after in itertools.pairwise(numbers[-20:]))

        assert await most_at_once(LONG_SECONDS) == 1
        assert await most_at_once(LONG_SECONDS / AT_ONCE / 2) == AT_ONCE

    asyncio.run(run())


def test_requests_whose_clients_have_gone_take_no_turn() -> None:
    async def run() -> None:
        fair, begun = FairTasks(AT_ONCE, clock=lambda: 0.0), list[str]()
        burst = [asyncio.create_task(_begin(fair, "a", begun)) for _ in range(100)]
        await asyncio.sleep(0)
        for task in burst[AT_ONCE:99]:
            task.cancel()
        await asyncio.wait_for(burst[99], 60)
        assert begun == ["a"] * (AT_ONCE + 1)

    asyncio.run(run())


def test_a_crowd_of_streams_lets_another_owners_update_through() -> None:
    async def run() -> None:
        fair, read = FairTasks(AT_ONCE, clock=lambda: 0.0), list[str]()
        sampling = SamplingParams(max_tokens=5)

        def stream(owner: str, number: int) -> Stream:
            request = EngineRequest(f"{owner}{number}", [1, 2], sampling, tenant=owner)
            return Stream(request, OutputCollector([1, 2], sampling, None), 1, Pace(), fair)

        async def reader(each: Stream) -> None:
            await each.changed()
            read.append(each.request.tenant)

        streams = [*(stream("a", number) for number in range(100)), stream("b", 0)]
        readers = [asyncio.create_task(reader(each)) for each in streams]
        await asyncio.sleep(0)
        for each in streams:
            each.add(EngineOutput(each.request.request_id, [7]), 0.0)
        while "b" not in read:
            before = len(read)
            await asyncio.sleep(0)
            assert len(read) - before <= AT_ONCE
        assert len(read) <= 4 * AT_ONCE
        await asyncio.gather(*readers)

    asyncio.run(run())
