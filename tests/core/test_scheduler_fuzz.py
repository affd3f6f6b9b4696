"""Random workloads through the scheduler and the toy worker, one step ahead as the engine runs: every request must get
exactly the answer that it would get alone, whatever is shared, preempted or aborted around it.

A failure names its seed; `run_workload(seed)` repeats it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from string import ascii_letters
from typing import Any
from unittest.mock import patch

import pytest

from engine.core import step_planner, tiers
from engine.core.batch import NOT_FINITE, EngineOutput, SchedulerOutput, StepResult
from engine.core.drafts.policy import DraftLimits, DraftPolicy
from engine.core.drafts.proposer import Proposal
from engine.core.engine_request import EngineRequest, ImageInput
from engine.core.fairness import deadlines, request_queues, step_budget, step_time
from engine.core.kv import block_pools, cache_groups, state_blocks
from engine.core.kv.block_pool import Name
from engine.core.kv.block_pools import UNHELD
from engine.core.kv.cache_groups import FULL, CacheGroup, most_blocks
from engine.core.params.pooling import UNSAMPLED, PoolingParams
from engine.core.params.sampling import SamplingParams
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.stepping import prefix_cache_store
from engine.stepping.prefix_cache_store import PrefixCacheStore, Store, StoreOfPools
from tests.support.toy import POISON, Launched, ToyRunner, single_answer, single_embedding, states_of
from tests.support.toy_file import ToyFile

NUM_WORKLOADS = 1400
NUM_TESTS = 2
MAX_DRAFTS = 7  # of a request
# Each of these happens among the workloads of each test, or the workloads are no test.
EXPECTED_EVENTS = [
    "preemptions",
    "resumed after preemption",
    "prefix-cache hits",
    "prompts scored in chunks",
    "scored prompts preempted",
    "hits on a block filled in the same step",
    "aborted while running, a token in flight",
    "aborted while waiting",
    "aborted while waiting, a token in flight",
    "ids used again while in flight",
    "finished by stop",
    "finished by length",
    "finished by a stop token",
    "finished by max_model_len",
    "embeddings of chunks",
    "embeddings from a cached prefix",
    "embeddings after preemption",
    "embeddings of a whole context",
    "ends of text before min_tokens",
    "refused",
    "extra tokens to be dropped",
    "cache resets",
    "the same batch object again",
    "deferred",
    "deferred, when none is left",
    "prefix-cache hits in a window group",
    "blocks given back by a window",
    "timed out",
    "timed out after its first token",
    "not begun, since it would be late",
    "preempted for another tenant",
    "paused for favoured tenants",
    "shorter for tenants that may come",
    "batches that take turns",
    "more than two steps at a time",
    "finished by error",
    "NaN in blocks that others hold",
    "prefix-cache hits on named content",
    "prefix-cache hits in two pools",
    "drafts accepted",
    "drafts rejected",
    "drafts deferred",
    "proposals by a model",
    "blocks for what a model proposes",
    "drafts of requests that take turns",
    "a step held back for drafts",
    "preempted while drafts were in flight",
    "steps with drafts and chunks",
    "prefix-cache hits on states",
    "states are kept where a prompt leaves a cached one",
    "waits for the state of a prompt that is computed",
    "states between the two ends of a prompt",
    "waits for a state that another one gives back",
    "blocks to the host",
    "blocks from the host",
    "loads of several requests at a time",
    "a step while blocks are on their way",
    "aborted while its blocks were on their way",
    "states from the host",
    "NaN in blocks in the host",
    "images encoded",
    "images encoded before",
    "encoded images forgotten",
    "an image above the budget",
    "waits for its image, while others go on",
    "starts without a token, since its image waits",
    "chunks that end before an image",
    "prefix-cache hits that end in an image",
    "chunks that cut no image",
]
EXPECTED_OF_FILES = [
    "blocks to the file",
    "blocks from the file",
    "blocks from another pool's file",
    "blocks that the file has lost",
    "blocks that the disk had no room for",
    "NaN in blocks in the file",
]


Left = dict[int, tuple[Name, list[int]]]  # slot in the file → name and content of a block


@dataclass
class Client:
    """One request as its sender sees it."""

    request: Request
    answer: tuple[list[int], str, int | None]
    embedding: bytes | None = None
    received: list[int] = field(default_factory=list)

    def receive(self, output: EngineOutput) -> None:
        tokens, finish_reason, stop_reason = self.answer
        if output.finish_reason == "error":
            assert (output.new_token_ids, output.embedding) == ([], None)
            return
        assert output.embedding == self.embedding
        self.received += output.new_token_ids
        assert self.received == tokens[: len(self.received)], f"wrong tokens for {output.request_id}"
        if self.request.sampling.prompt_logprobs is not None and len(self.received) == len(output.new_token_ids):
            prompt = self.request.token_ids[: self.request.num_prompt_tokens]
            assert [entry.logprob for entry in output.prompt_logprobs or ()] == [-float(token) for token in prompt[1:]]
        else:
            assert output.prompt_logprobs is None
        done = len(self.received) == len(tokens)
        assert (output.finish_reason, output.stop_reason) == ((finish_reason, stop_reason) if done else (None, None))
        if self.request.sampling.logprobs is None:
            assert output.logprobs is None
        else:
            assert [entry.logprob for entry in output.logprobs or ()] == [
                -float(token) for token in output.new_token_ids
            ]


class Drafter:
    """Proposes the next tokens of the answers, and wrong ones instead of some of them."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def start(self, request: EngineRequest) -> _Answer:
        client = self._workload.clients[request.request_id]
        assert client.request.engine_request is request
        return _Answer(self._workload, client)


