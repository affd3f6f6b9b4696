"""A decoder described by numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.quantization import Quantization
from engine.models.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The angle by which each position rotates a head's channels. `scaling` says which of the other fields count."""

    rotary_dim: int  # the first rotary_dim of each head are rotated
    theta: float
    scaling: str = "default"  # default | linear | dynamic | llama3 | yarn
    factor: float = 1.0  # how many times the context is stretched
    original_max_position_embeddings: int = 0  # dynamic, llama3, yarn: the context before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions as bounds of the ramp
    attention_factor: float = 1.0  # yarn: multiplies cos and sin


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

    def for_rank(self, shard: Shard) -> AttentionSpec:
        """One rank's heads. Where there are fewer KV heads than ranks, several ranks hold the same one."""
        return replace(
            self,
            num_heads=len(shard.span("num_attention_heads", self.num_heads)),
            num_kv_heads=len(shard.span("num_key_value_heads", self.num_kv_heads, replicate=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A SwiGLU MLP."""

    intermediate_size: int
    bias: bool = False

    def for_rank(self, shard: Shard) -> DenseSpec:
        """One rank's columns."""
        return replace(self, intermediate_size=len(shard.span("intermediate_size", self.intermediate_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: what mixes tokens, then what transforms each."""

    mixer: AttentionSpec
    mlp: DenseSpec

    def for_rank(self, shard: Shard) -> LayerSpec:
        return LayerSpec(mixer=self.mixer.for_rank(shard), mlp=self.mlp.for_rank(shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything the decoder and the engine must know of a model's configuration."""

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    context_length: int  # the longest context the model is meant for, its RoPE scaling included
    tie_word_embeddings: bool
    dtype: str  # of the published weights: "bfloat16", "float16" or "float32"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None  # of the weights; None: they are floats
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
