"""Checkpoints that also read images or sound: their text models, and the encoders of images that Quire runs.

Positions of text advance all sections of a multimodal RoPE alike, so that it is the plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.models.errors import ModelError
from engine.models.families.common import with_names
from engine.models.families.fields import Config, flag
from engine.models.families.vision import PARTS, VISION
from engine.models.spec import ModelSpec

Family = Callable[[Config], ModelSpec]

# Parts of names before those of the text model, the longest first.
NAMES = (
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("^language_model.output.", "lm_head."),
    ("model.text_model.", "model."),
    ("^visual.", "model.visual."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("^vision_tower.", "model.vision_tower."),
    ("^multi_modal_projector.", "model.multi_modal_projector."),
    ("^embed_vision.", "model.embed_vision."),
    ("^vision_embedder.", "model.vision_embedder."),
    ("^mm_projector.", "model.mm_projector."),
    ("^vision_model.", "model.vision_model."),
    ("^mlp1.", "model.mlp1."),
)
OTHER_INPUT = (
    *("vision_tower.", "vision_model.", "vision_encoder.", "visual.", "vision_language_adapter.", "embed_vision."),
    "vision_embedder.",
    *("audio_tower.", "audio_model.", "embed_audio.", "multi_modal_projector.", "mm_projector.", "mlp1.", "projector."),
    *("vision_projection.", "vision_adapter."),
    *("connector.", "image_newline", "patch_merger.", "mlp_AR.", "language_model.vision"),
)
UNUSED = ("vision_tower.head.",)  # SigLIP's pooling
DECODERS_ONLY = ("awq", "gptq")  # methods that leave encoders floats, also where config.json does not say so
READS_IMAGES = "reads_images"  # field among hf_overrides; false: the encoder is not loaded
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
# Architecture → description, and fields that published files leave out.
GEMMA3_SIZES = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
GEMMA4_12B = {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision"}
MISTRAL = {"model_type": "mistral", "sliding_window": None}
MODELS: dict[str, tuple[str, Config]] = {
    "Gemma3ForConditionalGeneration": ("Gemma 3 from 4B", {"model_type": "gemma3_text"} | GEMMA3_SIZES),
    "Gemma3nForConditionalGeneration": ("Gemma 3n", {"model_type": "gemma3n_text"}),
    "Gemma4ForConditionalGeneration": ("Gemma 4 as published", {"model_type": "gemma4_text"}),
    "Gemma4UnifiedForConditionalGeneration": ("Gemma 4 12B", {"model_type": "gemma4_unified_text"} | GEMMA4_12B),
    "Qwen2VLForConditionalGeneration": ("Qwen2-VL", {"model_type": "qwen2"}),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2.5-VL", {"model_type": "qwen2"}),
    "Qwen3VLForConditionalGeneration": ("Qwen3-VL", {"model_type": "qwen3"}),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3-VL with experts", {"model_type": "qwen3_vl_moe_text"}),
    "Qwen3_5ForConditionalGeneration": ("Qwen3.5, 3.6 and 3.8", {"model_type": "qwen3_5_text"}),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3.5 and 3.6 with experts", {"model_type": "qwen3_5_moe_text"}),
    "Mistral3ForConditionalGeneration": ("Mistral Small 3.1 and 3.2, Ministral 3, Devstral 2", MISTRAL),
    "LlavaForConditionalGeneration": ("LLaVA 1.5 and Pixtral", {"model_type": "llama"}),
    "LlavaNextForConditionalGeneration": ("LLaVA 1.6 and Granite Vision", {"model_type": "llama"}),
    "LlavaOnevisionForConditionalGeneration": ("LLaVA-OneVision", {"model_type": "qwen2"}),
    "Idefics3ForConditionalGeneration": ("Idefics 3 and SmolVLM", {"model_type": "llama"}),
    "SmolVLMForConditionalGeneration": ("SmolVLM 2", {"model_type": "llama"}),
    "InternVLForConditionalGeneration": ("InternVL 3 and 3.5", {"model_type": "qwen2"}),
    "InternVLChatModel": ("InternVL as OpenGVLab publishes it", {}),
    "Glm4vForConditionalGeneration": ("GLM-4.1V", {"model_type": "glm4v_text"}),
    "Glm4vMoeForConditionalGeneration": ("GLM-4.5V", {"model_type": "glm4v_moe_text"}),
    "Glm46VForConditionalGeneration": ("GLM-4.6V", {"model_type": "glm4v_moe_text"}),
    "Llama4ForConditionalGeneration": ("Llama 4", {"model_type": "llama4_text"}),
    "MllamaForConditionalGeneration": ("Llama 3.2 Vision", {"model_type": "mllama_text_model"}),
    "GlmOcrForConditionalGeneration": ("GLM-OCR", {"model_type": "glm_ocr_text"}),
    "Exaone4_5_ForConditionalGeneration": ("EXAONE 4.5", {"model_type": "exaone4"}),
    "Lfm2VlForConditionalGeneration": ("LFM2-VL and LFM2.5-VL", {"model_type": "lfm2"}),
    "KimiVLForConditionalGeneration": ("Kimi-VL", {"model_type": "deepseek_v3"}),
    "KimiK25ForConditionalGeneration": ("Kimi K2.5 and K2.6", {"model_type": "deepseek_v3"}),
    "Kimi_K25ForConditionalGeneration": ("Kimi K2.5 and K2.6 as transformers writes it", {"model_type": "deepseek_v3"}),
    "AyaVisionForConditionalGeneration": ("Aya Vision", {"model_type": "cohere2"}),
    "Cohere2VisionForConditionalGeneration": ("Command A Vision", {"model_type": "cohere2"}),
    "VoxtralForConditionalGeneration": ("Voxtral", {"model_type": "llama"}),
    "Qwen2AudioForConditionalGeneration": ("Qwen2-Audio", {"model_type": "qwen2"}),
    "GotOcr2ForConditionalGeneration": ("GOT-OCR 2", {"model_type": "qwen2"}),
    "LightOnOCRForConditionalGeneration": ("LightOnOCR", {"model_type": "qwen3"}),
    "MuseGlimmerForConditionalGeneration": ("Muse Glimmer", {"model_type": "muse_glimmer_text"}),
    "PaddleOCRVLForConditionalGeneration": ("PaddleOCR-VL", {"model_type": "ernie4_5"}),
}


def with_other_input(architecture: str, family_of: Callable[[Config], Family]) -> Family:
    """Return the family of an architecture in `MODELS`. family_of: config.json of a text model → its family."""
    name, defaults = MODELS[architecture]

    def read(config: Config) -> ModelSpec:
        text = text_config(config, defaults)
        spec = family_of(text)(text | {"architectures": [architecture]})
        reads_images = architecture in VISION and flag(config, READS_IMAGES, True)
        vision = VISION[architecture](config, text) if reads_images else None
        read_parts = () if vision is None else PARTS[vision.kind]
        other = tuple(name for name in OTHER_INPUT if name not in read_parts)
        quantization = spec.quantization
        of_text = config.get("quantization_config") is None
        if quantization is not None and (of_text or quantization.method in DECODERS_ONLY):
            floats = (name.removesuffix(".") for name in read_parts)
            spec = replace(spec, quantization=replace(quantization, ignored=(*quantization.ignored, *floats)))
        return replace(with_names(spec, NAMES, unused=UNUSED), other_input=other, vision=vision)

    reads = "text and images" if architecture in VISION else "only the text model; images and sound are refused"
    read.__doc__ = f"{name}: {reads}."
    return read


def text_config(config: Config, defaults: Config) -> Config:
    """Return the text model's configuration: an object of its own, or among the other fields as in old files."""
    name = next((name for name in TEXT_CONFIGS if config.get(name) is not None), "")
    text = config[name] if name else config
    if not isinstance(text, dict):
        raise ModelError(f"{name!r} must be an object, got {text!r}")
    if not name and "hidden_size" not in config:
        raise ModelError(f"{TEXT_CONFIGS[0]!r} must be an object, got None")
    if not name:
        text = {key: value for key, value in text.items() if key not in ("model_type", "architectures")}
    said = {key: value for key, value in text.items() if value is not None}
    # Transformers ties the head by the whole model's field. Old releases, which took the text model's, wrote no other.
    whole = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    inherited = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    found = defaults | inherited | said | whole
    for field in ("rope_scaling", "rope_parameters"):
        rope = found.get(field)
        if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
            found[field] = {**rope, "type": "default", "rope_type": "default"}
    return found
