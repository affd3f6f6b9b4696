"""A decoder described by numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from engine.models.quantization import Quantization
from engine.models.shard import Shard

if TYPE_CHECKING:
    from kernels import BlockSparse


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The angle by which each position rotates a head's channels. `scaling` says which of the other fields count."""

    rotary_dim: int  # the first rotary_dim of each head are rotated
    theta: float
    interleaved: bool = False  # channels 2i and 2i + 1 are a pair, not i and i + rotary_dim / 2
    scaling: str = "default"  # default | linear | dynamic | llama3 | yarn | longrope | proportional
    turning_dim: int = 0  # proportional: only the first turning_dim / 2 pairs turn, by angles as if all did
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
    sparse: BlockSparse | None = None  # which blocks of the past a head sees; None: all
    alibi: tuple[float, ...] = ()  # of each head: what its scores lose by a token of distance; (): nothing
    sinks: bool = False  # each head has a learnt score that joins the softmax's sum, without a value
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head
    qk_norm_over_heads: bool = False  # RMSNorm of all query heads together, and of all key heads
    fused: bool = False  # the checkpoint keeps q, k and v in one tensor, qkv_proj
    v_norm: bool = False  # RMSNorm of each value head, without a weight
    key_is_value: bool = False  # there is no v_proj: values are the projected keys, before their norm and rotation
    kv_of: int | None = None  # an earlier layer, whose cached keys and values it reads; None: it has its own

    @property
    def cached(self) -> tuple[int, int, int]:
        """Of each token: keys and values of heads of channels."""
        return 2, self.num_kv_heads, self.head_dim

    def for_rank(self, shard: Shard) -> AttentionSpec:
        """One rank's heads. Where there are fewer KV heads than ranks, several ranks hold the same one."""
        heads = shard.span("num_attention_heads", self.num_heads)
        return replace(
            self,
            num_heads=len(heads),
            alibi=self.alibi[heads.start : heads.stop],
            sparse=self.sparse and replace(self.sparse, first_head=heads.start),
            num_kv_heads=len(shard.span("num_key_value_heads", self.num_kv_heads, replicate=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Attention over latents (DeepSeek's MLA): the keys and values of all heads are projections of one short vector."""

    num_heads: int
    latent_dim: int  # of that vector
    plain_dim: int  # a head's query and key: channels without a position, and behind them `rope.rotary_dim` with one
    value_dim: int
    scale: float  # of the scores
    rope: RopeSpec
    query_rank: int = 0  # queries are made of a vector of this size; 0: of the hidden state
    bias: bool = False  # of the projections from and to the hidden state
    norm_eps: float = 1e-6  # of the norms of the short vectors

    def for_rank(self, shard: Shard) -> LatentSpec:
        """One rank's heads. All ranks cache the same."""
        return replace(self, num_heads=len(shard.span("num_attention_heads", self.num_heads)))

    @property
    def cached(self) -> tuple[int, int, int]:
        """The latent, and the channels that carry the position."""
        return 1, self.num_kv_heads, self.head_dim

    @property
    def kv_of(self) -> None:
        return None

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Of what queries and cached vectors are compared by."""
        return self.latent_dim + self.rope.rotary_dim

    @property
    def window(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """An MLP: down(activation(gate) · up), or down(activation(up)) where it is not gated."""

    intermediate_size: int
    bias: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"
    gated: bool = True
    fused: str = ""  # the tensor in which the checkpoint keeps gate and up together, if it does
    up_name: str = "up_proj"  # in the checkpoint
    down_name: str = "down_proj"

    def for_rank(self, shard: Shard) -> DenseSpec:
        """One rank's columns."""
        return replace(self, intermediate_size=len(shard.span("intermediate_size", self.intermediate_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How the router chooses and weighs a token's experts: see `kernels.Router`."""

    num_chosen: int
    scoring: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    renormalise: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls the tensors of a layer's mixture of experts, and how it keeps those of the experts.

    Either each expert has its own gate, up and down ("{}" stands for its number), or all experts' are stacked in two tensors.
    """

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    router_norm: str = "router.scale"  # the norm's weight, times √hidden
    expert_scale: str = "router.per_expert_scale"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    stacked: tuple[str, str] | None = None  # gate and up [E, 2I, hidden], down [E, hidden, I]
    suffix: str = "."  # of stacked tensors: see `layers.Part`
    interleaved: bool = False  # gate and up, stacked, take turns row by row
    transposed: bool = False  # stacked floats are [E, hidden, 2I] and [E, I, hidden]
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """The names of norms by which a dense MLP and experts stand side by side. What comes before the MLP is the layer's."""

    after_shared: str
    before_experts: str
    after_experts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts: gated MLPs of which each token's router chooses some, and maybe one that all tokens share."""

    num_experts: int
    intermediate_size: int  # of each
    router: RouterSpec
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    bias: bool = False  # of the experts
    router_bias: bool = False
    router_norm_eps: float = 0.0  # of a norm that the router alone reads tokens by; 0: it reads what the experts do
    expert_scale: bool = False  # what the router weighs an expert by is multiplied by a learnt number of that expert
    correction: bool = False  # a bias of the scores to choose by, not to weigh by
    shared: DenseSpec | None = None
    shared_gate: bool = False  # the shared expert is scaled by the sigmoid of a projection to one number
    apart: Apart | None = None  # norms of the shared expert's and the chosen experts' sum, each; None: they have none
    names: ExpertNames = ExpertNames()

    def for_rank(self, shard: Shard) -> MoESpec:
        """One rank's experts, whole, and its columns of the shared one."""
        num_experts = len(shard.span("num_experts", self.num_experts))
        return replace(self, num_experts=num_experts, shared=self.shared and self.shared.for_rank(shard))


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

    mixer: AttentionSpec | LatentSpec
    mlp: DenseSpec | MoESpec
    norms: Norms = Norms()
    parallel: bool = False  # both read the norm before the mixer, and add to the same residual stream
    residual_multiplier: float = 1.0  # of what each adds to it
    output_scale: bool = False  # the layer's output is multiplied by a learnt number

    def for_rank(self, shard: Shard) -> LayerSpec:
        return replace(self, mixer=self.mixer.for_rank(shard), mlp=self.mlp.for_rank(shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerSpec:
    """Per-layer embeddings (Gemma 3n and 4): each layer adds what it makes of a short vector of its own for each token."""

    size: int
    vocab_size: int


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
    names: tuple[tuple[str, str], ...] = ()  # parts of tensors' names in the checkpoint, and what we call them
    unused: tuple[str, ...] = ()  # how names, as we call them, of tensors begin that are not loaded
    per_layer: PerLayerSpec | None = None
    num_draft_layers: int = 0  # multi-token prediction: stored after the decoder's layers, and not loaded
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
