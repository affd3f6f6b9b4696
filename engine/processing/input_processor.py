"""The input processor: makes valid engine requests with the tokenizer, defaults and limits of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.core.engine_request import EngineRequest
from engine.core.params.pooling import PoolingParams
from engine.core.params.sampling import SamplingParams
from engine.errors import ConfigError, ParameterError
from engine.models.classifier import Classifier, labelled_classifier, read_classifier
from engine.models.errors import ModelError
from engine.models.families import read_spec
from engine.models.files import Progress, silent
from engine.models.generation_config import read_generation_config
from engine.models.hub import resolve_model, short_name
from engine.models.pooling_config import Prompts, is_embedding_model, normalizes, read_pooling, read_prompts
from engine.models.spec import ModelSpec, VisionSpec
from engine.processing.grammars import Grammars
from engine.processing.model_info import ModelInfo
from engine.processing.stored_weights import StoredWeights
from engine.text.tokenizer import Tokenizer
from engine.vision.loader import ImageLayout, ImageLoader
from engine.vision.processors import read_processor
from engine.vision.sources import Media
from engine.vision.videos import read_video_processor

ID_FIELDS = ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids")
PREDICTED_CHARACTERS = 16  # of a predicted answer, for each token of the context
MAX_BAD_TOKENS = 4096
# Tokens around images whose ids config.json does not have: (kind of encoder, field of its spec).
NAMED_TOKENS = {
    ("pixtral", "row_ends"): ("[IMG_BREAK]", "[IMG_END]"),
    ("intern", "before"): ("<img>",),
    ("intern", "behind"): ("</img>",),
    ("intern_chat", "before"): ("<img>",),
    ("intern_chat", "behind"): ("</img>",),
    ("intern_chat", "placeholder"): ("<IMG_CONTEXT>",),
}
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")  # default of a request


@dataclass(frozen=True)
class InputProcessor:
    """Tokenizes and checks requests. Needs the model's small files only, not the engine."""

    folder: Path
    model_name: str
    spec: ModelSpec
    tokenizer: Tokenizer | None  # None with skip_tokenizer_init
    default_sampling: dict[str, Any]  # fields of SamplingParams, from generation_config.json
    max_model_len: int
    max_logprobs: int
    default_pooling: str = "last"
    default_normalize: bool = True
    classifier: Classifier | None = None  # of a classification model
    prompts: Prompts = field(default_factory=Prompts)  # of an embedding model
    images: ImageLoader | None = None  # None: the model reads text only
    weights: StoredWeights | None = None
    fingerprint: str = ""  # see `system_fingerprint`

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress = silent) -> InputProcessor:
        """Find or download the model and read its small files. Raises `ModelError`, `TokenizerError`."""
        resolve = partial(resolve_model, config.model, revision=config.revision, download_dir=config.download_dir)
        # The small files first: no weights are downloaded of a model that cannot be served.
        spec = read_spec(resolve(weights=False, progress=progress), config.hf_overrides)
        folder = resolve(progress=progress)
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config, folder)
        return cls(
            folder,
            config.served_model_name[0] if config.served_model_name else config.model,
            spec,
            tokenizer,
            _default_sampling(config, folder),
            context_length(config, spec),
            config.max_logprobs,
            _default_pooling(config, folder, spec),
            normalizes(folder),
            _read_classifier(config, folder, spec, tokenizer),
            read_prompts(folder),
            _image_loader(config, folder, spec, tokenizer),
            StoredWeights(folder, spec, config.quantization, config.device),
        )

    def of_engine(self, max_model_len: int, fingerprint: str = "") -> InputProcessor:
        """Return a copy for an engine that has started with these, see `Ready`."""
        return replace(self, max_model_len=max_model_len, fingerprint=fingerprint)

    def local(self, config: EngineConfig) -> EngineConfig:
        """Return `config` with the model's local folder, served under the name that the user gave."""
        return replace(config, model=str(self.folder), served_model_name=(short_name(self.model_name),))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-text tokens according to all of the model's files, including the tokenizer's."""
        own = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        return tuple(dict.fromkeys((*self.spec.eos_token_ids, *([] if own is None else [own]))))

    @cached_property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name=self.model_name,
            architecture=self.spec.architecture,
            max_model_len=self.max_model_len,
            generates=self.spec.has_head,
            eos_token_ids=self.eos_token_ids,
            tokenizer=self.tokenizer,
            default_sampling=self.default_sampling,
            default_pooling=self.default_pooling,
            default_normalize=self.default_normalize,
            is_encoder=self.spec.is_encoder,
            type_offset=self.spec.vocab_size if self.spec.token_types > 1 else 0,
            hidden_size=self.spec.hidden_size,
            classifier=self.classifier,
            prompts=self.prompts,
            images=self.images,
            weights=self.weights,
            fingerprint=self.fingerprint,
        )

    def encode(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(
                "the prompt is text, but there is no tokenizer (skip_tokenizer_init): give prompt_token_ids"
            )
        return self.tokenizer.encode(prompt)

    def check(self, request: EngineRequest) -> EngineRequest:
        """Check a request and return it in the form that the engine accepts.

        Raises `ValueError`, with the valid values, if the engine could not run it: a `ParameterError` if one field of
        the request is at fault. May take a second, unless the sampling parameters are prepared already.
        """
        if request.pooling is not None:
            self._check_pooling(request.prompt_token_ids, request.pooling)
            return request
        if not self.spec.has_head:
            raise ValueError(f"the model {self.model_name} is an embedding model: it cannot generate text")
        self._check_prompt(request.prompt_token_ids, 1)
        sampling = self.prepare(request.sampling)
        return request if sampling is request.sampling else replace(request, sampling=sampling)

    def prepare(self, sampling: SamplingParams) -> SamplingParams:
        """Check the parameters and return them in the form that the engine accepts.

        Tokenizes texts for the sampler and checks the grammar. Call it once for all `n` completions of a request.
        Thread-safe. Raises `ValueError` as `check` does, and `TagsError` as `_with_grammar` does.
        """
        for name in ("logprobs", "prompt_logprobs"):
            got = getattr(sampling, name)
            if got == -1:
                sampling = sampling.clone(**{name: min(self.max_logprobs, self.spec.vocab_size)})
            elif (got or 0) > self.max_logprobs:
                raise ParameterError(name, f"must be at most max_logprobs={self.max_logprobs}, got {got}")
        if sampling.thinking_token_budget is not None and sampling.thinking_marks is None:
            raise ParameterError("thinking_token_budget", "needs thinking_marks, the tokens around the reasoning")
        if sampling.stop_strings and self.tokenizer is None:
            raise ParameterError("stop", "strings need a tokenizer, and there is none (skip_tokenizer_init)")
        return self._with_grammar(sampling if sampling.checked else self._with_tokens(sampling))

    def _check_pooling(self, prompt_token_ids: Sequence[int], pooling: PoolingParams) -> None:
        self._check_prompt(prompt_token_ids, 0)
        spec = self.spec
        own = spec.head.pooling if spec.head is not None else ""
        if own and (pooling.pooling, pooling.normalize, pooling.dimensions) != (own, False, None):
            raise ValueError(
                f"the model {self.model_name} is a classifier: its outputs are logits, with pooling {own!r}, normalize "
                "false and no dimensions"
            )
        if not own and (pooling.pooling == "all" or (pooling.pooling == "cls" and not spec.is_encoder)):
            valid = "last, mean or cls" if spec.is_encoder else "last or mean, since the model is no encoder"
            raise ParameterError("pooling", f"must be {valid}, got {pooling.pooling!r}")
        if (pooling.dimensions or 0) > spec.embedding_size:
            reason = f"must be at most {spec.embedding_size}, the model's own, got {pooling.dimensions}"
            raise ParameterError("dimensions", reason)

    def _check_prompt(self, prompt_token_ids: Sequence[int], num_answer: int) -> None:
        num_prompt, last_id = len(prompt_token_ids), self.spec.max_token_id
        if not num_prompt:
            raise ValueError("the prompt is empty: it must have at least one token")
        if num_prompt + num_answer > self.max_model_len:
            raise ValueError(
                f"the prompt has {num_prompt} tokens, but the context holds {self.max_model_len}"
                f"{', at least one of them for the answer' if num_answer else ''}: shorten the prompt"
            )
        if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) <= last_id:
            wrong = next(i for i in prompt_token_ids if not 0 <= i <= last_id)
            raise ParameterError("prompt", f"token ids must be from 0 to {last_id}, got {wrong}")

    def _with_tokens(self, sampling: SamplingParams) -> SamplingParams:
        breakers = sampling.dry_sequence_breakers
        given = (breakers, sampling.bad_words, *(getattr(sampling, name) for name in ID_FIELDS))
        if not any(given) and sampling.dry_multiplier == 0 and sampling.prediction is None:
            return sampling
        changes: dict[str, Any] = {"checked": True}
        if words := sampling.bad_words:
            ids = [each for word in words for each in ([word] if isinstance(word, list) else self._spellings(word))]
            changes["bad_words"] = [list(each) for each in dict.fromkeys(map(tuple, ids))]
            longest, spellings = max(map(len, ids)), len(changes["bad_words"])
            if longest * spellings > MAX_BAD_TOKENS:  # the sampler examines so many for each row in each step
                reason = (
                    f"must be fewer or shorter: {spellings} spellings of up to {longest} tokens, whose product "
                    f"is above {MAX_BAD_TOKENS}"
                )
                raise ParameterError("bad_words", reason)
        if sampling.dry_multiplier == 0:
            changes |= {"dry_sequence_breakers": None} if breakers else {}
        elif breakers is not None or self.tokenizer is not None:
            each = DRY_SEQUENCE_BREAKERS if breakers is None else breakers
            last = [b if isinstance(b, int) else self._encode_part("dry_sequence_breakers", "a" + b)[-1] for b in each]
            changes["dry_sequence_breakers"] = list(dict.fromkeys(last))
        vocab_size = self.spec.vocab_size
        if (prediction := sampling.prediction) is not None:
            changes["prediction"] = predicted = self._predicted(prediction)
            if predicted and not 0 <= min(predicted) <= max(predicted) < vocab_size:
                raise ParameterError("prediction", f"must have token ids from 0 to {vocab_size - 1}")
        sampling = sampling.clone(**changes)
        for name in (*ID_FIELDS, "dry_sequence_breakers"):
            if (highest := max(getattr(sampling, name) or (0,))) >= vocab_size:
                raise ParameterError(name, f"must be below {vocab_size}, got {highest}")
        for word in sampling.bad_words or ():
            if (highest := max(word)) >= vocab_size:  # type: ignore[operator]
                raise ParameterError("bad_words", f"must be below {vocab_size}, got {highest}")
        return sampling

    def _with_grammar(self, sampling: SamplingParams) -> SamplingParams:
        """Compile and check the requested grammar, unless that has been done.

        Raises `ParameterError` with the unsupported part, or `TagsError` if only schemas of tags are unusable.
        """
        asked = sampling.structured_outputs
        if asked is None or asked.compiled is not None:
            return sampling
        return sampling.clone(structured_outputs=self._grammars.compiled(asked))

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.spec.vocab_size, self.eos_token_ids)

    def _predicted(self, prediction: str | list[int]) -> list[int]:
        """Return the tokens of a predicted answer, no more than the context can hold."""
        if isinstance(prediction, str):
            text = prediction[: PREDICTED_CHARACTERS * self.max_model_len]
            prediction = self._encode_part("prediction", text) if text else []
        return prediction[: self.max_model_len]

    def _spellings(self, word: str) -> list[list[int]]:
        """Return a word's tokens at the start of a text and after a space: many vocabularies distinguish them."""
        return [self._encode_part("bad_words", word), self._encode_part("bad_words", " " + word.lstrip())]

    def _encode_part(self, name: str, text: str) -> list[int]:
        if self.tokenizer is None:
            reason = "texts need a tokenizer, and there is none (skip_tokenizer_init): give token ids"
            raise ParameterError(name, reason, ": ")
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise ParameterError(name, f"{text!r} has no tokens in this model's vocabulary", ": ")
        return ids


