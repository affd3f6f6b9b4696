"""Sampling beyond the kernel, through rows and steps on the device, against plain loops."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.core.batch import NewRequest, ScheduledBatch, SchedulerOutput
from engine.core.engine_request import EngineRequest
from engine.core.params.pooling import UNSAMPLED
from engine.core.params.sampling import SamplingParams
from engine.core.params.structured import StructuredOutputs
from engine.worker.device import CpuDevice
from engine.worker.input_batch import BatchSamples, InputBatch, PackedStep
from engine.worker.proposers.proposer import count_kept
from engine.worker.sampling.imposed import ImposedAcceptance
from engine.worker.sampling.logprobs import SampledLogprobs
from engine.worker.sampling.processors import PROCESSORS, BannedTokens, GrammarMask, Penalties
from engine.worker.sampling.sampler import Sampler
from engine.worker.sampling.verification import Verification
from kernels import reference
from kernels.data.layout import StepTensors
from tests.support.slow_sampler import next_token

VOCAB, EOS, BLOCK, MAX_LEN, ROWS = 60, (58, 59), 16, 128, 8
CPU = CpuDevice()


def step_of(number: int, admitted: list[NewRequest], batch: ScheduledBatch, removed: list[str]) -> SchedulerOutput:
    return SchedulerOutput(number, admitted, batch, {}, removed)


def freeing(*removed: str) -> SchedulerOutput:
    return step_of(0, [], ScheduledBatch([], [], 0, 0, []), list(removed))


class Sampling:
    """The sampling half of a model runner: requests come and go, logits are made up."""

    def __init__(self, max_drafts: int = 0) -> None:
        self.batch = InputBatch(ROWS, 1, MAX_LEN // BLOCK, CPU, max_drafts=max_drafts)
        self.step = StepTensors.allocate(ROWS, 1024, 1, CPU.torch_device, ROWS + max_drafts)
        self.sampler = Sampler(self.batch, self.step, EOS, VOCAB, MAX_LEN)
        self.number, self.last = 0, ScheduledBatch([], [], 0, 0, [])

    def run(
        self,
        logits: dict[str, list[float]],
        lengths: dict[str, int],
        admitted: dict[str, tuple[list[int], int, SamplingParams, int]],
        removed: list[str],
        chunks: set[str] = frozenset(),  # type: ignore[assignment]
        masks: dict[str, set[int]] | None = None,
    ) -> dict[str, int]:
        """A step that samples for each request but those of `chunks`; the new ones prefill all their tokens in it."""
        self.number += 1
        new_requests = [
            NewRequest(EngineRequest(name, tokens[:num_prompt], params), seed, tokens, 0, [list(range(8))])
            for name, (tokens, num_prompt, params, seed) in admitted.items()
        ]
        num_tokens = {name: lengths[name] if name in admitted else 1 for name in logits}
        names = sorted(logits, key=lambda name: num_tokens[name] > 1)
        partial = [i for i, name in enumerate(names) if name in chunks]
        sizes = [num_tokens[name] for name in names]
        batch = ScheduledBatch(names, sizes, sum(sizes), sizes.count(1), partial)
        if not admitted and not removed and self.last.request_ids == names and self.last.num_tokens == sizes:
            batch = self.last  # as the scheduler does
        output, self.last = step_of(self.number, new_requests, batch, removed), batch
        packed = self.prepare(output)
        tokens = self.sample(packed, [logits[name] for name in names], [(masks or {}).get(name) for name in names])
        rows = torch.tensor([row.index for row in packed.members.rows])
        assert torch.equal(self.batch.state.last_token[rows], tokens)
        return {name: int(token) for name, token in zip(names, tokens, strict=True)}

    def prepare(self, output: SchedulerOutput) -> PackedStep:
        self.apply(output)
        packed = self.batch.pack(output)
        reference.prepare_step(
            packed.packed, packed.segment, packed.num_seqs, packed.num_tokens, BLOCK, self.batch.state, self.step
        )
        return packed

    def sample(self, packed: PackedStep, logits: list[list[float]], masks: Sequence[set[int] | None]) -> torch.Tensor:
        """Draw the samples of a step, given the logits of each, and the tokens that its grammar allows."""
        table, sampler = torch.tensor(logits), self.sampler
        tokens = sampler.sample_unfiltered(table)
        before = table.clone()
        plan = sampler.plan(packed)
        allowed = [masks[i] or set() for i in plan.guided]
        words = [[sum(1 << t % 32 for t in ids if t // 32 == word) for word in range(2)] for ids in allowed]
        grammar_masks = sampler.masks(plan)
        grammar_masks[:] = torch.tensor(words).view(-1, 2).to(torch.int32)
        if plan.filtered:
            sampler.sample_filtered(table, tokens)
            masked = plan.guided[: plan.num_masked]
            table[masked] = before[masked]
        sampler.sample_groups(plan, grammar_masks, table, tokens)
        assert torch.equal(table, before), "log-probabilities are of raw logits"
        return tokens

    def apply(self, output: SchedulerOutput) -> None:
        self.sampler.update_rows(*self.batch.apply(output))

    def groups(self) -> list[Any]:
        """Groups of the last step."""
        return [group for group, _ in self.sampler._plan.groups]


def params_of(rng: random.Random) -> SamplingParams:
    """Some of everything."""

    def maybe(chance: float, **fields: Any) -> dict[str, Any]:
        return fields if rng.random() < chance else {}

    ids = [rng.randrange(VOCAB) for _ in range(40)]
    chosen: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.0, 1.6])}
    chosen |= maybe(0.4, repetition_penalty=rng.choice([0.7, 1.3, 2.0]))
    chosen |= maybe(0.3, frequency_penalty=rng.uniform(-2, 2)) | maybe(0.3, presence_penalty=rng.uniform(-2, 2))
    chosen |= maybe(0.3, logit_bias={t: rng.uniform(-100, 100) for t in ids[:3]})
    chosen |= maybe(0.3, allowed_token_ids=ids[5 : rng.randrange(6, 40)])
    chosen |= maybe(0.3, bad_words=[ids[:1], ids[1:3], ids[3:4] * 2, [1], [1, 2], [2, 1]])
    chosen |= maybe(0.3, min_tokens=rng.randrange(1, 9), stop_token_ids=ids[:2], ignore_eos=rng.random() < 0.3)
    chosen |= maybe(0.3, dry_multiplier=rng.uniform(0.1, 3), dry_allowed_length=rng.randrange(1, 4), dry_base=1.5)
    chosen |= maybe(0.3, dry_sequence_breakers=ids[4:6])
    chosen |= maybe(0.3, structured_outputs=StructuredOutputs(regex="x"))
    chosen |= maybe(0.2, top_n_sigma=rng.uniform(0.5, 3)) | maybe(0.2, typical_p=rng.uniform(0.1, 0.99))
    chosen |= maybe(0.3, xtc_threshold=rng.uniform(0.01, 0.3), xtc_probability=rng.choice([0.5, 1.0]))
    chosen |= maybe(0.2, top_k=rng.randrange(1, 30)) | maybe(0.2, top_p=rng.uniform(0.3, 1)) | maybe(0.2, min_p=0.05)
    return SamplingParams(max_tokens=100, **chosen)


@pytest.mark.parametrize("world", range(12))
def test_tokens_are_those_of_the_request_alone(world: int) -> None:
    """Requests come, go, are preempted and come back; each token is what plain loops give for this request alone."""
    rng = random.Random(world)
    sampling = Sampling()
    requests: dict[str, tuple[list[int], int, SamplingParams, int]] = {}
    running: dict[str, None] = {}
    special = 0
    for step in range(60):
        removed = [name for name in running if rng.random() < 0.08]
        for name in removed:
            del running[name]
            if rng.random() < 0.5:
                requests.pop(name)
        admitted = {}
        waiting = [name for name in requests if name not in running]
        while len(running) < ROWS and rng.random() < 0.5:
            if waiting and rng.random() < 0.7:
                name = waiting.pop()
            else:
                name = f"request-{step}-{len(running)}"
                prompt = [rng.randrange(6) if rng.random() < 0.8 else rng.randrange(VOCAB) for _ in range(9)]
                params = SamplingParams() if rng.random() < 0.2 else params_of(rng)
                requests[name] = (prompt, len(prompt), params, rng.getrandbits(63))
            admitted[name] = requests[name]
            running[name] = None
        if not running:
            sampling.apply(freeing(*removed))
            continue
        wide = rng.choice([1.0, 3.0])
        logits = {name: [rng.gauss(0, wide) + (3 * wide if t < 6 else 0) for t in range(VOCAB)] for name in running}
        lengths = {name: len(requests[name][0]) for name in running}
        masks = {name: {rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 40]))} for name in running}
        given = {n: (list(r[0]), *r[1:]) for n, r in admitted.items()}
        tokens = sampling.run(logits, lengths, given, removed, masks=masks)
        for name, token in tokens.items():
            known, num_prompt, params, seed = requests[name]
            as_device = torch.tensor(logits[name]).tolist()
            mask = masks[name] if params.structured_outputs else None
            assert token == next_token(as_device, known, num_prompt, params, seed, EOS, mask), (name, params)
            known.append(token)
            special += any(each.needed(params) for each in PROCESSORS if each is not GrammarMask)
            if len(known) == MAX_LEN:
                running.pop(name)
                requests.pop(name)
                sampling.apply(freeing(name))
    assert special > 50
    sampling.apply(freeing(*running))
    assert not sampling.sampler._processed
    history = sampling.sampler._history
    assert sorted(history._free) == list(range(len(history.tokens)))


def test_a_chunk_that_does_not_sample_leaves_no_token() -> None:
    sampling = Sampling()
    params = SamplingParams(temperature=0, presence_penalty=2, max_tokens=20)
    prompt = list(range(20, 40))
    logits = [1.0] * VOCAB
    logits[7] = 2.0
    sampling.run({"a": logits}, {"a": 8}, {"a": (prompt, 20, params, 0)}, [], chunks={"a"})
    assert sampling.sampler._history.tokens[0, :21].tolist() == [*prompt, 0]


def test_a_group_is_made_once_for_steps_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling()
    params = SamplingParams(presence_penalty=1, max_tokens=20)
    logits = {"a": [0.0] * VOCAB, "b": [0.0] * VOCAB}
    sampling.run(logits, {"a": 3, "b": 3}, {n: ([1, 2, 3], 3, params, 0) for n in logits}, [])
    groups = sampling.groups()
    sampling.run(logits, {"a": 4, "b": 4}, {}, [])
    assert sampling.groups()[0] is groups[0]
    sampling.run(logits, {"a": 5, "b": 5}, {"b": ([1, 2, 3, 4, 5], 3, params, 0)}, ["b"])
    assert sampling.groups()[0] is not groups[0]


def test_many_sequences_are_sampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling()
    monkeypatch.setattr("engine.worker.sampling.sampler.MAX_ELEMENTS", 3 * VOCAB)
    requests = {str(i): ([i], 1, SamplingParams(temperature=0, logit_bias={i: 100}), 0) for i in range(8)}
    tokens = sampling.run({n: [0.0] * VOCAB for n in requests}, dict.fromkeys(requests, 1), requests, [])
    assert tokens == {str(i): i for i in range(8)}
    assert [len(group.members) for group in sampling.groups()] == [3, 3, 2]


def test_bans_that_leave_nothing_give_way_to_what_is_allowed() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=[5, 9], bad_words=[[5], [9]])
    logits = [0.0] * VOCAB
    logits[9] = 1.0
    assert Sampling().run({"a": logits}, {"a": 1}, {"a": ([3], 1, params, 0)}, []) == {"a": 9}


def test_min_tokens_needs_a_processor_only_until_it_is_reached() -> None:
    sampling = Sampling()
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=20)
    logits = [0.0] * VOCAB
    logits[EOS[0]] = 1.0
    sampling.run({"a": logits}, {"a": 2}, {"a": ([1, 2], 2, params, 0)}, [])
    tokens, plans = [], []
    for length in range(3, 7):  # tokens in the context, two of them the prompt
        tokens.append(sampling.run({"a": logits}, {"a": length}, {}, [])["a"])
        plans.append(sampling.sampler._plan)
    assert tokens == [0, 0, EOS[0], EOS[0]]
    assert plans[0] is plans[1] is not plans[2] is plans[3], "a plan holds until then"
    assert not sampling.groups()


def test_a_processor_says_what_needs_it() -> None:
    assert Penalties.needed(replace(SamplingParams(), presence_penalty=2))
    assert not any(processor.needed(SamplingParams()) for processor in PROCESSORS)
    assert not any(processor.needed(UNSAMPLED) for processor in PROCESSORS)


def test_min_tokens_needs_no_processor_when_nothing_ends_the_text() -> None:
    assert BannedTokens.needed(SamplingParams(min_tokens=5))
    assert BannedTokens.needed(SamplingParams(min_tokens=5, ignore_eos=True, stop_token_ids=[3]))
    assert not BannedTokens.needed(SamplingParams(min_tokens=5, ignore_eos=True))


@pytest.mark.parametrize("world", range(8))
def test_samples_of_a_row_are_the_tokens_of_as_many_steps(world: int) -> None:
    """Sample after drafts: each sample sees the history before it, and no token after it."""
    rng, per_seq = random.Random(world), 3
    one, several = Sampling(), Sampling(max_drafts=2 * ROWS)
    params = {str(i): params_of(rng) for i in range(ROWS)}
    known = {name: [rng.randrange(VOCAB) for _ in range(rng.randint(3, 20))] for name in params}
    num_prompt = {name: rng.randint(1, len(tokens)) for name, tokens in known.items()}
    steps = [{name: [rng.gauss(0, 3) for _ in range(VOCAB)] for name in params} for _ in range(per_seq)]
    masks = [{name: {rng.randrange(VOCAB) for _ in range(30)} for name in params} for _ in range(per_seq)]
    drawn: dict[str, list[int]] = {name: [] for name in params}
    admitted = {name: (known[name], num_prompt[name], params[name], 7) for name in params}
    for logits, allowed in zip(steps, masks, strict=True):
        found = one.run(logits, {name: len(known[name]) for name in params}, admitted, [], masks=allowed)
        admitted = {}
        for name, token in found.items():
            drawn[name].append(token)

    names = [name for name in params if min(drawn[name]) >= 0]  # some exclude all tokens
    assert len(names) >= 2
    tokens = {name: known[name] + drawn[name][:-1] for name in names}
    new_requests = [
        NewRequest(
            EngineRequest(name, tokens[name][: num_prompt[name]], params[name]), 7, tokens[name], 0, [[*range(8)]]
        )
        for name in names
    ]
    sizes = [len(tokens[name]) for name in names]
    num_drafts = (per_seq - 1,) * len(names)
    batch = ScheduledBatch(names, sizes, sum(sizes), 0, [], num_drafts)
    output = replace(step_of(1, new_requests, batch, []), drafts={name: drawn[name][:-1] for name in names})
    packed = several.prepare(output)
    several.batch.expand_samples(packed, several.step, with_params=True)
    several.sampler.add_drafts(packed, output.drafts)
    assert several.step.samples.next_position[: len(names) * per_seq].tolist() == packed.positions.tolist()
    result = several.sample(
        packed,
        [logits[name] for name in names for logits in steps],
        [allowed[name] for name in names for allowed in masks],
    )
    assert result.view(-1, per_seq).tolist() == [drawn[name] for name in names]
    plan = several.sampler.plan(packed)
    assert (plan.num_sampled, plan.unsampled) == ([per_seq] * len(names), [])


def test_samples_of_chunks_are_not_wanted_and_others_have_as_many_as_drafts() -> None:
    sampling = Sampling(max_drafts=3)
    new_requests = [
        NewRequest(EngineRequest(name, [1] * 9, SamplingParams(logprobs=0)), 7, [1] * 9, num_computed, [[0]])
        for name, num_computed in (("a", 8), ("b", 8), ("c", 6), ("d", 0))
    ]
    batch = ScheduledBatch(["a", "b", "c", "d"], [1, 2, 5, 5], 13, 1, [3], (0, 1, 2, 0))
    output = replace(step_of(1, new_requests, batch, []), drafts={"b": [4], "c": [5, 6]})
    packed = sampling.prepare(output)
    sampling.batch.expand_samples(packed, sampling.step, with_params=False)
    samples = sampling.step.samples
    assert samples.token_index[:7].tolist() == [0, 1, 2, 5, 6, 7, 12]
    assert samples.next_position[:7].tolist() == packed.positions.tolist() == [9, 9, 10, 9, 10, 11, 5]
    assert samples.rows[:7].tolist() == [packed.members.rows[i].index for i in (0, 1, 1, 2, 2, 2, 3)]
    assert sampling.step.input_ids[:13].tolist() == [1, 1, 4, 1, 1, 1, 5, 6, 1, 1, 1, 1, 1]
    plan = sampling.sampler.plan(packed)
    assert (plan.unsampled, plan.num_sampled) == ([6], [1, 2, 3, 0])
    assert plan.with_logprobs == [0, 1, 2, 3, 4, 5]
    logits = torch.randn(7, VOCAB)
    tokens = logits.argmax(-1)
    found = SampledLogprobs.of(packed.members, plan.with_logprobs, logits, tokens, CPU.upload).read()
    assert {request: len(records) for request, records in found.items()} == {0: 1, 1: 2, 2: 3}
    best = logits.log_softmax(-1).amax(-1)
    assert [each.logprob for each in found[2]] == pytest.approx(best[3:6].tolist(), abs=1e-5)


def test_a_request_keeps_the_tokens_up_to_the_first_that_is_no_draft() -> None:
    rows = [cast(Any, None)] * 4
    samples = BatchSamples(ScheduledBatch(["a", "b", "c", "d"], [1, 3, 3, 4], 11, 1, [], (0, 2, 2, 3)), rows)
    indices, drafts = {"a": 0, "b": 1, "c": 2, "d": 3}, {"b": [5, 6], "c": [7, 8], "d": [1, 2, 3]}
    verification = Verification(samples, indices, drafts, np.arange(11))
    tokens = [9, 5, 6, 4, 7, 0, 8, 1, 2, 3, 3]
    assert verification.kept(tokens, []) == ([9, 5, 6, 4, 7, 0, 1, 2, 3, 3], [1, 3, 2, 4])
    assert verification.kept(tokens, [9, 4]) == ([9, 5, 6, 4, 1, 2], [1, 3, 0, 2]), "without the third of d, none of c"
    step = StepTensors.allocate(4, 11, 1, torch.device("cpu"), 11)
    step.input_ids[:11] = torch.tensor([0, 0, *drafts["b"], 0, *drafts["c"], 0, *drafts["d"]])
    for unsampled in ([], [9, 4]):
        counts = verification.kept(tokens, unsampled)[1]
        assert count_kept(step, samples, torch.tensor(tokens), unsampled, CPU.upload).tolist() == counts


def test_imposed_acceptance_keeps_drafts_whatever_was_sampled() -> None:
    rows = [cast(Any, None)] * 2
    samples = BatchSamples(ScheduledBatch(["a", "b"], [4, 4], 8, 0, [], (3, 3)), rows)
    drafts = {"a": [5, 6, 7], "b": [7, 8, 9]}
    imposed = ImposedAcceptance.of_length(2.5, 3)
    step, counts, of_device = StepTensors.allocate(2, 8, 1, torch.device("cpu"), 8), list[int](), list[int]()
    for first in range(0, 4000, 2):
        positions = np.array([*range(first, first + 4), *range(first + 7, first + 11)])
        verification = Verification(samples, {"a": 0, "b": 1}, drafts, positions, imposed)
        kept, numbers = verification.kept([1] * 8, [])
        assert kept == [*drafts["a"][: numbers[0] - 1], 1, *drafts["b"][: numbers[1] - 1], 1]
        step.samples.next_position[:8] = torch.from_numpy(positions)
        of_device += count_kept(step, samples, torch.ones(8, dtype=torch.int64), [], CPU.upload, imposed).tolist()
        counts += numbers
    assert counts == of_device
    assert sum(counts) / len(counts) == pytest.approx(2.5, abs=0.1)


def test_rows_are_set_back_to_the_outcome_of_their_drafts() -> None:
    sampling = Sampling(max_drafts=4)
    new = [NewRequest(EngineRequest(name, [1] * 9, SamplingParams()), 7, [1] * 9, 8, [[0]]) for name in "ab"]
    batch = ScheduledBatch(["a", "b"], [3, 3], 6, 0, [], (2, 2))
    sampling.prepare(replace(step_of(1, new, batch, []), drafts={"a": [2, 3], "b": [2, 3]}))
    sampling.batch.rewind({"b": (9, 5)})
    packed = sampling.prepare(step_of(2, [], ScheduledBatch(["b"], [1], 1, 1, []), []))
    assert packed.context_lens.tolist() == [10]
    assert [int(sampling.step.input_ids[0]), int(sampling.step.positions[0])] == [5, 9]
