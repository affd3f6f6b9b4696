"""Converts config.json to a ModelSpec. Each family is a short function: its differences from the common decoder."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.models import classifier
from engine.models.errors import ModelError
from engine.models.families import (
    classic,
    deci,
    encoders,
    experts,
    gated,
    gemma3n,
    gemma4,
    hybrid,
    kimi,
    llama_like,
    mpt,
    multimodal,
    newest,
    other_norms,
    phi3_small,
    recent,
    renamed,
    state_space,
)
from engine.models.families.fields import Config
from engine.models.families.missing import A_FUNCTION, missing
from engine.models.files import read_config, read_json
from engine.models.generation_config import read_eos_token_ids
from engine.models.pooling_config import dense_layers, is_embedding_model, max_seq_length
from engine.models.spec import HeadSpec, ModelSpec

INDEX = "model.safetensors.index.json"


def read_spec(folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read the specification of the model in `folder`. `overrides`: see `read_config`.

    End-of-text ids are those of generation_config.json, followed by further ones of config.json. Raises `ModelError`,
    which names the file and the field that is missing, invalid or not supported.
    """
    config = read_config(folder, overrides)
    if "qwen3_5_moe" in str(config.get("model_type")) and (folder / INDEX).is_file():
        names = read_json(folder / INDEX, folder).get("weight_map")
        is_stacked = isinstance(names, dict) and any(name.endswith(".experts.gate_up_proj") for name in names)
        config.setdefault("separate_experts", not is_stacked)
    if config.get("architectures") is None and (found := _architecture_of_type(config.get("model_type"), config)):
        config["architectures"] = [found]
    try:
        spec = _family(config)(config)
        if classifier.TOKENS in config and (spec.logits_multiplier != 1 or spec.logits_soft_cap):
            raise ModelError(f"{classifier.TOKENS!r} is not supported where logits are scaled or capped")
    except ModelError as error:
        overridden = " with hf_overrides" if overrides else ""
        raise ModelError(f"{folder / 'config.json'}{overridden}: {error}") from None
    eos = dict.fromkeys((*read_eos_token_ids(folder), *spec.eos_token_ids))
    spec = replace(spec, eos_token_ids=tuple(eos))
    is_embedding = is_embedding_model(folder)
    if is_embedding and spec.head is None:
        dense, longest = dense_layers(folder), max_seq_length(folder) or spec.context_length
        head = HeadSpec(layers=dense) if dense else None
        spec = replace(spec, head=head, context_length=min(spec.context_length, longest))
    may_generate = _plain(spec.architecture) in map(_plain, FAMILIES.keys() - encoders.ENCODERS)
    if may_generate and not spec.is_encoder and not is_embedding:
        return spec
    return replace(spec, has_head=False, tie_word_embeddings=True)  # so that the head takes no memory


def _architecture_of_type(model_type: Any, config: Config) -> str | None:
    """Return the architecture of a `model_type`, as transformers names both, or None."""
    stem = str(model_type).removesuffix("_text").replace("_", "").replace("-", "")
    suffixes = ("ForConditionalGeneration", "ForCausalLM")
    for suffix in (*(suffixes if "vision_config" in config else suffixes[::-1]), "Model"):
        for name in FAMILIES:
            if name.endswith(suffix) and name.removesuffix(suffix).lower().replace("_", "") == stem:
                return name
    return None


def _text_family(config: Config) -> Callable[[Config], ModelSpec]:
    """Return the family of a text model within another one, by its `architectures` or its `model_type`."""
    kind = config.get("model_type")
    if kind in TEXT_TYPES:
        return TEXT_TYPES[kind]
    names = [*(config.get("architectures") or ()), _architecture_of_type(kind, {})]
    for name in names:
        if name in FAMILIES and name not in multimodal.MODELS:
            return FAMILIES[name]
    raise ModelError(f"its text model, {names[0] or kind!r}, is not supported: it needs {missing(str(kind), {})}")


