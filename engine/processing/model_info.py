"""The properties of a loaded model that its users need."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine.core.engine_request import Adapter
from engine.models.classifier import Classifier, read_adapter_classifier
from engine.models.pooling_config import Prompts
from engine.processing.stored_weights import StoredWeights
from engine.text.tokenizer import Tokenizer
from engine.vision.loader import ImageLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A loaded model, as `AsyncEngine.model` describes it."""

    name: str
    architecture: str  # its name in config.json, such as LlamaForCausalLM
    max_model_len: int  # tokens of prompt and output together
    generates: bool  # false: the model computes embeddings only
    eos_token_ids: tuple[int, ...]  # the tokens that end a completion
    tokenizer: Tokenizer | None  # None with skip_tokenizer_init
    default_sampling: dict[str, Any] = field(default_factory=dict)  # fields of `SamplingParams`, by the model's authors
    default_pooling: str = "last"
    default_normalize: bool = True
    is_encoder: bool = False
    type_offset: int = 0  # what the ids of a pair's second text have added, see `ModelSpec.max_token_id`; 0: nothing
    prompts: Prompts = field(default_factory=Prompts)  # of an embedding model
    hidden_size: int = 0
    classifier: Classifier | None = None  # the head of a classification model
    fingerprint: str = ""  # of deterministic answers, see `system_fingerprint`; "": they are not
    weights: StoredWeights | None = None
    images: ImageLoader | None = None  # loads images for it; None: it reads text only

    def classifier_with(self, adapter: Adapter | None) -> Classifier | None:
        """Return the classifier of the model with an adapter, which may bring a head of its own; None: it has none.

        Heads of the latest adapters are kept. Raises `ModelError` for one that does not fit.
        """
        if adapter is None:
            return self.classifier
        own = _own_classifier(adapter, self.hidden_size, self.classifier)
        return self.classifier if own is None else own


@lru_cache(maxsize=16)  # a head has up to 4,096 rows
def _own_classifier(adapter: Adapter, hidden_size: int, base: Classifier | None) -> Classifier | None:
    return read_adapter_classifier(Path(adapter.path), hidden_size, base)