def load_tokenizer(config: EngineConfig, folder: Path) -> Tokenizer:
    """Load the tokenizer for the model in `folder`. Raises `TokenizerError`, `ModelError`."""
    if config.tokenizer is None:
        return Tokenizer.from_folder(folder)
    return Tokenizer.from_folder(
        resolve_model(config.tokenizer, revision=config.revision, download_dir=config.download_dir, weights=False)
    )


def _read_classifier(
    config: EngineConfig, folder: Path, spec: ModelSpec, tokenizer: Tokenizer | None
) -> Classifier | None:
    if spec.head is not None and spec.head.pooling:
        return labelled_classifier(folder, spec.head.num_outputs, spec.head.pooling, config.hf_overrides)
    if config.load_format == "dummy":
        return None

    def token_id(token: str) -> int | None:
        if tokenizer is None:
            raise ModelError("a classifier made of tokens needs the tokenizer: leave skip_tokenizer_init out")
        return tokenizer.token_to_id(token)

    return read_classifier(folder, spec.architecture, spec.hidden_size, config.hf_overrides, token_id)


def _image_loader(
    config: EngineConfig, folder: Path, spec: ModelSpec, tokenizer: Tokenizer | None
) -> ImageLoader | None:
    if spec.vision is None:
        return None
    vision, local = spec.vision, config.allowed_local_media_path

    def text_of(ids: Sequence[int]) -> str:
        return "".join((tokenizer.id_to_token(i) or "") for i in ids) if tokenizer is not None else ""

    media = Media(tuple(config.allowed_media_domains), None if local is None else Path(local).expanduser())

    def ids_of(field: str) -> Any:
        """Return ids as the tokenizer names them, or those of published ones."""
        named = NAMED_TOKENS.get((vision.kind, field), ()) if tokenizer is not None else ()
        found = tuple(tokenizer.token_to_id(token) for token in named) if tokenizer is not None else ()
        return found if found and None not in found else getattr(vision, field)

    token_id = ids_of("placeholder")[0] if vision.kind == "intern_chat" else vision.image_token_id
    layout = ImageLayout(
        token_id, vision.marker_id, ids_of("before"), ids_of("behind"), ids_of("row_ends"),
        vision.merge_size,
        text_of(() if vision.marker_id is None else (vision.marker_id,)), vision.margin, bool(vision.sees_both_ways),
        vision.video_token_id, tuple(text_of((token,)) for token in video_placeholder(vision)),
    )  # fmt: skip
    processor, text = read_processor(folder, vision), text_of(ids_of("placeholder")) + vision.placeholder_end
    takes_videos = config.limit_mm_per_prompt.get("video") != 0
    videos = read_video_processor(folder, vision) if takes_videos else None
    return ImageLoader(processor, media, token_id, text, config.max_images, layout, videos)


