"""DFlash, DFlash2 and DSpark: drafters that draft a block of tokens in one pass.

Their layers attend to the target: the keys and values of a position that the target has computed are of its hidden
states there, of several of its layers. The block that follows, the newest token and masks, attends to these and to
itself, later tokens included.

Sources: DFlash, arXiv 2602.06036, and the code that its authors publish with checkpoints, whose names of tensors and of
config.json these are. DFlash2 adds convolutions around sublayers, and a selector of one path through the most likely
tokens. DSpark adds a bias of each token on the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kernels
from engine.models.attention import Attention, AttentionMetadata
from engine.models.decoder import norm_maker
from engine.models.drafters.eagle3 import DraftVocabulary
from engine.models.drafters.spec import BlockSpec, DraftSpec
from engine.models.errors import ModelError
from engine.models.families.common import attention, decoder, dense, slides, windows_of
from engine.models.families.fields import flag, integer
from engine.models.files import read_config
from engine.models.layers import Embedding, Linear, LMHead
from engine.models.matrix import CheckpointModule, CheckpointTensor, Scope, empty
from engine.models.mlp import MLP
from engine.models.norms import MakeNorm
from engine.models.residual import OutputSum, ResidualEpilogue, ResidualStream, SublayerInput
from engine.models.rope import rope_table
from engine.models.shard import Span
from engine.models.spec import AttentionSpec, LayerSpec, ModelSpec

CONFIDENCE = "confidence_head."  # of DSpark: acceptance is learned instead
Sublayer = Callable[[SublayerInput, ResidualEpilogue], ResidualStream]


def read_dflash(folder: Path, target: ModelSpec, num_tokens: int) -> DraftSpec:
    """Read the config.json of a drafter in `folder` for this target. `num_tokens`: that it is to draft at a time.

    Raises `ModelError`, which names what is wrong.
    """
    try:
        config = read_config(folder)
        of_block = config.get("dflash_config")
        return _read(folder, config | of_block if isinstance(of_block, dict) else config, target, num_tokens)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None


def _read(folder: Path, config: dict[str, Any], target: ModelSpec, num_tokens: int) -> DraftSpec:
    named = " ".join(map(str, config.get("architectures") or ()))
    if not any(name in named.lower() for name in ("dflash", "dspark")):
        raise ModelError(f"'architectures' must name a block drafter, such as DFlashDraftModel, got {named!r}")
    for field, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if (value := integer(config, field)) != expected:
            raise ModelError(f"{field!r} must be that of the target, {expected}, got {value}")
    layers = config.get("target_layer_ids") or _spread(target.num_layers, integer(config, "num_hidden_layers"))
    if not isinstance(layers, list) or not all(type(each) is int and 0 <= each < target.num_layers for each in layers):
        raise ModelError(f"'target_layer_ids' must be layers from 0 to {target.num_layers - 1}, got {layers!r}")
    markov_rank = integer(config, "markov_rank", 0, minimum=0)
    from_anchor = flag(config, "sample_from_anchor", markov_rank > 0)
    size, most = integer(config, "block_size"), integer(config, "block_size") - (not from_anchor)
    if num_tokens > most:
        raise ModelError(f"'block_size' is {size}, so num_speculative_tokens must be at most {most}, got {num_tokens}")
    mask = integer(config, "mask_token_id", maximum=target.vocab_size - 1, minimum=0)
    config = config | {"architectures": [named], "tie_word_embeddings": False}
    mixer = attention(
        config, qk_norm=True, qkv_bias=flag(config, "attention_bias"), o_bias=flag(config, "attention_bias")
    )
    spec = decoder(config, replace(mixer, causal=False), dense(config), windows=windows_of(config, slides(config)))
    selector_rank = integer(config, "selector_rank", 0, minimum=0)
    taps = integer(config, "conv_kernel_size", 2 if selector_rank else 0, minimum=0)
    block = BlockSpec(
        target_layers=tuple(layers),
        num_tokens=num_tokens,
        mask_token_id=mask,
        from_anchor=from_anchor,
        markov_rank=markov_rank,
        selector_rank=selector_rank,
        selector_top_k=integer(config, "selector_top_k", 16, maximum=target.vocab_size),
        conv_taps=taps,
        conv_group_size=integer(config, "conv_group_size", 16),
        draft_vocab_size=integer(config, "draft_vocab_size", target.vocab_size, maximum=target.vocab_size),
    )
    if taps and target.hidden_size % block.conv_group_size:
        raise ModelError(f"'conv_group_size' must divide hidden_size={target.hidden_size}")
    return DraftSpec(method="dflash", folder=folder, model=replace(spec, quantization=None), block=block)


def _spread(num_layers: int, count: int) -> list[int]:
    """Return layers of the target as the drafters' authors choose them, if config.json names none."""
    if count == 1:
        return [num_layers // 2]
    last = num_layers - 3
    return [round(1 + i * (last - 1) / (count - 1)) for i in range(count)]


class WholeTensor(CheckpointModule):
    """A tensor of the checkpoint that every rank holds as it is."""

    def __init__(self, scope: Scope, name: str, *shape: int) -> None:
        super().__init__()
        self._name, self.value = scope.name(name), empty(*shape, dtype=scope.dtype, device=scope.device)

    def tensors(self) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(self._name, tuple(map(Span.whole, self.value.shape)), self.value)


class GroupedConv(nn.Module):
    """Mixes each token of a block with those before it, before a sublayer and after it. Factors depend on the token:
    a stored one for each channel, and a projected one for each group of channels.
    """

    def __init__(self, block: BlockSpec, hidden_size: int, scope: Scope) -> None:
        super().__init__()
        self._taps, self._length = block.conv_taps, block.length
        self._group = block.conv_group_size
        self.base = WholeTensor(scope, "base_kernel", 2, self._taps, hidden_size)
        rows = 2 * self._taps * (hidden_size // self._group)
        self.projection = Linear(scope, hidden_size, {"kernel_projection": rows})

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sublayer's input, given its normalised hidden states [n · length, hidden], and what `after`
        reads.
        """
        factors = self.projection.run(x).view(len(x), 2, self._taps, -1)
        return self._mixed(x, 0, factors[:, 0]), factors[:, 1]

    def after(self, x: Tensor, factors: Tensor) -> Tensor:
        """Return what the sublayer adds, given its output [n · length, hidden]."""
        return self._mixed(x, 1, factors)

    def _mixed(self, x: Tensor, side: int, factors: Tensor) -> Tensor:
        blocks = x.view(-1, self._length, x.shape[1])
        of_channels = self.base.value[side] + factors.repeat_interleave(self._group, -1)  # [T, taps, hidden]
        of_channels = of_channels.view(*blocks.shape[:2], self._taps, -1)
        out = blocks * of_channels[:, :, 0]
        for tap in range(1, min(self._taps, self._length)):
            out[:, tap:] += blocks[:, :-tap] * of_channels[:, tap:, tap]
        return out.view_as(x)


class BlockLayer(nn.Module):
    """A decoder layer whose attention is not causal, with convolutions around its sublayers or none."""

    def __init__(
        self, layer: LayerSpec, block: BlockSpec, size: int, table: Tensor | None, make_norm: MakeNorm, scope: Scope
    ) -> None:
        super().__init__()
        assert isinstance(layer.mixer, AttentionSpec)
        self.attention_norm = make_norm(scope / "input_layernorm", size)
        self.attention = Attention(layer.mixer, size, table, make_norm, scope / "self_attn")
        self.mlp_norm = make_norm(scope / "post_attention_layernorm", size)
        self.mlp = MLP(layer.mlp, size, scope / "mlp")  # type: ignore[arg-type]
        self.sum = OutputSum()
        self.attention_conv = GroupedConv(block, size, scope / "attention_conv") if block.conv_taps else None
        self.mlp_conv = GroupedConv(block, size, scope / "mlp_conv") if block.conv_taps else None

    def forward(self, x: Tensor, positions: Tensor, kv: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return the residual stream of blocks after the layer: [T, hidden] → [T, hidden]."""

        def attend(given: SublayerInput, epilogue: ResidualEpilogue) -> ResidualStream:
            return self.attention(given, epilogue, positions, kv, metadata)  # type: ignore[no-any-return]

        x = self._added(x, self.attention_norm(x), self.attention_conv, attend)
        return self._added(x, self.mlp_norm(x), self.mlp_conv, self.mlp)

    def _added(self, x: Tensor, normed: Tensor, conv: GroupedConv | None, sublayer: Sublayer) -> Tensor:
        if conv is None:
            return sublayer(SublayerInput(x, normed=normed), self.sum.into(ResidualStream(x))).hidden
        given, factors = conv.before(normed)
        out = ResidualStream(torch.zeros_like(x))
        out = sublayer(SublayerInput(given, normed=given), self.sum.into(out))
        return x + conv.after(out.hidden, factors)

    def store(self, x: Tensor, positions: Tensor, kv: Tensor, slots: Tensor) -> None:
        """Store the keys and values of what the target computed: x [T, hidden], slots [T] int64."""
        layer, spec = self.attention, self.attention.spec
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        norms, interleaved = (layer.q_norm.weight, layer.k_norm.weight), spec.rope is not None and spec.rope.interleaved
        args = kernels.RopeArgs(
            spec.num_heads, spec.num_kv_heads, layer.cos_sin, *norms, layer.q_norm.eps, interleaved=interleaved
        )
        qkv = layer.qkv.run(SublayerInput(x, normed=x))
        scale = layer.kv_scale if kv.dtype == torch.float8_e4m3fn else None
        kernels.rope_and_store(qkv, positions, args, kernels.KVSlots(kv[0], kv[1], slots, scale))


class BlockDrafter(nn.Module):
    """A block drafter. Embedding and output head are the target's unless its checkpoint has its own."""

    def __init__(self, spec: ModelSpec, block: BlockSpec, num_positions: int, scope: Scope, head_scope: Scope) -> None:
        """`spec`: of a decoder of the drafter's layers. `num_positions`: rows of the RoPE table. `head_scope`: of the
        output head.
        """
        super().__init__()
        make_norm, size = norm_maker(spec), spec.hidden_size
        self.spec = block
        self.projection = Linear(scope, len(block.target_layers) * size, {"fc": size})
        self.hidden_norm = make_norm(scope / "hidden_norm", size)
        self.layers = nn.ModuleList()
        for i, layer in enumerate(spec.layers):
            assert isinstance(layer.mixer, AttentionSpec)
            table = None if layer.mixer.rope is None else rope_table(layer.mixer.rope, num_positions).to(scope.device)
            self.layers.append(BlockLayer(layer, block, size, table, make_norm, scope / f"layers.{i}"))
        self.norm = make_norm(scope / "norm", size)
        self.embed_tokens = Embedding(scope / "embed_tokens", spec.vocab_size, size) if block.has_embedding else None
        self.lm_head = LMHead(head_scope, block.draft_vocab_size, size) if block.has_head else None
        self.vocabulary = DraftVocabulary(block.draft_vocab_size, spec.vocab_size, scope) if block.has_head else None
        self.markov: nn.ModuleList | None = None
        self.selector: nn.ModuleList | None = None
        if rank := block.markov_rank:
            of_head = scope / "markov_head"
            names = ("markov_w1.weight", "markov_w2.weight")
            self.markov = nn.ModuleList(WholeTensor(of_head, name, spec.vocab_size, rank) for name in names)
        if rank := block.selector_rank:
            of_selector, names = scope / "candidate_selector", ("predecessor_codebook", "successor_codebook")
            self.selector = nn.ModuleList(WholeTensor(of_selector, name, spec.vocab_size, rank) for name in names)
            self.selector.append(WholeTensor(of_selector, "hidden_projection.weight", rank, size))

    def combine(self, states: list[Tensor]) -> Tensor:
        """Project the target's hidden states, each [T, hidden], to what the layers attend to: [T, hidden]."""
        normed: Tensor = self.hidden_norm(self.projection.run(torch.cat(states, 1)))
        return normed

    def following(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """Return the logits [n, V] of a token given the one before it, [n] int64.

        logits [n, V]: without it. hidden [n, hidden]: after the last norm.
        """
        before = before.clamp(0, logits.shape[1] - 1)  # while kernels are only compiled, nothing writes tokens
        if self.markov is not None:
            first, second = (each.value for each in self.markov)
            return logits + first[before] @ second.T  # type: ignore[operator, index, union-attr]
        if self.selector is None:
            return logits
        first, second, projection = (each.value for each in self.selector)
        scores, candidates = logits.topk(self.spec.selector_top_k, -1)
        path = first[before] * (hidden @ projection.T)  # type: ignore[operator, index, union-attr]
        scores = scores + torch.einsum("nr,ncr->nc", path, second[candidates])  # type: ignore[index]
        return torch.full_like(logits, -torch.inf).scatter(1, candidates, scores)
