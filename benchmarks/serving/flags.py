"""The flags of `quire bench serve`: those of `vllm bench serve`, and some more."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import workloads
from benchmarks.serving import metrics
from benchmarks.serving.client import Answer
from benchmarks.serving.images import ImageShape, read_buckets
from benchmarks.serving.metrics import METRICS, Report
from engine.errors import ConfigError
from engine.flags import check, flag

RANDOM = ("random", "random-mm", "chat", "prefix_repetition", "conversations")
FILES = ("custom", "sharegpt")


@dataclass(frozen=True)
class TargetFlags:
    """Server."""

    base_url: str | None = flag(None, "where it is, instead of --host and --port", metavar="URL")
    host: str = flag("127.0.0.1", "its address")
    port: int = flag(8000, "its port", at_least=1, at_most=65535)
    endpoint: str = flag("/v1/completions", "/v1/completions or /v1/chat/completions", metavar="PATH")
    backend: str = flag(
        "openai", "kind of API; all mean what --endpoint says", choices=("openai", "vllm", "quire", "openai-chat")
    )
    model: str | None = flag(None, "name of the model (else the first that the server lists)", metavar="NAME")
    served_model_name: str | None = flag(None, "name in the API, when --model is a path", metavar="NAME")
    tokenizer: str | None = flag(
        None,
        "folder or Hugging Face id, to make texts of random prompts or to count a dataset's tokens",
        metavar="MODEL",
    )
    header: tuple[str, ...] = flag((), "more headers for each request", metavar="KEY=VALUE")
    api_key: str | None = flag(None, "key of the server (also OPENAI_API_KEY)", metavar="KEY")
    insecure: bool = flag(False, "accept any TLS certificate")
    request_timeout: float = flag(21600.0, "seconds that one request may take", above=0)
    ready_check_timeout_sec: int = flag(0, "seconds to wait for a server that is not up yet", at_least=0)
    temperature: float | None = flag(None, "of sampling (else the server's default)", at_least=0)
    top_p: float | None = flag(None, "of sampling", above=0, at_most=1)
    top_k: int | None = flag(None, "of sampling", at_least=-1)
    min_p: float | None = flag(None, "of sampling", at_least=0, at_most=1)
    ignore_eos: bool | None = flag(None, "answers of full length, whatever is in them (else for random prompts only)")
    extra_body: dict[str, Any] | None = flag(None, "more fields for each request")  # noqa: RUF009

    def __post_init__(self) -> None:
        check(self)
        if self.base_url is not None and (self.host, self.port) != ("127.0.0.1", 8000):
            raise ConfigError("base_url says where the server is, and so do host and port: give one of them")
        if not self.endpoint.endswith("/completions") or not self.endpoint.startswith("/"):
            raise ConfigError(f"endpoint must be a path that ends in /completions, got {self.endpoint!r}")
        if self.backend == "openai-chat" and not self.chat:
            raise ConfigError(f"backend openai-chat needs --endpoint /v1/chat/completions, got {self.endpoint}")
        for item in self.header:
            if not re.fullmatch(r"[\w-]+=[^\r\n]*", item):
                raise ConfigError(f"header must be KEY=VALUE, got {item!r}")
        for name in ("stream", "stream_options", "prompt", "messages", "n"):
            if name in (self.extra_body or {}):
                raise ConfigError(f"extra_body must not hold {name!r}, which the benchmark needs for itself")

    @property
    def chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.base_url or f"http://{host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        given = dict(item.split("=", 1) for item in self.header)
        return ({"Authorization": f"Bearer {key}"} if key else {}) | given

    @property
    def secrets(self) -> list[str]:
        """Names of flags that must not be saved."""
        given = [self.api_key or "", *(item.split("=", 1)[1] for item in self.header)]
        return [secret for secret in given if len(secret) > 3]


@dataclass(frozen=True)
class DatasetFlags:
    """Prompts."""

    dataset_name: str = flag(
        "random",
        "random, random-mm (with images), chat (lengths of real chats), prefix_repetition, conversations, custom or "
        f"sharegpt (files), or one of {', '.join(workloads.NAMED)}",
        choices=(*RANDOM, *FILES, *workloads.NAMED),
        metavar="NAME",
    )
    dataset_path: str | None = flag(None, "file of a custom or sharegpt dataset", metavar="FILE")
    num_prompts: int | None = flag(None, "how many (else 1000, or all of a file or trace)", at_least=1)
    seed: int = flag(0, "of random prompts, order and arrival times", at_least=0)
    input_len: int | None = flag(None, "short for --random-input-len", at_least=1)
    output_len: int | None = flag(None, "tokens of each answer, whatever the dataset", at_least=1)
    random_input_len: int = flag(1024, "prompt tokens of random", at_least=1)
    random_output_len: int = flag(128, "answer tokens of random", at_least=1)
    random_range_ratio: float = flag(0.0, "lengths of random vary by this fraction, from 0 to below 1", at_least=0)
    random_prefix_len: int = flag(0, "more tokens before each prompt of random, the same in all", at_least=0)
    random_vocab_size: int | None = flag(
        None, "random token ids are below this (else 10000, or less if the server takes no more)", at_least=1
    )
    random_mm_base_items_per_request: int = flag(1, "images of a prompt of random-mm", at_least=0)
    random_mm_num_mm_items_range_ratio: float = flag(
        0.0, "their number varies by this fraction, from 0 to 1", at_least=0, at_most=1
    )
    random_mm_limit_mm_per_prompt: dict[str, Any] | None = flag(  # noqa: RUF009
        None, "most of them, such as '{\"image\": 3}' (default: 255)", metavar="JSON"
    )
    random_mm_bucket_config: str = flag(
        "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}", "height, width, 1 frame → how often", metavar="SIZES"
    )
    random_mm_num_distinct_items: int | None = flag(
        None, "images are chosen from so many different ones (else each is sent once)", at_least=1
    )
    chat_max_input_len: int | None = flag(
        None, "prompts of chat have at most so many tokens (else up to 4,509)", at_least=1
    )
    prefix_repetition_prefix_len: int = flag(256, "tokens that prompts of prefix_repetition share", at_least=1)
    prefix_repetition_suffix_len: int = flag(256, "tokens of each that are its own", at_least=1)
    prefix_repetition_num_prefixes: int = flag(10, "how many different prefixes", at_least=1)
    prefix_repetition_output_len: int = flag(128, "answer tokens", at_least=1)
    conversations_num_turns: int = flag(8, "turns of each conversation; each repeats all before it", at_least=1)
    conversations_num_system_prompts: int = flag(6, "how many different beginnings conversations have", at_least=1)
    conversations_system_len: int = flag(2000, "tokens of each of these", at_least=1)
    conversations_turn_len: int = flag(200, "prompt tokens that a turn adds", at_least=1)
    conversations_output_len: int = flag(100, "answer tokens of a turn", at_least=1)
    conversations_range_ratio: float = flag(0.8, "both lengths vary by this fraction, from 0 to below 1", at_least=0)
    conversations_thinking_time: float = flag(0.0, "mean seconds between an answer and the next turn", at_least=0)
    custom_output_len: int = flag(256, "answer tokens of custom prompts that do not say", at_least=1)
    sharegpt_output_len: int | None = flag(None, "answer tokens (else as many as the dataset's answer)", at_least=1)
    disable_shuffle: bool = flag(False, "keep the order of a file")
    replay: str | None = flag(
        None,
        "a trace (`quire serve --record-trace`, or Mooncake's): its arrivals, lengths, shared prefixes; random tokens",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.replay is not None and (self.dataset_name != "random" or self.input_len or self.output_len):
            raise ConfigError("replay says all about the prompts: leave dataset_name, input_len and output_len out")
        if self.dataset_name in FILES and self.dataset_path is None:
            raise ConfigError(f"dataset_name {self.dataset_name} needs --dataset-path")
        if self.dataset_name not in FILES and self.dataset_path is not None:
            raise ConfigError(f"dataset_path is for custom and sharegpt, but dataset_name is {self.dataset_name}")
        for name in ("random_range_ratio", "conversations_range_ratio"):
            if (ratio := getattr(self, name)) >= 1:
                raise ConfigError(f"{name} must be below 1, got {ratio:g}")
        if self.input_len is not None and self.dataset_name not in ("random", "random-mm"):
            raise ConfigError(f"input_len is for random prompts, but dataset_name is {self.dataset_name}")
        if self.output_len is not None and self.dataset_name in workloads.NAMED:
            raise ConfigError(f"dataset_name {self.dataset_name} has answer lengths of its own: leave output_len out")
        count, prefixes = self.num_prompts or 1000, self.prefix_repetition_num_prefixes
        if self.dataset_name == "prefix_repetition" and count < prefixes:
            raise ConfigError(f"num_prompts must be at least prefix_repetition_num_prefixes ({prefixes}), got {count}")

        _ = self.images

    @property
    def is_random(self) -> bool:
        return self.dataset_name not in FILES

    @functools.cached_property
    def images(self) -> ImageShape | None:
        """The images of prompts; None: they have none."""
        limits = self.random_mm_limit_mm_per_prompt
        if limits is not None and any(type(each) is not int or each < 0 for each in limits.values()):
            raise ConfigError(f"random_mm_limit_mm_per_prompt must hold numbers, such as {{'image': 3}}, got {limits}")
        sizes, weights = read_buckets(self.random_mm_bucket_config)
        if self.dataset_name != "random-mm":
            return None
        most = (limits or {}).get("image", 255)
        return ImageShape(
            self.random_mm_base_items_per_request, self.random_mm_num_mm_items_range_ratio, most, sizes, weights,
            self.random_mm_num_distinct_items,
        )  # fmt: skip


@dataclass(frozen=True)
class TrafficFlags:
    """Traffic."""

    request_rate: str = flag("inf", "requests a second; inf: all at once", metavar="X")
    replay_speed: float = flag(1.0, "2: the arrivals of a trace come twice as fast", above=0)
    burstiness: float = flag(
        1.0, "1: Poisson arrivals; below: in bursts; above: more regular (needs --request-rate)", above=0
    )
    max_concurrency: int | None = flag(None, "most requests at the same time", at_least=1)
    num_warmups: int = flag(0, "requests before the clock runs", at_least=0)
    repeat: int = flag(
        1, "how often to measure, with other prompts; more than 1 gives confidence intervals", at_least=1
    )
    find_max_rate: tuple[str, ...] = flag(
        (), "find the highest rate at which these milliseconds hold, such as p99_ttft:500 p99_tpot:50", metavar="TARGET"
    )

    find_seconds: float | None = flag(
        None,
        "of find_max_rate: measure each rate for so long, after a warm-up of a third of that; a rate at which more and "
        "more requests are in flight does not hold (else: --num-prompts requests at each rate)",
        above=0,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.find_seconds is not None and not self.find_max_rate:
            raise ConfigError("find_seconds needs find_max_rate")
        try:
            rate = float(self.request_rate)
        except ValueError:
            rate = math.nan
        if not rate > 0:
            raise ConfigError(f"request_rate must be inf or a number above 0, got {self.request_rate!r}")
        if self.burstiness != 1 and rate == math.inf and not self.find_max_rate:
            raise ConfigError("burstiness has no effect on requests that are sent all at once: give a --request-rate")
        if self.find_max_rate and rate != math.inf:
            raise ConfigError("find_max_rate chooses the rates itself: leave request_rate out")
        if self.find_max_rate and self.repeat > 1:
            raise ConfigError("find_max_rate and repeat cannot be combined")
        for text in self.find_max_rate:
            Target.parse(text)

    @property
    def rate(self) -> float:
        return float(self.request_rate)


@dataclass(frozen=True)
class ReportFlags:
    """Report."""

    goodput: tuple[str, ...] = flag(
        (), "limits of a good request in ms, such as ttft:500 tpot:50 e2el:9000", metavar="LIMIT"
    )
    percentile_metrics: str = flag("ttft,tpot,itl", f"what to report, of {','.join(METRICS)}", metavar="LIST")
    metric_percentiles: str = flag("99", "percentiles to report, such as 50,90,99", metavar="LIST")
    disable_tqdm: bool = flag(False, "no progress bar")
    save_result: bool = flag(False, "save the result as JSON")
    append_result: bool = flag(False, "add the result to the file, as a line of its own")
    save_detailed: bool = flag(False, "save times and texts of each request, too")
    result_dir: str | None = flag(None, "where to save it (else here)", metavar="FOLDER")
    result_filename: str | None = flag(None, "name of the file", metavar="NAME")
    label: str | None = flag(None, "first part of the file's name (else the backend)", metavar="TEXT")
    metadata: tuple[str, ...] = flag((), "what to save with the result", metavar="KEY=VALUE")

    def __post_init__(self) -> None:
        check(self)
        names = tuple(filter(None, self.percentile_metrics.split(",")))
        for name in names:
            if name not in METRICS:
                raise ConfigError(f"percentile_metrics must be of {','.join(METRICS)}, got {name!r}")
        for text in self.metric_percentiles.split(","):
            try:
                inside = 0 <= float(text) <= 100
            except ValueError:
                inside = False
            if not inside:
                raise ConfigError(f"metric_percentiles must be numbers from 0 to 100, got {text!r}")
        for item in self.metadata:
            if "=" not in item:
                raise ConfigError(f"metadata must be KEY=VALUE, got {item!r}")
        saving = self.save_result or self.append_result
        for name in ("save_detailed", "result_dir", "result_filename"):
            if getattr(self, name) and not saving:
                raise ConfigError(f"{name} needs --save-result")
        _ = self.report

    @functools.cached_property
    def report(self) -> Report:
        limits = {}
        for item in self.goodput:
            name, _, limit = item.partition(":")
            if name not in ("ttft", "tpot", "e2el") or not re.fullmatch(r"\d+(\.\d+)?", limit):
                raise ConfigError(f"goodput must be like ttft:500, tpot:50 or e2el:9000 (milliseconds), got {item!r}")
            limits[name] = float(limit)
        return Report(
            tuple(filter(None, self.percentile_metrics.split(","))),
            tuple(float(text) for text in self.metric_percentiles.split(",")),
            limits or None,
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A percentile of a metric that is to stay within a limit."""

    metric: str
    percentile: float
    limit_ms: float

    @classmethod
    def parse(cls, text: str) -> Target:
        match = re.fullmatch(r"(?:p(\d+(?:\.\d+)?)_)?(\w+):(\d+(?:\.\d+)?)", text)
        if not match or match[2] not in METRICS or float(match[1] or 99) > 100:
            raise ConfigError(f"find_max_rate must be like p99_ttft:500 (of {', '.join(METRICS)}), got {text!r}")
        return cls(match[2], float(match[1] or 99), float(match[3]))

    @property
    def name(self) -> str:
        return f"p{self.percentile:g}_{self.metric}_ms"

    def measured(self, answers: Sequence[Answer]) -> float:
        """Milliseconds."""
        values = metrics.samples_of(answers)[self.metric]
        return metrics.summarize(self.metric, values, [self.percentile])[self.name]
