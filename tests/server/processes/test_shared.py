"""Parts of several API processes, without processes: limits, metrics, streams of guests, forwarded requests."""

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from engine import ConfigError, EngineConfig
from engine.core.batch import EngineOutput, StepOutputs
from engine.core.engine_request import EngineRequest
from engine.errors import EngineAsleepError
from engine.replicas.guest import Guest, GuestStream, Lost, Outputs
from engine.replicas.in_flight import InFlight
from engine.replicas.supervisor import Watchdog
from server.cli.serve import check_processes
from server.generation.errors import BusyError, InvalidRequestError
from server.generation.queue import RequestQueue
from server.generation.rate_limits import RateLimits
from server.processes import pool
from server.processes.forwarding import Forwarder, Forwards
from server.processes.merged_metrics import added, lasting, merge, of_owner, sums_of
from server.processes.messages import Body, Forward, Sent
from server.processes.shared_limits import LimitsHost, SharedQueue
from server.settings import ServerConfig


def metrics(requests: int, seconds: float, waiting: float) -> list[Metric]:
    registry = CollectorRegistry()
    Counter("requests", "r", ("key",), registry=registry).labels(f"k{requests}").inc(requests)
    Histogram("seconds", "s", buckets=(1, 2), registry=registry).observe(seconds)
    Gauge("quire:oldest_waiting_seconds", "w", registry=registry).set(waiting)
    Gauge("num_blocks", "b", registry=registry).set(7)
    return list(registry.collect())


def test_metrics_of_processes_are_one_servers() -> None:
    class Merged:
        def collect(self) -> Iterator[Metric]:
            ended = lasting(added(sums_of(metrics(1, 0.5, 9)), sums_of(metrics(2, 0.5, 9))))
            yield from merge(metrics(1, 1.5, 2), [sums_of(metrics(2, 1.5, 4)), ended])

    lines = generate_latest(Merged()).decode().splitlines()  # type: ignore[arg-type]
    assert {'requests_total{key="k1"} 2.0', 'requests_total{key="k2"} 4.0'} <= set(lines)
    assert {'seconds_bucket{le="1.0"} 2.0', 'seconds_bucket{le="+Inf"} 4.0', "seconds_sum 4.0"} <= set(lines)
    assert {"quire:oldest_waiting_seconds 4.0", "num_blocks 7.0"} <= set(lines)


def test_a_key_sees_its_own_usage_only() -> None:
    registry = CollectorRegistry()
    usage = Counter("quire:key_requests", "r", ("key",), registry=registry)
    for name in ("a", "b"):
        usage.labels(name).inc()
    assert [series.labels for series in of_owner(sums_of(registry.collect()), "a")] == [(("key", "a"),)]


def test_a_queue_counts_requests_of_all_processes() -> None:
    """Also of one that is lost while it prepares requests."""

    async def run() -> None:
        queue = RequestQueue(InFlight(), 2, 1, lambda reason: None)
        hosts = [LimitsHost(queue, RateLimits()) for _ in range(2)]
        tasks: list[asyncio.Task[None]] = []

        def of(host: LimitsHost) -> SharedQueue:
            async def call(method: str, **arguments: Any) -> Any:
                return await getattr(host, method)(**arguments)

            return SharedQueue(call, lambda method, **rest: tasks.append(asyncio.create_task(call(method, **rest))))

        first, second = map(of, hosts)
        async with first.admitted(2, "a"):
            async with second.admitted(1, "a"):
                with pytest.raises(BusyError, match="1 requests are waiting"):
                    await second.admitted(1, "a").__aenter__()
            await asyncio.gather(*tasks)
            with pytest.raises(InvalidRequestError, match="asks for 4 answers"):
                await first.admitted(4, "a").__aenter__()
            hosts[0].close()
            async with second.admitted(3, "a"):
                pass
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_outputs_of_a_guest_keep_their_order() -> None:
    async def run() -> list[Any]:
        sent: list[Any] = []
        forgotten: list[str] = []
        guest = Guest(refuse_c, lambda stream: forgotten.append(stream.request.request_id), sent.append)
        streams: dict[str, GuestStream] = {}
        for name in ("a", "b", "c"):
            guest.add(EngineRequest(name, [1]))
            streams |= {name: guest._streams[name]} if name in guest._streams else {}
        streams["a"].add_token(5, 0)
        streams["b"].add_tokens([6, 7], 0)
        streams["a"].add(EngineOutput("a", [8]), 0)
        streams["a"].add_token(9, 0)  # of the next step, before the messages of this one are sent
        streams["b"].close("killed")
        await asyncio.sleep(0.01)
        streams["a"].add(EngineOutput("a", [], "stop"), 0)
        await asyncio.sleep(0.01)
        assert streams["a"].output.metrics.num_generation_tokens == 3
        assert forgotten == ["b", "a"]
        assert len(guest) == 0
        return sent

    assert asyncio.run(run()) == [
        Lost("c", "asleep"),
        Outputs(StepOutputs(["a", "b"], [5, 6, 7], [EngineOutput("a", [8])], [1, 2])),
        Outputs(StepOutputs(["a"], [9])),
        Lost("b", "killed"),
        Outputs(StepOutputs(outputs=[EngineOutput("a", [], "stop")])),
    ]


