"""Offline inference in this process, with the interface of vLLM's `LLM`.

llm = LLM(model="...")
for result in llm.generate(["Once upon a time"], SamplingParams(max_tokens=50)):
    print(result.outputs[0].text)
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from engine.config import EngineConfig
from engine.core.engine_request import Adapter, EngineRequest
from engine.core.params.pooling import UNSAMPLED, PoolingParams
from engine.core.params.sampling import SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.flags import nearest, settings_of
from engine.offline.beams import search_beams
from engine.offline.images import load_all, take_images
from engine.offline.job_runner import Answer, Job, JobRunner, check_all
from engine.offline.lost_rank import LostRank
from engine.offline.results import embedding_output, request_output
from engine.offline.scores import (
    ClassificationRequestOutput,
    ScoringRequestOutput,
    classified,
    classifiers_of,
    pairs_of,
    read_by,
    scored,
    similarities,
    what_scores,
)
from engine.processing.adapters import LoRARequest, LoRARequests, adapters_of
from engine.processing.beam_search import BeamSearchParams
from engine.processing.input_processor import InputProcessor
from engine.processing.output_collector import (
    BeamSearchOutput,
    EmbeddingRequestOutput,
    OutputCollector,
    RequestOutput,
    with_samples,
)
from engine.processing.prompts import Prompt, as_list, read_prompt
from engine.setup.weight_source import TensorFolders
from engine.text.chat_renderer import ChatRenderer
from engine.text.chat_templates import choose_renderer
from engine.text.tokenizer import Tokenizer, TokenizerError
from engine.utils.progress import TerminalProgress

Bar: TypeAlias = bool | Callable[..., Any]  # whether to show progress, or a function that makes a bar
Messages: TypeAlias = list[dict[str, Any]]
Prompts: TypeAlias = Prompt | Sequence[Prompt]
Texts: TypeAlias = str | list[str]
_log = logging.getLogger(__name__)


class LLM:
    """A model in this process. Not thread-safe."""

    def __init__(self, model: str, **settings: Any) -> None:
        """Load `model`, a folder or a Hugging Face id. `settings`: fields of `EngineConfig`.

        Raises `TypeError` for an unknown setting, else `ModelError`, `TokenizerError`, `ConfigError` or `EngineError`,
        each with a message of one line.
        """
        start = time.perf_counter()
        known = settings_of(EngineConfig)
        for name in settings:
            if name not in known:
                raise TypeError(f"LLM() has no setting {name!r}{nearest(name, known)}")
        self.config = EngineConfig(model=model, **settings)
        if self.config.data_parallel_size > 1:
            raise ConfigError("data_parallel_size must be 1 offline: replicas are the server's")
        processor = InputProcessor.load(self.config)
        config, spec = processor.local(self.config), processor.spec
        ends, progress = processor.eos_token_ids, TerminalProgress()
        self._lost = lost = LostRank()
        with lost.raised():
            self._engine = Engine(config, spec=spec, eos_token_ids=ends, offline=True, progress=progress, lost=lost)
        self._input_processor = processor.of_engine(self._engine.runner.max_model_len)
        self._ids = itertools.count()
        self._runner = JobRunner(self._engine, self._lost)
        self._tensors = TensorFolders()
        print(f"{self._engine.summary()} · ready in {time.perf_counter() - start:.1f} s", file=sys.stderr)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        priority: list[int] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Generate completions for one prompt or several. Results are in the order of the prompts.

        `sampling_params`: one for all prompts, or a list with one for each; None: the model's defaults. `use_tqdm`:
        whether to show a progress bar, or a function that makes one. `priority`: one for each prompt; lower values run
        first. `lora_request`: the LoRA adapter of all prompts, or a list with one for each, None for the base model
        alone; needs the setting `enable_lora`.

        A completion that fails has the `finish_reason` "error" and an `error`; all others are returned as without it.
        Raises `ValueError`, which names the prompt, if one cannot run; then none runs. Ctrl-C aborts all requests; the
        LLM stays usable.
        """
        return self._generate(prompts, sampling_params, use_tqdm, True, priority, lora_request)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or several: lists of {"role": …, "content": …}.

        `content` is a text or a list of parts: {"type": "text", "text": …}, {"type": "image", "image": …} with a Pillow
        image, a path or the bytes of a file, {"type": "image_url", "image_url": {"url": …}}.

        `chat_template`: a Jinja template, or the path of one, to use instead of the model's. `continue_final_message`:
        continue the last message instead of answering it; requires `add_generation_prompt=False`. Otherwise as
        `generate`.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False")
        conversations = _conversations(messages)
        renderer = _chat_renderer(self._input_processor, self.get_tokenizer(), chat_template, bool(tools))
        loader = self._input_processor.images
        with_images = [take_images(conversation) for conversation in conversations]
        rendered = [
            renderer.render(
                conversation,
                image_text=loader.text if loader is not None and images else "",
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation, images in with_images
        ]
        for change in dict.fromkeys(change for each in rendered for change in each.changes):
            _log.warning("messages: %s", change)
        prompts: list[Prompt] = [
            {"prompt": each.text, "multi_modal_data": {"image": [images[i] for i in each.images] if loader else images}}
            if images
            else each.text
            for each, (_, images) in zip(rendered, with_images, strict=True)
        ]
        return self._generate(prompts, sampling_params, use_tqdm, False, None, lora_request)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of KV cache and weights until `wake_up`. `level`: 1: the weights move to host memory; 2: they
        are dropped, and loaded again. Raises `EngineError` for level 1 with several ranks.
        """
        self._engine.sleep(level)

    def wake_up(self) -> None:
        """End `sleep`. Raises `EngineError` if memory is too low by now; the model is still asleep then."""
        self._engine.wake_up()

    def update_weights(self, weights: str | Mapping[str, Tensor]) -> None:
        """Replace the weights by those in another folder of the same model; or some tensors: those in a folder without
        config.json, these ones, by the checkpoint's names, or those that `send_weights` sends from an address.

        Raises `EngineError` if they do not fit: those of before stay. Tensors are copied to shared memory, and stay
        there until all of them are replaced, or `close`.
        """
        self._tensors.update(self._engine, weights)

    def is_sleeping(self) -> bool:
        """Return whether the model sleeps."""
        return self._engine.is_sleeping

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: Bar = True,
        priority: list[int] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed one prompt or several: pool the model's final hidden states. Results are in the order of the prompts.

        `pooling`: "last" for the last token's hidden state, "mean" for the mean over all tokens, "cls" for the first
        token's, of encoders; None: the engine's setting `pooling`. `normalize`: scale to length 1; None: as the model's
        modules.json says, else True. `dimensions`: keep only the first ones, for models trained for that.
        `prompt_name`: the model's prompt that is put before texts, such as "query"; None: its default, if it has one.
        Otherwise as `generate`. Raises `EngineError` if a prompt fails, `ValueError` for an unknown prompt.

        A classifier of texts or tokens among the encoders gives logits; `normalize` must be False.
        """
        own = self._input_processor
        params = PoolingParams(
            pooling=pooling or own.default_pooling,
            normalize=own.default_normalize if normalize is None else normalize,
            dimensions=dimensions,
        )
        prefix = own.prompts.prefix(prompt_name)
        several = [prefix + each if isinstance(each, str) else each for each in as_list(prompts)]
        adapters = adapters_of(lora_request, len(several), self.config.enable_lora)
        jobs = self._jobs(several, [UNSAMPLED] * len(several), True, priority, params, adapters)
        self._runner.run(jobs, use_tqdm, "Embedding")
        check_all(jobs)
        return [embedding_output(job) for job in jobs]

    def classify(
        self,
        prompts: Prompts,
        *,
        use_tqdm: Bar = True,
        priority: list[int] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[ClassificationRequestOutput]:
        """Label one text or several by the model's classifier or an adapter's. Raises `ValueError`, and as `embed`."""
        several = as_list(prompts)
        adapters = adapters_of(lora_request, len(several), self.config.enable_lora)
        classifiers = classifiers_of(self._input_processor, adapters)
        options: Any = {"use_tqdm": use_tqdm, "priority": priority, "lora_request": lora_request}
        return classified(classifiers, self.embed(several, **read_by(classifiers), **options))

    def score(
        self, text_1: Texts, text_2: Texts, *, use_tqdm: Bar = True, lora_request: LoRARequest | None = None
    ) -> list[ScoringRequestOutput]:
        """Score a text with each of several others, or texts with others pair by pair.

        A classifier with one label reads both texts of a pair. Embedding models: cosine similarity.
        Raises `ValueError` if the model is neither, and as `embed`.
        """
        pairs = pairs_of(text_1, text_2)
        [adapter] = adapters_of(lora_request, 1, self.config.enable_lora)
        prompts, classifier = what_scores(self._input_processor, adapter, pairs)
        options = {"normalize": True} if classifier is None else read_by([classifier])
        found = self.embed(prompts, use_tqdm=use_tqdm, lora_request=lora_request, **options)
        return similarities(found) if classifier is None else scored(classifier, found)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, use_tqdm: Bar = False, lora_request: LoRARequests = None
    ) -> list[BeamSearchOutput]:
        """Search for the most likely completions: `params.beam_width` for each prompt, the best first.

        `use_tqdm`: show a progress bar for each step. Otherwise as `generate`. Raises `EngineError` if a prompt fails.
        """
        first = params.step_sampling()
        several = as_list(prompts)
        if any(isinstance(each, Mapping) and each.get("multi_modal_data") for each in several):
            raise ValueError("beam_search takes no images: use a server's API for that")
        adapters = adapters_of(lora_request, len(several), self.config.enable_lora)
        jobs = self._jobs(several, [first] * len(several), True, None, None, adapters)

        def step(asked: list[Prompt], own: list[Adapter | None]) -> list[Job]:
            steps = self._jobs(asked, [first] * len(asked), True, None, None, own)
            self._runner.run(steps, use_tqdm, "Beam search")
            check_all(steps)
            return steps

        return search_beams(jobs, params, self._input_processor, step, adapters)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `ValueError` with `skip_tokenizer_init`."""
        if self._input_processor.tokenizer is None:
            raise ValueError("there is no tokenizer (skip_tokenizer_init)")
        return self._input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's `generation_config.json` suggests."""
        return SamplingParams(**self._input_processor.default_sampling)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns whether it was emptied: not while requests are running."""
        return self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Release the device's memory. The LLM cannot be used afterwards."""
        self._runner.close()
        self._tensors.close()

    def _generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: Bar,
        add_special_tokens: bool,
        priority: list[int] | None,
        lora_request: LoRARequests,
    ) -> list[RequestOutput]:
        several = as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        each = _one_each(sampling_params, len(several))
        adapters = adapters_of(lora_request, len(several), self.config.enable_lora)
        jobs = self._jobs(several, each, add_special_tokens, priority, None, adapters)
        self._runner.run(jobs, use_tqdm, "Generating")
        has_metrics, tokenizer = not self.config.disable_log_stats, self._input_processor.tokenizer
        return [request_output(job, tokenizer, has_metrics) for job in jobs]

    def _jobs(
        self,
        prompts: list[Prompt],
        sampling_params: list[SamplingParams],
        add_special_tokens: bool,
        priority: list[int] | None,
        pooling: PoolingParams | None,
        adapters: list[Adapter | None],
    ) -> list[Job]:
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"priority must be one for each prompt ({len(prompts)}), got {len(priority)}")
        jobs = []
        asked = zip(prompts, sampling_params, adapters, strict=True)
        for index, (prompt, sampling, adapter) in enumerate(asked):
            try:
                first = priority[index] if priority is not None else 0
                jobs.append(self._job(prompt, sampling, add_special_tokens, pooling, first, adapter))
            except (ValueError, TokenizerError) as error:
                raise ValueError(f"prompts[{index}]: {error}") from None
        return jobs

    def _job(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        add_special_tokens: bool,
        pooling: PoolingParams | None,
        priority: int,
        adapter: Adapter | None,
    ) -> Job:
        (text, token_ids, cache_salt, images), loader = read_prompt(prompt), self._input_processor.images
        loaded = [] if images is None else load_all(loader, images)
        if token_ids is None:
            assert text is not None
            if self._input_processor.tokenizer is None:
                raise ValueError("is a text, but there is no tokenizer (skip_tokenizer_init): give prompt_token_ids")
            written = text if loader is None else loader.written(text, loaded)
            token_ids = self._input_processor.tokenizer.encode(written, add_special_tokens)
        request_id = str(next(self._ids))
        request = EngineRequest(request_id, token_ids, sampling, pooling, cache_salt, priority, adapter=adapter)
        if images is not None:
            assert loader is not None
            placed = loader.place(token_ids, loaded)
            token_ids = placed.token_ids
            request = replace(request, prompt_token_ids=token_ids, name_ids=placed.name_ids, images=placed.images)
        request = self._input_processor.check(request)
        room = 0 if pooling is not None else self._input_processor.max_model_len - len(token_ids)
        return Job(request_id, text, token_ids, _answers(request, self._input_processor.tokenizer, room))


