"""Scales as whole multiples of one for each 256 channels, as the larger blocks of GGUF have them: a byte for each
group, where floats would take four, and nothing is rounded.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

SPAN = 256  # channels that share a factor
UNIT = 2.0**-24  # every float16 is a whole multiple of it


class Steps(NamedTuple):
    """scale[n, g] = codes[n, g] · factor[n, g // (groups of a span)]."""

    factor: Tensor  # [N, spans] float32
    codes: Tensor  # [N, groups] int8


def in_steps(scale: Tensor, group: int) -> Steps | None:
    """scale [N, groups] float32 of `group` channels each; None: these are no such multiples, or not of whole spans."""
    together = SPAN // group
    if SPAN % group or scale.shape[1] % together:
        return None
    spans = scale.unflatten(1, (-1, together))
    units = spans.double() / UNIT
    most = float(units.abs().amax()) if units.numel() else 0.0
    if not most < 2.0**53:
        return None
    whole = units.to(torch.int32 if most < 2.0**31 else torch.int64)
    factor = functools.reduce(torch.gcd, whole.unbind(2))
    codes = whole // factor.clamp(min=1)[..., None]
    is_turned = codes.amax(2) > 127  # 128 is no code, -128 is one
    factor, codes = torch.where(is_turned, -factor, factor), torch.where(is_turned[..., None], -codes, codes)
    found = Steps((factor.double() * UNIT).float(), codes.clamp(-128, 127).to(torch.int8).flatten(1))
    return found if torch.equal(found.codes.unflatten(1, (-1, together)) * found.factor[..., None], spans) else None
