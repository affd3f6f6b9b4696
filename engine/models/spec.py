"""A model described by numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.models.quantization import Quantization, Renames
from engine.models.recurrent_spec import RecurrentSpec
from engine.models.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding. `scaling` determines which of the other fields apply."""

    rotary_dim: int  # the first rotary_dim channels of each head are rotated
    theta: float
    interleaved: bool = False  # channels 2i and 2i + 1 form a pair, instead of i and i + rotary_dim / 2
    scaling: str = "default"  # default | linear | dynamic | llama3 | yarn | longrope | proportional
    rotating_dim: int = (
        0  # proportional: only the first rotating_dim / 2 pairs rotate, with the frequencies of all pairs
    )
    factor: float = 1.0  # by which the context is extended
    original_max_position_embeddings: int = 0  # dynamic, llama3, yarn, longrope: the context before extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    short_factors: tuple[float, ...] = ()  # longrope: of each pair's wavelength, within the original context
    long_factors: tuple[float, ...] = ()  # longrope: the same beyond the original context


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """Scaling of queries by their positions (Llama 4): 1 + beta · log(1 + ⌊(position + offset) / length⌋)."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """Block-sparse attention: the fields of `kernels.BlockSparse`."""

    block: int
    local: int
    stride: int
    head_step: int
    first_head: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpec:
    """Gates of an attention's output: activation(projection of its input)."""

    name: str = ""  # of their matrix; "": in q_proj, each head's query is followed by its gate
    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    of_heads: bool = False  # a head has one gate, else each channel has


