"""Which steps expand latents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.model_shapes import SHAPES
from engine.models.families import read_config_spec
from engine.models.spec import LatentSpec, ModelSpec
from engine.worker.device import CpuDevice
from engine.worker.latent_expander import LatentExpander, can_expand, is_worth_expanding
from engine.worker.options import RunnerOptions