def _family(config: Config) -> Callable[[Config], ModelSpec]:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelError(f"'architectures' must be a list of one name, got {names!r}")
    bodies = (names[0].removesuffix(suffix) for suffix in ("Model", classifier.SUFFIX))  # without an output head
    spelled = {_plain(name): family for name, family in FAMILIES.items()}
    for name in (names[0], *(body + head for body in bodies for head in ("ForCausalLM", "LMHeadModel"))):
        if _plain(name) in spelled:
            return spelled[_plain(name)]
    need, nearest = missing(names[0], config), ""
    if need == A_FUNCTION:  # perhaps it is a misspelt name
        stems = {family.removesuffix("ForCausalLM"): family for family in FAMILIES}
        close = difflib.get_close_matches(names[0][:99].removesuffix("ForCausalLM"), stems, n=3, cutoff=0.7)
        nearest = f"; the nearest that are: {', '.join(stems[stem] for stem in close)}" if close else ""
    raise ModelError(
        f"architecture {names[0]!r} is not supported: it needs {need}{nearest}; `quire models` lists all that are"
    )


def _plain(name: str) -> str:
    """Return an architecture's name without capitals and underscores: old files spell it Ernie4_5_ForCausalLM."""
    return name.replace("_", "").lower()


FAMILIES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": llama_like.llama,
    "MistralForCausalLM": llama_like.mistral,
    "MinistralForCausalLM": llama_like.ministral,
    "Qwen2ForCausalLM": llama_like.qwen2,
    "Qwen3ForCausalLM": llama_like.qwen3,
    "SmolLM3ForCausalLM": llama_like.smollm3,
    "SeedOssForCausalLM": llama_like.seed_oss,
    "GraniteForCausalLM": llama_like.granite,
    "Phi3ForCausalLM": llama_like.phi3,
    "Phi3SmallForCausalLM": phi3_small.phi3_small,
    "Ernie4_5ForCausalLM": llama_like.ernie,
    "HeliumForCausalLM": llama_like.helium,
    "GemmaForCausalLM": other_norms.gemma,
    "Gemma2ForCausalLM": other_norms.gemma2,
    "Gemma3ForCausalLM": other_norms.gemma3,
    "Gemma3nForCausalLM": gemma3n.gemma3n,
    "Gemma4ForCausalLM": gemma4.gemma4,
    "Olmo2ForCausalLM": other_norms.olmo2,
    "Olmo3ForCausalLM": other_norms.olmo3,
    "Exaone4ForCausalLM": other_norms.exaone4,
    "GlmForCausalLM": other_norms.glm,
    "Glm4ForCausalLM": other_norms.glm4,
    "CohereForCausalLM": other_norms.cohere,
    "Cohere2ForCausalLM": other_norms.cohere2,
    "Starcoder2ForCausalLM": other_norms.starcoder2,
    "NemotronForCausalLM": other_norms.nemotron,
    "MptForCausalLM": mpt.mpt,
    "MixtralForCausalLM": experts.mixtral,
    "Qwen2MoeForCausalLM": experts.qwen2_moe,
    "Qwen3MoeForCausalLM": experts.qwen3_moe,
    "OlmoeForCausalLM": experts.olmoe,
    "GraniteMoeForCausalLM": experts.granite_moe,
    "GraniteMoeSharedForCausalLM": experts.granite_moe,
    "Glm4MoeForCausalLM": experts.glm4_moe,
    "Glm4MoeLiteForCausalLM": experts.glm4_moe_lite,
    "DeepseekV2ForCausalLM": experts.deepseek_v2,
    "DeepseekV3ForCausalLM": experts.deepseek_v3,
    "DeepseekV32ForCausalLM": experts.deepseek_v32,
    "GlmMoeDsaForCausalLM": experts.glm_moe_dsa,
    "MiniMaxM2ForCausalLM": experts.minimax_m2,
    "GptOssForCausalLM": experts.gpt_oss,
    "Lfm2ForCausalLM": hybrid.lfm2,
    "Lfm2MoeForCausalLM": hybrid.lfm2_moe,
    "Dots1ForCausalLM": experts.dots1,
    "MellumForCausalLM": newest.mellum,
    "SolarOpenForCausalLM": newest.solar_open,
    "HYV3ForCausalLM": newest.hy3,
    "ExaoneMoeForCausalLM": newest.exaone_moe,
    "PhimoeForCausalLM": newest.phimoe,
    "MiniCPM3ForCausalLM": newest.minicpm3,
    "Ministral3ForCausalLM": recent.ministral3,
    "Mistral4ForCausalLM": recent.mistral4,
    "Llama4ForCausalLM": recent.llama4,
    "HunYuanDenseV1ForCausalLM": recent.hunyuan_dense,
    "HunYuanMoEV1ForCausalLM": recent.hunyuan_moe,
    "Ernie4_5_MoeForCausalLM": recent.ernie_moe,
    "ArceeForCausalLM": llama_like.arcee,
    "DeciLMForCausalLM": deci.deci,
    "StableLmForCausalLM": other_norms.stablelm,
    "OlmoForCausalLM": other_norms.olmo,
    "GPT2LMHeadModel": classic.gpt2,
    "GPTBigCodeForCausalLM": classic.gpt_bigcode,
    "GPTNeoForCausalLM": classic.gpt_neo,
    "GPTNeoXForCausalLM": classic.gpt_neox,
    "GPTJForCausalLM": classic.gptj,
    "OPTForCausalLM": classic.opt,
    "PhiForCausalLM": classic.phi,
    "BloomForCausalLM": classic.bloom,
    "FalconForCausalLM": classic.falcon,
    "RWForCausalLM": classic.falcon,
    "InternLMForCausalLM": renamed.internlm,
    "InternLM2ForCausalLM": renamed.internlm2,
    "InternLM3ForCausalLM": renamed.internlm3,
    "ExaoneForCausalLM": renamed.exaone,
    "ChatGLMModel": renamed.chatglm,
    "ChatGLMForConditionalGeneration": renamed.chatglm,
    "BaichuanForCausalLM": renamed.baichuan,
    "MiniCPMForCausalLM": renamed.minicpm,
    "MiMoForCausalLM": renamed.mimo,
    "OrionForCausalLM": renamed.orion,
    "Qwen3NextForCausalLM": hybrid.qwen3_next,
    "Qwen3_5ForCausalLM": hybrid.qwen3_5,
    "Qwen3_5MoeForCausalLM": hybrid.qwen3_5_moe,
    "NemotronHForCausalLM": state_space.nemotron_h,
    "GraniteMoeHybridForCausalLM": state_space.granite_hybrid,
    "FalconH1ForCausalLM": state_space.falcon_h1,
    "BambaForCausalLM": state_space.bamba,
    "KimiLinearForCausalLM": kimi.kimi_linear,
    "LagunaForCausalLM": gated.laguna,
    "AfmoeForCausalLM": gated.afmoe,
    "GraniteSWAForCausalLM": newest.granite_swa,
    "CwmForCausalLM": newest.cwm,
    "HyperCLOVAXForCausalLM": newest.hyperclovax,
    "YoutuForCausalLM": newest.youtu,
    "VaultGemmaForCausalLM": newest.vault_gemma,
}


