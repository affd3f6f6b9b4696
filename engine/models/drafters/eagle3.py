"""EAGLE-3: a draft head of one layer, which reads hidden states of three layers of the target.

Source: arXiv 2503.01840. Names of tensors and of config.json are those of its authors' and of vLLM's checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.attention import Attention, AttentionMetadata
from engine.models.decoder import norm_maker
from engine.models.drafters.spec import DraftSpec, Eagle3Spec
from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense
from engine.models.families.fields import flag, integer
from engine.models.files import read_config
from engine.models.layers import Embedding, Linear, LMHead
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope
from engine.models.mlp import MLP
from engine.models.residual import InputNorm, OutputSum, ResidualStream, SublayerInput
from engine.models.rope import rope_table
from engine.models.shard import Span
from engine.models.spec import AttentionSpec, ModelSpec

NUM_STATES = 3  # layers of the target that a head reads
LAYERS = "eagle_aux_hidden_state_layer_ids"


def read_eagle3(folder: Path, target: ModelSpec) -> DraftSpec:
    """Read the config.json of a head in `folder` for this target. Raises `ModelError`, which names what is wrong."""
    try:
        return _read(folder, _plain_config(read_config(folder)), target)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the head and of its layer together: some files have them apart."""
    of_layer, of_eagle = config.get("transformer_layer_config"), config.get("eagle_config")
    for fields in (of_layer, of_eagle):
        if isinstance(fields, dict):
            config = {**fields, **config}
    return config


