"""Result files as pictures, one per file; needs the optional extra `plot`.

engines                  speeds as multiples of the baseline; several files go into one picture with --output
scale                    speed-up over GPUs, for each work
routing                  prompt tokens found in caches, and the busiest replica (python -m benchmarks.micro.routing)
servers                  output tokens a second, and their share of the offline speed where that was measured
serve --save-detailed    distributions of time to first token and of inter-token latency
serve --find-max-rate    percentiles over request rates
kernels                  rates of attention beside FlashAttention 3 and the device's limit (not over an fp8 cache)
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.report.compare import read
from benchmarks.serving.servers import speeds
from engine.errors import ConfigError
from engine.flags import Parser

# Of Okabe and Ito's palette, which people with any kind of colour vision can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, GRAY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#999999"
COLORS = {
    "quire": BLUE,
    "vllm": ORANGE,
    "flash_attention_3": ORANGE,
    "transformers": GRAY,
    "transformers-batching": PURPLE,
}
NAMES = {"quire": "Quire", "vllm": "vLLM", "flash_attention_3": "FlashAttention 3"}


def main(argv: list[str]) -> int:
    parser = Parser(prog="quire bench plot", description="Draw benchmark results.", epilog=__doc__)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="results of quire bench engines, servers, serve, kernels"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="picture to write, .png or .svg (else beside the result)"
    )
    args = parser.parse_args(argv)
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install 'quire[plot]'") from None
    matplotlib.use("Agg")
    results = [(Path(name), read(Path(name))) for name in args.files]
    if args.output and len(results) > 1:
        results = [(Path(args.output), _joined([result for _, result in results]))]
    for path, result in results:
        output = Path(args.output) if args.output else path.with_suffix(".png")
        try:
            draw(result).savefig(output, dpi=120, bbox_inches="tight")
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        print(f"saved {output}")
    return 0


def _joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Several comparisons of engines as one."""
    if any(result.get("benchmark") != "engines" for result in results):
        raise ConfigError("--output names one picture: only results of quire bench engines go together in one")
    if len({(result["baseline"], _where(result)) for result in results}) > 1:
        raise ConfigError("--output names one picture, but the results are of several baselines or machines")
    return {**results[0], "runs": [run for result in results for run in result["runs"]]}


def draw(result: dict[str, Any]) -> Any:
    """A matplotlib figure; `ValueError` says why there is nothing to draw."""
    if result.get("benchmark") == "engines":
        return _draw_engines(result)
    if result.get("benchmark") == "scale":
        return _draw_scale(result)
    if result.get("benchmark") == "routing":
        return _draw_routing(result)
    if result.get("benchmark") == "servers":
        return _draw_servers(result)
    if "find_max_rate" in result:
        return _draw_rates(result["find_max_rate"])
    if detailed := [run for run in result.get("runs") or [result] if "ttfts" in run]:
        return _draw_distributions(detailed)
    if "limits" in result:
        return _draw_kernels(result)
    if "request_throughput" in result:
        raise ValueError("has no times of single requests: run quire bench serve with --save-detailed")
    raise ValueError("is not a result of quire bench engines, scale, servers, serve or kernels")


def _where(result: dict[str, Any]) -> str:
    environment = result["environment"]
    return str(environment.get("gpu") or f"{environment['cpu_cores']} CPU cores")