class _Answer:
    def __init__(self, workload: Workload, client: Client) -> None:
        self._workload, self._answer, self._num_prompt = workload, client.answer[0], client.request.num_prompt_tokens

    def propose(self, token_ids: Sequence[int], most: int) -> Proposal:
        rng, first = self._workload.drafter, len(token_ids) - self._num_prompt
        tokens = self._answer[first : first + rng.randint(0, most)]
        tokens += [1] * rng.randint(0, most - len(tokens))
        lie = self._workload.vocab_size - 1
        return Proposal([lie if rng.random() >= self._workload.truth else token for token in tokens])


class Workload:
    """A scheduler of random size, and clients that come, wait and leave at random."""

    def __init__(self, seed: int, has_tier: bool = False, left: list[Left] | None = None) -> None:
        """`left`: what another workload has left in the files; None: in half of those with a tier, there are files."""
        self.rng = rng = Random(seed)
        self.seed = seed
        self.now = 0.0  # the time: a step takes one, and more for each token
        self.block_size = rng.choice([1, 2, 3, 4, 8])
        self.max_model_len = rng.randint(4, 48)
        self.vocab_size = rng.choice([3, 10, 40, 100])
        blocks_of_one = -(-self.max_model_len // self.block_size)
        self.num_blocks = rng.randint(max(1, blocks_of_one * 3 // 4), blocks_of_one * rng.choice([1, 2, 4]) + 1)
        max_num_seqs = rng.choice([1, 2, 4, 8, 16])
        budget = rng.choice([1, 2, 3, 7, 16, 50, 1000])
        caching = rng.random() < 0.8
        self.groups = self._groups(Random(seed))
        num_blocks: int | list[int] = self.num_blocks
        if self.groups != (FULL,):
            needed = most_blocks(self.groups, self.max_model_len, self.block_size, budget)
            wanted = [max(int(count * Random(seed).choice([0.8, 1, 1.3, 2])), 1) for count in needed]
            if self.groups[-1].is_state:
                wanted[-1] = max(int(needed[-1] * Random(seed).choice([0.8, 1])), 1)
                wanted[-1] += Random(seed).randint(0, 3 * max_num_seqs)
                if seed % 4 == 0:  # states are what is short
                    wanted = [8 * count for count in wanted[:-1]] + [needed[-1]]
            self.num_blocks, num_blocks = sum(wanted), wanted
        self.num_batches = Random(seed).choice([1, 1, 1, 2, 4])
        self.scheduler = Scheduler(
            num_blocks, self.block_size, max_num_seqs, budget, self.max_model_len, caching, self.groups,
            clock=lambda: self.now, num_batches=self.num_batches, drafts=self._drafts(),
            has_tiers=has_tier,
        )  # fmt: skip
        self.tier, self.delays = self.scheduler.blocks.tier, Random(seed)
        self.delay = self.delays.choice([0, 0.5, 0.9])  # the part of the steps in which a load does not arrive
        self.most_slots = self.delays.choice([0, 3, 40, 1000])
        self.runner = ToyRunner(num_blocks, self.block_size, max_num_seqs, budget, self.vocab_size, self.groups)
        self.files, self.store = self._files(Random(seed), left)
        self.one_ahead = rng.random() < 0.9
        self.abort_rate = rng.choice([0, 0, 0.02, 0.2])
        self.reset_rate = rng.choice([0, 0, 0.02])
        self.lateness = Random(seed)
        self.turns = Random(seed)
        self.faults = Random(seed)
        self.nan_rate = self.faults.choice([0, 0, 0, 0.2])
        self.contents = Random(seed)
        self.content_rate = self.contents.choice([0, 0, 0.7])
        self.pictures = Random(seed)
        self.picture_rate = self.pictures.choice([0, 0, 0, 0.8])
        self.picture_sizes = [self.pictures.choice([1, 2, 2, 5, 9, 17]) for _ in range(12)]
        self.runner.max_encoded_tokens = self.scheduler.encoder.max_tokens = self.pictures.choice([1, 9, 20, 60])
        self.both_ways = seed % 3 == 0
        if self.both_ways:
            self.picture_sizes = [min(size, budget) for size in self.picture_sizes]
        self.tenants = Random(seed)
        self.tenant_names = list(self.tenants.choice(["", "a", "ab", "aaaab", "abcdefgh"]))
        if self.tenants.random() < 0.4:  # some are of one group
            self.tenant_names = [self.tenants.choice([name, f"group/{name}"]) for name in self.tenant_names]
        self.defer_rate = self.lateness.choice([0, 0, 0.1, 0.6])
        trunks = [self._tokens(rng.randint(0, self.max_model_len * 2 // 3)) for _ in range(rng.randint(1, 3))]
        last_arrival = rng.choice([0, 10, 80])
        self.arrivals = sorted((rng.randint(0, last_arrival), rng.choice(trunks)) for _ in range(rng.randint(1, 24)))
        self.clients: dict[str, Client] = {}
        self.finished: list[Client] = []
        self.requests: list[Request] = []
        self.published: dict[Name, int] = {}
        self.last_gone = "a"  # the id of a request that ended, perhaps with a token in flight
        self.in_flight: deque[Launched] = deque()  # the oldest step first
        self.token_time = self.tenants.choice([0, 0, 0.1, 1])
        self.events: Counter[str] = Counter()
        self.planned = self.scheduler._planner.plan

    def _drafts(self) -> DraftPolicy | None:
        """Drafts that are all true, all wrong or guessed; verified at random, or when they pay."""
        self.drafter = rng = Random(self.seed)
        limit = rng.choice([0, 0, 1, 3, MAX_DRAFTS])
        self.truth = rng.choice([0.0, 0.5, 0.9, 1.0])
        limits = DraftLimits(limit, rng.choice([1, 4, 100]), max_seqs=rng.choice([2, 100]))
        adaptive, by_model = rng.random() < 0.3, Random(self.seed).choice([0, 0, 1, limit])
        return DraftPolicy(Drafter(self), limits, adaptive, by_model) if limit else None

    def _files(self, rng: Random, left: list[Left] | None) -> tuple[list[Any], Store | None]:
        """A file for each pool below the tier."""
        if self.tier is None or (left is None and rng.random() < 0.5):
            return [], None
        self.most_slots = rng.choice([0, 0, 2, 20])
        files, stores = list[Any](), list[PrefixCacheStore]()
        for number, pool in enumerate(self.scheduler.blocks.pools.pools):
            file: Any = ToyFile(self.runner, rng, rng.choice([3, 1000, 1000]), rng.choice([0, 0.05, 0.3]), number)
            if left:
                file.slots |= left[number]
            files.append(file)
            in_host = self.most_slots > 0
            stores.append(PrefixCacheStore(file, pool, lambda: self.now, self.tier, in_host, number))
            assert not stores[-1].load(0)
        return files, stores[0] if len(stores) == 1 else StoreOfPools(stores)

    def _groups(self, rng: Random) -> tuple[CacheGroup, ...]:
        def window() -> CacheGroup:
            return CacheGroup(rng.randint(1, self.max_model_len))

        kinds: list[tuple[CacheGroup, ...]] = [(FULL,), (window(),), (FULL, window()), (window(), FULL, window())]
        groups = rng.choice(kinds)
        if len(groups) > 1 and rng.random() < 0.4:  # one group has blocks of another size
            groups = (*groups[:-1], replace(groups[-1], pool=1))
        if rng.random() < 0.4:
            groups = (*groups, CacheGroup(pool=groups[-1].pool + 1, is_state=True, max_retracted=1 + MAX_DRAFTS))
        return groups

    def run(self) -> Counter[str]:
        with (
            patch.object(deadlines, "MIN_MEASURED", 1),
            patch.object(tiers, "MIN_LOADED_TOKENS", 1),
            patch.object(prefix_cache_store, "RETRY_SECONDS", 5),
            patch.object(step_time, "SHORT_TOKENS", 2),
            patch.object(step_budget, "SHARED_STEPS", 4),
            patch.object(state_blocks, "CHECKPOINT_TOKENS", self.turns.choice([8, 24, 1024])),
            patch.object(self.scheduler._planner, "plan", self._plan),
            patch.object(block_pools, "SPARE_STATES", cache_groups.SPARE_STATES if self.seed % 4 else 1000),
            patch.object(step_planner, "PAUSED_STEPS", self.turns.choice([2, 16])),
            patch.object(request_queues, "FAVOURED_STEPS", self.turns.choice([3, 32])),
        ):
            return self._run()

    def _run(self) -> Counter[str]:
        step = 0
        while self.arrivals or self.scheduler.has_work():
            self._come_and_go(step)
            self._step()
            step += 1
            assert step < 20_000, "the requests do not finish"
        self._check_end()
        return self.events + self.runner.events

    def _tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(length)]

    def _step(self) -> None:
        """`Engine.step`, with the invariants checked after each move."""
        scheduler = self.scheduler
        self._move_blocks()
        output = self._schedule()
        scheduler.check()
        if output.moves is not None:
            self.runner.move(output.moves)
            self.events["states from the host"] += self.groups[-1].is_state and any(
                pool == self.groups[-1].pool for load in output.moves.loads for pool, *_ in load.copies
            )
        self.events["loads of several requests at a time"] += len(self.runner.loads) > 1
        self.events["a step while blocks are on their way"] += bool(output and self.runner.loads)
        if self.num_batches > 1:
            self.events["batches that take turns"] += bool(output and self.in_flight)
            self.events["more than two steps at a time"] += bool(output and len(self.in_flight) > 1)
            most = 1 + max((max(step.output.batch.num_drafts, default=0) for step in self.in_flight), default=0)
            most = max(most, 1 + max(output.batch.num_drafts, default=0))
            self.events["drafts of requests that take turns"] += len(output.drafts)
            for request in scheduler.queues.running:
                assert request.num_tokens <= len(request.token_ids) + most, (
                    "a step needs what another one in flight samples"
                )
        held = (
            not output
            and bool(self.in_flight)
            and any(request.num_tokens < request.max_num_tokens for request in scheduler.queues.running)
        )
        self.events["a step held back for drafts"] += held and self.num_batches == 1
        self.events["steps with drafts and chunks"] += bool(output.drafts and output.batch.partial)
        self.events["blocks for what a model proposes"] += output.num_proposals > 0 and any(
            request.num_slots > request.num_tokens + self.block_size for request in scheduler.queues.running
        )
        self.events["blocks given back by a window"] += any(any(r.num_passed) for r in scheduler.queues.running)
        self._observe_states()
        self._observe_images(output)
        said = output.new_requests, output.removed, output.encoder
        assert output or not any(said), "an output that is not launched says something"
        launched = self.runner.launch(output) if output else None
        if self.store is not None:
            self.store.begin_reads()
        self.now += 1 + self.token_time * output.batch.total_num_tokens
        for given in scheduler.take_late():
            self._not_begun(given)
        self._end_late()
        scheduler.check()
        if not self.one_ahead and launched:
            self.in_flight.append(launched)
            launched = None
        preempted = any(request.num_tokens > len(request.token_ids) for request in scheduler.queues.waiting)
        self.events["preempted while drafts were in flight"] += any(
            request.num_tokens > len(request.token_ids) + 1 for request in scheduler.queues.waiting
        )
        if self.rng.random() < self.abort_rate or (preempted and self.abort_rate and self.tenants.random() < 0.3):
            self._abort()
        if self.in_flight and (launched is None or len(self.in_flight) >= self.num_batches - 1):
            launched_ids = set(launched.output.batch.request_ids) if launched else set()
            for given in scheduler.update(*self._proposed(*self._corrupted(*self.in_flight.popleft().read()))):
                self._deliver(given)
                self.events["extra tokens to be dropped"] += (
                    given.finish_reason == "stop" and given.request_id in launched_ids
                )
                assert given.finish_reason != "length" or given.request_id not in launched_ids, "a step was wasted"
        if launched:
            launched = self._defer(launched)
        scheduler.check()
        self._check_published()
        if launched:
            self.in_flight.append(launched)
        for index, pool in enumerate(scheduler.blocks.pools.pools):
            self.runner.poison(pool.free_and_empty(), index)

    def _move_blocks(self) -> None:
        """Some loads arrive, in any order. The host gets more memory."""
        tier, rng = self.tier, self.delays
        if tier is None:
            return
        if self.store is not None:
            self.store.step()
        if rng.random() < 0.2:
            counts = [slots.num_slots for slots in tier._slots]
            tier.resize([min(count + rng.choice([0, 1, 20]), self.most_slots) for count in counts])
        for pool, slots in enumerate(tier._slots):
            for slot in slots.free():
                self.runner.host[pool, slot] = [POISON] * self.block_size
        loads = self.runner.loads
        while loads and rng.random() >= self.delay:
            self.scheduler.arrived([self.runner.arrive(rng.randrange(len(loads)))])

    def _plan(self) -> step_planner.Plan | None:
        plan = self.planned()
        self.events["waits for a state that another one gives back"] += plan is not None and plan.lacks_states
        return plan

    def _observe_states(self) -> None:
        if not self.groups[-1].is_state:
            return
        running, waiting = self.scheduler.queues.running, self.scheduler.queues.waiting
        self.events["states are kept where a prompt leaves a cached one"] += any(r.branch >= 0 for r in running)
        self.events["waits for the state of a prompt that is computed"] += any(
            self.scheduler.blocks.awaits_state(r, len(self.scheduler.blocks.match_prefix(r)[0]))
            for r in waiting
            if r.reads_cache
        )
        held = ([i for i, block_id in enumerate(r.block_tables[-1]) if block_id != UNHELD] for r in running)
        self.events["states between the two ends of a prompt"] += any(
            index + 2 < len(r.block_tables[-1])
            for r, indices in zip(running, held, strict=True)
            for index in indices[:-1]
        )

    def _observe_images(self, output: SchedulerOutput) -> None:
        batch, chunks = output.batch, dict[str, int]()
        chunks.update(zip(batch.request_ids, batch.num_tokens, strict=True))
        for request in self.scheduler.queues.running:
            end = request.num_computed_tokens
            if any(image.start == end for image in request.engine_request.images):
                self.events["waits for its image, while others go on"] += bool(output) and (
                    request.request_id not in chunks and batch.total_num_tokens < self.scheduler.max_num_batched_tokens
                )
                self.events["chunks that end before an image"] += request.request_id in chunks and (
                    batch.total_num_tokens < self.scheduler.max_num_batched_tokens
                )
        unsent = any(each.is_unsent for each in self.scheduler.queues.running)
        self.events["starts without a token, since its image waits"] += unsent
        for new in output.new_requests:
            cached = new.num_computed_tokens
            self.events["prefix-cache hits that end in an image"] += any(
                image.start < cached < image.stop for image in new.request.images
            )

    def _corrupted(self, output: SchedulerOutput, result: StepResult) -> tuple[SchedulerOutput, StepResult]:
        """The result, in which some requests got NaN instead of a token or an embedding."""
        token_ids, embeddings, at = result.token_ids.copy(), result.embeddings.copy(), 0
        for index, (request_id, count) in enumerate(zip(output.batch.request_ids, result.num_sampled, strict=True)):
            if (count or index in embeddings) and self.faults.random() < self.nan_rate:
                if count:
                    token_ids[at] = NOT_FINITE
                else:
                    embeddings[index] = b""
                running = {
                    each.request_id: set(each.block_tables[0][each.num_passed[0] :])
                    for each in self.scheduler.queues.running
                }
                own = running.pop(request_id, set())
                hashes = self.clients[request_id].request.block_hashes if request_id in self.clients else []
                self.events["NaN in blocks in the host"] += self.tier is not None and any(
                    (g, block_hash) in slots for slots in self.tier._slots for g in range(2) for block_hash in hashes
                )
                self.events["NaN in blocks in the file"] += self.tier is not None and any(
                    saved is not None and (g, block_hash) in saved
                    for saved in self.tier.saved for g in range(2) for block_hash in hashes
                )  # fmt: skip
                self.events["NaN in blocks that others hold"] += any(own & other for other in running.values())
            at += count
        return output, replace(result, token_ids=token_ids, embeddings=embeddings)

    def _proposed(self, output: SchedulerOutput, result: StepResult) -> tuple[SchedulerOutput, StepResult]:
        """The result, with guesses of a drafter on the device."""
        if output.num_proposals:
            for index, (request_id, count) in enumerate(zip(output.batch.request_ids, result.num_sampled, strict=True)):
                client = self.clients.get(request_id)
                if count and client is not None:
                    known = client.request.token_ids + [0] * count
                    guessed = _Answer(self, client).propose(known, output.num_proposals).token_ids
                    result.proposals[index] = guessed
                    self.events["proposals by a model"] += len(guessed)
        return output, result

    def _schedule(self) -> SchedulerOutput:
        queues = self.scheduler.queues
        was_favoured, running = queues.has_favoured, {each: queues.tenant_of(each).name for each in queues.running}
        num_preemptions = self.scheduler.stats().num_preemptions
        output = self.scheduler.schedule()
        if self.scheduler.stats().num_preemptions > num_preemptions:
            stopped = {name for request, name in running.items() if request not in queues.running}
            new = {each.request.tenant for each in output.new_requests}
            self.events["preempted for another tenant"] += bool(new - stopped)
        self.events["paused for favoured tenants"] += was_favoured and any(
            request in queues.running
            and request.request_id not in output.batch.request_ids
            and request.num_tokens < request.max_num_tokens
            and sum(output.batch.num_tokens) < self.scheduler.max_num_batched_tokens
            for request in running
        )
        self.events["shorter for tenants that may come"] += not was_favoured and any(
            output.batch.total_num_tokens < self.scheduler.max_num_batched_tokens for _ in output.batch.partial
        )
        self.events["chunks that cut no image"] += any(
            request.num_computed_tokens == start for request in queues.running for start, _ in request.uncut if start
        )
        return output

    def _check_published(self) -> None:
        """Check that a block holds the tokens of its name, in the very step that publishes it."""
        size, published = self.block_size, dict[Name, int]()
        for pool in self.scheduler.blocks.pools.pools:
            names = {block_id: pool.name_of(block_id) for block_id in range(pool.num_blocks)}
            published |= {name: block_id for block_id, name in names.items() if name is not None}
        for (g, block_hash), block_id in published.items() - self.published.items():
            request = next(each for each in self.requests if block_hash in each.block_hashes)
            end = (request.block_hashes.index(block_hash) + 1) * size
            states = states_of(request.name_ids(0, end), request.seed)[end - size :]
            assert self.runner.read_block(block_id, self.groups[g].pool) == [state ^ g for state in states], (
                "a published block holds other KV than its name says"
            )
        self.published = published

    def _defer(self, launched: Launched) -> Launched:
        """Some requests are not sampled after all."""
        batch, rows = launched.output.batch, self.runner.rows
        late = [
            index
            for index, request_id in enumerate(batch.request_ids)
            if self.lateness.random() < self.defer_rate
            and index not in batch.partial
            and rows[request_id].pooling is None
        ]
        self.scheduler.defer(late)
        self.events["deferred"] += len(late)
        self.events["drafts deferred"] += bool(batch.num_drafts) and any(batch.num_drafts[index] for index in late)
        self.events["deferred, when none is left"] += any(
            batch.request_ids[index] not in self.clients for index in late
        )
        return self.runner.defer(launched, late)

    def _deliver(self, output: EngineOutput) -> None:
        client = self.clients[output.request_id]
        client.receive(output)
        if output.finish_reason is not None:
            self.finished.append(self.clients.pop(output.request_id))
            self.last_gone = output.request_id
            self.events[f"finished by {output.finish_reason}"] += 1
            self.events["finished by a stop token"] += output.stop_reason is not None
            whole_context = len(client.request.token_ids) == self.max_model_len
            self.events["finished by max_model_len"] += whole_context and output.finish_reason == "length"
            if client.request.sampling.prompt_logprobs is not None:
                budget = self.scheduler.max_num_batched_tokens
                self.events["prompts scored in chunks"] += client.request.num_prompt_tokens > budget
                self.events["scored prompts preempted"] += output.num_preemptions > 0
            self.events["resumed after preemption"] += output.num_preemptions > 0
            self.events["prefix-cache hits on named content"] += (
                output.num_cached_tokens > 0 and client.request.engine_request.name_ids is not None
            )
            if client.embedding is not None:
                budget = self.scheduler.max_num_batched_tokens
                self.events["embeddings of chunks"] += client.request.num_prompt_tokens > budget
                self.events["embeddings from a cached prefix"] += output.num_cached_tokens > 0
                self.events["embeddings after preemption"] += output.num_preemptions > 0
                self.events["embeddings of a whole context"] += whole_context
            self.events["ends of text before min_tokens"] += bool(
                set(client.received[: client.request.sampling.min_tokens - 1]) & client.request.stop_ids
            )

    def _come_and_go(self, step: int) -> None:
        while self.arrivals and self.arrivals[0][0] <= step:
            self._add(self.arrivals.pop(0)[1])
        if self.rng.random() < self.abort_rate:
            self._abort()
        if self.rng.random() < self.reset_rate:
            idle = not self.scheduler.queues.running and not (self.tier and self.tier.has_loads)
            assert self.scheduler.reset_prefix_cache() == idle
            if idle and self.store is not None:
                self.store.clear()
            self.events["cache resets"] += idle

    def _add(self, trunk: list[int]) -> None:
        rng = self.rng
        if self.finished and self.turns.random() < 0.3:  # the next turn of a conversation: its prompt ends in an answer
            trunk = self.turns.choice(self.finished).request.token_ids
        prompt = trunk[: rng.choice([len(trunk), rng.randint(0, len(trunk))])] + self._tokens(rng.choice([0, 1, 1, 5]))
        max_tokens = rng.choice([None, rng.randint(1, 30)])
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens or 9)]),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=rng.choice([None, [2], [0, 2]]),
            logprobs=rng.choice([None, None, 0]),
            prompt_logprobs=self.turns.choice([None, None, None, 0]),
        )
        pooling = rng.choice([None, None, None, PoolingParams(), PoolingParams(pooling="mean")])
        if pooling is not None:
            sampling, max_tokens = UNSAMPLED, 1
        eos = frozenset(rng.choice([[0], [0, 1], []]))
        request_id = rng.choice([self.last_gone, *ascii_letters])
        salt = rng.choice([0, 0, 0, 1])
        salt_name = f"salt {salt}" if salt else ""
        names, images = self._named(prompt)
        engine_request = EngineRequest(
            request_id,
            prompt,
            sampling,
            pooling,
            salt_name,
            priority=self.turns.choice([0, 0, 1, -1]),
            tenant=self.tenants.choice(self.tenant_names or [""]),
            deadline=self.tenants.choice([0, 0, 0, self.now + self.tenants.randint(1, 60)]),
            name_ids=names,
            images=images,
        )
        names = engine_request.prompt_name_ids
        request = Request(engine_request, eos, seed=salt)
        most = self.max_model_len + (pooling is not None)  # an embedding adds no token to the context
        longest = min(len(prompt) + (max_tokens or most), most)
        fits = 1 <= len(prompt) < most and self.scheduler.blocks.can_hold(longest - 1)
        if self.groups == (FULL,):
            assert fits == (1 <= len(prompt) < most and longest - 1 <= self.num_blocks * self.block_size)
        if request_id in self.clients or not fits:
            with pytest.raises(ValueError, match=r"in use|would fit|it may have"):
                self.scheduler.add(request)
            self.events["refused"] += 1
            return
        self.scheduler.add(request)
        self.requests.append(request)
        if pooling is None:
            client = Client(request, single_answer(names, sampling, eos, salt, self.max_model_len, self.vocab_size))
        else:
            client = Client(request, ([], "stop", None), single_embedding(names, pooling, salt))
        self.clients[request_id] = client
        in_flight = [each for step in self.in_flight for each in step.output.batch.request_ids]
        self.events["ids used again while in flight"] += request_id in in_flight

    def _named(self, prompt: list[int]) -> tuple[list[int] | None, tuple[ImageInput, ...]]:
        """The prompt with one of two contents in place of its even tokens, or with images; None: without."""
        if self.pictures.random() < self.picture_rate:
            return self._pictured(prompt)
        if self.contents.random() >= self.content_rate:
            return None, ()
        content = self.contents.choice([1, 2]) << 61
        return [content + token if token % 2 == 0 else token for token in prompt], ()

    def _pictured(self, prompt: list[int]) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The prompt with images in place of some of its tokens."""
        names, images, at = prompt.copy(), [], 0
        while (at := at + self.pictures.choice([0, 0, 1, 3])) < len(prompt):
            number = self.pictures.randrange(len(self.picture_sizes))
            size = self.picture_sizes[number]
            if at + size > len(prompt):
                break
            images.append(ImageInput(at, size, (1, size), b"", f"image {number}", self.both_ways))
            names[at : at + size] = [(1 << 62) + 100 * number + each for each in range(size)]
            at += size
        return names, tuple(images)

    def _not_begun(self, output: EngineOutput) -> None:
        """Check the end of a request that would have missed its deadline."""
        client = self.clients.pop(output.request_id)
        assert (output.finish_reason, output.new_token_ids) == ("timeout", [])
        assert client.request.engine_request.deadline
        assert not client.request.scheduled_time, "it was running"
        self.last_gone = output.request_id
        self.events["not begun, since it would be late"] += 1

    def _end_late(self) -> None:
        """Abort the requests whose deadlines have passed, as `AsyncEngine` does."""
        for request_id, client in list(self.clients.items()):
            if 0 < client.request.engine_request.deadline <= self.now:
                assert self.scheduler.abort(request_id)
                del self.clients[request_id]
                assert client.received == client.answer[0][: len(client.received)]
                self.last_gone = request_id
                self.events["timed out"] += 1
                self.events["timed out after its first token"] += bool(client.received)

    def _abort(self) -> None:
        waiting = self.scheduler.queues.waiting
        preempted = [request.request_id for request in waiting if request.num_tokens > len(request.token_ids)]
        request_id = self.rng.choice(["unknown", *self.clients, *preempted * 60])
        client = self.clients.pop(request_id, None)
        if client is None:
            assert not self.scheduler.abort(request_id)
            return
        unread = client.request.num_tokens > len(client.request.token_ids)
        load = client.request.load
        self.events["aborted while its blocks were on their way"] += load is not None and not load.is_done
        state = "running" if client.request in self.scheduler.queues.running else "waiting"
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        self.scheduler.check()
        self.last_gone = request_id
        self.events[f"aborted while {state}, a token in flight" if unread else f"aborted while {state}"] += 1

    def _check_end(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        while self.runner.loads:
            scheduler.arrived([self.runner.arrive(0)])
        while self.tier is not None and self.tier.has_loads:  # of requests that were aborted
            assert self.store is not None
            self.store.begin_reads()
            self.store.step()
        for file in self.files:
            self.events += file.events
        scheduler.check()
        stats = scheduler.stats()
        assert not self.in_flight
        assert not self.clients, "a request got no end"
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks, "blocks are lost"
        assert stats.num_free_states == stats.num_states, "states are lost"
        assert stats.kv_cache_usage == 0
        assert sorted(self.runner.rows) == sorted(scheduler.requests.removed), "rows are lost"
        assert stats.generation_tokens >= sum(len(client.received) for client in self.finished)
        self.events["prefix-cache hits in two pools"] += stats.prefix_hits > 0 and len(scheduler.blocks.pools.pools) > 1
        self.events["preemptions"] += stats.num_preemptions
        self.events["prefix-cache hits"] += stats.prefix_hits > 0


def run_workload(seed: int, has_tier: bool | None = None) -> Counter[str]:
    """`has_tier`: evicted blocks go to host memory; None: in half of the workloads."""
    workload = Workload(seed, Random(seed).random() < 0.5 if has_tier is None else has_tier)
    try:
        return workload.run()
    except BaseException as error:
        error.add_note(f"workload seed {seed}")
        raise


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_TESTS))])
def test_every_answer_is_the_single_request_answer(part: int) -> None:
    events: Counter[str] = Counter()
    for seed in range(part, NUM_WORKLOADS, NUM_TESTS):
        events += run_workload(seed)
    missing = [name for name in EXPECTED_EVENTS if not events[name]]
    assert not missing, f"the workloads do not exercise: {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_TESTS))
def test_every_answer_is_the_single_request_answer_with_a_tier_in_host_memory(part: int) -> None:
    for seed in range(10_000 + part, 11_500, NUM_TESTS):
        run_workload(seed, has_tier=True)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 20))])
def test_what_a_workload_leaves_in_a_file_is_right_in_the_next_one(part: int) -> None:
    """The same requests come again, to an empty cache above the file, with other delays and faults."""
    events: Counter[str] = Counter()
    for seed in range(part, 1500, 20):
        try:
            first = Workload(seed, True, [])
            first.run()
            events += Workload(seed, True, [file.slots for file in first.files]).run()
        except BaseException as error:
            error.add_note(f"workload seed {seed}")
            raise
    missing = [name for name in EXPECTED_OF_FILES if not events[name]] if part == 0 else []
    assert not missing, f"the workloads do not exercise: {missing}"
