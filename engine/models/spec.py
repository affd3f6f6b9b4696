"""A decoder described by numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.models.errors import ModelError
from engine.models.quantization import Quantization
from engine.models.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The angle by which each position rotates a head's channels. `scaling` says which of the other fields count."""

    rotary_dim: int  # the first rotary_dim of each head are rotated
    theta: float
    interleaved: bool = False  # channels 2i and 2i + 1 are a pair, not i and i + rotary_dim / 2
    scaling: str = "default"  # default | linear | dynamic | llama3 | yarn | longrope
    factor: float = 1.0  # how many times the context is stretched
    original_max_position_embeddings: int = 0  # dynamic, llama3, yarn, longrope: the context before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions as bounds of the ramp
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    short_factors: tuple[float, ...] = ()  # longrope: of each pair's wavelength within the original context
    long_factors: tuple[float, ...] = ()  # longrope: beyond it


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    rope: RopeSpec | None
    window: int = 0  # how many of the newest tokens a token attends to, itself included; 0: all
    soft_cap: float = 0.0  # of the scores; 0: none
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head
    qk_norm_over_heads: bool = False  # RMSNorm of all query heads together, and of all key heads
    fused: bool = False  # the checkpoint keeps q, k and v in one tensor, qkv_proj

    def for_rank(self, shard: Shard) -> AttentionSpec:
        """One rank's heads. Where there are fewer KV heads than ranks, several ranks hold the same one."""
        if self.qk_norm_over_heads and shard.size > 1:
            raise ModelError(f"{shard.size} ranks cannot divide heads that are normed together; use one GPU")
        return replace(
            self,
            num_heads=len(shard.span("num_attention_heads", self.num_heads)),
            num_kv_heads=len(shard.span("num_key_value_heads", self.num_kv_heads, replicate=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """An MLP: down(activation(gate) · up), or down(activation(up)) where it is not gated."""

    intermediate_size: int
    bias: bool = False
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    gated: bool = True
    fused: bool = False  # the checkpoint keeps gate and up in one tensor, gate_up_proj
    up_name: str = "up_proj"  # in the checkpoint
    down_name: str = "down_proj"

    def for_rank(self, shard: Shard) -> DenseSpec:
        """One rank's columns."""
        return replace(self, intermediate_size=len(shard.span("intermediate_size", self.intermediate_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The names of a layer's norms in the checkpoint; "": there is none."""

    before_mixer: str = "input_layernorm"
    after_mixer: str = ""  # of its output, before that is added to the residual stream
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: what mixes tokens, then what transforms each."""

    mixer: AttentionSpec
    mlp: DenseSpec
    norms: Norms = Norms()
    parallel: bool = False  # both read the norm before the mixer, and add to the same residual stream
    residual_multiplier: float = 1.0  # of what each adds to it

    def for_rank(self, shard: Shard) -> LayerSpec:
        return replace(self, mixer=self.mixer.for_rank(shard), mlp=self.mlp.for_rank(shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything the decoder and the engine must know of a model's configuration."""

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    context_length: int  # the longest context the model is meant for, its RoPE scaling included
    tie_word_embeddings: bool
    dtype: str  # of the published weights: "bfloat16", "float16" or "float32"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None  # of the weights; None: they are floats
    norm: Literal["rms", "layer", "layer_bias"] = "rms"  # RMSNorm; LayerNorm without or with a bias
    norm_offset: float = 0.0  # norms multiply by their stored weights plus this
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_soft_cap: float = 0.0  # 0: none
    has_head: bool = True  # False: it is published for embeddings, and generates nothing

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """The attention window of each layer; 0: full attention."""
        return tuple(layer.mixer.window for layer in self.layers)

    def for_rank(self, shard: Shard) -> ModelSpec:
        """What one rank computes and caches: its heads and MLP columns; the vocabulary stays whole.

        ModelError where they cannot be divided evenly.
        """
        return replace(self, layers=tuple(layer.for_rank(shard) for layer in self.layers))
