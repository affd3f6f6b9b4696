"""The figures of a serving benchmark on made-up timelines, computed by hand."""

import math
from array import array

import pytest

from benchmarks.serving import metrics
from benchmarks.serving.client import Answer
from benchmarks.serving.metrics import Report


def answer(start: float, *times: float, output_len: int | None = None, prompt_len: int = 10, cause: str = "") -> Answer:
    return Answer(
        prompt_len,
        start=start,
        times=array("d", times),
        output_len=len(times) if output_len is None else output_len,
        cause=cause,
        error=cause,
    )


# two whole answers and one that broke after its first token
TIMELINE = [
    answer(100.0, 100.1, 100.2, 100.4),  # ttft 100 ms, gaps 100 and 200 ms, tpot 150 ms, e2el 400 ms
    answer(100.5, 100.8, 101.8, output_len=5),  # ttft 300 ms, one gap of 1 s for 4 tokens: tpot 250 ms, e2el 1300 ms
    answer(100.0, 100.1, cause="connection lost"),
]


def test_throughputs_count_whole_answers() -> None:
    result = metrics.measure(TIMELINE, 2.0, Report())
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["failures"] == {"connection lost": 1}
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 8)
    assert result["request_throughput"] == 1.0
    assert result["output_throughput"] == 4.0
    assert result["total_token_throughput"] == 14.0
    assert result["request_goodput"] is None


def test_latencies() -> None:
    result = metrics.measure(TIMELINE, 2.0, Report(("ttft", "tpot", "itl", "e2el"), (50.0, 99.0, 99.9)))
    expected = {
        "mean_ttft_ms": 200,
        "median_ttft_ms": 200,
        "std_ttft_ms": 100,
        "p50_ttft_ms": 200,
        "p99_ttft_ms": 298,
        "p99.9_ttft_ms": 299.8,
        "mean_tpot_ms": 200,
        "mean_itl_ms": (100 + 200 + 1000) / 3,
        "median_itl_ms": 200,
        "p99_itl_ms": 984,
        "mean_e2el_ms": 850,
        "p99_e2el_ms": 1291,
    }
    assert {key: result[key] for key in expected} == pytest.approx(expected)


def test_an_answer_of_one_token_has_no_tpot_and_no_gap() -> None:
    result = metrics.measure([answer(0.0, 0.5)], 1.0, Report())
    assert (result["mean_ttft_ms"], result["mean_tpot_ms"], result["mean_itl_ms"]) == (500, 0, 0)


def test_nothing_completed_is_all_zeros() -> None:
    result = metrics.measure([TIMELINE[2]], 1.0, Report(goodput={"ttft": 1.0}))
    assert (
        result["completed"] == result["request_throughput"] == result["p99_ttft_ms"] == result["request_goodput"] == 0
    )
    assert "TTFT" not in metrics.table(result | {"failures": {"timeout": 1}}, Report())


@pytest.mark.parametrize(
    ("limits", "good"),
    [({"ttft": 100.1}, 1), ({"ttft": 301}, 2), ({"ttft": 301, "tpot": 200}, 1), ({"e2el": 399}, 0), ({"tpot": 251}, 2)],
)
def test_goodput_counts_requests_that_keep_all_limits(limits: dict[str, float], good: int) -> None:
    assert metrics.measure(TIMELINE, 2.0, Report(goodput=limits))["request_goodput"] == good / 2


def test_peaks() -> None:
    """In the second from 100 to 101: 3 tokens, and half of the other answer's 5, which came in two events."""
    result = metrics.measure(TIMELINE, 2.0, Report())
    assert result["max_output_tokens_per_s"] == 5.5
    assert result["max_concurrent_requests"] == 1
    overlapping = [answer(0.0, 1.0), answer(0.5, 2.0), answer(1.0, 3.0), answer(1.5, 1.6)]
    assert metrics.peaks(overlapping)[1] == 3  # the first ends when the third begins


def test_confidence_intervals() -> None:
    assert metrics.confidence([1.0]) is None
    assert metrics.confidence([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert metrics.t95(1) == 12.706
    assert metrics.t95(29.9) == 2.045
    assert metrics.t95(31) == pytest.approx(2.040, abs=2e-3)
    assert metrics.t95(1000) == pytest.approx(1.962, abs=1e-3)


def test_several_runs_are_merged() -> None:
    runs = [metrics.measure(TIMELINE, seconds, Report()) for seconds in (1.0, 2.0, 4.0)]
    merged = metrics.merge(runs)
    assert merged["num_runs"] == 3
    assert merged["runs"] == runs
    assert (merged["completed"], merged["failed"], merged["duration"]) == (6, 3, 7.0)
    assert merged["failures"] == {"connection lost": 3}
    assert merged["request_throughput"] == pytest.approx((2 + 1 + 0.5) / 3)
    assert merged["confidence_95"]["request_throughput"] == pytest.approx(4.303 * 0.7637626 / math.sqrt(3))
    assert merged["request_goodput"] is None
    assert metrics.merge(runs[:1]) == runs[0]
    assert "Request throughput (req/s):              1.17 ± 1.90" in metrics.table(merged, Report())


def test_the_table_is_vllms() -> None:
    result = metrics.measure(TIMELINE, 2.0, Report(goodput={"ttft": 200}))
    shown = metrics.table(result | {"max_concurrency": 8, "configured_rate": 2.5}, Report())
    assert shown.splitlines() == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             8         ",
        "Request rate configured (RPS):           2.50      ",
        "Benchmark duration (s):                  2.00      ",
        "Total input tokens:                      20        ",
        "Total generated tokens:                  8         ",
        "Request throughput (req/s):              1.00      ",
        "Request goodput (req/s):                 0.50      ",
        "Output token throughput (tok/s):         4.00      ",
        "Peak output token throughput (tok/s):    5.50      ",
        "Peak concurrent requests:                1.00      ",
        "Total token throughput (tok/s):          14.00     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          200.00    ",
        "Median TTFT (ms):                        200.00    ",
        "P99 TTFT (ms):                           298.00    ",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          200.00    ",
        "Median TPOT (ms):                        200.00    ",
        "P99 TPOT (ms):                           249.00    ",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           433.33    ",
        "Median ITL (ms):                         200.00    ",
        "P99 ITL (ms):                            984.00    ",
        "-------------Failed requests by cause-------------",
        "connection lost:                         1         ",
        "==================================================",
    ]


def test_details() -> None:
    found = metrics.details(TIMELINE)
    assert found["input_lens"] == [10, 10, 10]
    assert found["output_lens"] == [3, 5, 0]
    assert found["ttfts"] == pytest.approx([0.1, 0.3, 0.1])
    assert [len(gaps) for gaps in found["itls"]] == [2, 1, 0]
    assert found["errors"] == ["", "", "connection lost"]