@dataclass(frozen=True, slots=True)
class DisentangledSpec:
    """Scores by relative positions (DeBERTa), see `engine.models.disentangled`."""

    max_distance: int
    num_buckets: int = 0  # of distances to one side; 0: each has its own
    norm: bool = True  # the vectors of relative positions are normalised

    @property
    def span(self) -> int:
        """Learnt vectors to one side."""
        return self.num_buckets or self.max_distance


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    rope: RopeSpec | None
    window: int = 0  # number of newest tokens that a token attends to, including itself; 0: all
    causal: bool = True  # False: tokens see later ones too, `window - 1` of them if there is a window
    soft_cap: float = 0.0  # of the scores; 0: none
    sparse: SparseSpec | None = None  # blocks that each head attends to; None: all
    alibi: tuple[float, ...] = ()  # ALiBi slope of each head; (): no ALiBi
    # Fields of `kernels.AttentionArgs` that are learnt numbers per head, in the checkpoint under these names.
    learnt: tuple[str, ...] = ()
    relative: bool = False  # the model's learnt biases of scores by the distance of query and key, see `RelativeBias`
    disentangled: DisentangledSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head
    gate: GateSpec | None = None  # of the output of each head
    qk_norm_over_heads: bool = False  # RMSNorm over all query heads together, and over all key heads
    # The norms of heads have weights of their own for each head: in one tensor, or in one for each.
    qk_norm_of_each: Literal["", "stacked", "separate"] = ""
    qk_norm_weights: bool = True  # False: norms of heads have no weights
    rotates_first: bool = False  # RoPE comes before the norms of heads
    scales_queries: bool = False  # by their positions, see `ModelSpec.query_scaling`
    clip: float = 0.0  # limit of projected queries, keys and values; 0: none
    fused: bool = False  # the checkpoint has q, k and v in one tensor, qkv_proj
    grouped: bool = False  # whose rows are, for each KV head: its queries, its key, its value
    v_norm: bool = False  # RMSNorm of each value head, without a weight
    key_is_value: bool = False  # no v_proj: values are the projected keys before norm and RoPE
    kv_of: int | None = None  # earlier layer whose cached keys and values are read; None: the layer has its own

    @property
    def widens(self) -> bool:
        """True if prefill over an e4m3 cache may read upcast copies of its pages.

        The kernel that gains from them computes neither ALiBi nor, with scales, block-sparse attention.
        """
        return self.sparse is None and not self.alibi

    @property
    def cached(self) -> tuple[int, int, int]:
        """Shape of a token's cache entry: keys and values of each KV head."""
        return 2, self.num_kv_heads, self.head_dim

    def for_rank(self, shard: Shard) -> AttentionSpec:
        """Return one rank's heads. If there are fewer KV heads than ranks, several ranks hold the same head."""
        heads = shard.span("num_attention_heads", self.num_heads)
        return replace(
            self,
            num_heads=len(heads),
            alibi=self.alibi[heads.start : heads.stop],
            sparse=self.sparse and replace(self.sparse, first_head=heads.start),
            num_kv_heads=len(shard.span("num_key_value_heads", self.num_kv_heads, replicate=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """DeepSeek's lightning indexer: a token attends to the `top_k` tokens with the best scores among those it sees."""

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool  # pairs of its RoPE, which has the frequencies of attention's
    is_shared: bool = False  # the layer attends to the tokens that an earlier one chose, and has no indexer


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek): keys and values of all heads are projections of one short vector."""

    num_heads: int
    latent_dim: int  # size of that vector
    plain_dim: int  # channels of a head's query and key without RoPE, followed by `rope.rotary_dim` channels with RoPE
    value_dim: int
    scale: float  # of the scores
    rope: RopeSpec
    scales_queries: bool = False  # by their positions, see `ModelSpec.query_scaling`
    query_rank: int = 0  # queries are projected from a vector of this size; 0: from the hidden state
    bias: bool = False  # of the projections from and to the hidden state
    norm_eps: float = 1e-6  # of the norms of the short vectors
    index: IndexSpec | None = None  # None: tokens attend to all that they see

    def for_rank(self, shard: Shard) -> LatentSpec:
        """Return one rank's heads. All ranks cache the same latents."""
        return replace(self, num_heads=len(shard.span("num_attention_heads", self.num_heads)))

    @property
    def cached(self) -> tuple[int, int, int]:
        """Shape of a token's cache entry: the latent, the RoPE channels, and the indexer's key. Layers that share a
        choice leave the key's place empty, so that all are in one cache group.
        """
        return 1, self.num_kv_heads, self.head_dim + (0 if self.index is None else self.index.head_dim)

    @property
    def kv_of(self) -> None:
        return None

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Size of queries and cached vectors in the scores."""
        return self.latent_dim + self.rope.rotary_dim

    @property
    def window(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A dense MLP: down(activation(gate) · up), or down(activation(up)) without a gate.

    "clamped_swiglu": (up + 1) · gate · σ(1.702 gate), whose rows alternate in one tensor, `up_name`: gate, up, gate …
    """

    intermediate_size: int
    bias: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"] = "silu"
    limit: float = 0.0  # clamped_swiglu: the most of the gate and of |up|
    gated: bool = True
    down_bias: bool | None = None  # None: `bias`
    up_first: bool = False  # `fused` holds up, then gate; for "gelu" alone
    gate_multiplier: float = 1.0  # of the gate, before its activation
    # Share of a token's gates that are cut off, if they are distributed normally: relu(gate - cutoff); 0: none is.
    sparsity: float = 0.0
    fused: str = ""  # name of a tensor that holds gate, then up; "": separate tensors
    up_name: str = "up_proj"  # in the checkpoint
    down_name: str = "down_proj"

    def for_rank(self, shard: Shard) -> DenseSpec:
        """Return one rank's columns."""
        return replace(self, intermediate_size=len(shard.span("intermediate_size", self.intermediate_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Choice and weights of a token's experts, see `kernels.Router`."""

    num_chosen: int
    scoring: Literal["softmax", "softmax_chosen", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    renormalise: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names and layout of an MoE in the checkpoint.

    Either each expert has its own gate, up and down tensors ("{}" stands for its number), or all experts are stacked in
    two tensors.
    """

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    router_norm: str = "router.scale"  # the norm's weight, times √hidden
    expert_scale: str = "router.per_expert_scale"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    stacked: tuple[str, str] | None = None  # gate and up [E, 2I, hidden], down [E, hidden, I]
    suffix: str = "."  # of stacked tensors, see `layers.Part`
    interleaved: bool = False  # rows of gate and up alternate in stacked tensors
    transposed: bool = False  # stacked floats are [E, hidden, 2I] and [E, I, hidden]
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    latent: tuple[str, str] = ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")  # into and out of `MoESpec.latent`


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelNorms:
    """Names of the norms if a dense MLP and experts run in parallel. The norm before the MLP is the layer's."""

    after_shared: str
    before_experts: str
    after_experts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """An MoE: MLPs, top-k of them for each token, and an optional shared expert."""

    num_experts: int
    intermediate_size: int  # of each expert
    router: RouterSpec
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"] = "silu"  # relu2: without gates
    bias: bool = False  # of the experts
    router_bias: bool = False
    router_norm_eps: float = 0.0  # of the router's own norm; 0: the router reads the same input as the experts
    expert_scale: bool = False  # each expert has a learnt factor of its weight
    correction: bool = False  # a bias of the scores for choosing experts, not for weighting them
    shared: DenseSpec | None = None
    shared_gate: bool = False  # the shared expert is scaled by a sigmoid gate
    # The experts of two rounds: the best, weighted by a softmax over those whose logits, relative to the larger of
    # them and the best, lie within this margin below it (SparseMixer); 0: `router` chooses.
    margin: float = 0.0
    latent: int = 0  # experts read and write projections of this size; 0: hidden states
    scales_input: bool = False  # the weight of the only chosen expert scales its input instead of its output
    parallel_norms: ParallelNorms | None = None  # norms around the dense MLP and the experts; None: no such norms
    names: ExpertNames = ExpertNames()

    def for_rank(self, shard: Shard) -> MoESpec:
        """Return one rank's experts, and its columns of the shared expert."""
        num_experts = len(shard.span("num_experts", self.num_experts))
        return replace(self, num_experts=num_experts, shared=self.shared and self.shared.for_rank(shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Names of a layer's norms in the checkpoint; "": no norm."""

    before_mixer: str = "input_layernorm"
    after_mixer: str = ""  # of the mixer's output, before it is added to the residual stream
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    sum_mixer: str = ""  # of the residual stream, after the mixer's output is added to it
    sum_mlp: str = ""
    after_eps: float = 0.0  # of the norms after mixer and MLP; 0: that of all norms


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: a mixer (attention or a recurrent layer), then an MLP."""

    mixer: AttentionSpec | LatentSpec | RecurrentSpec
    mlp: DenseSpec | MoESpec | None  # None: there is none
    norms: Norms = Norms()
    parallel: bool = False  # mixer and MLP read the stream before either adds to it, through one norm or two
    further: tuple[DenseSpec, ...] = ()  # MLPs after the first, each with a norm before it
    lends_input: bool = False  # the next layer's mixer reads this one's normalised input; there is no MLP
    residual_multiplier: float = 1.0  # of the outputs added to the residual stream
    mlp_multiplier: float | None = None  # of the MLP's output; None: residual_multiplier
    output_scale: bool = False  # the layer's output is multiplied by a learnt number
    weights_of: int | None = None  # the earlier layer whose weights it uses; None: it has its own

    def for_rank(self, shard: Shard) -> LayerSpec:
        further = tuple(mlp.for_rank(shard) for mlp in self.further)
        mlp = self.mlp and self.mlp.for_rank(shard)
        return replace(self, mixer=self.mixer.for_rank(shard), mlp=mlp, further=further)

    @property
    def mlps(self) -> tuple[DenseSpec | MoESpec, ...]:
        return ((self.mlp,) if self.mlp is not None else ()) + self.further


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerSpec:
    """Per-layer embeddings (Gemma 3n and 4): a short vector per token and layer, which the layer projects and adds."""

    size: int
    vocab_size: int
    is_partial: bool = False  # further tokens of the vocabulary have the vectors of token 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """Alternating updates of several residual streams (Gemma 3n), see `engine.models.altup`."""

    num_streams: int
    active: int  # the stream that layers compute
    scales_output: bool  # by learnt numbers, before the layer's own embedding is added
    laurel_rank: int  # of the learnt augmented residual


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntPositions:
    """A learnt vector for each position, added to the tokens' embeddings."""

    count: int  # rows of the table
    offset: int = 0  # row of position 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayerSpec:
    """A linear layer after pooling, an activation, and a LayerNorm."""

    name: str  # of the matrix in the checkpoint
    num_outputs: int
    bias: bool = True
    activation: Literal["", "tanh", "gelu", "gelu_tanh", "relu", "silu"] = ""
    norm: str = ""  # of the LayerNorm; "": none
    norm_bias: bool = False
    folder: str = ""  # whose model.safetensors holds the matrix; "": the model's own


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Layers after pooling: a classifier, or sentence-transformers' Dense modules."""

    layers: tuple[HeadLayerSpec, ...]
    pooling: str = ""  # of a classifier, see `PoolingParams.pooling`; "": it is no classifier

    @property
    def num_outputs(self) -> int:
        return self.layers[-1].num_outputs


Grid = tuple[int, int]  # rows and columns of patches


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """An encoder of images: a transformer over patches. A block of patches becomes a token of the text model."""

    kind: Literal[
        "qwen",
        "qwen2",
        "pixtral",
        "siglip",
        "intern",
        "intern_chat",
        "glm",
        "gemma4",
        "gemma4_unified",
        "kimi_vl",
        "kimi_k25",
    ] = "qwen"  # see `models.vision.kinds`
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # pixels of a side
    merge_size: int  # patches of a side of a block
    num_positions: int = 0  # learnt vectors of a square of positions; 0: none
    tile: Grid | None = None  # the only grid that the encoder reads, an image may have several; None: it reads any
    num_tiles: tuple[int, int] = 1, 12  # fewest and most of an image, where the processor's file does not say
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "gelu_tanh"
    steepness: float = 1.0  # the activation's input is multiplied by it, its result divided (not where it is gated)
    eps: float = 1e-6  # of norms
    norm: Literal["rms", "layer"] = "layer"  # of InternVL
    qkv_bias: bool = True  # of InternVL and GLM
    qk_norm: bool = False  # RMSNorms of queries and keys: InternVL's over all heads, GLM-OCR's over each
    layer_bias: bool = False  # of GLM-OCR: the other matrices of layers have biases, too
    head_size: int = 0  # 0: `hidden_size` / `num_heads`
    clips: bool = False  # of Gemma 4: inputs and outputs of matrices are limited
    is_standardised: bool = False  # of Gemma 4: tokens are shifted and scaled before the projection
    theta: float = 10_000.0  # of the encoder's RoPE
    deepstack: tuple[int, ...] = ()  # layers whose merged output is added after the first layers of the text model
    is_older: bool = False  # Qwen2-VL's or Qwen2.5-VL's parts, without a bias of patches
    window: int = 0  # side of an attention window, in blocks of merged patches; 0: full attention
    full_layers: tuple[int, ...] = ()  # layers without windows
    # From the encoder to the text model: of the projector's MLP, and the eps of its norm.
    projector_activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "gelu"
    projector_bias: bool = True
    projector_size: int = 0  # inner size of GLM's
    projector_eps: float = 1e-6

    # In the prompt.
    image_token_id: int  # placeholder of a token of an image
    placeholder: tuple[int, ...]  # tokens that stand for an image in a prompt, the image's one among them
    placeholder_end: str = ""  # text behind these
    video_token_id: int | None = None  # placeholder of a token of a video; None: the model reads none
    time_steps: float = 0.0  # positions that a second of a video takes; 0: times stand in the prompt as texts
    marker_id: int | None = None  # that stands for an image in a prompt, where it is not the image's token
    before: tuple[int, ...] = ()  # tokens that are written before each image, and behind it
    behind: tuple[int, ...] = ()
    margin: str = ""  # text that is written before these and behind them
    # Layers of the text model that let each token of an image see the others: all, or those with a sliding window.
    sees_both_ways: Literal["", "all", "windows"] = ""
    max_tokens: int = 0  # of an image, where the checkpoint limits them
    pad_id: int | None = None  # token whose vectors for each layer the tokens of an image get
    row_ends: tuple[int, int] | None = None  # tokens behind each row of an image, and behind its last one
    # Pairs of the text model's RoPE that turn by time, row and column; None: images have positions as texts have.
    rope_sections: tuple[int, int, int] | None = None
    rope_interleaved: bool = True  # these take turns, as long as there are some; else they follow each other

    # Pixels are divided by 255; then the mean of a channel is subtracted, and the result divided by `std`.
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    min_pixels: int = 65_536  # of a resized image, where the checkpoint does not say
    max_pixels: int = 16_777_216
    longest_edge: int = 0  # pixels of the longest side of a resized image, where the checkpoint does not say

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def num_whole(self) -> int:
        """The tokens of an image that one step must compute together; 0: any part of an image is computed alone."""
        return self.max_tokens if self.sees_both_ways else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptationSpec:
    """Adapters of several tasks in a checkpoint (jina-embeddings-v3), see `checkpoints.adapted`."""

    count: int
    chosen: int | None  # whose adapter is merged; None: none
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that the decoder and the engine need from a model's configuration."""

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    context_length: int  # longest supported context, including RoPE scaling
    tie_word_embeddings: bool
    dtype: str  # of the published weights: "bfloat16", "float16" or "float32"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None  # of the weights; None: float weights
    # RMSNorm; LayerNorm with weights only, with biases too, or without either
    norm: Literal["rms", "layer", "layer_bias", "layer_plain"] = "rms"
    norm_offset: float = 0.0  # added to the stored weights of norms
    final_norm_offset: float | None = None  # of the final one; None: `norm_offset`
    embedding_multiplier: float = 1.0
    positions: LearntPositions | None = None
    query_scaling: QueryScaling | None = None  # of layers with `scales_queries`
    embedding_norm: Literal["", "norm", "unweighted"] = ""  # of the embeddings, before the first layer
    token_types: int = 0  # rows of the table of token types, which tokens' ids tell; 0: there is none
    final_norm: bool = True
    head_bias: bool = False  # of the output head
    head_normed: bool = False  # the rows of the output head are divided by their norms
    transposed: bool = False  # the layers' matrices are stored as [in, out]
    logits_multiplier: float = 1.0
    logits_soft_cap: float = 0.0  # 0: none
    names: Renames = ()  # of the checkpoint's tensors
    unused: tuple[str, ...] = ()  # prefixes of tensor names, in Quire's form, that are not loaded
    other_input: tuple[str, ...] = ()  # the same for parts of the model that read images or sound
    num_embeddings: int = 0  # rows of the embedding, if they are more than the vocabulary; 0: they are not
    embedding_dim: int = 0  # channels of embeddings, which are projected to `hidden_size`; 0: they have these
    adaptations: AdaptationSpec | None = None
    per_layer: PerLayerSpec | None = None
    altup: AltUpSpec | None = None  # None: there is one residual stream
    num_draft_layers: int = 0  # multi-token prediction layers stored after the decoder's, see `mtp`
    # How the checkpoint names such layers, if a drafter can use them: as further layers, or below "mtp".
    mtp: Literal["", "layers", "mtp"] = ""
    vision: VisionSpec | None = None  # the encoder of images; None: the model reads text only
    has_head: bool = True  # False: an embedding model, which cannot generate
    head: HeadSpec | None = None  # after pooling; None: pooled hidden states are embeddings

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_encoder(self) -> bool:
        """True if tokens see later ones: a step must have whole sequences, and keys and values last for one layer."""
        return any(isinstance(layer.mixer, AttentionSpec) and not layer.mixer.causal for layer in self.layers)

    @property
    def max_token_id(self) -> int:
        """The largest id of a prompt's token. An id beyond the vocabulary is that of a token of the second type (the
        second text of a pair), plus the vocabulary's size.
        """
        return self.vocab_size * max(self.token_types, 1) - 1

    @property
    def embedding_size(self) -> int:
        """Size of a pooled output."""
        return self.hidden_size if self.head is None else self.head.num_outputs

    @property
    def has_states(self) -> bool:
        """True if there are recurrent layers."""
        return any(isinstance(layer.mixer, RecurrentSpec) for layer in self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention window of each layer; 0: full attention, or a recurrent layer."""
        return tuple(layer.mixer.window for layer in self.layers)

    def for_rank(self, shard: Shard) -> ModelSpec:
        """Return one rank's part: its heads and MLP columns. The vocabulary stays whole.

        Raises `ModelError` if they cannot be divided evenly.
        """
        return replace(self, layers=tuple(layer.for_rank(shard) for layer in self.layers))