def _answers(request: EngineRequest, tokenizer: Tokenizer | None, room: int) -> list[Answer]:
    """Return the answers to a request, of at most `room` tokens each, none generated yet."""
    sampling = request.sampling
    max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    answers = []
    for index, own in enumerate(with_samples(sampling)):
        answer_id = request.request_id if sampling.n == 1 else f"{request.request_id}-{index}"
        collector = OutputCollector(request.prompt_token_ids, own, tokenizer)
        answers.append(Answer(replace(request, request_id=answer_id, sampling=own), collector, max_tokens))
    return answers


def _one_each(given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts. Raises `ValueError`."""
    each = [given] * count if isinstance(given, SamplingParams) else list(given)
    if len(each) != count:
        raise ValueError(f"sampling_params must be one, or one for each prompt ({count}), got {len(each)}")
    return each


def _conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """Return one conversation or several as a list of them. Raises `ValueError` for what is no conversation."""
    if not messages:
        raise ValueError("messages must hold at least one message, got an empty list")
    conversations: Sequence[Messages] = [messages] if isinstance(messages[0], Mapping) else messages  # type: ignore
    for conversation in conversations:
        for message in [conversation] if isinstance(conversation, (str, Mapping)) else conversation:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"messages must be dicts with 'role' and 'content', got {message!r}")
    return conversations


def _chat_renderer(processor: InputProcessor, tokenizer: Tokenizer, given: str | None, has_tools: bool) -> ChatRenderer:
    """Return the renderer of a chat template: `given`, its path, or the model's."""
    sources: Mapping[str, str] = tokenizer.chat_templates
    if given is not None:
        sources = {"default": given if "{" in given else Path(given).read_text(encoding="utf-8")}
    elif not sources:
        raise ValueError(f"{processor.model_name} has no chat template: give one as chat_template")
    return choose_renderer(sources, tokenizer.special_tokens_map, has_tools=has_tools)