def _read(folder: Path, config: dict[str, Any], target: ModelSpec) -> DraftSpec:
    named = " ".join(map(str, config.get("architectures") or ())) + str(config.get("speculators_model_type", ""))
    if "eagle3" not in named.lower():
        raise ModelError(f"'architectures' must name an EAGLE-3 head, such as LlamaForCausalLMEagle3, got {named!r}")
    if flag(config, "fc_norm"):
        raise ModelError("'fc_norm' must be false: norms of each hidden state are not supported")
    if not flag(config, "use_aux_hidden_state", True):
        raise ModelError("'use_aux_hidden_state' must be true: heads that read one hidden state are not supported")
    if (count := integer(config, "num_hidden_layers", 1)) != 1:
        raise ModelError(f"'num_hidden_layers' must be 1 for an EAGLE-3 head, got {count}")
    if (size := integer(config, "hidden_size")) != target.hidden_size:
        raise ModelError(f"'hidden_size' must be that of the target, {target.hidden_size}, got {size}")
    if (vocab := integer(config, "vocab_size")) != target.vocab_size:
        raise ModelError(f"'vocab_size' must be that of the target, {target.vocab_size}, got {vocab}")
    num_layers, bias = target.num_layers, flag(config, "attention_bias")
    layers = config.get(LAYERS) or [2, num_layers // 2, num_layers - 3]
    if (
        not isinstance(layers, list)
        or len(layers) != NUM_STATES
        or not all(isinstance(layer, int) and 1 <= layer <= num_layers for layer in layers)
    ):
        raise ModelError(f"{LAYERS!r} must be {NUM_STATES} layers from 1 to {num_layers}, got {layers!r}")
    config = {**config, "architectures": [named], "num_hidden_layers": 1, "tie_word_embeddings": False}
    spec = decoder(config, attention(config, qkv_bias=bias, o_bias=bias), dense(config, bias=flag(config, "mlp_bias")))
    eagle3 = Eagle3Spec(
        target_layers=tuple(layers),
        draft_vocab_size=integer(config, "draft_vocab_size", vocab, maximum=vocab),
        norm_before_residual=flag(config, "norm_before_residual"),
        norm_before_fc=flag(config, "norm_before_fc"),
        norm_output=flag(config, "norm_output"),
    )
    return DraftSpec(method="eagle3", folder=folder, model=replace(spec, quantization=None), eagle3=eagle3)


class DraftVocabulary(CheckpointModule):
    """The tokens that a head can propose."""

    def __init__(self, count: int, vocab_size: int, scope: Scope) -> None:
        super().__init__()
        self._is_whole, self._name = count == vocab_size, scope.name("d2t")
        self._ids = torch.arange(count)
        self.register_buffer("token_ids", self._ids.to(scope.device), persistent=False)  # [count] int64

    def tensors(self) -> Iterator[CheckpointTensor]:
        if not self._is_whole:
            whole = (Span.whole(len(self._ids)),)
            yield CheckpointTensor(self._name, whole, self.token_ids, frozenset({"I64", "I32"}), take=self._take)

    def _take(self, offsets: Tensor) -> None:
        self.token_ids.copy_(self._ids + offsets)

    token_ids: Tensor


class Eagle3Head(nn.Module):
    """A head: its layer's attention reads the token's embedding beside the hidden state.

    The hidden state is a projection of those of the target at first, then the head's own.
    """

    def __init__(
        self, spec: ModelSpec, eagle3: Eagle3Spec, num_positions: int, scope: Scope, head_scope: Scope
    ) -> None:
        """`spec`: of a decoder that has the head's layer alone. `num_positions`: rows of the RoPE table. `head_scope`:
        of the output head.
        """
        super().__init__()
        make_norm, size, layer = norm_maker(spec), spec.hidden_size, spec.layers[0]
        assert isinstance(layer.mixer, AttentionSpec)
        of_layer = scope / "midlayer"
        self.spec = eagle3
        self.before_projection = make_norm(scope / "input_norm", NUM_STATES * size) if eagle3.norm_before_fc else None
        self.projection = Linear(scope, NUM_STATES * size, {"fc": size})
        self.embed_tokens: Embedding | None = None
        if eagle3.has_embedding:
            self.embed_tokens = Embedding(scope / "embed_tokens", spec.vocab_size, size)
        self.embedding_norm = make_norm(of_layer / "input_layernorm", size)
        self.hidden_norm = make_norm(of_layer / "hidden_norm", size)
        table = None if layer.mixer.rope is None else rope_table(layer.mixer.rope, num_positions).to(scope.device)
        self.attention = Attention(layer.mixer, size, table, make_norm, of_layer / "self_attn")
        of_heads = {"q_proj": layer.mixer.num_heads, "k_proj": layer.mixer.num_kv_heads}
        of_heads["v_proj"] = layer.mixer.num_kv_heads
        width = layer.mixer.head_dim
        self.attention.qkv = Linear(  # of both inputs
            of_layer / "self_attn",
            2 * size,
            {name: count * width for name, count in of_heads.items()},
            bias=layer.mixer.qkv_bias,
            shard="column",
            width=width,
        )
        self.mlp_norm = InputNorm(make_norm(of_layer / "post_attention_layernorm", size))
        self.sum = OutputSum()
        self.mlp = MLP(layer.mlp, size, of_layer / "mlp")  # type: ignore[arg-type]
        self.norm = make_norm(scope / "norm", size)
        self.lm_head = LMHead(head_scope, eagle3.draft_vocab_size, size)
        self.vocabulary = DraftVocabulary(eagle3.draft_vocab_size, spec.vocab_size, scope)

    def combine(self, states: list[Tensor]) -> Tensor:
        """Project the target's hidden states, each [T, hidden], to one: [T, hidden]."""
        x = torch.cat(states, 1)
        return self.projection.run(x if self.before_projection is None else self.before_projection(x))

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, kv: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Return the residual stream [T, hidden], or the rows at `metadata.logits_indices`.

        embedded [T, hidden]: of the tokens that follow. hidden [T, hidden]: by `combine`, or by `following`.
        """
        normed = self.hidden_norm(hidden)
        stream = ResidualStream(normed.clone() if self.spec.norm_before_residual else hidden.clone())
        both = torch.cat((self.embedding_norm(embedded), normed), 1)
        epilogue = self.sum.into(stream)
        stream = self.attention(SublayerInput(both, normed=both), epilogue, positions, kv, metadata)
        stream = self.mlp(self.mlp_norm(stream), self.sum.into(stream))
        return stream.hidden

    def following(self, hidden: Tensor) -> Tensor:
        """Return what the head reads for the next draft, given its residual stream [n, hidden]."""
        normed: Tensor = self.norm(hidden) if self.spec.norm_output else hidden
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of `vocabulary` on all ranks, given the residual stream: [n, hidden] → [n, count]."""
        return self.lm_head.gather(self.lm_head.own_logits(SublayerInput(hidden, self.norm)))
