"""Result files as pictures: one per file. Knows the files and matplotlib (the optional extra `plot`); runs nothing.

engines            speeds beside each other, as multiples of the baseline
serve --save-detailed    distributions of time to first token and of inter-token latency
serve --find-max-rate    percentiles over request rates
kernels            share of the device's limit
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.results_compare import read
from engine.config import Parser
from engine.errors import ConfigError

COLORS = {"quire": "tab:blue", "vllm": "tab:orange", "flash_attention_3": "tab:orange", "transformers": "tab:gray"}


def main(argv: list[str]) -> int:
    parser = Parser(prog="quire bench plot", description="Draw benchmark results.", epilog=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="results of quire bench engines, serve or kernels")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="picture to write, .png or .svg (else beside the result)"
    )
    args = parser.parse_args(argv)
    if args.output and len(args.files) > 1:
        raise ConfigError("--output names one picture, but several results are given")
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install 'quire[plot]'") from None
    matplotlib.use("Agg")
    results = [(Path(name), read(Path(name))) for name in args.files]
    for path, result in results:
        output = Path(args.output) if args.output else path.with_suffix(".png")
        try:
            draw(result).savefig(output, dpi=150, bbox_inches="tight")
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        print(f"saved {output}")
    return 0


def draw(result: dict[str, Any]) -> Any:
    """A matplotlib figure; `ValueError` says why there is nothing to draw."""
    if result.get("benchmark") == "engines":
        return _draw_engines(result)
    if "find_max_rate" in result:
        return _draw_rates(result["find_max_rate"])
    if detailed := [run for run in result.get("runs") or [result] if "ttfts" in run]:
        return _draw_distributions(detailed)
    if "limits" in result:
        return _draw_kernels(result)
    if "request_throughput" in result:
        raise ValueError("has no times of single requests: run quire bench serve with --save-detailed")
    raise ValueError("is not a result of quire bench engines, serve or kernels")


def _axes(columns: int, title: str, height: float = 4.0, width: float = 5.5) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.3)
    return figure, list(axes)


def _draw_engines(result: dict[str, Any]) -> Any:
    """Bars, one group for each work, a picture for each model; the baseline is the line at 1."""
    models = list(dict.fromkeys(row["model"] for row in result["runs"]))
    if not models:
        raise ValueError("holds no runs")
    environment = result["environment"]
    where = environment.get("gpu", f"{environment.get('cpu_cores')} CPU cores")
    figure, axes = _axes(len(models), f"Speed, {result['baseline']} = 1 · {where}")
    for ax, model in zip(axes, models, strict=True):
        rows = [row for row in result["runs"] if row["model"] == model and row["ratio"]]
        works = list(dict.fromkeys(row["work"] for row in rows))
        engines = list(dict.fromkeys(row["engine"] for row in rows))
        for number, engine in enumerate(engines):
            ratios = {row["work"]: row["ratio"] for row in rows if row["engine"] == engine}
            places = [i + (number - (len(engines) - 1) / 2) * 0.8 / len(engines) for i in range(len(works))]
            bars = ax.bar(
                places,
                [ratios.get(work, 0.0) for work in works],
                0.8 / len(engines),
                label=engine,
                color=COLORS.get(engine),
            )
            ax.bar_label(bars, fmt="%.2f", fontsize=8)
        ax.axhline(1.0, color="black", linewidth=0.8)
        ax.set_xticks(range(len(works)), works)
        ax.set_title(model)
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_distributions(runs: list[dict[str, Any]]) -> Any:
    samples = {
        "Time to first token (ms)": [value for run in runs for value in run["ttfts"] if value],
        "Inter-token latency (ms)": [value for run in runs for gaps in run["itls"] for value in gaps],
    }
    figure, axes = _axes(len(samples), "Share of requests and tokens within a time")
    for ax, (label, values) in zip(axes, samples.items(), strict=True):
        ordered = sorted(value * 1e3 for value in values) or [0.0]
        ax.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
        ax.set_xlabel(label)
        ax.set_ylim(0, 1)
        for share in (0.5, 0.99):
            value = ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
            ax.plot(value, share, ".", color="black")
            ax.annotate(f" p{share * 100:.0f}: {value:.1f}", (value, share), fontsize=8, va="top")
    return figure


def _draw_rates(found: dict[str, Any]) -> Any:
    probes = sorted((p for p in found["probes"] if p["rate"] != "inf"), key=lambda p: p["rate"])
    if not probes:
        raise ValueError("holds no rates but inf")
    figure, axes = _axes(len(found["targets"]), f"Highest rate that holds: {found['max_rate']} requests/s")
    for ax, target in zip(axes, found["targets"], strict=True):
        name, _, limit = target.partition(":")
        key = (name if name.startswith("p") and "_" in name else f"p99_{name}") + "_ms"
        ax.plot([p["rate"] for p in probes], [p[key] for p in probes], color="gray", linewidth=0.8)
        for holds, color in ((True, "tab:green"), (False, "tab:red")):
            own = [p for p in probes if p["holds"] is holds]
            ax.scatter(
                [p["rate"] for p in own], [p[key] for p in own], color=color, label="holds" if holds else "fails"
            )
        ax.axhline(float(limit), color="black", linewidth=0.8)
        ax.set_xlabel("requests/s")
        ax.set_ylabel(key)
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_kernels(result: dict[str, Any]) -> Any:
    cases, limits = result["results"], result["limits"]
    if not cases:
        raise ValueError("holds no cases")
    figure, (ax,) = _axes(1, "Share of the device's limit", height=1.5 + 0.3 * len(cases), width=8.0)
    engines = [engine for engine in ("flash_attention_3", "quire") if any(engine in case for case in cases)]
    for number, engine in enumerate(engines):
        shares = []
        for case in cases:
            found = case.get(engine, {"TB_s": 0.0, "TFLOP_s": 0.0})
            by_bytes = case["name"].startswith("decode")
            limit = limits["copy_TB_s"] if by_bytes else limits["matmul_TFLOP_s"]
            shares.append(found["TB_s" if by_bytes else "TFLOP_s"] / limit)
        places = [i + (number - (len(engines) - 1) / 2) * 0.8 / len(engines) for i in range(len(cases))]
        ax.barh(places, shares, 0.8 / len(engines), label=engine, color=COLORS.get(engine))
    ax.set_yticks(range(len(cases)), [case["name"] for case in cases], fontsize=8)
    ax.invert_yaxis()
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
