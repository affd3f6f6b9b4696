"""A runner whose next token follows from prompt and position alone, and which checks what it is asked to do."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.batch import SchedulerOutput, StepResult
from engine.core.kv.cache_groups import FULL, CacheGroup
from engine.models.files import Progress
from engine.models.spec import ModelSpec
from engine.worker.options import RunnerOptions

VOCAB = 300


def next_token(prompt: list[int], position: int) -> int:
    """Never an end of text (256, 257)."""
    return (sum(prompt) * 31 + position * 7) % 256


@dataclass
class FakeHandle:
    output: SchedulerOutput
    result: StepResult
    guided: list[int] = field(default_factory=list)
    fault: Callable[[SchedulerOutput], None] | None = None
    has_ended: bool = False

    def read(self) -> tuple[SchedulerOutput, StepResult]:
        if self.fault is not None:
            self.fault(self.output)
        return self.output, self.result


@dataclass
class FakeRunner:
    num_blocks: int
    num_states = 0
    block_size: int
    max_model_len: int
    options: RunnerOptions
    cache_groups: tuple[CacheGroup, ...] = (FULL,)
    device_name: str = "fake"
    kv_cache_bytes: int = 1 << 20
    cache_bound: str = "a fake"
    step_seconds: Mapping[int, float] = field(default_factory=dict)
    attention_backend: str = "fake"
    prompts: dict[str, list[int]] = field(default_factory=dict)
    num_computed: dict[str, int] = field(default_factory=dict)
    max_scheduled: int = 0
    permits: threading.Semaphore | None = None  # each launch waits for one and takes it
    launch_fault: Callable[[SchedulerOutput], None] | None = None  # shown each step, and may raise an exception
    read_fault: Callable[[SchedulerOutput], None] | None = None
    reset_fault: Exception | None = None
    num_resets: int = 0
    closed: bool = False

    @classmethod
    def build(cls, folder: Path, spec: ModelSpec, options: RunnerOptions, *, progress: Progress) -> "FakeRunner":
        return cls(options.num_gpu_blocks_override or 64, options.block_size, options.max_model_len, options)

    def launch(self, output: SchedulerOutput) -> FakeHandle:
        if self.permits is not None:
            assert self.permits.acquire(timeout=60), "the test does not let the runner go on"
        if self.launch_fault is not None:
            self.launch_fault(output)
        for request_id in output.removed:
            self.prompts.pop(request_id, None)
        for new in output.new_requests:
            self.prompts[new.request_id] = new.token_ids[: new.num_prompt_tokens]
            self.num_computed[new.request_id] = new.num_computed_tokens
        assert len(self.prompts) <= self.options.max_num_seqs
        batch = output.batch
        assert batch.total_num_tokens <= self.options.max_num_batched_tokens
        self.max_scheduled = max(self.max_scheduled, len(batch))
        tokens, num_sampled = [], []
        for index, (request_id, num_tokens) in enumerate(zip(batch.request_ids, batch.num_tokens, strict=True)):
            self.num_computed[request_id] += num_tokens
            num_sampled.append(int(index not in batch.partial))
            if num_sampled[-1]:
                tokens.append(next_token(self.prompts[request_id], self.num_computed[request_id]))
        return FakeHandle(output, StepResult(tokens, num_sampled), fault=self.read_fault)

    def reset(self) -> None:
        self.num_resets += 1
        if self.reset_fault is not None:
            raise self.reset_fault
        self.prompts.clear()
        self.num_computed.clear()

    def close(self) -> None:
        self.closed = True
