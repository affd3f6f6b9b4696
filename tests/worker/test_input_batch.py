"""The device gets the step that the scheduler decided on: random steps, packed and unpacked, against rows kept the
plain way.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from engine.core.batch import SchedulerOutput, StepResult
from engine.core.engine_request import EngineRequest
from engine.core.kv.cache_groups import FULL, CacheGroup
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.worker.device import CpuDevice
from engine.worker.input_batch import InputBatch
from kernels import reference
from kernels.data.layout import StepTensors

CPU = CpuDevice()
BLOCK, MAX_LEN, ROWS, BUDGET = 4, 48, 5, 20


@dataclass
class Plain:
    """A request as the contract tells of it, with the tokens that only the device knows."""

    token_ids: list[int]
    block_ids: list[list[int]]  # for each cache group
    num_computed: int


class Device:
    """Rows on a device whose model is a dice."""

    def __init__(self, rng: random.Random, num_groups: int) -> None:
        self.rng = rng
        self.batch = InputBatch(ROWS, num_groups, MAX_LEN // BLOCK, CPU)
        self.step = StepTensors.allocate(ROWS + 3, BUDGET + 3, num_groups, CPU.torch_device)
        self.plain: dict[str, Plain] = {}
        self.num_kept = self.num_padded = self.num_deferred = 0
        self.deferred: list[int] = []

    def run(self, output: SchedulerOutput) -> StepResult:
        batch, before = output.batch, list(self.batch._members.values())
        self.batch.apply(output)
        sizes: tuple[int, ...]
        padding = self.rng.choice([0, 2])  # tokens: of a sequence each, or of one beside decodes and prompts
        if batch.num_decodes == len(batch):
            num_seqs = len(batch) + padding
            sizes = (num_seqs if padding else 0,)
        else:
            num_seqs = ROWS + 2 if padding else len(batch)
            num_tokens = batch.total_num_tokens + padding
            sizes = (num_seqs, num_tokens) if padding else ()
        length = self.batch.packed_size(output, *sizes)
        packed = self.batch.pack(output, *sizes)
        assert len(packed.packed) == length, "by this number an executor is chosen before the step is packed"
        if batch.num_decodes < len(batch):
            assert packed.num_decodes == batch.num_decodes
        self.num_kept += packed.members in before
        self.num_padded += padding > 0
        reference.prepare_step(
            packed.packed, packed.segment, packed.num_seqs, packed.num_tokens, BLOCK, self.batch.state, self.step
        )
        for request_id in output.removed:
            del self.plain[request_id]
        for a in output.new_requests:
            self.plain[a.request_id] = Plain(
                list(a.token_ids), [list(ids) for ids in a.block_ids], a.num_computed_tokens
            )
        for request_id, block_ids in output.new_block_ids.items():
            for table, new in zip(self.plain[request_id].block_ids, block_ids, strict=True):
                table += new
        tokens, counts, at = [], [], 0
        self.deferred = []
        for i, (request_id, num_tokens) in enumerate(zip(batch.request_ids, batch.num_tokens, strict=True)):
            self.check(i, self.plain[request_id], at, num_tokens)
            at += num_tokens
            deferred = i not in batch.partial and self.rng.random() < 0.1
            counts.append(int(i not in batch.partial and not deferred))
            if deferred:
                self.deferred.append(i)
                self.plain[request_id].num_computed -= 1
            elif i not in batch.partial:
                tokens.append(self.rng.randrange(1000))
                self.plain[request_id].token_ids.append(tokens[-1])
                self.batch.state.last_token[self.batch.rows[request_id].index] = tokens[-1]
        assert (packed.num_seqs, packed.num_tokens) == (num_seqs, at + padding)
        assert (self.step.slot_mapping[:, at : at + padding] == -1).all()
        assert self.step.samples.rows[len(batch) : num_seqs].tolist() == [ROWS] * (num_seqs - len(batch))
        assert not self.step.context_lens[len(batch) : num_seqs].any()
        if self.deferred:
            self.batch.defer(packed, self.step, self.deferred)
            self.num_deferred += len(self.deferred)
        return StepResult(tokens, counts)

    def check(self, i: int, plain: Plain, at: int, num_tokens: int) -> None:
        step, own = self.step, slice(at, at + num_tokens)
        positions = range(plain.num_computed, plain.num_computed + num_tokens)
        assert step.input_ids[own].tolist() == [plain.token_ids[p] for p in positions]
        assert step.positions[own].tolist() == list(positions)
        for slots, block_ids in zip(step.slot_mapping[:, own].tolist(), plain.block_ids, strict=True):
            assert slots == [block_ids[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
        plain.num_computed += num_tokens
        assert step.samples.next_position[i] == step.context_lens[i] == plain.num_computed
        assert step.samples.token_index[i] == at + num_tokens - 1


@pytest.mark.parametrize("groups", [(FULL,), (CacheGroup(9),), (CacheGroup(6), FULL)])
@pytest.mark.parametrize("seed", range(6))
def test_every_step_reaches_the_device_as_it_was_scheduled(seed: int, groups: tuple[CacheGroup, ...]) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([16, 60]) * len(groups)
    scheduler = Scheduler(num_blocks, BLOCK, ROWS, BUDGET, MAX_LEN, groups=groups)
    device = Device(rng, len(groups))
    in_flight = None
    for step in range(300):
        if rng.random() < 0.1:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
            sampling = SamplingParams(max_tokens=rng.randint(1, 17), ignore_eos=True)
            scheduler.add(Request(EngineRequest(str(step), prompt, sampling), frozenset(), seed=0))
        if rng.random() < 0.02:
            scheduler.abort(str(rng.randrange(step + 1)))
        output = scheduler.schedule()
        launched = (output, device.run(output)) if output else None
        if in_flight:
            scheduler.update(*in_flight)
        if launched:
            scheduler.defer(device.deferred)
        in_flight = launched
    assert device.num_kept > 10
    assert device.num_padded > 10
    assert device.num_deferred >= 3
