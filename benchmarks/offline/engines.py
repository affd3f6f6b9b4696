"""The same work on every engine installed, side by side: ratios of medians.

Each engine runs in a process of its own, one after another, in alternating order (A B, then B A, …), so that a machine
that slows down slows both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import llama_cpp, workloads
from benchmarks.counting import counting_folder
from benchmarks.floors import decode_seconds
from benchmarks.model_shapes import add_tokenizer, model_folder
from benchmarks.processes import describe_machine, last_line, nvidia_smi, process_group, wait_for_free_gpu
from benchmarks.random_weights import write_random_weights
from benchmarks.result_files import to_text
from benchmarks.workloads import Workload
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, check, flag, load, nearest, run_command

OTHER_TREE = "quire@"
MODULES = {"quire": "engine", "vllm": "vllm", "transformers": "transformers", "transformers-batching": "transformers"}
DEFAULTS = {"models": ("qwen3-0.6b",), "work": ("latency1", "latency8", "nano")}
EPILOG = """examples:
  quire bench engines --models qwen3-0.6b --work latency1,nano
  quire bench engines --engines quire,vllm --models qwen3-0.6b,llama-3.1-8b --time-limit 580 --output-json engines.json
  quire bench engines --engines quire,transformers --models llama-100m --work 1x32x64,16x32x64
  quire bench engines --engines quire,vllm --models qwen3-8b --work nano,nano+1,nano+32
  quire bench engines --engines quire@../before,quire --baseline quire@../before    a change, and what was before it

Weights are random. All engines get the same token ids, temperature 0.6 (0 for copy), ignore_eos, no detokenisation, and
the same settings: bfloat16 (float32 where there is no GPU), 85 % of the GPU's memory, a context of 4096 tokens (32768
for longctx), prefix cache off but for prefix. WORK+N: its requests use N random LoRA adapters of rank 16 alternately.
Before the clock: a few short requests. What counts is the median.

