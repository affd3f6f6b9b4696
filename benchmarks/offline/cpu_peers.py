"""Quire beside llama.cpp on a CPU, format by format, beside vLLM's CPU build and beside itself, without C++ kernels or
of another commit: interleaved, the best of all rounds. Without drafts, which llama.cpp makes none of either.

python -m benchmarks.offline.cpu_peers --llama-cpp ../llama.cpp/build/bin
QUIRE_CPU_ISA=x86-64-v3 python -m benchmarks.offline.cpu_peers --llama-cpp-source ../llama.cpp
python -m benchmarks.offline.cpu_peers --pytorch
python -m benchmarks.offline.cpu_peers --models lfm2-350m qwen3.5-0.8b --formats int8 Q4_K_M --llama-cpp …/bin
python -m benchmarks.offline.cpu_peers --models lfm2-350m qwen3.5-0.8b --formats Q4_K_M --turns --llama-cpp …/bin
git worktree add ../before COMMIT && python -m benchmarks.offline.cpu_peers --other-quire ../before
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gguf_files import gguf_file
from benchmarks.llama_cpp import build_programs
from benchmarks.model_shapes import model_folder
from benchmarks.processes import describe_machine, last_line, process_group
from benchmarks.result_files import to_text
from benchmarks.workloads import MAX_TOKEN_ID
from engine.errors import ConfigError
from engine.flags import Parser, add_flags, check, flag, load, run_command

FORMATS: dict[str, tuple[dict[str, Any], str]] = {  # settings of Quire → llama.cpp's type
    "float32": ({"dtype": "float32"}, "f32"),
    "bfloat16": ({"dtype": "bfloat16"}, "bf16"),
    "int8": ({"dtype": "bfloat16", "quantization": "int8"}, "Q8_0"),
    "int4": ({"dtype": "bfloat16", "quantization": "int4"}, "Q4_K_M"),
}
FILES = {kind: ({"dtype": "bfloat16", "load_format": "auto"}, kind) for kind in ("Q8_0", "Q4_K_M")}  # the same for both
PYTORCH, OTHER = "quire by PyTorch", "other quire"
DRAFTS = "engine/setup/speculative.py"  # a tree without it knows no drafts
CONTEXT, PROMPT, LONG_PROMPT = 640, 32, 512
FIRST, ANSWER, NEXT = 448, 64, 64  # tokens of a conversation: its first prompt, the answer, and what is new then
HEADS = {
    "1": "1 stream", "4": "4", "16": "16", "prefill": f"prefill {LONG_PROMPT}", "next": "second turn",
    "again": "second turn, nothing cached",
}  # fmt: skip
EPILOG = """Each model has random weights; every engine computes prompts of 32 tokens and then greedy answers, for 1,
4 and 16 requests at once, and one prompt of 512 tokens. Figures are tok/s: answers over the whole time, or tokens of
the prompt. With --turns: the time to the first token of a conversation's second turn, as new tokens a second;
llama.cpp's is that of the new tokens behind the others (llama-bench -d), and that of all of them. Needs llama.cpp's
llama-bench, llama-batched-bench and, where no GGUF files are there, llama-quantize and `pip install gguf`."""


@dataclass(frozen=True)
class Flags:
    """Comparison."""

    llama_cpp: str = flag("", "folder of llama.cpp's programs", metavar="FOLDER")
    llama_cpp_source: str | None = flag(
        None, "llama.cpp's source, to be built for the instruction set that Quire has, in models_dir", metavar="FOLDER"
    )
    vllm: str | None = flag(None, "Python of an environment that has vLLM's CPU build, for bfloat16", metavar="FILE")
    pytorch: bool = flag(False, "Quire by PyTorch instead of its C++ kernels, too; llama.cpp may be left out then")
    other_quire: str = flag(
        "", "folder of another checkout of Quire, to be measured beside this one; llama.cpp may be left out then",
        metavar="FOLDER",
    )  # fmt: skip
    models: tuple[str, ...] = flag(
        ("llama-100m", "qwen3-0.6b"), "names of benchmarks/model_shapes.py, or folders with a config.json"
    )
    formats: tuple[str, ...] = flag(
        tuple(FORMATS), f"of {', '.join(FORMATS)}; {', '.join(FILES)}: llama.cpp's file of that type is read by both"
    )
    rounds: int = flag(2, "how often each engine is started in each format, in alternating order", at_least=1)
    threads: int = flag(os.cpu_count() or 1, "of each engine", at_least=1)
    turns: bool = flag(False, "the second turn of a conversation, with the first one cached and without")
    quick: bool = flag(False, "one round of the first model, with shorter answers")
    time_limit: float = flag(720.0, "seconds after which nothing more is begun", above=0)
    models_dir: str = flag("out/models", "where models are written, and GGUF files are looked for", metavar="FOLDER")
    output_json: str | None = flag(
        None, "where to save the results, with a Markdown table beside them (else under out/bench)", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check(self)
        if unknown := [name for name in self.formats if name not in FORMATS | FILES]:
            raise ConfigError(f"formats must be of {', '.join(FORMATS | FILES)}, got {unknown[0]!r}")
        if self.other_quire and not Path(self.other_quire, "engine", "__init__.py").is_file():
            raise ConfigError(f"other_quire must be a checkout of Quire, got {self.other_quire!r}")
        if self.llama_cpp_source is not None or ((self.pytorch or self.other_quire) and not self.llama_cpp):
            return
        for program in ("llama-bench", "llama-batched-bench"):
            if not Path(self.llama_cpp, program).is_file():
                raise ConfigError(f"llama_cpp must be the folder that holds {program}, got {self.llama_cpp!r}")


@dataclass
class Comparison:
    """Engines and formats to compare, and the best figures so far."""

    flags: Flags
    scratch: Path
    # (model, format, engine, column) → tok/s.
    best: dict[tuple[str, str, str, str], float] = field(default_factory=dict)
    instruction_set: str = "its own instruction set"
    versions: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def works(self) -> dict[str, tuple[int, int, int]]:
        """Column → requests, tokens of each prompt and answer."""
        if self.flags.turns:
            return {"next": (1, FIRST, ANSWER), "again": (1, FIRST + ANSWER + NEXT, 1)}
        few = 8 if self.flags.quick else 24
        return {
            "1": (1, PROMPT, 2 * few),
            "4": (4, PROMPT, 2 * few),
            "16": (16, PROMPT, few),
            "prefill": (1, LONG_PROMPT, 1),
        }

    def keep(self, model: str, precision: str, engine: str, column: str, tokens_per_second: float) -> None:
        key = (model, precision, engine, column)
        self.best[key] = max(self.best.get(key, 0.0), tokens_per_second)

    def measure(self, engine: str, folder: Path, precision: str) -> None:
        if engine == "llama.cpp":
            self._llama(folder, precision)
        else:
            self._llm(engine, folder, precision)

    def _llm(self, engine: str, folder: Path, precision: str) -> None:
        """Quire, by C++ kernels or PyTorch, or vLLM: see `one_engine`."""
        job, events, log = (self.scratch / name for name in ("job.json", "events.jsonl", "log.txt"))
        works = self.works
        settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": CONTEXT, "max_num_seqs": 16}
        settings |= {"enable_prefix_caching": self.flags.turns, "disable_log_stats": True}
        settings |= (FORMATS | FILES)[precision][0]
        if engine != "vllm" and (engine != OTHER or Path(self.flags.other_quire, DRAFTS).is_file()):
            settings["speculative_config"] = {"num_speculative_tokens": 0}
        model = self._gguf(folder, precision) if precision in FILES else folder
        vocab_size = min(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"], MAX_TOKEN_ID)
        wanted = [
            {
                "name": column,
                "prompts": [[(i * 31 + t * 7) % (vocab_size - 3) + 3 for t in range(prompt)] for i in range(count)],
                "output_lens": [answer] * count,
                "repeat": 4 if self.flags.turns else 2,
                "reset": self.flags.turns,
                "next": list(range(3, 3 + NEXT)) if column == "next" else None,
            }
            for column, (count, prompt, answer) in works.items()
        ]
        runs, is_quire = ("vllm" if engine == "vllm" else "quire"), engine != "vllm"
        told = {"engine": runs, "model": str(model), "settings": settings, "works": wanted, "temperature": 0.0}
        job.write_text(json.dumps({**told, "started": time.time(), "deadline": 1e12}))
        events.write_text("")
        script = str(Path(__file__).with_name("one_engine.py"))
        python = sys.executable if is_quire else str(self.flags.vllm)
        environment = {"OMP_NUM_THREADS": str(self.flags.threads)}
        if engine == PYTORCH:
            environment["QUIRE_CPU_KERNELS"] = "pytorch"
        tree = f"quire@{self.flags.other_quire}" if engine == OTHER else runs
        with process_group([python, "-P", script, str(job), str(events)], tree, log, environment) as process:
            code = process.wait()
        events_text = events.read_text()
        if code or '"done"' not in events_text:
            self.failures.append(f"{engine} · {folder.name} · {precision}: ended with code {code}: {last_line(log)}")
        for event in map(json.loads, events_text.splitlines()):
            if event["event"] == "ready":
                self.versions[OTHER if engine == OTHER else runs] = event["version"]
            elif event["event"] == "run":
                count, prompt, answer = works[event["work"]]
                tokens = NEXT if self.flags.turns else count * (answer if answer > 1 else prompt)
                self.keep(folder.name, precision, engine, event["work"], tokens / event["seconds"])

    def _gguf(self, folder: Path, precision: str) -> Path:
        quantize = Path(self.flags.llama_cpp, "llama-quantize")
        return gguf_file(folder, (FORMATS | FILES)[precision][1], quantize, Path(self.flags.models_dir))

    def _llama(self, folder: Path, precision: str) -> None:
        """llama.cpp's own benchmarks, which sample nothing."""
        programs, file = Path(self.flags.llama_cpp), self._gguf(folder, precision)
        threads = str(self.flags.threads)
        for column, (count, prompt, answer) in self.works.items():
            is_prompt = answer == 1 or column == "next"
            if is_prompt:
                command = [str(programs / "llama-bench"), "-m", str(file), "-t", threads, "-o", "jsonl", "-n", "0"]
                if column == "next":
                    command += ["-p", str(NEXT), "-d", str(prompt + answer), "-r", "4"]
                else:
                    command += ["-p", str(prompt), "-r", "2"]
            else:
                command = [str(programs / "llama-batched-bench"), "-m", str(file), "-t", threads, "-tb", threads]
                # The prompt's last logits give an answer's first token, so there is one step less than tokens.
                command += ["-c", "2048", "-npp", str(prompt), "-ntg", str(answer - 1), "-npl", f"{count},{count}"]
                command += ["--output-format", "jsonl"]
            environment = {**os.environ, "LD_LIBRARY_PATH": str(programs)}
            shown = subprocess.run(command, env=environment, capture_output=True, text=True)
            if shown.returncode:
                self.failures.append(f"{' '.join(command)}: {(shown.stderr.strip().splitlines() or ['no output'])[-1]}")
            for line in shown.stdout.splitlines():
                if not line.startswith("{"):
                    continue
                row = json.loads(line)
                if is_prompt:
                    self.versions["llama.cpp"] = f"build {row['build_number']} ({row['build_commit']})"
                    tokens = NEXT if self.flags.turns else prompt
                    speeds = [1e9 * tokens / nanoseconds for nanoseconds in row["samples_ns"]]
                else:
                    speeds = [count * answer / (row["t_pp"] + row["t_tg"])]
                for speed in speeds:
                    self.keep(folder.name, precision, "llama.cpp", column, speed)


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m benchmarks.offline.cpu_peers", description=__doc__.split("\n")[0], epilog=EPILOG)
    add_flags(parser, Flags)
    (flags,) = load(parser.parse_args(argv), Flags)
    path = Path(flags.output_json or f"out/bench/cpu-peers-{time.strftime('%Y%m%d-%H%M%S')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        machine = describe_machine(Path(scratch))
        if flags.llama_cpp_source is not None:
            models, name = Path(flags.models_dir), machine["cpu_isa"]
            flags = replace(
                flags,
                llama_cpp=str(build_programs(Path(flags.llama_cpp_source), models, name).resolve()),
                llama_cpp_source=None,
            )
        comparison = Comparison(flags, Path(scratch), instruction_set=machine["cpu_isa"])
        compare(comparison)
    result = {**machine, "threads": flags.threads, "versions": comparison.versions, "failures": comparison.failures}
    rows = [dict(zip(("model", "format", "engine", "work"), key, strict=True)) for key in comparison.best]
    result["rows"] = [
        {**row, "tokens_per_second": round(best, 1)} for row, best in zip(rows, comparison.best.values(), strict=True)
    ]
    path.write_text(to_text(result))
    path.with_suffix(".md").write_text(table(comparison) + "\n")
    print(table(comparison))
    print(f"saved {path} and {path.with_suffix('.md')}")
    return 1 if comparison.failures else 0


def compare(comparison: Comparison) -> None:
    flags, begin = comparison.flags, time.monotonic()
    folders = [model_folder(name, Path(flags.models_dir)) for name in flags.models]
    for number in range(1 if flags.quick else flags.rounds):
        for folder in folders[: 1 if flags.quick else None]:
            for precision in flags.formats:
                if time.monotonic() - begin > flags.time_limit:
                    comparison.failures.append(f"no time was left for round {number + 1}: {folder.name} · {precision}")
                    continue
                print(f"[{number + 1}] {folder.name} · {precision}", file=sys.stderr, flush=True)
                wanted = {"llama.cpp": flags.llama_cpp, PYTORCH: flags.pytorch, OTHER: flags.other_quire}
                wanted["vllm"] = flags.vllm and precision == "bfloat16"
                engines = ["quire", *(engine for engine, is_wanted in wanted.items() if is_wanted)]
                for engine in engines[:: -1 if number % 2 else 1]:
                    comparison.measure(engine, folder, precision)


def table(comparison: Comparison) -> str:
    """tok/s of each, and how many times as fast Quire is."""
    engines = list(dict.fromkeys(key[2] for key in comparison.best))
    heads = {column: HEADS[column] for column in comparison.works}
    lines = ["| | " + " | ".join(heads.values()) + " |", "|---|" + "---:|" * len(heads)]
    for model, precision in dict.fromkeys(key[:2] for key in comparison.best):
        own = {column: comparison.best.get((model, precision, "quire", column)) for column in heads}
        for engine in engines:
            found = {column: comparison.best.get((model, precision, engine, column)) for column in heads}
            if not any(found.values()):
                continue
            name = f"{engine} {(FORMATS | FILES)[precision][1]}" if engine == "llama.cpp" else f"{engine} {precision}"
            cells = []
            for column, speed in found.items():
                mine, times = own[column], ""
                if engine != "quire" and speed and mine:
                    times = f" (**{mine / speed:.2f}**)"
                cells.append(f"{speed:,.0f}{times}" if speed else "–")
            lines.append(f"| {model} · {name} | " + " | ".join(cells) + " |")
    return "\n".join(
        [
            f"{comparison.instruction_set}; tok/s; in brackets, how many times as fast Quire is",
            "",
            *lines,
            *comparison.failures,
        ]
    )


if __name__ == "__main__":
    run_command(main)
