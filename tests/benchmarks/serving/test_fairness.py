"""The table of what a flood costs another client."""

from __future__ import annotations

import asyncio

from benchmarks.serving.fairness import FLOODS, FairnessFlags, Measured, Run, rows, table


def test_rows_compare_with_alone_and_with_first_come_first_served() -> None:
    found = {("", True): Measured([0.02] * 20, [10])}
    for flood in FLOODS:
        found[flood, False] = Measured([30.0] * 20, [900, 1100])
        found[flood, True] = Measured([0.03] * 18 + [0.04] * 22, [970, 990])
    row = next(rows(found))
    assert round(row["times_alone"], 6) == 2
    assert round(row["throughput"], 6) == 0.98
    assert "| 200 × n=4 | 20 ms | 40 ms, 2.0 × | 30.0 s | 980, 98.0% | 1,000 |" in table(found)


def test_who_is_who() -> None:
    async def keys(fair: bool) -> list[bytes]:
        run = Run(FairnessFlags(), "http://127.0.0.1:1", None, fair)
        return [client.request("GET", "/health") for client in (run._other, run._flooder)]

    other, flooder = asyncio.run(keys(fair=True))
    assert b"other-" in other
    assert b"flooder-" in flooder
    other, flooder = asyncio.run(keys(fair=False))
    assert other == flooder