With --write-weights, Quire's and vLLM's first greedy tokens of a few prompts are compared: engines that disagree about
most do not compute the same model, which is reported as a failure.
"""
COMPARED = "16x32x1"  # prompts whose first greedy tokens are compared
FORM = ("dtype", "kv_cache_dtype", "mamba_ssm_cache_dtype", "quantization", "language_model_only")  # of what is moved
RANK = 16  # of LoRA adapters
LEAST_EQUAL = 0.5  # the fraction that must be equal; with random weights, rounding decides some near-ties differently


def words_of(items: Iterable[str]) -> tuple[str, ...]:
    """The words of a flag that may be given as several words or with commas, each once."""
    return tuple(dict.fromkeys(word for item in items for word in item.split(",") if word))


def check_engine(engine: str, modules: Mapping[str, str], llama_server: str | None, gguf: str | None) -> None:
    """Raise `ConfigError` unless an engine is known and installed; `modules`: name → module."""
    if engine == llama_cpp.NAME:
        llama_cpp.check_server(llama_server, gguf)
    elif engine not in modules:
        known = (*modules, llama_cpp.NAME)
        raise ConfigError(f"engine {engine!r} must be one of {', '.join(known)}{nearest(engine, known)}")
    elif not importlib.util.find_spec(modules[engine]):
        raise ConfigError(f"engine {engine} is not installed for {sys.executable}")


@dataclass(frozen=True)
class EnginesFlags:
    """Comparison."""

    engines: tuple[str, ...] = flag(
        (),
        f"of {', '.join(MODULES)} (else the first three, if installed), llama.cpp, or quire@FOLDER: another checkout",
        metavar="NAME",
    )
    models: tuple[str, ...] = flag(
        ("qwen3-0.6b",), "names of benchmarks/model_shapes.py, or folders with a config.json"
    )
    work: tuple[str, ...] = flag(
        (),
        f"of {', '.join(workloads.OFFLINE)}, or COUNTxINPUTxOUTPUT such as 16x128x64 (else latency1, latency8, nano)",
        metavar="NAME",
    )
    baseline: str | None = flag(None, "engine that the others are compared with (else vllm, else the last one)")
    rounds: int = flag(
        2, "how often each engine is started; those that do not fit the time limit are left out", at_least=1
    )
    repeat: int | None = flag(
        None, "timed runs of each work in each round (else 3, and 7 of up to 16 requests)", at_least=1
    )
    time_limit: int | None = flag(None, "seconds that the whole comparison may take", at_least=1)
    dtype: str | None = flag(None, "of the weights", choices=("bfloat16", "float16", "float32"))
    max_model_len: int | None = flag(None, "context, for all work", size=True, at_least=2)
    gpu_memory_utilization: float = flag(0.85, "share of the GPU's memory for each engine", above=0, at_most=1)
    engine_args: dict[str, Any] | None = flag(  # noqa: RUF009
        None, 'more settings, such as {"vllm": {"max_num_seqs": 512}}'
    )
    llama_server: str | None = flag(None, "program of the engine llama.cpp, to be named in --engines", metavar="FILE")
    gguf: str | None = flag(None, "the model as llama.cpp reads it", metavar="FILE")
    models_dir: str = flag("out/models", "where configurations of models are written", metavar="FOLDER")
    write_weights: bool = flag(
        False,
        "write random weights for shapes there, and load weights: low-bit dummy ones differ, and zeros are faster",
    )
    output_json: str | None = flag(
        None, "where to save the results, with a Markdown table beside them (else under out/bench)", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check(self)
        for name in ("engines", "models", "work"):
            object.__setattr__(self, name, words_of(getattr(self, name)) or DEFAULTS.get(name, ()))
        for engine in (*self.engines, *(self.engine_args or {}), *filter(None, [self.baseline])):
            if engine.startswith(OTHER_TREE):
                if not Path(engine.removeprefix(OTHER_TREE), "engine").is_dir():
                    raise ConfigError(f"engine {engine}: that folder holds no checkout of Quire")
                continue
            check_engine(engine, MODULES, self.llama_server, self.gguf)
        if not all(isinstance(settings, dict) for settings in (self.engine_args or {}).values()):
            raise ConfigError('engine_args must be settings for each engine, such as {"vllm": {"max_num_seqs": 512}}')
        installed = [name for name in list(MODULES)[:3] if importlib.util.find_spec(MODULES[name])]
        engines = self.engines or tuple(installed)
        baseline = self.baseline or ("vllm" if "vllm" in engines else engines[-1])
        if baseline not in engines:
            raise ConfigError(f"baseline {baseline} must be one of the engines that run: {', '.join(engines)}")
        object.__setattr__(self, "engines", engines)
        object.__setattr__(self, "baseline", baseline)


@dataclass(frozen=True)
class Job:
    """One start of one engine: a model, and the work whose settings agree."""

    engine: str
    model: str
    folder: Path
    settings: dict[str, Any]
    works: tuple[Workload, ...]
    program: str = ""  # of one_engine.py, where it has another name than the engine
    adapters: tuple[str, ...] = ()  # folders of the LoRA adapters that works use
    compared: tuple[str | list[Any], ...] = ()  # prompts whose first greedy tokens should be those of the other engines

    @property
    def key(self) -> str:
        """Key that the job has in all rounds."""
        return f"{self.engine} · {self.model} · {', '.join(work.name for work in self.works)}"


@dataclass
class Results:
    """Figures so far."""

    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = field(default_factory=dict)  # (engine, model, work)
    starts: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)  # (engine, model)
    greedy: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # (engine, model): first tokens of COMPARED
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def take(self, job: Job, number: int, events: Iterable[dict[str, Any]]) -> list[str]:
        """Keep what a process said. Returns the works that have at least one run."""
        expected = {work.name: workloads.num_tokens(work.requests)[1] for work in job.works}
        measured = []
        for event in events:
            if event["event"] == "ready":
                self.starts.setdefault((job.engine, job.model), []).append({"round": number, **event})
            elif event["event"] == "greedy":
                self.greedy[job.engine, job.model] = event["tokens"]
            elif event["event"] == "run":
                work = event["work"]
                if event["num_output_tokens"] != expected[work]:
                    self.failures.append(
                        f"{job.engine} · {job.model} · {work}: made {event['num_output_tokens']:,} tokens instead of "
                        f"{expected[work]:,}"
                    )
                    continue
                measured.append(work)
                self.runs.setdefault((job.engine, job.model, work), []).append({"round": number, **event})
        return measured

    def equal_greedy(self, engine: str, baseline: str, model: str) -> float | None:
        """The fraction of first greedy tokens that are the baseline's; None where they were not compared."""
        own, others = self.greedy.get((engine, model)), self.greedy.get((baseline, model))
        if own is None or others is None:
            return None
        return sum(a == b for a, b in zip(own, others, strict=True)) / len(own)

    def disagreements(self, baseline: str) -> list[str]:
        """The engines that do not compute what the baseline computes."""
        found = {key: self.equal_greedy(key[0], baseline, key[1]) for key in self.greedy}
        return [
            f"{engine} · {model}: {equal:.0%} of the first greedy tokens are those of {baseline}, so these two do not "
            "compute the same model: do not compare their speed"
            for (engine, model), equal in found.items()
            if equal is not None and equal < LEAST_EQUAL
        ]


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="quire bench engines", description="Compare engines on the same work, in alternating order.", epilog=EPILOG
    )
    add_flags(parser, EnginesFlags)
    (flags,) = load(parser.parse_args(argv), EnginesFlags)
    path = Path(flags.output_json or f"out/bench/engines-{time.strftime('%Y%m%d-%H%M%S')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    result = compare(flags, path)
    print(table(result))
    print(f"saved {path} and {path.with_suffix('.md')}")
    return 1 if result["failures"] else 0


def compare(flags: EnginesFlags, path: Path) -> dict[str, Any]:
    """Run everything; save the results to `path` after every process. Refuse what cannot run before any does."""
    pairs = plan(flags, has_gpu=nvidia_smi("name") is not None)
    return measure_all(flags, pairs, path, partial(summary, flags), table)


def measure_all(
    flags: EnginesFlags,
    pairs: list[list[Job]],
    path: Path,
    report: Callable[[Results, dict[str, Any]], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """Run these jobs. `report` makes the result file of the figures and the machine; `table` makes Markdown."""
    deadline = time.time() + (flags.time_limit or float("inf"))
    with tempfile.TemporaryDirectory() as scratch:
        machine = describe_machine(Path(scratch))
        results = Results()
        durations: dict[str, float] = {}  # of each job, the last time it ran
        for number, pair in schedule(pairs, flags.rounds):
            needed = sum(durations.get(job.key, 0.0) for job in pair)
            if time.time() + needed > deadline:
                results.left_out.append(f"round {number + 1}: {' and '.join(job.key for job in pair)}")
                continue
            for job in pair:
                begin = time.time()
                print(f"[{number + 1}/{flags.rounds}] {job.key}", file=sys.stderr, flush=True)
                run_job(job, number, flags, deadline, Path(scratch), results)
                durations[job.key] = time.time() - begin
                result = report(results, machine)
                path.write_text(to_text(result))
                path.with_suffix(".md").write_text(table(result) + "\n")
    result = report(results, machine)
    path.write_text(to_text(result))
    path.with_suffix(".md").write_text(table(result) + "\n")
    return result


def plan(flags: EnginesFlags, has_gpu: bool) -> list[list[Job]]:
    """Jobs that belong side by side: one list for each model and each group of work that one start can serve."""
    pairs, more = [], flags.engine_args or {}
    for model in flags.models:
        config = json.loads((model_folder(model, Path(flags.models_dir)) / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        for (context, prefix_caching, _, counts, _, embeds), works in _groups(flags, model, config).items():
            folder = _with_weights(flags, model, counts)
            settings = {
                "load_format": "auto" if flags.write_weights else "dummy",
                "skip_tokenizer_init": True,
                "max_model_len": context,
                "dtype": flags.dtype or ("bfloat16" if has_gpu else "float32"),
                "gpu_memory_utilization": flags.gpu_memory_utilization,
                "enable_prefix_caching": prefix_caching,
                "disable_log_stats": True,
                "seed": 0,
            }
            if embeds:
                _check_alone(flags, "embeddings")
                add_tokenizer(folder)
            adapters = _adapters(flags, folder, works)
            if adapters:
                settings |= {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": RANK}
            most = min(max(len(work.requests) for work in works), llama_cpp.MOST_SEQS)
            server = {"llama_server": flags.llama_server, "gguf": flags.gguf, "context": context, "max_num_seqs": most}
            compared = tuple(request.prompt for request in workloads.named(COMPARED, config["vocab_size"]).requests)
            pair = []
            for engine in flags.engines:
                own = server if engine == llama_cpp.NAME else settings | more.get(engine, {})
                if embeds and engine == "vllm":
                    own = {**own, "runner": "pooling", "skip_tokenizer_init": False}  # it asks for one to embed
                agrees = own.get("load_format") == "auto" and not counts  # text that counts agrees whatever is wrong
                shown = compared if agrees and not embeds else ()
                pair.append(Job(engine, Path(model).name, folder, own, tuple(works), "", adapters, shown))
            pairs.append(pair)
    return pairs


def _groups(
    flags: EnginesFlags, model: str, config: dict[str, Any]
) -> dict[tuple[int, bool, bool, bool, bool, bool], list[Workload]]:
    """The work by what one start must have: context, prefix cache, greedy sampling, weights whose text counts, LoRA,
    embeddings.
    """
    groups: dict[tuple[int, bool, bool, bool, bool, bool], list[Workload]] = {}
    for name in flags.work:
        work = workloads.named(name, config["vocab_size"])
        context = flags.max_model_len or (4096 if work.longest <= 4096 else 32768)
        context = min(context, config.get("max_position_embeddings", context))
        if work.longest > context:
            raise ConfigError(f"work {name} needs {work.longest:,} tokens of context, {model} runs with {context:,}")
        if work.counts and not flags.write_weights:
            raise ConfigError(f"work {name} is for weights whose text counts: give --write-weights")
        key = context, work.prefix_caching, work.greedy, work.counts, work.adapters > 0, work.embeds
        groups.setdefault(key, []).append(work)
    return groups


def _with_weights(flags: EnginesFlags, model: str, counts: bool) -> Path:
    """The folder of a model, with weights if they are to be written."""
    root = Path(flags.models_dir)
    folder = counting_folder(model, root) if counts else model_folder(model, root)
    if flags.write_weights and (counts or folder.parent == root.resolve()):  # a shape: no folder of the user's own
        write_random_weights(folder, counts=counts)
    return folder


def _adapters(flags: EnginesFlags, model: Path, works: Iterable[Workload]) -> tuple[str, ...]:
    """The folders of the adapters that these works use, which are written if they are missing."""
    if not (count := max(work.adapters for work in works)):
        return ()
    _check_alone(flags, "LoRA adapters")
    from benchmarks.random_adapters import adapters_of  # needs PyTorch

    return tuple(map(str, adapters_of(model, RANK, count)))


def _check_alone(flags: EnginesFlags, what: str) -> None:
    """Raise `ConfigError` if other engines than Quire and vLLM are asked for what these two do."""
    if others := [name for name in flags.engines if name.partition("@")[0] not in ("quire", "vllm")]:
        raise ConfigError(f"work with {what} is for quire and vllm alone, not {', '.join(others)}")


def schedule(pairs: list[list[Job]], rounds: int) -> Iterator[tuple[int, list[Job]]]:
    """Every round runs all pairs, every other one in the reverse order of engines."""
    for number in range(rounds):
        for pair in pairs:
            yield number, pair[:: -1 if number % 2 else 1]


def run_job(job: Job, number: int, flags: EnginesFlags, deadline: float, scratch: Path, results: Results) -> None:
    """One process, ended by force when the time is over. What it measured before counts."""
    if time.time() > deadline:
        results.left_out.append(f"round {number + 1}: {job.key}")
        return
    wait_for_free_gpu()
    job_path, events_path, log_path = scratch / "job.json", scratch / "events.jsonl", scratch / "log.txt"
    events_path.write_text("")
    works = [
        {
            "name": work.name,
            "prompts": [request.prompt for request in work.requests],
            "output_lens": [request.output_len for request in work.requests],
            "repeat": flags.repeat or (7 if len(work.requests) <= 16 else 3),
            "reset": work.prefix_caching,
            "adapters": work.adapters,
        }
        for work in job.works
    ]
    wanted: dict[str, Any] = {
        "engine": job.program or job.engine,
        "model": str(job.folder),
        "settings": job.settings,
        "works": works,
        "compared": job.compared,
        "adapters": job.adapters,
    }
    if job.works[0].greedy:
        wanted["temperature"] = 0.0
    job_path.write_text(json.dumps({**wanted, "started": time.time(), "deadline": min(deadline, 1e12)}))
    # -P: neither the benchmarks' folder nor the working folder hides modules of other engines
    command = [
        sys.executable,
        "-P",
        str(Path(__file__).with_name("one_engine.py")),
        str(job_path),
        str(events_path),
    ]
    with process_group(command, job.engine, log_path) as process:
        code = _wait(process, events_path, deadline)
    events = [json.loads(line) for line in events_path.read_text().splitlines()]
    measured = results.take(job, number, events)
    finished = bool(events) and events[-1]["event"] == "done"
    missing = [work.name for work in job.works if work.name not in measured]
    if code is None and not finished:
        results.left_out.append(
            f"round {number + 1}: {job.key}: the time was over ({', '.join(missing) or 'in the last'})"
        )
    elif not finished:
        doing = events[-1].get("work", "after start-up") if events else "at start-up"
        results.failures.append(f"{job.key}: ended with code {code} ({doing}): {last_line(log_path)}")
        print(log_path.read_text(errors="replace")[-8000:], file=sys.stderr)
    elif missing:
        results.left_out.append(f"round {number + 1}: {job.engine} · {job.model} · {', '.join(missing)}: no time left")


def _wait(process: subprocess.Popen[bytes], events_path: Path, deadline: float, patience: float = 60.0) -> int | None:
    """The exit code; None when the time is over, or when the process does not end though its work is done."""
    while time.time() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
        if '"event": "done"' in events_path.read_text():
            deadline = min(deadline, time.time() + patience)
            patience = float("inf")
    return None


def summary(flags: EnginesFlags, results: Results, machine: dict[str, Any]) -> dict[str, Any]:
    """The result file."""
    rows = []
    for (engine, model, name), runs in results.runs.items():
        seconds = [run["seconds"] for run in runs]
        work = workloads.named(name, workloads.MAX_TOKEN_ID + 1)
        num_prompt, num_output = workloads.num_tokens(work.requests)
        median = statistics.median(seconds)
        floor = _floor(flags, model, work, machine)
        rows.append(
            {
                "engine": engine,
                "model": model,
                "work": name,
                "what": workloads.describe(name),
                "num_requests": len(work.requests),
                "num_prompt_tokens": num_prompt,
                "num_output_tokens": num_output,
                "seconds": seconds,
                "rounds": [run["round"] for run in runs],
                "median_seconds": median,
                "best_seconds": min(seconds),
                "share_of_floor": floor and floor / median,
                "output_tokens_per_second": num_output / median,
                "tokens_per_second": (num_prompt + num_output) / median,
                "ratio": _ratio(results.runs.get((str(flags.baseline), model, name), []), runs, "seconds"),
            }
        )
    starts = [
        {
            "engine": engine,
            "model": model,
            "version": events[0]["version"],
            "init_seconds": [event["init_seconds"] for event in events],
            "import_seconds": [event["import_seconds"] for event in events],
            "process_seconds": [event["process_seconds"] for event in events],
            "rounds": [event["round"] for event in events],
            "ratio": _ratio(results.starts.get((str(flags.baseline), model), []), events, "init_seconds"),
            "equal_greedy": results.equal_greedy(engine, str(flags.baseline), model),
        }
        for (engine, model), events in results.starts.items()
    ]
    return {
        "benchmark": "engines",
        "baseline": flags.baseline,
        "runs": rows,
        "starts": starts,
        "failures": [*results.failures, *results.disagreements(str(flags.baseline))],
        "left_out": results.left_out,
        "settings": dataclasses.asdict(flags),
        "environment": machine,
    }


def _floor(flags: EnginesFlags, model: str, work: Workload, machine: dict[str, Any]) -> float | None:
    """Seconds that decoding takes at least, see `floors`; None where most of the work are prompts."""
    if any(request.output_len <= len(request.prompt) // 2 for request in work.requests):
        return None
    root = Path(flags.models_dir)
    folder = model_folder(next(name for name in flags.models if Path(name).name == model), root)
    own = (flags.engine_args or {}).get("quire", {})
    kept = {name: own[name] for name in FORM if name in own}
    settings = {"dtype": flags.dtype or "bfloat16", "max_model_len": min(4096, flags.max_model_len or 4096)}
    return decode_seconds(folder, settings | kept, work, machine)


def _ratio(baseline: list[dict[str, Any]], own: list[dict[str, Any]], key: str) -> float | None:
    """Speed over that of the baseline, by medians."""
    if not baseline:
        return None
    return float(statistics.median(run[key] for run in baseline) / statistics.median(run[key] for run in own))


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    machine, lines = result["environment"], []
    parts = [machine.get("gpu", f"{machine['cpu_cores']} CPU cores"), f"torch {machine['torch']}"]
    if "copy_TB_per_s" in machine:
        parts += [f"copy {machine['copy_TB_per_s']} TB/s", f"matmul {machine['matmul_TFLOP_per_s']} TFLOP/s"]
    versions = dict.fromkeys(f"{row['engine']} {row['version']}" for row in result["starts"])
    lines.append(" · ".join([*parts, *versions]))
    for model in dict.fromkeys(row["model"] for row in (*result["starts"], *result["runs"])):
        lines += ["", *_model_table(result, model)]
    for title, found in (("Failures", result["failures"]), ("Left out", result["left_out"])):
        if found:
            lines += ["", f"{title}:", "", *(f"- {item}" for item in found)]
    return "\n".join(lines)


def _model_table(result: dict[str, Any], model: str) -> list[str]:
    baseline = result["baseline"]
    engines = list(dict.fromkeys(row["engine"] for row in result["starts"] if row["model"] == model))
    others = [engine for engine in engines if engine != baseline]
    head = ["work", f"what, on {model}", *engines, *(f"{engine} ÷ {baseline}" for engine in others)]
    body = []
    for name in result["settings"]["work"]:
        rows = {row["engine"]: row for row in result["runs"] if (row["model"], row["work"]) == (model, name)}
        if rows:
            cells = [_speed(rows[engine]) if engine in rows else "–" for engine in engines]
            body.append([name, workloads.describe(name), *cells, *(_times(rows.get(engine)) for engine in others)])
    starts = {row["engine"]: row for row in result["starts"] if row["model"] == model}
    for name, what, key in (
        ("start-up", "constructor until ready, s", "init_seconds"),
        ("", "process start until ready, s", "process_seconds"),
    ):
        cells = [" ".join(f"{seconds:.1f}" for seconds in starts[engine][key]) for engine in engines]
        base = starts.get(baseline, {}).get(key)
        ratios = [
            f"{statistics.median(base) / statistics.median(starts[engine][key]):.2f}" if base else "–"
            for engine in others
        ]
        body.append([name, what, *cells, *ratios])
    equal = [starts[engine].get("equal_greedy") for engine in engines]
    if any(fraction is not None and engine != baseline for engine, fraction in zip(engines, equal, strict=True)):
        cells = ["–" if fraction is None else f"{fraction:.0%}" for fraction in equal]
        body.append(["", f"first greedy tokens that are {baseline}'s", *cells, *("" for _ in others)])
    return [
        "| " + " | ".join(head) + " |",
        "|---|---|" + "---:|" * (len(head) - 2),
        *("| " + " | ".join(row) + " |" for row in body),
    ]


def _speed(row: dict[str, Any]) -> str:
    """Tokens a second: those made, or all of them where next to none are made."""
    made = row["num_output_tokens"] > row["num_requests"]
    rate = row["output_tokens_per_second" if made else "tokens_per_second"]
    spread = (max(row["seconds"]) - row["best_seconds"]) / row["median_seconds"]
    share = row.get("share_of_floor")
    floor = f", {share:.0%} of what the GPU can move" if share else ""
    return f"{rate:,.0f} tok/s ({len(row['seconds'])} runs, {spread:.0%} apart{floor})"


def _times(row: dict[str, Any] | None) -> str:
    return f"**{row['ratio']:.2f}**" if row and row["ratio"] else "–"


if __name__ == "__main__":
    run_command(main)