def _glm_ocr(config: Config) -> ModelSpec:
    return other_norms.glm4({"attention_bias": False, "partial_rotary_factor": 1.0, **config})


FAMILIES |= encoders.ENCODERS
FAMILIES |= {name: multimodal.with_other_input(name, _text_family) for name in multimodal.MODELS}
TEXT_TYPES: dict[Any, Callable[[Config], ModelSpec]] = {  # of text models that have no architecture of their own
    "qwen2_vl_text": llama_like.qwen2,
    "qwen2_5_vl_text": llama_like.qwen2,
    "qwen3_vl_text": llama_like.qwen3,
    "qwen3_vl_moe_text": experts.qwen3_vl_moe,
    "qwen3_5_text": hybrid.qwen3_5,
    "qwen3_5_moe_text": hybrid.qwen3_5_moe_stacked,
    "glm4v_text": other_norms.glm4,
    "glm4v_moe_text": experts.glm4_moe,
    "glm_ocr_text": _glm_ocr,
    "mllama_text_model": newest.mllama,
    "paddleocr_vl_text": llama_like.llama,
    "kimi_k2": experts.deepseek_v3,
    "gemma4_unified_text": gemma4.gemma4,
    "muse_glimmer_text": gated.muse_glimmer,
    "ministral3": recent.ministral3,
    "mistral4": recent.mistral4,
}
