"""Names what a model needs that Quire lacks, by the fields of config.json of a family that Quire does not know."""

from __future__ import annotations

from engine.models.families.fields import Config

# Fields of config.json, or parts of an architecture's name → what they stand for. The first that is found is named.
_FIELDS = {
    "is_encoder_decoder": "an encoder beside the decoder",
    "attn_res_block_size": "residuals that attend to those of earlier layers",
    "linear_num_value_heads": "delta-net layers, which keep a state instead of a KV cache",
    "conv_L_cache": "convolution layers, which keep a state instead of a KV cache",
    "mamba_d_state": "state-space (Mamba) layers, which keep a state instead of a KV cache",
    "ssm_state_size": "state-space (Mamba) layers, which keep a state instead of a KV cache",
    "ssm_cfg": "state-space (Mamba) layers, which keep a state instead of a KV cache",
    "state_size": "state-space (Mamba) layers, which keep a state instead of a KV cache",
    "linear_attn_config": "linear attention, which keeps a state instead of a KV cache",
    "compress_rates": "attention over compressed keys, with sinks, and several residual streams (hyper-connections)",
    "compress_ratios": "attention over compressed keys, with sinks, and several residual streams (hyper-connections)",
    "index_kpool": "sparse attention over pooled keys, and several residual streams (hyper-connections)",
    "index_topk": "sparse attention",
    "sparse_attention_config": "sparse attention",
    "hc_mult": "several residual streams (hyper-connections)",
    "swa_num_key_value_heads": "layers with heads of different sizes",
    "zero_expert_num": "experts that return their input",
    "vision_config": "images as input",
    "audio_config": "sound as input",
    "text_config": "input that is not text",
    "auto_map": "code that comes with the model, which Quire never runs",
}
_NAMES = {
    "Mamba": _FIELDS["state_size"],
    "MiniMaxForCausalLM": "linear attention, which keeps a state instead of a KV cache",
    "Apertus": "an activation with learnt parameters (xIELU)",
    "BitNet": "ternary weights",
    "DiffLlama": "differential attention",
    "JetMoe": "experts of attention",
    "CodeGen": "query, key and value stored in the order of the ranks that trained it",
    "XGLM": "sinusoidal positions",
    "Rwkv": "recurrent layers, which keep a state instead of a KV cache",
    "Deberta": "attention by relative positions",
    "Bert": "an encoder of another form than BERT's",
    "T5": _FIELDS["is_encoder_decoder"],
    "Whisper": _FIELDS["audio_config"],
    "Vision": _FIELDS["vision_config"],
    "VLFor": _FIELDS["vision_config"],
}
A_FUNCTION = "a function of about ten lines in engine/models/families (CONTRIBUTING.md, Add a model family)"


def missing(architecture: str, config: Config) -> str:
    """Return what keeps Quire from serving the model, in words that follow "it needs"."""
    text = config.get("text_config")
    for field, need in _FIELDS.items():
        if config.get(field) or (isinstance(text, dict) and field != "auto_map" and text.get(field)):
            return need
    for part, need in _NAMES.items():
        if part.lower() in architecture.lower():
            return need
    return A_FUNCTION
