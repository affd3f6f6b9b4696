"""config.json → ModelSpec, one short function per family, which says only how it differs from the common decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, num_layers
from engine.models.families.fields import Config, flag, integer
from engine.models.files import read_json
from engine.models.generation_config import read_eos_token_ids
from engine.models.pooling_config import is_embedding_model
from engine.models.spec import ModelSpec


def read_spec(folder: Path) -> ModelSpec:
    """The specification of the model in `folder`.

    End-of-text ids are those of generation_config.json, then those that only config.json names. ModelError names the
    file and the field that is missing, wrong or not supported.
    """
    path = folder / "config.json"
    config = read_json(path)
    try:
        spec = _family(config)(config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    eos = dict.fromkeys((*read_eos_token_ids(folder), *spec.eos_token_ids))
    spec = replace(spec, eos_token_ids=tuple(eos))
    if spec.architecture in FAMILIES and not is_embedding_model(folder):
        return spec
    return replace(spec, has_head=False, tie_word_embeddings=True)  # so that no memory is taken for one


def _family(config: Config) -> Callable[[Config], ModelSpec]:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"'architectures' must be a list of one name, got {names!r}")
    for name in (names[0], names[0].removesuffix("Model") + "ForCausalLM"):  # LlamaModel: without an output head
        if name in FAMILIES:
            return FAMILIES[name]
    raise ModelError(f"architecture {names[0]!r} is not supported; supported: {', '.join(FAMILIES)}")


def llama(config: Config) -> ModelSpec:
    """Llama 1, 2 and 3.x, and what is shaped like them."""
    bias = flag(config, "attention_bias")
    mlp = dense(config, bias=flag(config, "mlp_bias"))
    return decoder(config, attention(config, qkv_bias=bias, o_bias=bias), mlp)


def mistral(config: Config) -> ModelSpec:
    """Mistral: every layer has the sliding window if there is one (null: none has)."""
    window = 0 if config.get("sliding_window", 4096) is None else integer(config, "sliding_window", 4096)
    return decoder(config, attention(config, window=window), dense(config))


def qwen2(config: Config) -> ModelSpec:
    """Qwen2 and Qwen2.5: bias on query, key and value."""
    return decoder(config, attention(config, qkv_bias=True), dense(config), windows=_qwen_windows(config))


def qwen3(config: Config) -> ModelSpec:
    """Qwen3: RMSNorm of each query and key head."""
    bias = flag(config, "attention_bias")
    mixer = attention({"head_dim": 128, **config}, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return decoder(config, mixer, dense(config), windows=_qwen_windows(config))


FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def _qwen_windows(config: Config) -> tuple[int, ...]:
    """The window of each layer: by `layer_types`, else for the layers from `max_window_layers` on."""
    count = num_layers(config)
    types = config.get("layer_types")
    if types is None:
        slides_at_all = flag(config, "use_sliding_window")
        first = integer(config, "max_window_layers", 28, minimum=0) if slides_at_all else count
        slides = [layer >= first for layer in range(count)]
    elif not isinstance(types, list) or len(types) != count:
        raise ModelError(f"'layer_types' must be a list of num_hidden_layers={count} names, got {types!r}")
    elif unknown := sorted({str(name) for name in types} - {"full_attention", "sliding_attention"}):
        raise ModelError(f"'layer_types' may name full_attention and sliding_attention, got {', '.join(unknown)}")
    else:
        slides = [name == "sliding_attention" for name in types]
    window = integer(config, "sliding_window") if any(slides) else 0
    return tuple(window if slide else 0 for slide in slides)
