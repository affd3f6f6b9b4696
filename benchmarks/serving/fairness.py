"""What one client's flood costs another at a real server, beside first come, first served.

    quire serve MODEL &
    python -m benchmarks.serving.fairness --base-url http://127.0.0.1:8000

One client floods: 200 requests for 4 answers each, or 200 long prompts, and another as soon as one has ended. Another asks for
8 tokens once a second. First come, first served is the same with one `user` for both; so the server must not ask for keys.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from benchmarks.serving.client import Client, Failure
from engine.flags import Parser, add_flags, flag, load

NUM_FLOODING = 200


@dataclass(frozen=True)
class FairnessFlags:
    """Fairness."""

    base_url: str = flag("http://127.0.0.1:8000", "of the server", metavar="URL")
    seconds: int = flag(30, "of each measurement", at_least=2)
    prompt_len: int = flag(1500, "tokens of a long prompt", at_least=1)


def _crowd(dice: random.Random, flags: FairnessFlags) -> dict[str, Any]:
    return {"prompt": _tokens(dice, 32), "n": 4, "max_tokens": dice.choice([8, 32, 128, 512])}


def _long(dice: random.Random, flags: FairnessFlags) -> dict[str, Any]:
    return {"prompt": _tokens(dice, flags.prompt_len), "max_tokens": dice.choice([8, 64])}


def _tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(300, 1000) for _ in range(count)]


FLOODS: dict[str, Callable[[random.Random, FairnessFlags], dict[str, Any]]] = {"n=4": _crowd, "long prompts": _long}


class Run:
    """A flood, or none, and a client that asks once a second."""

    def __init__(self, flags: FairnessFlags, flood: str | None, fair: bool) -> None:
        """`fair`: the two are different users."""
        self._flags, self._flood, self._fair = flags, flood, fair
        self._dice = random.Random(0)
        self._client = Client(flags.base_url, timeout=600)
        self.latencies: list[float] = []
        self.tokens_per_second = 0.0

    async def run(self) -> Run:
        flooding = [asyncio.create_task(self._keep_flooding()) for _ in range(NUM_FLOODING if self._flood else 0)]
        await asyncio.sleep(3 if flooding else 0)  # until the flood is there
        start, num_before = perf_counter(), await self._num_tokens()
        asking = []
        for _ in range(self._flags.seconds):
            asking.append(asyncio.create_task(self._ask({"prompt": _tokens(self._dice, 20), "max_tokens": 8}, "other")))
            await asyncio.sleep(1)
        num_tokens = await self._num_tokens() - num_before
        self.tokens_per_second = num_tokens / (perf_counter() - start)
        await asyncio.wait(asking, timeout=60)
        for asked in asking:
            done = asked.done() and not asked.exception()
            self.latencies.append(asked.result() if done else float("inf"))
        for task in (*flooding, *asking):
            task.cancel()
        await asyncio.gather(*flooding, *asking, return_exceptions=True)
        await self._client.close()
        return self

    async def _keep_flooding(self) -> None:
        assert self._flood is not None
        while True:
            await self._ask(FLOODS[self._flood](self._dice, self._flags), "flooder")

    async def _ask(self, body: dict[str, Any], user: str) -> float:
        start = perf_counter()
        await self._client.json(
            "POST", "/v1/completions", body | {"ignore_eos": True, "user": user if self._fair else "all"}
        )
        return perf_counter() - start

    async def _num_tokens(self) -> float:
        """Of prompts and answers, that the server has computed by now."""
        text = (await self._client.fetch("GET", "/metrics")).decode()
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names))

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.latencies, n=20)[-1]


async def _main(flags: FairnessFlags) -> None:
    alone = await Run(flags, None, fair=True).run()
    print(f"alone: median {statistics.median(alone.latencies) * 1e3:.0f} ms, p95 {alone.p95 * 1e3:.0f} ms", flush=True)
    for flood in FLOODS:
        for fair in (True, False):
            run = await Run(flags, flood, fair).run()
            name = "fair" if fair else "first come, first served"
            print(
                f"{flood}, {name}: median {statistics.median(run.latencies):.2f} s, p95 {run.p95:.2f} s "
                f"({run.p95 / alone.p95:.1f} × alone), {run.tokens_per_second:,.0f} tokens/s",
                flush=True,
            )


def main() -> None:
    parser = Parser(prog="fairness", description=__doc__)
    add_flags(parser, FairnessFlags)
    try:
        (flags,) = load(parser.parse_args(), FairnessFlags)
        asyncio.run(_main(flags))
    except Failure as error:
        sys.exit(f"fairness: {error}")


if __name__ == "__main__":
    main()
