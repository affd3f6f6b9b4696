"""The transformer of all model families: decoders, and encoders, whose attention is not causal.

Shapes: T tokens of the step, H query heads, Hkv key heads, D head_dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

import kernels
from engine.models.altup import AltUp, Streams, Sublayers
from engine.models.attention import Attention, AttentionMetadata
from engine.models.disentangled import DisentangledAttention, RelativeEmbeddings
from engine.models.errors import ModelError
from engine.models.formats import formats_of_tied_head
from engine.models.layers import Embedding, Linear, LMHead, PositionEmbedding, TokenTypes
from engine.models.matrix import Matrix, Scope
from engine.models.mixers import LayerCache, Mixer, make_mixer
from engine.models.mlp import MLP
from engine.models.moe import DenseAndExperts, MoE
from engine.models.norms import LayerNorm, MakeNorm, NoNorm, Norm, PlainLayerNorm, RMSNorm, unweighted
from engine.models.per_layer import PerLayerEmbedding, PerLayerInput
from engine.models.pooling_head import PoolingHead
from engine.models.relative import RelativeBias
from engine.models.residual import ImageSpan, InputNorm, OutputSum, ResidualStream, SublayerInput, TokenContext
from engine.models.rope import query_scales, rope_table
from engine.models.shard import Span
from engine.models.spec import (
    AltUpSpec,
    AttentionSpec,
    DenseSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    PerLayerSpec,
)
from engine.models.vision.kinds import make_encoder
from engine.models.vision.layers import VisionEncoder


class Decoder(nn.Module):
    """Computes logits from token ids: one rank's part of the model.

    `weights.load_model` fills the weights. Weights of other pipeline stages have no memory.
    """

    def __init__(self, spec: ModelSpec, scope: Scope, *, max_model_len: int | None = None, own_rows: int = 0) -> None:
        """`max_model_len`: number of positions in the RoPE tables; None: the model's whole context. `own_rows`: further
        rows, which steps write for tokens whose position is not a single number.

        Raises `ModelError` if the model cannot be divided among the scope's ranks.
        """
        super().__init__()
        self.spec = spec.for_rank(scope.shard)
        ropes = dict.fromkeys(layer.mixer.rope for layer in spec.layers)
        tables = {
            rope: rope_table(rope, (max_model_len or spec.context_length) + own_rows).to(scope.device) if rope else None
            for rope in ropes
        }
        body, make_norm, self.stage = scope / "model", norm_maker(spec), scope.stage
        self.own_layers = self.stage.layers(len(spec.layers))
        is_first, is_last = self.stage.is_first, self.stage.is_last
        has_embedding = is_first or (is_last and spec.tie_word_embeddings)
        num_rows = spec.num_embeddings or spec.vocab_size
        size = spec.embedding_dim or spec.hidden_size
        self.embed_tokens = Embedding(body.only_if(has_embedding) / "embed_tokens", num_rows, size)
        self.rope_tables = {rope: table for rope, table in tables.items() if rope is not None and table is not None}
        self._check_stage(spec)
        self._add_embeddings(spec, body.only_if(is_first), make_norm)
        per_layer = spec.per_layer
        self.per_layer: PerLayerEmbedding | None = None
        if per_layer:
            self.per_layer = PerLayerEmbedding(per_layer, spec.hidden_size, len(spec.layers), make_norm, body)
        self.layers = nn.ModuleList()
        for i, layer in enumerate(spec.layers):
            if layer.weights_of is not None:
                self.layers.append(self.layers[layer.weights_of])
                continue
            own = replace(body.only_if(i in self.own_layers) / "layers" / i, transposed=spec.transposed)
            cos_sin = tables[layer.mixer.rope]
            self.layers.append(DecoderLayer(layer, spec.hidden_size, cos_sin, make_norm, own, per_layer, spec.altup))
        self.streams = Streams(spec.altup, spec.hidden_size, body) if spec.altup else None
        self._share_scales(spec)
        self._share_biases(spec, body)
        body, scope = body.only_if(is_last), scope.only_if(is_last)
        if spec.final_norm_offset is not None:
            make_norm = norm_maker(replace(spec, norm_offset=spec.final_norm_offset))
        self.norm = (make_norm if spec.final_norm else no_norm)(body / "norm", spec.hidden_size)
        self.head = PoolingHead(spec.head, spec.hidden_size, spec.norm_eps, scope) if spec.head else None
        if spec.tie_word_embeddings:
            scope = replace(scope, weight_formats=formats_of_tied_head(scope.weight_formats, scope.name("lm_head")))
        self.lm_head = LMHead(scope, spec.vocab_size, spec.hidden_size, bias=spec.head_bias, normed=spec.head_normed)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self._here = cast(list[DecoderLayer], list(self.layers)[self.own_layers.start : self.own_layers.stop])
        for here, following in itertools.pairwise(self._here):
            here.precede(following)
        self._skips = [False] * len(self._here)  # see `few_layers`
        # Layer → memory [tokens, hidden] to which each step copies the residual stream after it, for a drafter.
        self.taps: dict[int, Tensor] = {}
        # In the dtype of the weights, as the models were trained.
        self._of_logits = spec.logits_multiplier, spec.logits_soft_cap
        self._embedding_multiplier = torch.tensor(spec.embedding_multiplier, dtype=scope.dtype).item()

    def _add_embeddings(self, spec: ModelSpec, first: Scope, make_norm: MakeNorm) -> None:
        """Create what is added to token embeddings, their norm and the encoder of images, if the model has them.

        `first`: the scope of the first stage.
        """
        self.positions = self.token_types = self.embedding_norm = self.embedding_projection = None
        self.vision: VisionEncoder | None = None
        size = spec.embedding_dim or spec.hidden_size
        if spec.embedding_dim:
            parts = {"embed_projection": spec.hidden_size}
            self.embedding_projection = Linear(first, spec.embedding_dim, parts, bias=True)
        if spec.token_types:
            self.token_types = TokenTypes(spec.token_types, spec.vocab_size, size, first / "embed_types")
        if spec.vision is not None:
            self.vision = make_encoder(spec.vision, spec.hidden_size, first)
        if spec.positions is not None:
            self.positions = PositionEmbedding(spec.positions, size, first / "embed_positions")
        if spec.embedding_norm:
            make_norm = unweighted(make_norm) if spec.embedding_norm == "unweighted" else make_norm
            self.embedding_norm = make_norm(first / "embed_norm", size)

    def _check_stage(self, spec: ModelSpec) -> None:
        """Raises `ModelError` if layers that need each other would be in different stages."""
        first = self.own_layers.start
        if first and spec.layers[first - 1].lends_input:
            raise ModelError(f"mixers that read the same input must be in one of {self.stage.count} stages")
        mixer = spec.layers[first].mixer
        if first and isinstance(mixer, LatentSpec) and mixer.index is not None and mixer.index.is_shared:
            raise ModelError(
                f"layer {first} attends to the tokens that the one before it chooses, and would be in another of "
                f"{self.stage.count} stages"
            )
        shares_kv = any(layer.mixer.kv_of is not None for layer in spec.layers)
        shares_kv |= any(layer.weights_of is not None for layer in spec.layers)
        if self.stage.count > 1 and (spec.per_layer or shares_kv):
            raise ModelError(
                "layers that share weights, or keys and values, or have embeddings of their own, must be in one stage"
            )
        last_read = len(self.own_layers) - self.stage.is_last
        if self.stage.is_first and spec.vision is not None and len(spec.vision.deepstack) > last_read:
            raise ModelError("the layers that read images must be in the first stage: use fewer stages")

    def _share_scales(self, spec: ModelSpec) -> None:
        """Let a layer that reads another's cache use the scale that it was written with."""
        for i, layer in enumerate(spec.layers):
            if (source := layer.mixer.kv_of) is not None:
                reader, owner = (cast(DecoderLayer, self.layers[at]).attention for at in (i, source))
                assert isinstance(reader, Attention)
                assert isinstance(owner, Attention)
                reader.kv_scale = owner.kv_scale

    def _share_biases(self, spec: ModelSpec, body: Scope) -> None:
        """Let all layers read the model's biases of scores by distance, or vectors of distances, if it has such."""
        self.relative_bias: RelativeBias | None = None
        self.relative_embeddings: RelativeEmbeddings | None = None
        for layer in self.layers:
            attention = cast(DecoderLayer, layer).attention
            if isinstance(attention, DisentangledAttention) and attention.spec.disentangled is not None:
                if self.relative_embeddings is None:
                    own = spec.hidden_size, spec.norm_eps, body / "relative_embeddings"
                    self.relative_embeddings = RelativeEmbeddings(attention.spec.disentangled, *own)
                attention.distances = self.relative_embeddings
            if isinstance(attention, Attention) and attention.spec.relative:
                if self.relative_bias is None:
                    mixer = cast(AttentionSpec, spec.layers[0].mixer)
                    self.relative_bias = RelativeBias(mixer.num_heads, body / "relative_attention_bias")
                attention.relative = self.relative_bias

    def pack_weights(self) -> None:
        """Repack all weights for the GEMMs of their device. They cannot be filled afterwards."""
        pack_weights(self)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: Sequence[LayerCache],
        attention: Sequence[AttentionMetadata],
        hidden: Tensor | None = None,
        logits_indices: Tensor | None = None,
        adapters: kernels.AdapterTokens | None = None,
        images: ImageTokens | None = None,
    ) -> Tensor:
        """Run the layers: input_ids [T], positions [T] integer → hidden [T, hidden], before the final norm.

        Later pipeline stages start from the previous stage's `hidden` [T, hidden]. `logits_indices` [N] integer: the
        last layer computes the hidden states of these tokens only, and [N, hidden] is returned.

        kv_cache: for each layer of this stage [2, num_blocks, Hkv, block_size, D], or for latents
        [1, num_blocks, 1, block_size, L + R], to which the step's keys and values are written (a strided view if the
        kernels accept one); for recurrent layers the parts of their blocks of states. attention: for each layer its
        cache group's metadata. adapters: the LoRA adapters of the T tokens; None: no token has one. images: the tokens
        that stand for images.
        """
        if hidden is None:
            hidden = self.embed(input_ids, adapters)
            if images is not None and images.indices is not None and images.embeddings is not None:
                hidden = hidden.index_copy(0, images.indices, images.embeddings)
            if self.positions is not None:
                hidden = self.positions(hidden, positions)
            if self.embedding_norm is not None:
                hidden = self.embedding_norm(hidden)
            if self.embedding_projection is not None:
                hidden = self.embedding_projection.run(hidden)
        vectors = [None] * len(self._here) if self.per_layer is None else self._vectors(input_ids, hidden, images)
        if logits_indices is not None:
            attention = [*attention[:-1], replace(attention[-1], logits_indices=logits_indices)]
        scaling = self.spec.query_scaling
        scales = None if scaling is None else query_scales(scaling, positions).to(hidden.dtype)
        spans = () if images is None else images.spans
        context = TokenContext(adapters=adapters, query_scales=scales, image_spans=spans)
        stream = ResidualStream(hidden if self.streams is None else self.streams.expand(hidden), context=context)
        layers = zip(self.own_layers, self._here, self._skips, kv_cache, attention, vectors, strict=True)
        for index, layer, skips, kv, metadata, vector in layers:
            if skips:
                stream = replace(stream, normed=None)  # a norm that is computed already was for this layer
            else:
                stream = layer(stream, positions, kv, metadata, vector)
            if images is not None and images.indices is not None and index < len(images.deepstack):
                added = stream.hidden.index_add(0, images.indices, images.deepstack[index])
                stream = replace(stream, hidden=added, normed=None)
            if (tap := self.taps.get(index)) is not None:
                tap[: len(stream.hidden)].copy_(stream.hidden)
        return stream.hidden if self.streams is None else self.streams.merge(stream.hidden)

    def _vectors(self, input_ids: Tensor, hidden: Tensor, images: ImageTokens | None) -> Sequence[Tensor]:
        """Return the vectors [T, P] of each layer's own. Tokens of images get those of the padding token."""
        assert self.per_layer is not None
        if images is not None and images.indices is not None:
            assert self.spec.vision is not None
            assert self.spec.vision.pad_id is not None
            input_ids = input_ids.index_fill(0, images.indices, self.spec.vision.pad_id)
            hidden = hidden.index_copy(0, images.indices, self.embed_tokens(input_ids[images.indices]))
        found: Tensor = self.per_layer(input_ids, hidden)
        return found.unbind(1)

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Within the context, compute only layers that need kernels or memory of their own.

        These are both layers where two kinds follow each other for the first time, and the last two.
        """
        specs = [self.spec.layers[i] for i in self.own_layers]
        kinds = [(spec, layer.forms_of_weights()) for spec, layer in zip(specs, self._here, strict=True)]
        last = len(kinds) - 1
        pairs = [(*pair, i + 1 == last) for i, pair in enumerate(itertools.pairwise(kinds))]
        firsts = {pairs.index(pair) for pair in pairs}
        self._skips = [i != last and not firsts & {i - 1, i} for i in range(len(kinds))]
        try:
            yield
        finally:
            self._skips = [False] * len(self._here)

    def logits(self, hidden: Tensor, adapters: kernels.AdapterTokens | None = None) -> Tensor:
        """Apply the final norm and the output head: [N, hidden] -> [N, vocab], in the model's dtype, on all ranks.
        `adapters`: those of the N tokens.
        """
        return self.lm_head.gather(self.own_logits(hidden, adapters=adapters))

    def own_logits(
        self, hidden: Tensor, out: Tensor | None = None, adapters: kernels.AdapterTokens | None = None
    ) -> Tensor:
        """Return the logits [N, n] of this rank's part of the vocabulary, in `out` if given, for `lm_head.gather`."""
        x = SublayerInput(hidden, self.norm, context=TokenContext(adapters=adapters))
        return self._scaled(self.lm_head.own_logits(x, out))

    def logits_of_normed(self, normed: Tensor, head: LMHead | None = None) -> Tensor:
        """Apply the output head, or `head`, to hidden states after a norm: [N, hidden] -> [N, vocab], on all ranks."""
        head = self.lm_head if head is None else head
        return head.gather(self._scaled(head.own_logits(SublayerInput(normed, normed=normed))))

    def _scaled(self, logits: Tensor) -> Tensor:
        multiplier, cap = self._of_logits
        return kernels.scale(logits, multiplier, cap) if cap or multiplier != 1 else logits

    def embed(self, input_ids: Tensor, adapters: kernels.AdapterTokens | None = None) -> Tensor:
        """Return the scaled embeddings of token ids [T], with those of their types: [T, hidden]. `adapters`: of these
        tokens.
        """
        if self.token_types is not None:
            return self.token_types(self.embed_tokens(input_ids % self.spec.vocab_size), input_ids)
        hidden = self.embed_tokens(input_ids, adapters)
        if self._embedding_multiplier != 1:
            hidden = kernels.scale(hidden, self._embedding_multiplier)
        return hidden


