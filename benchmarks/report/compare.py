"""Two result files side by side: ratios, what is better, and whether it is more than chance."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.metrics import t95
from engine.errors import ConfigError
from engine.flags import Parser

EPILOG = """examples:
  quire bench compare before.json after.json
  quire bench compare --threshold 5 before.json after.json     exit code 1 when a figure is more than 5 % worse

The files are those of quire bench serve (vLLM's, too), throughput, latency, engines, servers and kernels. If a figure
was measured several times in both, "better" and "worse" mean that the means differ at the 95 % level (Welch's
t-test); "same" means that they do not. With a single measurement, a difference of less than 2 % is "same", and a
question mark follows what is not."""
_SERVE = {
    "request_throughput": 1,
    "request_goodput": 1,
    "output_throughput": 1,
    "total_token_throughput": 1,
    "max_output_tokens_per_s": 1,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a result, with all its measurements."""

    values: tuple[float, ...]
    higher_is_better: bool

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


def main(argv: list[str]) -> int:
    parser = Parser(prog="quire bench compare", description="Compare two benchmark results.", epilog=EPILOG)
    parser.add_argument("before", metavar="A.json", help="the result to compare with")
    parser.add_argument("after", metavar="B.json", help="the other one")
    parser.add_argument(
        "--threshold", type=float, metavar="PERCENT", help="exit with 1 when a figure is worse by more than this"
    )
    args = parser.parse_args(argv)
    if args.threshold is not None and not args.threshold >= 0:
        raise ConfigError(f"threshold must be a number of percent, at least 0, got {args.threshold}")
    before, after = figures(read(Path(args.before))), figures(read(Path(args.after)))
    shared = [name for name in before if name in after]
    if not shared:
        raise ConfigError(f"{args.before} and {args.after} have no figure in common")
    rows = [(name, before[name], after[name]) for name in shared]
    print(table(rows))
    alone = len(before) + len(after) - 2 * len(shared)
    if alone:
        print(f"({alone} figures are in one of the files only)")
    return int(any(is_worse_by(a, b, args.threshold) for _, a, b in rows)) if args.threshold is not None else 0


def read(path: Path) -> dict[str, Any]:
    """A result file; of one with several lines (--append-result) the last."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        try:
            result = json.loads(text)
        except ValueError:
            result = json.loads(text.splitlines()[-1])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, IndexError):
        raise ConfigError(f"{path}: is not a benchmark's JSON") from None
    if not isinstance(result, dict):
        raise ConfigError(f"{path}: is not a benchmark's JSON")
    return result


def figures(result: dict[str, Any]) -> dict[str, Figure]:
    """Every figure of a result by its name. `ConfigError` when it is no result of ours."""
    kind = result.get("benchmark", "serve" if "request_throughput" in result else None)
    reader = READERS.get(str(kind))
    if "limits" in result:
        reader = _of_kernels
    if reader is None:
        raise ConfigError("not a result of quire bench serve, throughput, latency, engines, servers or kernels")
    return dict(reader(result))


def _of_serve(result: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    runs = result.get("runs") or [result]
    for key, value in result.items():
        if isinstance(value, (int, float)) and (key in _SERVE or key.endswith("_ms")) and not key.startswith("std_"):
            yield key, Figure(tuple(run[key] for run in runs if key in run) or (value,), key in _SERVE)


def _of_throughput(result: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    times = result["elapsed_times"]
    for key, amount in (
        ("requests_per_second", result["num_requests"]),
        ("output_tokens_per_second", result["num_output_tokens"]),
        ("tokens_per_second", result["total_num_tokens"]),
    ):
        yield key, Figure(tuple(amount / seconds for seconds in times), True)
    yield "startup_seconds", Figure((result["startup_seconds"],), False)


def _of_latency(result: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    yield "latency", Figure(tuple(result["latencies"]), False)
    for p, seconds in result["percentiles"].items():
        yield f"p{p}_latency", Figure((seconds,), False)
    if "startup_seconds" in result:
        yield "startup_seconds", Figure((result["startup_seconds"],), False)


def _of_engines(result: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    for row in result["runs"]:
        tokens = (
            row["num_output_tokens"] if row["num_output_tokens"] > row["num_requests"] else row["num_prompt_tokens"]
        )
        values = tuple(tokens / seconds for seconds in row["seconds"])
        yield f"{row['engine']} {row['model']} {row['work']} tok/s", Figure(values, True)
    for row in result["starts"]:
        yield f"{row['engine']} {row['model']} start-up s", Figure(tuple(row["init_seconds"]), False)


def _of_kernels(result: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    for case in result["results"]:
        for engine in ("quire", "flash_attention_3"):
            if engine in case:
                yield f"{engine} {case['name']} us", Figure((case[engine]["us"],), False)


def _of_servers(result: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    for model, engine in dict.fromkeys((row["model"], row["engine"]) for row in result["served"]):
        rows = [row for row in result["served"] if (row["model"], row["engine"]) == (model, engine)]
        runs = [run for row in rows for run in row.get("runs", [row])]
        for name, figure in _of_serve(runs[0] | {"runs": runs}):
            yield f"{engine} {model} {name}", figure
        yield f"{engine} {model} start-up s", Figure(tuple(row["startup_seconds"] for row in rows), False)


READERS = {
    "serve": _of_serve,
    "throughput": _of_throughput,
    "latency": _of_latency,
    "engines": _of_engines,
    "servers": _of_servers,
}


def table(rows: list[tuple[str, Figure, Figure]]) -> str:
    width = max(len("figure"), *(len(name) for name, _, _ in rows))
    lines = [f"{'figure':<{width}} {'A':>14} {'B':>14} {'B ÷ A':>8}"]
    for name, a, b in rows:
        ratio = f"{b.mean / a.mean:8.3f}" if a.mean else f"{'–':>8}"
        lines.append(f"{name:<{width}} {_shown(a):>14} {_shown(b):>14} {ratio}  {verdict(a, b)}")
    return "\n".join(lines)


def _shown(figure: Figure) -> str:
    return f"{figure.mean:,.0f}" if abs(figure.mean) >= 10000 else f"{figure.mean:,.4g}"


def verdict(a: Figure, b: Figure) -> str:
    """better, worse or same; with ? when a single measurement has to do."""
    sure = is_significant(a, b)
    if sure is None:
        if abs(b.mean - a.mean) <= 0.02 * abs(a.mean):
            return "same?"
    elif not sure:
        return "same"
    word = "better" if (b.mean > a.mean) == a.higher_is_better else "worse"
    return word if sure else word + "?"


def is_significant(a: Figure, b: Figure) -> bool | None:
    """Do the means differ at the 95 % level, by Welch's t-test? None if either was measured only once."""
    if min(len(a.values), len(b.values)) < 2:
        return None
    parts = [statistics.variance(figure.values) / len(figure.values) for figure in (a, b)]
    error = sum(parts)
    if not error:
        return a.mean != b.mean
    degrees = error**2 / sum(part**2 / (len(figure.values) - 1) for part, figure in zip(parts, (a, b), strict=True))
    return abs(b.mean - a.mean) > t95(max(1.0, degrees)) * math.sqrt(error)


def is_worse_by(a: Figure, b: Figure, percent: float) -> bool:
    """Is B worse than A by more than this, and not by chance as far as that is known?"""
    if is_significant(a, b) is False or not a.mean:
        return False
    worse = (a.mean - b.mean if a.higher_is_better else b.mean - a.mean) / abs(a.mean)
    return worse * 100 > percent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
