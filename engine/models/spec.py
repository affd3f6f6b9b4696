"""A decoder described by numbers. Knows shapes and constants; never knows files, tensors or family names' quirks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The angles that each position turns by. `scaling` says which of the other fields count."""

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
class ModelSpec:
    """Everything the decoder and the engine must know of a model's configuration."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int, ...]  # per layer; 0: full attention
    attention_scale: float
    soft_cap: float  # of the attention scores; 0: none
    dtype: str  # of the published weights: "bfloat16", "float16" or "float32"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    has_head: bool = True  # False: it is published for embeddings, and generates nothing

    @property
    def context_length(self) -> int:
        """The longest context the model is meant for, its RoPE scaling counted as vLLM counts it.

        Linear and dynamic scaling stretch `max_position_embeddings`; yarn stretches the original length; llama3's
        `max_position_embeddings` is already stretched.
        """
        rope = self.rope
        if rope is None or rope.scaling in ("default", "llama3"):
            return self.max_position_embeddings
        if rope.scaling == "yarn":
            return max(self.max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
        return int(self.max_position_embeddings * rope.factor)