class ImageTokens(NamedTuple):
    """The n tokens of a step that stand for images."""

    indices: Tensor | None = None  # [n] int64: their places in the step; None: this stage does not embed them
    embeddings: Tensor | None = None  # [n, hidden]
    deepstack: Sequence[Tensor] = ()  # [n, hidden] each: added after the first layers
    spans: Sequence[ImageSpan] = ()  # those that see each other


class DecoderLayer(nn.Module):
    """Attention or a recurrent layer, then MLP. Each reads the residual stream and adds to it in place."""

    def __init__(
        self,
        layer: LayerSpec,
        hidden_size: int,
        cos_sin: Tensor | None,
        make_norm: MakeNorm,
        scope: Scope,
        per_layer: PerLayerSpec | None = None,
        altup: AltUpSpec | None = None,
    ) -> None:
        super().__init__()
        names, multiplier = layer.norms, layer.residual_multiplier

        def norm(name: str) -> Norm | None:
            return make_norm(scope / name, hidden_size) if name else None

        self.parallel, self.lends_input = layer.parallel, layer.lends_input
        self.attention_norm = InputNorm(norm(names.before_mixer))
        self.mlp_norm = InputNorm(norm(names.before_mlp))  # none, if parallel: both sublayers read the first
        self.attention_sum = OutputSum(norm(names.after_mixer), multiplier)
        self.mlp_sum = OutputSum(
            norm(names.after_mlp), multiplier if layer.mlp_multiplier is None else layer.mlp_multiplier
        )
        for after in (self.attention_sum.after, self.mlp_sum.after):
            if after is not None and names.after_eps:
                after.eps = names.after_eps
        self.attention_sum_norm, self.mlp_sum_norm = norm(names.sum_mixer), norm(names.sum_mlp)
        self.attention: Mixer = make_mixer(layer.mixer, hidden_size, cos_sin, make_norm, scope)
        self.mlp: MLP | MoE | DenseAndExperts | None
        if layer.mlp is None:
            self.mlp = None
        elif isinstance(layer.mlp, MoESpec) and layer.mlp.parallel_norms:
            self.mlp = DenseAndExperts(layer.mlp, hidden_size, make_norm, scope)
        elif isinstance(layer.mlp, MoESpec):
            self.mlp = MoE(layer.mlp, hidden_size, scope)
        else:
            self.mlp = MLP(layer.mlp, hidden_size, scope / "mlp")
        self.further = nn.ModuleList(
            FurtherMLP(mlp, hidden_size, make_norm, multiplier, scope / "further" / i)
            for i, mlp in enumerate(layer.further)
        )
        self.per_layer = PerLayerInput(per_layer, hidden_size, make_norm, scope) if per_layer else None
        self.output_scale = OutputScale(scope) if layer.output_scale else None
        self.altup = AltUp(altup, hidden_size, make_norm, scope) if altup else None
        self.attention_norm.read_by(self._next_norm)
        if self.mlp is not None:
            self.mlp_norm.read_by(self.mlp.next_norm)
        if not self.parallel and self.mlp is not None and self.altup is None:
            self.attention_sum.precede(self.mlp_norm)

    def forms_of_weights(self) -> tuple[object, ...]:
        """Return shapes, dtypes and formats of the weights: layers that agree need the same kernels and memory."""
        return tuple(_form(module.weight) for module in self.modules() if isinstance(module, Matrix))

    def precede(self, following: DecoderLayer) -> None:
        """Let this layer's last kernel compute the norm with which the layer `following` begins, where it is faster."""
        if self.output_scale is None and not self.further and self.altup is None:
            last = self.attention_sum if self.mlp is None else self.mlp_sum
            (last if self.per_layer is None else self.per_layer.after).precede(following.attention_norm)

    def _next_norm(self, norm: RMSNorm, hidden: Tensor) -> kernels.NextNorm | None:
        """See `Linear.next_norm`. If the MLP reads the same norm, it is not quantised."""
        wanted = self.attention.next_norm(norm, hidden)
        return None if self.parallel and wanted is not None and wanted.rounded is not None else wanted

    def forward(
        self,
        stream: ResidualStream,
        positions: Tensor,
        kv: LayerCache,
        metadata: AttentionMetadata,
        vector: Tensor | None = None,
    ) -> ResidualStream:
        """Return the stream after this layer, or its rows at `metadata.logits_indices`. `vector` [T, P]: the tokens'
        per-layer embeddings, if the model has them.
        """
        slots = None if isinstance(self.mlp, MLP | None) else metadata.slot_mapping
        stream = replace(stream, context=stream.context._replace(slots=slots, vector=vector))
        if self.altup is not None:
            return self.altup(cast(Sublayers, self), stream, positions, kv, metadata)  # type: ignore[no-any-return]
        x = self.attention_norm(stream)
        normed = None
        if self.parallel or self.lends_input:
            x = x.with_normed(x.value)
        if self.parallel:
            normed = x.value if self.mlp_norm.norm is None else self.mlp_norm.norm(stream.hidden)
        stream = self.attention(x, self.attention_sum.into(stream), positions, kv, metadata)
        if normed is not None:
            stream = replace(stream, normed=metadata.select(normed))
        if self.attention_sum_norm is not None:
            stream = replace(stream, hidden=self.attention_sum_norm(stream.hidden), normed=None)
        if self.mlp is not None:
            stream = self.mlp(self.mlp_norm(stream), self.mlp_sum.into(stream))
        elif self.lends_input:
            stream = replace(stream, normed=x.value)
        if self.mlp_sum_norm is not None:
            stream = replace(stream, hidden=self.mlp_sum_norm(stream.hidden), normed=None)
        for mlp in self.further:
            stream = mlp(stream)
        if self.per_layer is not None:
            stream = self.per_layer(stream)
        if self.output_scale is not None:
            stream = replace(stream, hidden=self.output_scale(stream.hidden), normed=None)
        return stream