def refuse_c(stream: GuestStream) -> None:
    if stream.request.request_id == "c":
        raise EngineAsleepError("asleep")


def test_a_forwarded_request_is_read_and_answered_part_by_part() -> None:
    """An app that is ahead of its client waits, and learns that the client is gone."""

    async def run() -> None:
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append((scope["path"], scope["headers"], scope["client"]))
            seen.extend([await receive(), await receive()])
            await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            seen.append("sent")
            seen.append(await receive())
            await send({"type": "http.response.body", "body": b"two"})

        forwarder: Forwarder
        forwards = Forwards(app, lambda message: forwarder.take(message))

        def to_main(message: Forward | Body | Sent) -> None:
            forwards.begin(message) if isinstance(message, Forward) else forwards.take(message)

        forwarder = Forwarder(to_main)
        parts = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.request", "body": b"y"}]
        may_send, answers = asyncio.Semaphore(1), list[Any]()

        async def receive() -> Any:
            return parts.pop(0) if parts else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await may_send.acquire()
            answers.append(message)

        scope = {"type": "http", "path": "/p", "headers": [(b"h", b"v")], "client": ("1.2.3.4", 5), "state": object()}
        task = asyncio.create_task(forwarder(scope, receive, send))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert seen[3:] == [], "the client has taken no more than the head"
        may_send.release()
        may_send.release()
        await asyncio.wait_for(task, 60)
        assert seen[0] == ("/p", [(b"h", b"v")], ("1.2.3.4", 5))
        assert [each["body"] for each in seen[1:3]] == [b"x", b"y"]
        assert seen[3:] == ["sent", {"type": "http.disconnect"}]
        assert [each.get("body") for each in answers] == [None, b"one", b""]

    asyncio.run(run())


def test_a_forwarded_request_whose_app_fails_is_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a secret")

    async def run() -> None:
        forwarder: Forwarder
        forwards = Forwards(app, lambda message: forwarder.take(message))
        forwarder = Forwarder(forwards.begin)
        with pytest.raises(RuntimeError, match="did not answer"):
            await forwarder({"type": "http", "path": "/", "headers": []}, None, None)  # type: ignore[arg-type]

    asyncio.run(run())


@pytest.mark.parametrize(("is_stopped", "seconds"), [(True, 7.0), (False, 60.0)])
def test_a_process_without_signs_of_life_is_ended(
    is_stopped: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, killed = [0.0], []

    class Child:
        heartbeat = SimpleNamespace(read=lambda: 5)

        def is_stopped(self) -> bool:
            return is_stopped

        def kill(self) -> None:
            killed.append(now[0])

    with socket.socket() as listener:
        process = pool.ApiProcess(None, 0, listener)  # type: ignore[arg-type]
        process._watchdog, process._child, process._beats = Watchdog(lambda: now[0]), Child(), True  # type: ignore[assignment]
        for tick in range(100):
            now[0] = float(tick)
            process.look(1.0)
    assert killed == [seconds]


@pytest.mark.parametrize(
    ("configs", "more", "reason"),
    [
        ([EngineConfig(model="a")] * 2, {}, "single model"),
        ([EngineConfig(model="a", enable_lora=True)], {}, "enable_lora"),
        ([EngineConfig(model="a")], {"record_trace": "t"}, "record_trace"),
    ],
)
def test_what_cannot_be_shared_is_refused(configs: list[EngineConfig], more: dict[str, Any], reason: str) -> None:
    check_processes(configs, ServerConfig(**more))
    with pytest.raises(ConfigError, match=reason):
        check_processes(configs, ServerConfig(api_server_count=2, **more))
