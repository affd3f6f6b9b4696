"""An engine without a model: the interface of `AsyncEngine`, real text handling, and canned tokens."""

import asyncio
import math
import os
import random
import time
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.core.batch import EngineOutput, SchedulerStats, TokenLogprobs
from engine.core.engine_request import Adapter, EngineRequest
from engine.core.params.pooling import UNSAMPLED, PoolingParams
from engine.core.params.sampling import SamplingParams
from engine.errors import EngineAsleepError, EngineDeadError, EngineError
from engine.models.pooling_config import Prompts
from engine.processing.adapters import find_adapter
from engine.processing.grammars import vocabulary_of
from engine.processing.input_processor import InputProcessor
from engine.processing.model_info import ModelInfo
from engine.processing.output_collector import OutputCollector, RequestUpdate
from engine.processing.stored_weights import StoredWeights
from engine.replicas.in_flight import InFlight
from engine.replicas.state import EngineState, StateHolder
from engine.stats import ExpertTokens, StepTokens
from engine.structured.grammar import Compiler
from engine.text.tokenizer import Tokenizer
from engine.vision.loader import ImageLoader

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'refused' or m.content == 'refuse me' %}{{ raise_exception('no such words') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{{ extra }}{{ tools | length if tools else '' }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN_SIZE = 8
ANSWER = "Grüße! Ein 👋 von mir. Zwei plus zwei ist vier.\n\nEnd"


def make_tokenizer(template: str | Mapping[str, str] | None = TEMPLATE, special: Sequence[str] = ()) -> Tokenizer:
    """One token for each byte, so that most characters outside ASCII are several tokens; from 256 they are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<|im_start|>", "<|im_end|>", "<|bos|>", *special]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"}, template)


def embedding_of(prompt: list[int], pooling: PoolingParams) -> list[float]:
    """Embedding of a prompt: by its last token, or by all of them."""
    chosen = prompt if pooling.pooling == "mean" else prompt[-1:]
    vector = [math.fsum(math.sin(token * (i + 1) + 1) for token in chosen) for i in range(HIDDEN_SIZE)]
    vector = vector[: pooling.dimensions]
    length = math.hypot(*vector) if pooling.normalize else 1.0
    return [value / length for value in vector]


class FakeEngine:
    """Answers `answer` token by token, then ends; with ignore_eos over and over. Seeds rotate the answer."""

    def __init__(
        self,
        *,
        template: str | Mapping[str, str] | None = TEMPLATE,
        max_model_len: int = 512,
        delay: float = 0.0,
        max_num_seqs: int = 1000,
    ) -> None:
        """`max_num_seqs`: requests that run, as its statistics say; the others are waiting."""
        self.max_num_seqs = max_num_seqs
        self.in_flight = getattr(self, "in_flight", None) or InFlight()  # the server keeps it
        self.answer, self.delay = ANSWER, delay
        self.num_blocks, self.block_size, self.max_model_len = 32, 16, max_model_len
        self.tokenizer: Tokenizer | None = make_tokenizer(template)
        self.default_sampling: dict[str, Any] = {}
        self.default_pooling = "last"
        self.is_encoder, self.prompts = False, Prompts()
        self.classifier: Any = None
        self.images: ImageLoader | None = None
        self.weights: StoredWeights | None = None
        self.with_images: list[EngineRequest] = []
        self.generates = True
        self.model_name = "toy"
        self.eos_token_ids = (257,)
        self.architecture = "ToyForCausalLM"
        self.stats: SchedulerStats | None = None
        self.states = StateHolder()
        self.states.enter("ready")
        self.step_tokens = StepTokens()
        self.expert_tokens = ExpertTokens()
        self.pid = os.getpid()
        self.replicas = [self]
        self.fail_after: int | None = None  # tokens after which a request ends with "error"
        self.refuses = False  # the request is to blame for that
        self.time_out_after: int | None = None  # tokens after which a request with a deadline ends for that
        self.die_after: int | None = None  # tokens after which the engine dies
        self.holds = False  # answers and embeddings wait until they are aborted
        self.holds_after: int | None = None  # tokens after which answers do: they are there however slow the test is
        self.active: dict[str, list[int]] = {}
        self.begun: set[str] = set()  # perhaps before anything reads their answers
        self.aborted: set[str] = set()
        self.requests: list[tuple[str, list[int], SamplingParams]] = []
        self.salts: list[str] = []
        self.owners: list[str] = []
        self.deadlines: list[float] = []
        self.embedded: list[tuple[list[int], PoolingParams, int]] = []  # with their priorities
        self.priorities: list[int] = []
        self.ended: dict[str, int] = {}  # tokens that each request got
        self.num_resets = 0  # of the prefix cache
        self.max_loras = 0  # no adapters are served
        self.adapters: list[str | None] = []  # names, of each request's
        self.sleep_level = 0
        self.cannot_sleep = ""  # why
        self._generated = 0

    @property
    def state(self) -> EngineState:
        return self.states.state

    async def state_change(self, seen: EngineState) -> EngineState:
        return await self.states.change(seen)

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(
            name=self.model_name,
            architecture=self.architecture,
            max_model_len=self.max_model_len,
            generates=self.generates,
            eos_token_ids=self.eos_token_ids,
            tokenizer=self.tokenizer,
            default_sampling=self.default_sampling,
            default_pooling=self.default_pooling,
            is_encoder=self.is_encoder,
            prompts=self.prompts,
            hidden_size=HIDDEN_SIZE,
            classifier=self.classifier,
            images=self.images,
            weights=self.weights,
        )

    @property
    def num_requests(self) -> int:
        return len(self.active)

    @property
    def _input_processor(self) -> InputProcessor:
        size = self.tokenizer.vocab_size if self.tokenizer is not None else 259
        head = None
        if self.classifier is not None and self.classifier.is_in_worker:
            head = SimpleNamespace(pooling=self.classifier.pooling)
        spec: Any = SimpleNamespace(
            vocab_size=size, max_token_id=size - 1, eos_token_ids=(257,), hidden_size=HIDDEN_SIZE, has_head=True,
            embedding_size=HIDDEN_SIZE, head=head, is_encoder=self.is_encoder,
        )  # fmt: skip
        return InputProcessor(Path(), "toy", spec, self.tokenizer, {}, self.max_model_len, 5)

    async def prepare(self, sampling: SamplingParams, tenant: str = "") -> SamplingParams:
        """The grammar is checked, and heeded by `GrammarEngine` alone."""
        if sampling.structured_outputs is None:
            return self._input_processor.prepare(sampling)
        return await asyncio.to_thread(self._input_processor.prepare, sampling)

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestUpdate, None]:
        request_id, prompt = request.request_id, request.prompt_token_ids
        self._input_processor.check(request)
        self.with_images += [request] if request.images else []
        self.salts.append(request.cache_salt)
        self.adapters.append(None if request.adapter is None else request.adapter.name)
        self.owners.append(request.tenant)
        self.deadlines.append(request.deadline)
        if request.pooling is not None:
            self.embedded.append((prompt, request.pooling, request.priority))
        else:
            self.priorities.append(request.priority)
        if self.state.phase == "dead":
            raise EngineDeadError(self.state.reason)
        if self.sleep_level:
            raise EngineAsleepError("the model is asleep")
        self.in_flight.add(request_id, request.tenant)
        self.begun.add(request_id)
        if request.pooling is not None:
            return self._embed(request_id, prompt, request.pooling)
        return self._generate(request_id, prompt, request.sampling)

    async def _embed(
        self, request_id: str, prompt: list[int], pooling: PoolingParams
    ) -> AsyncGenerator[RequestUpdate, None]:
        assert request_id not in self.active
        self.active[request_id] = []
        collector = OutputCollector(prompt, UNSAMPLED, self.tokenizer)
        now = time.monotonic()
        try:
            while self.holds and request_id not in self.aborted:
                await asyncio.sleep(0.005)
            output = EngineOutput(request_id, [], "stop", None, None, min(3, len(prompt) - 1), 0, now, now)
            if request_id in self.aborted:
                output.finish_reason = "abort"
            elif self.fail_after is not None:
                output.finish_reason, output.error = "error", "it is broken"
            else:
                output.embedding = array("f", embedding_of(prompt, pooling)).tobytes()
            collector.add(output, time.monotonic())
            yield collector.take()
        finally:
            del self.active[request_id]
            self.ended[request_id] = 0
            self.in_flight.end(request_id)
            self.begun.discard(request_id)

    async def abort(self, request_id: str) -> None:
        if request_id in self.active or request_id in self.begun:
            self.aborted.add(request_id)

    async def load_adapter(self, name: str, path: str) -> Adapter:
        if self.state.phase == "dead":
            raise EngineDeadError(self.state.reason)
        return find_adapter(name, path)

    @property
    def is_sleeping(self) -> bool:
        return self.sleep_level > 0

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        if self.cannot_sleep:
            raise EngineError(self.cannot_sleep)
        if abort:
            for request_id in list(self.active):
                await self.abort(request_id)
        self.sleep_level = level
        self.states.enter("asleep")

    async def wake_up(self) -> None:
        if self.cannot_sleep:
            raise EngineError(self.cannot_sleep)
        self.sleep_level = 0
        self.states.enter("ready")

    weights_path, weights_version = "first", 0

    async def update_weights(self, path: str, *, abort: bool = False) -> None:
        if self.cannot_sleep:
            raise EngineError(self.cannot_sleep)
        if abort:
            for request_id in list(self.active):
                await self.abort(request_id)
        self.weights_path, self.weights_version = path, self.weights_version + 1

    async def reset_prefix_cache(self) -> bool:
        if self.state.phase == "dead":
            raise EngineDeadError(self.state.reason)
        self.num_resets += not self.active
        return not self.active

    def tokens(self, sampling: SamplingParams) -> list[int]:
        tokenizer = self.tokenizer or make_tokenizer()
        ids = tokenizer.encode(self.answer)
        first = (sampling.seed or 0) % 7
        ids = ids[first:] + ids[:first]
        if sampling.ignore_eos:
            return (ids * (1 + (sampling.max_tokens or 0) // len(ids)))[: sampling.max_tokens]
        return [*ids, 257][: sampling.max_tokens]

    def _stats(self) -> SchedulerStats:
        num_active = len(self.active)
        return SchedulerStats(
            num_running=min(num_active, self.max_num_seqs),
            num_waiting=max(num_active - self.max_num_seqs, 0),
            num_blocks=32,
            num_free_blocks=32 - num_active,
            num_preemptions=0,
            prefix_queries=4 * self._generated,
            prefix_hits=self._generated,
            prompt_tokens=50,
            generation_tokens=self._generated,
            num_corrupted=3,
        )

    async def _generate(
        self, request_id: str, prompt: list[int], sampling: SamplingParams
    ) -> AsyncGenerator[RequestUpdate, None]:
        assert request_id not in self.active
        self.requests.append((request_id, prompt, sampling))
        generated = self.active[request_id] = []
        collector = OutputCollector(prompt, sampling, self.tokenizer)
        tokens = self.tokens(sampling)
        now = time.monotonic()
        try:
            while True:
                await asyncio.sleep(self.delay)
                while (self.holds or len(generated) == self.holds_after) and request_id not in self.aborted:
                    await asyncio.sleep(0.005)
                if self.die_after is not None and len(generated) >= self.die_after:
                    self.states.enter("dead", reason="the engine process was killed by SIGKILL")
                if self.state.phase == "dead":
                    raise EngineDeadError(self.state.reason)
                if request_id in self.aborted:
                    collector.add(EngineOutput(request_id, [], "abort"), time.monotonic())
                    yield collector.take()
                    return
                if self.deadlines[-1] and self.time_out_after == len(generated):
                    collector.add(EngineOutput(request_id, [], "timeout"), time.monotonic())
                    yield collector.take()
                    return
                token = tokens[len(generated)]
                generated.append(token)
                self._generated += 1
                self.stats = self._stats()
                self.step_tokens.observe(self.stats)
                finish = None
                if token == 257 or token in (sampling.stop_token_ids or ()):
                    finish = "stop"
                elif len(generated) == len(tokens):
                    finish = "length"
                if self.fail_after == len(generated):
                    finish = "error"
                logprobs = None
                if sampling.logprobs is not None:
                    top = sampling.logprob_token_ids or [token, 65, 66, 67, 68][: sampling.logprobs]
                    logprobs = [TokenLogprobs(-0.5, 1, top, [-0.5, -1.5, float("-inf"), -4.0, -5.0][: len(top)])]
                stop_token = token if finish == "stop" and token != 257 else None
                output = EngineOutput(
                    request_id, [token], finish, stop_token, logprobs, min(3, len(prompt) - 1), 0, now, now
                )
                if (most := sampling.prompt_logprobs) is not None and len(generated) == 1:
                    tops = [67, 68, 69, 70, 71][:most]
                    output.prompt_logprobs = [
                        TokenLogprobs(-float(i), i, tops, [-0.25] * len(tops)) for i in range(1, len(prompt))
                    ]
                output.error = "it is broken" if finish == "error" else ""
                output.is_refused = self.refuses and finish == "error"
                collector.add(output, time.monotonic())
                update = collector.take()
                yield update
                if update.finish_reason is not None:
                    return
        finally:
            del self.active[request_id]
            self.ended[request_id] = len(generated)
            self.in_flight.end(request_id)
            self.begun.discard(request_id)


class GrammarEngine(FakeEngine):
    """Writes `answer` as far as the request's grammar allows, then what comes to its mind: a model that knows nothing.

    It likes to come to an end.
    """

    def __init__(self, *, special: Sequence[str] = (), template: str | None = TEMPLATE, **options: Any) -> None:
        """`special`: tokens of the vocabulary beside the usual ones."""
        super().__init__(template=template, **{"max_model_len": 8192, **options})
        self.tokenizer = make_tokenizer(template, special)
        self.compiler = Compiler(lambda: vocabulary_of(self.tokenizer, self.tokenizer.vocab_size, [257]))  # type: ignore

    def tokens(self, sampling: SamplingParams) -> list[int]:
        if sampling.structured_outputs is None:
            return super().tokens(sampling)
        assert sampling.structured_outputs.compiled is not None
        assert self.tokenizer is not None
        matcher = self.compiler.compile(sampling.structured_outputs.compiled)
        dice, found = random.Random(sampling.seed or 0), list[int]()
        wanted = self.tokenizer.encode(self.answer)
        while len(found) < (sampling.max_tokens or 1):
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            if wanted and bits >> wanted[0] & 1:
                token = wanted.pop(0)
            else:
                wanted = []
                allowed = [i for i in range(bits.bit_length()) if bits >> i & 1]
                ends = [i for i in (257, *self.tokenizer.encode('"]}')) if i in allowed]
                token = dice.choice(ends if ends and dice.random() < 0.3 else allowed)
            assert matcher.consume_token(token), matcher.get_error()
            found.append(token)
            if token == 257:
                break
        return found
