"""Per-layer embeddings (Gemma 3n and 4): each layer gets a short vector of its own for each token.

Shapes: T tokens of the step, L layers, P the size of that vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import kernels
from engine.models.layers import Embedding, Linear
from engine.models.matrix import Scope
from engine.models.norms import MakeNorm
from engine.models.residual import OutputSum, ResidualStream, SublayerInput
from engine.models.spec import PerLayerSpec


class PerLayerEmbedding(nn.Module):
    """Computes the vectors of all layers from token ids and embeddings. Ranks divide only the rows of the table."""

    def __init__(
        self, spec: PerLayerSpec, hidden_size: int, num_layers: int, make_norm: MakeNorm, scope: Scope
    ) -> None:
        super().__init__()
        width = num_layers * spec.size
        self.embed_tokens = Embedding(scope / "embed_tokens_per_layer", spec.vocab_size, width)
        self.projection = Linear(scope, hidden_size, {"per_layer_model_projection": width})
        self.norm = make_norm(scope / "per_layer_projection_norm", spec.size)
        self._shape = num_layers, spec.size
        self._vocab_size = spec.vocab_size if spec.is_partial else 0
        # In the dtype of the weights, as the model was trained.
        self._multiplier = torch.tensor(spec.size**0.5, dtype=scope.dtype).item()
        self._projection_multiplier = hidden_size**-0.5

    def forward(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """input_ids [T], embedded [T, hidden] → [T, L, P]."""
        if self._vocab_size:
            input_ids = torch.where(input_ids < self._vocab_size, input_ids, 0)
        of_tokens = kernels.scale(self.embed_tokens(input_ids), self._multiplier)
        projected = kernels.scale(self.projection.run(embedded), self._projection_multiplier)
        normed = self.norm(projected.unflatten(1, self._shape))
        return (normed + of_tokens.unflatten(1, self._shape)) * 2**-0.5


class PerLayerInput(nn.Module):
    """Adds a layer's own vector of each token, gated by the residual stream, to the residual stream."""

    def __init__(self, spec: PerLayerSpec, hidden_size: int, make_norm: MakeNorm, scope: Scope) -> None:
        super().__init__()
        self.gate = Linear(scope, hidden_size, {"per_layer_input_gate": spec.size})
        self.projection = Linear(scope, spec.size, {"per_layer_projection": hidden_size})
        self.after = OutputSum(make_norm(scope / "post_per_layer_input_norm", hidden_size))

    def forward(self, stream: ResidualStream) -> ResidualStream:
        """Add the projection of the tokens' vectors to the residual stream [T, hidden] in place."""
        vector = stream.context.vector
        assert vector is not None
        x = SublayerInput(stream.hidden, context=stream.context)
        gated = kernels.activation(self.gate.run(x), "gelu_tanh") * vector
        return self.projection.run(gated, self.after.into(stream))
