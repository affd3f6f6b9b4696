"""A runner whose next token follows from prompt and position alone, and which checks what it is asked to do."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.batch import SchedulerOutput, StepResult
from engine.core.cache_groups import FULL, CacheGroup
from engine.models.progress import Progress
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

    def read(self) -> tuple[SchedulerOutput, StepResult]:
        return self.output, self.result


@dataclass
class FakeRunner:
    num_blocks: int
    block_size: int
    max_model_len: int
    options: RunnerOptions
    cache_groups: tuple[CacheGroup, ...] = (FULL,)
    device_name: str = "fake"
    kv_cache_bytes: int = 1 << 20
    prompts: dict[str, list[int]] = field(default_factory=dict)
    num_computed: dict[str, int] = field(default_factory=dict)
    max_scheduled: int = 0
    permits: threading.Semaphore | None = None  # each launch waits for one and takes it
    broken: bool = False
    closed: bool = False

    @classmethod
    def build(cls, folder: Path, spec: ModelSpec, options: RunnerOptions, *, progress: Progress) -> "FakeRunner":
        return cls(options.num_gpu_blocks_override or 64, options.block_size, options.max_model_len, options)

    def launch(self, output: SchedulerOutput) -> FakeHandle:
        if self.permits is not None:
            assert self.permits.acquire(timeout=10), "the test does not let the runner go on"
        if self.broken:
            raise RuntimeError("the fake device is on fire")
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
        return FakeHandle(output, StepResult(tokens, num_sampled))

    def close(self) -> None:
        self.closed = True