def video_placeholder(vision: VisionSpec) -> tuple[int, ...]:
    """Return the tokens that stand for two frames of a video, as `VisionSpec.placeholder` for an image."""
    if vision.video_token_id is None:
        return ()
    return tuple(vision.video_token_id if token == vision.image_token_id else token for token in vision.placeholder)


def _default_pooling(config: EngineConfig, folder: Path, spec: ModelSpec) -> str:
    if spec.head is not None and spec.head.pooling:
        return spec.head.pooling
    if config.pooling != "auto":
        return config.pooling
    if spec.is_encoder and not is_embedding_model(folder):
        return "mean"  # as sentence-transformers does
    return read_pooling(folder)


def context_length(config: EngineConfig, spec: ModelSpec) -> int:
    """Return `max_model_len` as set, else the model's context, which the engine shortens to fit its KV cache."""
    if config.max_model_len is None:
        return spec.context_length
    if config.max_model_len > spec.context_length:
        raise ConfigError(
            f"max_model_len must be at most {spec.context_length}, the model's own context, got {config.max_model_len}"
        )
    return config.max_model_len


def _default_sampling(config: EngineConfig, folder: Path) -> dict[str, Any]:
    if config.generation_config == "vllm":
        return {}
    source = folder if config.generation_config == "auto" else Path(config.generation_config)
    if config.generation_config != "auto" and not (source / "generation_config.json").is_file():
        raise ConfigError(f"generation_config must be auto, vllm or a folder with generation_config.json, got {source}")
    found: dict[str, Any] = read_generation_config(source)
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ConfigError(f"{source / 'generation_config.json'}: {error}") from None
    return found
