"""Two results side by side, and pictures of results."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import compare, plot
from benchmarks.report.compare import Figure, figures, verdict
from engine.errors import ConfigError


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def serve_result(throughput: float, ttft: float, *runs: tuple[float, float]) -> dict[str, Any]:
    def one(throughput: float, ttft: float) -> dict[str, Any]:
        return {"request_throughput": throughput, "mean_ttft_ms": ttft, "std_ttft_ms": 1.0, "completed": 5}

    result = one(throughput, ttft) | {"request_goodput": None}
    return result | ({"runs": [one(*run) for run in runs]} if runs else {})


KERNELS = {
    "limits": {"copy_TB_s": 4.0, "matmul_TFLOP_s": 800.0},
    "results": [
        {
            "name": name,
            "quire": {"us": 10.0, "TB_s": 3.0, "TFLOP_s": 5.0},
            "flash_attention_3": {"us": 12.0, "TB_s": 2.5, "TFLOP_s": 4.0},
        }
        for name in ("decode 1", "prefill 1")
    ],
}
ENGINES = {
    "benchmark": "engines",
    "baseline": "vllm",
    "environment": {"cpu_cores": 2},
    "runs": [
        {
            "engine": engine,
            "model": "m",
            "work": work,
            "what": "2 requests, 25 in, 10 out",
            "num_requests": 2,
            "num_prompt_tokens": 50,
            "num_output_tokens": tokens,
            "seconds": [1.0, 2.0],
            "ratio": 1.5,
        }
        for engine in ("quire", "vllm")
        for work, tokens in (("nano", 100), ("prefill", 2))
    ],
    "starts": [{"engine": "quire", "model": "m", "init_seconds": [3.0]}],
}
SERVERS = {
    "benchmark": "servers",
    "served": [
        {"engine": "quire", "model": "m", "startup_seconds": 2.0, **serve_result(1.5, 9.0, (1.0, 8.0), (2.0, 10.0))},
        {"engine": "quire", "model": "m", "startup_seconds": 3.0, **serve_result(3.0, 12.0)},
    ],
}
THROUGHPUT = {
    "benchmark": "throughput",
    "elapsed_times": [1.0, 2.0],
    "num_requests": 4,
    "num_output_tokens": 40,
    "total_num_tokens": 100,
    "startup_seconds": 3.0,
}
LATENCY = {"benchmark": "latency", "latencies": [1.0, 2.0], "percentiles": {"50": 1.5}, "startup_seconds": 3.0}


@pytest.mark.parametrize(
    ("a", "b", "higher", "expected"),
    [
        ([100.0], [101.0], True, "same?"),
        ([100.0], [110.0], True, "better?"),
        ([100.0], [110.0], False, "worse?"),
        ([100.0, 101.0, 99.0], [110.0, 111.0, 109.0], True, "better"),
        ([100.0, 101.0, 99.0], [110.0, 111.0, 109.0], False, "worse"),
        ([100.0, 130.0, 70.0], [110.0, 140.0, 80.0], True, "same"),
        ([100.0, 100.0], [100.0, 100.0], True, "same"),
        ([100.0, 100.0], [101.0, 101.0], True, "better"),
        ([100.0, 101.0], [200.0], True, "better?"),
    ],
)
def test_verdicts(a: list[float], b: list[float], higher: bool, expected: str) -> None:
    assert verdict(Figure(tuple(a), higher), Figure(tuple(b), higher)) == expected


def test_welch_by_hand() -> None:
    """t = 2 / sqrt(1/3 + 4/3) = 1.55 with 2.94 degrees of freedom: not significant; four times the difference is."""
    a = Figure((9.0, 10.0, 11.0), True)
    assert compare.is_significant(a, Figure((10.0, 12.0, 14.0), True)) is False
    assert compare.is_significant(a, Figure((16.0, 18.0, 20.0), True)) is True


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (serve_result(5.0, 20.0), {"request_throughput": (5.0,), "mean_ttft_ms": (20.0,)}),
        (
            serve_result(5.0, 20.0, (4.0, 10.0), (6.0, 30.0)),
            {"request_throughput": (4.0, 6.0), "mean_ttft_ms": (10.0, 30.0)},
        ),
        (
            THROUGHPUT,
            {
                "requests_per_second": (4.0, 2.0),
                "output_tokens_per_second": (40.0, 20.0),
                "tokens_per_second": (100.0, 50.0),
                "startup_seconds": (3.0,),
            },
        ),
        (LATENCY, {"latency": (1.0, 2.0), "p50_latency": (1.5,), "startup_seconds": (3.0,)}),
        (
            ENGINES,
            {
                "quire m nano tok/s": (100.0, 50.0),
                "quire m prefill tok/s": (50.0, 25.0),
                "vllm m nano tok/s": (100.0, 50.0),
                "vllm m prefill tok/s": (50.0, 25.0),
                "quire m start-up s": (3.0,),
            },
        ),
        (
            SERVERS,
            {
                "quire m request_throughput": (1.0, 2.0, 3.0),
                "quire m mean_ttft_ms": (8.0, 10.0, 12.0),
                "quire m start-up s": (2.0, 3.0),
            },
        ),
        (
            KERNELS,
            {
                "quire decode 1 us": (10.0,),
                "flash_attention_3 decode 1 us": (12.0,),
                "quire prefill 1 us": (10.0,),
                "flash_attention_3 prefill 1 us": (12.0,),
            },
        ),
    ],
    ids=["serve", "serve-runs", "throughput", "latency", "engines", "servers", "kernels"],
)
def test_figures_of_every_kind(result: dict[str, Any], expected: dict[str, tuple[float, ...]]) -> None:
    assert {name: figure.values for name, figure in figures(result).items()} == expected


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.json", serve_result(5.0, 20.0, (5.0, 20.0), (5.1, 21.0)))
    b = write(tmp_path / "b.json", serve_result(10.0, 40.0, (10.0, 40.0), (10.1, 41.0)) | {"p99_itl_ms": 3.0})
    assert compare.main([a, b]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["figure", "A", "B", "B", "÷", "A"]
    assert lines[1].split() == ["request_throughput", "5.05", "10.05", "1.990", "better"]
    assert lines[2].split() == ["mean_ttft_ms", "20.5", "40.5", "1.976", "worse"]


def test_a_threshold_decides_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write(tmp_path / f"{i}.json", serve_result(5.0, ttft)) for i, ttft in enumerate((20.0, 22.0)))
    assert compare.main([a, b]) == 0
    assert compare.main([a, b, "--threshold", "5"]) == 1
    assert compare.main([a, b, "--threshold", "15"]) == 0
    assert compare.main([b, a, "--threshold", "5"]) == 0


def test_of_several_lines_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n".join(json.dumps(serve_result(rate, 1.0)) for rate in (1.0, 2.0)) + "\n")
    assert compare.read(path)["request_throughput"] == 2.0


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is not a benchmark's JSON"), ("[1]", "is not a benchmark's JSON"), ("{}", "not a result of quire bench")],
)
def test_wrong_files(tmp_path: Path, content: str, message: str) -> None:
    good, bad = write(tmp_path / "good.json", LATENCY), write(tmp_path / "bad.json", content)
    with pytest.raises(ConfigError, match=message):
        compare.main([good, bad])
    with pytest.raises(ConfigError, match="No such file"):
        compare.main([good, str(tmp_path / "nowhere.json")])
    with pytest.raises(ConfigError, match="no figure in common"):
        compare.main([good, write(tmp_path / "other.json", KERNELS)])


DRAWABLE = {
    "engines": ENGINES,
    "servers": {
        "benchmark": "servers",
        "settings": {"num_prompts": 10, "max_concurrency": 4, "input_len": 6, "output_len": 20},
        "environment": {"gpu": "a GPU"},
        "served": [{"engine": engine, "model": "m", "output_throughput": 150.0} for engine in ("quire", "vllm")],
        "offline": [{"engine": "quire", "model": "m", "seconds": [1.0]}],
    },
    "kernels": KERNELS | {"environment": {"gpu": "a GPU"}},
    "detailed": serve_result(1.0, 2.0) | {"ttfts": [0.1, 0.2, 0.0], "itls": [[0.01, 0.02], [], [0.03]]},
    "rates": serve_result(1.0, 2.0)
    | {
        "find_max_rate": {
            "targets": ["p99_ttft:500", "tpot:20"],
            "max_rate": 2.0,
            "probes": [
                {"rate": "inf", "holds": False, "p99_ttft_ms": 900.0, "p99_tpot_ms": 30.0},
                {"rate": 2.0, "holds": True, "p99_ttft_ms": 300.0, "p99_tpot_ms": 10.0},
                {"rate": 3.0, "holds": False, "p99_ttft_ms": 700.0, "p99_tpot_ms": 15.0},
            ],
        }
    },
}


@pytest.mark.parametrize("kind", list(DRAWABLE))
def test_pictures(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "a.json", DRAWABLE[kind])
    assert plot.main([path]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert plot.main([path, "-o", str(tmp_path / "b.svg")]) == 0
    assert "<svg" in (tmp_path / "b.svg").read_text()


def test_what_the_pictures_say() -> None:
    pytest.importorskip("matplotlib")
    (servers,) = plot.draw(DRAWABLE["servers"]).axes
    assert [text.get_text().strip() for text in servers.texts] == ["150 (75% of offline)", "150"]
    decode, prefill = plot.draw(DRAWABLE["kernels"]).axes
    assert [text.get_text() for text in decode.texts] == ["75%", "62%"]
    assert [text.get_text() for text in prefill.texts] == ["1%", "0%"]
    assert "a large copy, 4" in decode.get_xlabel()
    (engines,) = plot.draw(ENGINES).axes
    assert [text.get_text() for text in engines.texts] == ["1.50", "1.50"]  # the baseline is a line
    assert engines.get_xticklabels()[0].get_text().splitlines()[1:] == ["2 requests", "25 in", "10 out"]


def test_pictures_that_cannot_be_drawn(tmp_path: Path) -> None:
    for result, message in ((serve_result(1.0, 2.0), "--save-detailed"), (LATENCY, "is not a result of quire bench")):
        with pytest.raises(ValueError, match=message):
            plot.draw(result)
    pytest.importorskip("matplotlib")
    engines, other = write(tmp_path / "a.json", ENGINES), write(tmp_path / "b.json", ENGINES | {"baseline": "quire"})
    for second, message in (
        (write(tmp_path / "c.json", KERNELS), "only results of quire bench engines"),
        (other, "several"),
    ):
        with pytest.raises(ConfigError, match=message):
            plot.main([engines, second, "-o", str(tmp_path / "d.png")])


def test_several_comparisons_are_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    other = ENGINES | {"runs": [run | {"model": "n"} for run in ENGINES["runs"]]}  # type: ignore[operator]
    paths = [write(tmp_path / "a.json", ENGINES), write(tmp_path / "b.json", other)]
    assert plot.main([*paths, "-o", str(tmp_path / "c.png")]) == 0
    joined = plot._joined([ENGINES, other])
    assert [axes.get_title() for axes in plot.draw(joined).axes] == ["m", "n"]