def _axes(
    columns: int, title: str, height: float = 4.0, width: float = 5.5, *, across: bool = False
) -> tuple[Any, list[Any]]:
    """A figure and its axes side by side. `across`: bars run from left to right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="x" if across else "y", alpha=0.3)
        ax.set_axisbelow(True)
        if across:
            ax.spines["left"].set_visible(False)
            ax.tick_params(axis="y", length=0)
            ax.invert_yaxis()
    return figure, list(axes)


def _legend(figure: Any, handles: list[Any]) -> None:
    """Below the axes, so that it hides no bar."""
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _places(number: int, count: int, groups: int) -> list[float]:
    """Positions of the bars of one of `count` series in each of `groups` groups."""
    return [group + (number - (count - 1) / 2) * 0.8 / count for group in range(groups)]


def _draw_engines(result: dict[str, Any]) -> Any:
    """Bars, one group for each work, axes for each model; the baseline is the line at 1."""
    baseline = result["baseline"]
    rows = [row for row in result["runs"] if row["ratio"] and row["engine"] != baseline]
    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        raise ValueError(f"holds no work that {baseline} and another engine did")
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    whose = f"Speed of {NAMES.get(engines[0], engines[0])}" if len(engines) == 1 else "Speed"
    num_works = max(len({row["work"] for row in rows if row["model"] == model}) for model in models)
    figure, axes = _axes(
        len(models),
        f"{whose}, {NAMES.get(baseline, baseline)} = 1 · {_where(result)}",
        height=3.8,
        width=1.2 + 0.75 * num_works * max(1.0, 0.7 * len(engines)),
    )
    top = max(row["ratio"] for row in rows)
    for ax, model in zip(axes, models, strict=True):
        works = list(dict.fromkeys(row["work"] for row in rows if row["model"] == model))
        bars = []
        for number, engine in enumerate(engines):
            ratios = {row["work"]: row["ratio"] for row in rows if (row["model"], row["engine"]) == (model, engine)}
            bars.append(
                ax.bar(
                    _places(number, len(engines), len(works)),
                    [ratios.get(work, math.nan) for work in works],
                    0.8 / len(engines),
                    label=NAMES.get(engine, engine),
                    color=COLORS.get(engine),
                )
            )
            ax.bar_label(bars[-1], ["" if work not in ratios else f"{ratios[work]:.2f}" for work in works], padding=2)
        ax.axhline(1.0, color="black", linewidth=1)
        ax.set_ylim(0, 1.12 * max(top, 1.0))
        ax.locator_params(axis="y", nbins=5)
        what = {
            row["work"]: row["what"].replace(", ", "\n").replace(" + ", "\n+ ") for row in rows if row["model"] == model
        }
        ax.set_xticks(range(len(works)), [f"{work}\n{what[work]}" for work in works], fontsize="x-small")
        ax.set_title(model, fontsize="medium")
    axes[0].set_ylabel("ratio of tokens a second")
    if len(engines) > 1:
        _legend(figure, bars)
    return figure


def _draw_scale(result: dict[str, Any]) -> Any:
    """Axes for each kind of parallelism, a line for each work; the ideal is dashed, efficiency stands at the points."""
    rows = [row for row in result["runs"] if row["speed_up"]]
    kinds = list(dict.fromkeys(row["parallel"] for row in rows))
    if not kinds:
        raise ValueError("holds nothing that ran on one GPU")
    figure, axes = _axes(len(kinds), f"Speed-up of {result['settings']['model']} · {_where(result)}")
    sizes = sorted({row["gpus"] for row in rows})
    for ax, kind in zip(axes, kinds, strict=True):
        ax.plot(sizes, sizes, color="black", linewidth=0.8, linestyle="--", label="ideal")
        for work in dict.fromkeys(row["work"] for row in rows):
            own = sorted((r["gpus"], r["speed_up"]) for r in rows if (r["parallel"], r["work"]) == (kind, work))
            if own:
                ax.plot(*zip(*own, strict=True), marker="o", label=f"{work}: {own[-1][1] / own[-1][0]:.0%}")
        ax.set_xticks(sizes)
        ax.set_xlabel("GPUs" if "gpu" in result["environment"] else "ranks on a CPU")
        ax.set_ylim(bottom=0)
        ax.set_title(f"{kind} parallel; efficiency on the most", fontsize="medium")
        ax.legend(fontsize="small")
    axes[0].set_ylabel("speed-up over one")
    return figure


def _draw_routing(result: dict[str, Any]) -> Any:
    """Hit rate and imbalance over the number of replicas, a line for each way to route."""
    rows = result["runs"]
    figure, axes = _axes(2, "Routing, simulated")
    what = {"hit_rate": "prompt tokens found in a cache", "imbalance": "busiest replica's work ÷ mean"}
    for ax, (key, label) in zip(axes, what.items(), strict=True):
        for way in dict.fromkeys(row["way"] for row in rows):
            own = sorted((row["replicas"], row[key]) for row in rows if row["way"] == way)
            if way != "one cache" or key == "hit_rate":
                ax.plot(
                    *zip(*own, strict=True),
                    marker="o",
                    label="one cache as large as all" if way == "one cache" else way,
                )
        ax.set_xscale("log")
        ax.set_xticks(sorted({row["replicas"] for row in rows}), labels=sorted({row["replicas"] for row in rows}))
        ax.minorticks_off()
        ax.set_xlabel("replicas")
        ax.set_title(label, fontsize="medium")
        ax.set_ylim(bottom=0)
    axes[0].legend(fontsize="small")
    return figure


def _draw_servers(result: dict[str, Any]) -> Any:
    """Axes for each model, a bar for each engine; behind it, paler, its offline speed."""
    from matplotlib.patches import Patch

    found = speeds(result)
    if not found:
        raise ValueError("holds no server's speed")
    models = list(dict.fromkeys(model for model, _ in found))
    settings = result["settings"]
    num_bars = max(sum(own == model for own, _ in found) for model in models)
    figure, axes = _axes(
        len(models),
        f"{settings['num_prompts']} requests, {settings['max_concurrency']} at a time, "
        f"{settings['input_len']} tokens in, "
        f"{settings['output_len']} out · {_where(result)}",
        height=1.7 + 0.6 * num_bars,
        across=True,
    )
    for ax, model in zip(axes, models, strict=True):
        engines = [engine for own, engine in found if own == model]
        longest = max(value for engine in engines for value in found[model, engine] if value)
        for place, engine in enumerate(engines):
            speed, offline = found[model, engine]
            label, color = f" {speed:,.0f}", COLORS.get(engine, GREEN)
            if offline is not None:
                ax.barh(place, offline, 0.8, color=color, alpha=0.3)
                label += f" ({speed / offline:.0%} of offline)"
            ax.barh(place, speed, 0.45, color=color)
            ax.text(max(speed, offline or 0.0), place, label, va="center")
        ax.set_yticks(range(len(engines)), [NAMES.get(engine, engine) for engine in engines])
        ax.set_xlim(0, 1.5 * longest)
        ax.set_xlabel("output tokens a second")
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.locator_params(axis="x", nbins=5)
        ax.set_title(model, fontsize="medium")
    if any(offline is not None for _, offline in found.values()):
        _legend(figure, [Patch(color=GRAY, label="served"), Patch(color=GRAY, alpha=0.3, label="offline")])
    return figure


def _draw_distributions(runs: list[dict[str, Any]]) -> Any:
    samples = {
        "Time to first token (ms)": [value for run in runs for value in run["ttfts"] if value],
        "Inter-token latency (ms)": [value for run in runs for gaps in run["itls"] for value in gaps],
    }
    figure, axes = _axes(len(samples), "Share of requests and tokens within a time")
    for ax, (label, values) in zip(axes, samples.items(), strict=True):
        ordered = sorted(value * 1e3 for value in values) or [0.0]
        ax.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], color=BLUE)
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
        for holds, color in ((True, GREEN), (False, RED)):
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
    """Decode in bytes a second beside a copy, prefill in operations a second beside a product of matrices."""
    from matplotlib.patches import Patch

    cases = [case for case in result["results"] if not case.get("kv_dtype")]
    kinds = {
        "decode": ("TB_s", "copy_TB_s", "TB/s", "a large copy"),
        "prefill": ("TFLOP_s", "matmul_TFLOP_s", "TFLOP/s", "a large product of matrices"),
    }
    own = {kind: [case for case in cases if case["name"].startswith(kind)] for kind in kinds}
    shown = [kind for kind in kinds if own[kind]]
    if not shown:
        raise ValueError("holds no cases but those over an fp8 cache")
    engines = [engine for engine in ("quire", "flash_attention_3") if any(engine in case for case in cases)]
    longest = max(len(own[kind]) for kind in shown)
    figure, axes = _axes(
        len(shown), f"Paged attention · {_where(result)}", height=1.6 + 0.45 * longest, width=6.5, across=True
    )
    for ax, kind in zip(axes, shown, strict=True):
        key, limit_key, unit, what = kinds[kind]
        limit = result["limits"][limit_key]
        for number, engine in enumerate(engines):
            rates = [case[engine][key] if engine in case else math.nan for case in own[kind]]
            places = _places(number, len(engines), len(rates))
            ax.barh(places, rates, 0.8 / len(engines), color=COLORS[engine])
            for place, rate in zip(places, rates, strict=True):
                share = "" if math.isnan(rate) else f"{rate / limit:.0%}"
                ax.text(1.09 * limit, place, share, va="center", ha="right", fontsize="small")
        ax.axvline(limit, color="black", linewidth=1)
        ax.set_yticks(range(len(own[kind])), [case["name"].removeprefix(kind).strip() for case in own[kind]])
        ax.set_xlim(0, 1.1 * limit)
        ax.set_xlabel(f"{unit} (line: {what}, {limit:,.4g})")
        ax.set_title(kind, fontsize="medium")
    _legend(figure, [Patch(color=COLORS[engine], label=NAMES[engine]) for engine in engines])
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
