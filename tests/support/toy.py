"""A worker without weights or a device, to test the policy by: KV slots hold hashes of their prefix.

Its model: the state after a token is a hash of all tokens up to it, by their names in the prefix cache (and of the
request's seed, so that requests of different seeds must not share blocks), and the next token follows from the state. A
step writes states through the slot mapping and reads the whole context back through the block table, so a slot that
holds anything but the right prefix is found at once. A recurrent layer reads only the block of the token before a
step's first one, and before the step writes. Whatever the contract between policy and mechanism promises is
asserted on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.core.batch import (
    BlockLoad,
    BlockMoves,
    PromptScores,
    ScheduledBatch,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from engine.core.engine_request import ImageInput
from engine.core.kv.block_pools import UNHELD, held_ids
from engine.core.kv.cache_groups import FULL, CacheGroup
from engine.core.params.pooling import PoolingParams
from engine.core.params.sampling import SamplingParams

POISON = -7


def states_of(token_ids: Sequence[int], seed: int, states: list[int] | None = None) -> list[int]:
    """The state after each token; `states` of the first tokens is continued in place."""
    states = [] if states is None else states
    state = states[-1] if states else seed
    for token_id in token_ids[len(states) :]:
        state = hash((state, token_id))
        states.append(state)
    return states


def next_token(state: int, vocab_size: int) -> int:
    return (state >> 7) % vocab_size


def single_answer(
    prompt: list[int], sampling: SamplingParams, eos: frozenset[int], seed: int, max_model_len: int, vocab_size: int
) -> tuple[list[int], str, int | None]:
    """Answer to a request that is alone: tokens, finish reason, stop reason."""
    tokens, states = list(prompt), states_of(prompt, seed)
    while True:
        token = next_token(states[-1], vocab_size)
        tokens.append(token)
        states_of(tokens, seed, states)
        num_output = len(tokens) - len(prompt)
        if num_output >= sampling.min_tokens:
            if token in eos and not sampling.ignore_eos:
                return tokens[len(prompt) :], "stop", None
            if token in (sampling.stop_token_ids or ()):
                return tokens[len(prompt) :], "stop", token
        if num_output == sampling.max_tokens or len(tokens) == max_model_len:
            return tokens[len(prompt) :], "length", None


def single_embedding(prompt: list[int], pooling: PoolingParams, seed: int) -> bytes:
    """Embedding of a request that is alone."""
    states = states_of(prompt, seed)
    return repr(states[-1] if pooling.pooling == "last" else sum(states)).encode()


@dataclass(slots=True)
class Row:
    """A request on the device, which knows each token as soon as it is sampled."""

    token_ids: list[int]
    states: list[int]
    block_tables: list[list[int]]  # one for each cache group
    num_computed: int
    sampling: SamplingParams
    seed: int
    pooling: PoolingParams | None
    num_prompt_tokens: int
    images: tuple[ImageInput, ...] = ()
    is_drafted: bool = False  # its last step had drafts, and no rewind has come since
    pooled: int = 0  # sum of the states that were computed here, not taken from the cache


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that has run, whose result the caller reads when it likes."""

    output: SchedulerOutput
    result: StepResult

    def read(self) -> tuple[SchedulerOutput, StepResult]:
        return self.output, self.result


