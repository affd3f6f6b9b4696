"""A KV cache as the engine may lay it out."""

import torch
from torch import Tensor

NUM_LAYERS = 3


def as_a_layer_of_one_tensor(kv: Tensor) -> Tensor:
    """A copy of kv [2, num_blocks, Hkv, block_size, D] that is a view of one layer of a tensor [num_blocks, layers, 2,
    ...].

    In such a tensor a block is one contiguous piece over all layers. The other layers hold NaN.
    """
    whole = torch.full((kv.shape[1], NUM_LAYERS, 2, *kv.shape[2:]), float("nan"))
    whole = whole.to(kv.dtype).to(kv.device)
    layer = whole[:, 1].transpose(0, 1)
    layer.copy_(kv)
    return layer