class FurtherMLP(nn.Module):
    """An MLP after a layer's own, with a norm of its own."""

    def __init__(self, spec: DenseSpec, hidden_size: int, make_norm: MakeNorm, multiplier: float, scope: Scope) -> None:
        super().__init__()
        self.norm = InputNorm(make_norm(scope / "norm", hidden_size))
        self.sum, self.mlp = OutputSum(None, multiplier), MLP(spec, hidden_size, scope / "mlp")

    def forward(self, stream: ResidualStream) -> ResidualStream:
        """Add the MLP of the stream [T, hidden] to it in place."""
        return self.mlp(self.norm(stream), self.sum.into(stream))  # type: ignore[no-any-return]


def _form(value: Any) -> object:
    """Describe a weight or a part of one: its tensors' shapes and dtypes, all else as it is."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, tuple):
        return tuple(map(_form, value))
    return tuple(_form(getattr(value, field.name)) for field in fields(value)) if is_dataclass(value) else value


class OutputScale(Norm):
    """Scales hidden [T, hidden] in place by a learnt number."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope, 1, eps=0.0)
        self._name = scope.name("layer_scalar")

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mul_(self.weight)


def pack_weights(model: nn.Module) -> None:
    """Repack the weights of all parts of a model for the GEMMs of their device. They cannot be filled afterwards."""
    for module in model.modules():
        if isinstance(module, Matrix) and module.is_here:
            module.pack()
    for module in model.modules():
        if isinstance(module, MoE):
            module.pack()


def no_norm(scope: Scope, size: int | Span) -> Norm:
    """Create a norm that changes nothing, see `norm_maker`."""
    return NoNorm(scope, size, eps=0.0)


def norm_maker(spec: ModelSpec) -> MakeNorm:
    """Return a function that creates the model's norms, see `Norm`."""

    def make(scope: Scope, size: int | Span) -> Norm:
        if spec.norm == "rms":
            return RMSNorm(scope, size, spec.norm_eps, spec.norm_offset)
        if spec.norm == "layer_plain":
            return PlainLayerNorm(scope, size, spec.norm_eps)
        return LayerNorm(scope, size, spec.norm_eps, spec.norm_offset, bias=spec.norm == "layer_bias")

    return make