class ToyRunner:
    """Runs each step when it is launched: the order of steps is all that a device promises."""

    def __init__(
        self,
        num_blocks: int | Sequence[int],
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        groups: Sequence[CacheGroup] = (FULL,),
    ) -> None:
        """`num_blocks`: of the only pool, or of each."""
        self.groups = groups
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        counts = [num_blocks] if isinstance(num_blocks, int) else num_blocks
        self.kv = [[POISON] * (count * block_size) for count in counts]  # of each pool
        self.rows: dict[str, Row] = {}
        self.step = 0
        self.last_batch: ScheduledBatch | None = None
        self.events: Counter[str] = Counter()
        self.host: dict[tuple[int, int], list[int]] = {}  # pool, slot → content
        self.loads: list[BlockLoad] = []  # on their way
        self.encoded: dict[str, int] = {}  # digest of an image → its tokens
        self.max_encoded_tokens = 0

    def poison(self, block_ids: Iterable[int], pool: int = 0) -> None:
        for block_id in held_ids(block_ids):
            self.write_block(block_id, [POISON] * self.block_size, pool)

    def read_block(self, block_id: int, pool: int = 0) -> list[int]:
        return self.kv[pool][block_id * self.block_size : (block_id + 1) * self.block_size]

    def write_block(self, block_id: int, content: list[int], pool: int = 0) -> None:
        self.kv[pool][block_id * self.block_size : (block_id + 1) * self.block_size] = content

    def move(self, moves: BlockMoves) -> None:
        """Copy to the host at once, since later steps may write the blocks. Loads take a while, see `arrive`."""
        for pool, block_id, slot in moves.spills:
            content = self.read_block(block_id, pool)
            assert POISON not in content, "a block that is not written goes to the host"
            self.host[pool, slot] = content
        self.events["blocks to the host"] += len(moves.spills)
        for load in moves.loads:
            for pool, _, block_id in load.copies:
                self.poison([block_id], pool)
            self.loads.append(load)

    def arrive(self, index: int) -> int:
        """End a load: only now are its slots read and its blocks written. Returns its number."""
        load = self.loads.pop(index)
        for pool, slot, block_id in load.copies:
            assert self.read_block(block_id, pool) == [POISON] * self.block_size, "a block on its way was written"
            self.write_block(block_id, self.host[pool, slot], pool)
            self.events["blocks from the host"] += 1
        return load.number

    def launch(self, output: SchedulerOutput) -> Launched:
        self._check(output)
        self._update_rows(output)
        self._encode(output)
        self._read_states(output)
        self._write(output)
        self._read(output)
        return Launched(output, self._sample(output))

    def defer(self, launched: Launched, indices: list[int]) -> Launched:
        """Take back what was sampled at these indices of the last step."""
        for index in indices:
            row = self.rows[launched.output.batch.request_ids[index]]
            for _ in range(launched.result.num_sampled[index]):
                row.token_ids.pop()
                row.states.pop()
            row.num_computed = len(row.token_ids) - 1
        result = launched.result
        token_ids, num_sampled = result.token_ids.copy(), result.num_sampled.copy()
        for index in sorted(indices, reverse=True):
            at = sum(num_sampled[:index])
            del token_ids[at : at + num_sampled[index]]
            num_sampled[index] = 0
        logprobs = {index: found for index, found in result.logprobs.items() if num_sampled[index]}
        return Launched(
            launched.output, replace(result, token_ids=token_ids, num_sampled=num_sampled, logprobs=logprobs)
        )

    def _check(self, output: SchedulerOutput) -> None:
        assert output.step > self.step, "steps are numbered in order"
        self.step = output.step
        batch, ids, sizes = output.batch, output.batch.request_ids, output.batch.num_tokens
        assert sizes, "an empty step was launched"
        assert len(ids) == len(sizes) == len(batch)
        assert min(sizes) >= 1
        assert sum(sizes) == batch.total_num_tokens <= self.max_num_batched_tokens
        assert batch.num_decodes == sizes.count(1)
        assert sizes[: batch.num_decodes].count(1) == batch.num_decodes, "requests that compute one token come first"
        assert len(set(ids)) == len(ids), "a request twice in a batch"
        assert set(output.drafts) == {ids[i] for i, number in enumerate(batch.num_drafts) if number}
        if batch is self.last_batch:
            assert not set(ids) & set(output.removed), "the same batch object for other requests"
            self.events["the same batch object again"] += 1
        self.last_batch = batch
        assert {new.request_id for new in output.new_requests} <= set(ids), "admitted for nothing"

    def _update_rows(self, output: SchedulerOutput) -> None:
        for request_id in output.removed:
            del self.rows[request_id]
        for new in output.new_requests:
            assert new.request_id not in self.rows, "a second row for one request"
            tokens, num_computed = new.token_ids, new.num_computed_tokens
            assert num_computed % self.block_size == 0
            assert num_computed < len(tokens), "nothing left to compute"
            assert 1 <= new.num_prompt_tokens <= len(tokens)
            for group, block_ids in zip(self.groups, new.block_ids, strict=True):
                self.poison(block_ids[num_computed // self.block_size :], group.pool)
            self.rows[new.request_id] = Row(
                list(tokens),
                states_of(new.request.prompt_name_ids + tokens[new.num_prompt_tokens :], new.seed),
                [list(block_ids) for block_ids in new.block_ids],
                num_computed,
                new.request.sampling,
                new.seed,
                new.request.pooling,
                new.num_prompt_tokens,
                new.request.images,
            )
        assert len(self.rows) <= self.max_num_seqs, "more rows than the device has"
        admitted = {new.request_id for new in output.new_requests}
        assert not admitted & set(output.new_block_ids), "a new request has all its blocks"
        for request_id, tables in output.new_block_ids.items():
            row = self.rows[request_id]
            for group, table, added in zip(self.groups, row.block_tables, tables, strict=True):
                self.poison(added, group.pool)
                table += added
        for request_id, (num_computed, newest) in output.rewinds.items():
            row = self.rows[request_id]
            assert row.is_drafted, "a row without drafts is set back"
            assert (row.num_computed, row.token_ids[-1]) == (num_computed, newest)
            row.is_drafted = False
        for index, (row, num_tokens) in enumerate(self._scheduled(output)):
            assert not row.is_drafted, "the outcome of its drafts is not known yet"
            if number := self._num_drafts(output, index):
                drafts = output.drafts[output.batch.request_ids[index]]
                assert len(drafts) == number == num_tokens - 1
                assert row.num_computed == len(row.token_ids) - 1
                row.token_ids += drafts
                states_of(row.token_ids, row.seed, row.states)
            end = row.num_computed + num_tokens
            assert end <= len(row.token_ids), "a token that is not sampled yet"
            assert (index in output.batch.partial) == (end < len(row.token_ids))

    def _encode(self, output: SchedulerOutput) -> None:
        for digest in output.encoder.forgotten if output.encoder else ():
            del self.encoded[digest]
            self.events["encoded images forgotten"] += 1
        new: dict[str, int] = {}
        for row, num_tokens in self._scheduled(output):
            for image in row.images:
                if image.start < row.num_computed + num_tokens and row.num_computed < image.stop:
                    if image.digest not in self.encoded:
                        new[image.digest] = image.num_tokens
                    else:
                        self.events["images encoded before"] += row.num_computed <= image.start
        total = sum(new.values())
        assert total == (output.encoder.num_tokens if output.encoder else 0), "more is encoded than was planned"
        assert total <= self.max_num_batched_tokens or len(new) == 1, "more is encoded than the budget allows"
        self.encoded |= new
        assert sum(self.encoded.values()) <= self.max_encoded_tokens or len(self.encoded) == 1, "too many are kept"
        self.events["images encoded"] += len(new)
        self.events["an image above the budget"] += total > self.max_num_batched_tokens

    @staticmethod
    def _num_drafts(output: SchedulerOutput, index: int) -> int:
        return output.batch.num_drafts[index] if output.batch.num_drafts else 0

    def _scheduled(self, output: SchedulerOutput) -> Iterator[tuple[Row, int]]:
        for request_id, num_tokens in zip(output.batch.request_ids, output.batch.num_tokens, strict=True):
            yield self.rows[request_id], num_tokens

    def _write(self, output: SchedulerOutput) -> None:
        size = self.block_size
        written: dict[tuple[int, int], Row] = {}  # by pool and block
        for row, num_tokens in self._scheduled(output):
            for position in range(row.num_computed, row.num_computed + num_tokens):
                for g, (group, table) in enumerate(zip(self.groups, row.block_tables, strict=True)):
                    block_id = table[position // size]
                    if group.is_state and block_id == UNHELD:
                        assert position < row.num_computed + num_tokens - 1, "the newest state has no block"
                        continue
                    assert block_id != UNHELD, "a token without a block"
                    assert written.setdefault((group.pool, block_id), row) is row, "two writers of one block"
                    self.kv[group.pool][block_id * size + position % size] = row.states[position] ^ g
                row.pooled += row.states[position]
            row.num_computed += num_tokens
        for new in output.new_requests:
            num_cached = new.num_computed_tokens // size
            for group, block_ids in zip(self.groups, new.block_ids, strict=True):
                cached = block_ids[group.first_needed(new.num_computed_tokens) // size : num_cached]
                self.events["hits on a block filled in the same step"] += any(
                    (group.pool, block_id) in written for block_id in cached
                )
                self.events["prefix-cache hits in a window group"] += bool(group.window and cached)
                self.events["prefix-cache hits on states"] += bool(group.is_state and cached)

    def _read_states(self, output: SchedulerOutput) -> None:
        """Read the states from which the step continues. No layer does so later, when others have written theirs."""
        size = self.block_size
        for row, _ in self._scheduled(output):
            for g, (group, table) in enumerate(zip(self.groups, row.block_tables, strict=True)):
                if not group.is_state or not row.num_computed:
                    continue
                index = (row.num_computed - 1) // size
                assert table[index] != UNHELD, "a state that is read is not held"
                found = self.read_block(table[index], group.pool)[: row.num_computed - index * size]
                assert found == [state ^ g for state in row.states[index * size : row.num_computed]], (
                    f"step {output.step}: a request continues from a state that is not its own prefix's"
                )

    def _read(self, output: SchedulerOutput) -> None:
        size = self.block_size
        for row, num_tokens in self._scheduled(output):
            for g, (group, table) in enumerate(zip(self.groups, row.block_tables, strict=True)):
                if group.is_state:
                    continue
                first = group.first_needed(row.num_computed - num_tokens)
                for position in range(first, row.num_computed):
                    assert table[position // size] != UNHELD, "a block that is read is not held"
                    found = self.kv[group.pool][table[position // size] * size + position % size]
                    assert found == row.states[position] ^ g, (
                        f"step {output.step}: a request reads KV that is not its own prefix's"
                    )

    def _sample(self, output: SchedulerOutput) -> StepResult:
        token_ids, num_sampled, logprobs, prompt_logprobs, embeddings = [], [], {}, {}, {}
        for index, (row, num_tokens) in enumerate(self._scheduled(output)):
            if number := self._num_drafts(output, index):
                kept = self._verify(row, number)
                token_ids += kept
                num_sampled.append(len(kept))
                if row.sampling.logprobs is not None:
                    logprobs[index] = [TokenLogprobs(-float(token), 1, [], []) for token in kept]
                continue
            num_sampled.append(int(row.pooling is None and index not in output.batch.partial))
            first = row.num_computed - num_tokens + 1
            if row.sampling.prompt_logprobs is not None and first < row.num_prompt_tokens:
                scored = row.token_ids[first : min(row.num_computed + 1, row.num_prompt_tokens)]
                prompt_logprobs[index] = PromptScores(first, [TokenLogprobs(-float(t), 1, [], []) for t in scored])
            if index in output.batch.partial:
                continue
            if row.pooling is not None:
                value = row.states[-1] if row.pooling.pooling == "last" else row.pooled
                embeddings[index] = repr(value).encode()
                continue
            token_id = next_token(row.states[-1], self.vocab_size)
            row.token_ids.append(token_id)
            states_of(row.token_ids, row.seed, row.states)
            token_ids.append(token_id)
            if row.sampling.logprobs is not None:
                logprobs[index] = [TokenLogprobs(-float(token_id), 1, [], [])]
        return StepResult(token_ids, num_sampled, logprobs, prompt_logprobs, embeddings)

    def _verify(self, row: Row, number: int) -> list[int]:
        """Keep the drafts up to the first wrong one, and sample the token after them. Returns these tokens."""
        first = len(row.token_ids) - number
        end = first
        while end < first + number and row.token_ids[end] == next_token(row.states[end - 1], self.vocab_size):
            end += 1
        self.events["drafts accepted"] += end - first
        self.events["drafts rejected"] += first + number - end
        del row.token_ids[end:], row.states[end:]
        row.num_computed, row.is_drafted = end, True
        row.token_ids.append(next_token(row.states[-1], self.vocab_size))
        states_of(row.token_ids, row.seed, row.states)
        return row.token_ids[first:]
