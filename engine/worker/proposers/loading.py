"""Builds the proposer of a drafter."""

from __future__ import annotations

from engine.models.decoder import Decoder
from engine.models.drafters.dflash import BlockDrafter
from engine.models.drafters.eagle3 import Eagle3Head
from engine.models.drafters.loading import load_drafter
from engine.models.drafters.spec import DraftSpec
from engine.models.files import Progress
from engine.models.matrix import Scope
from engine.worker.model_runner import ModelRunner
from engine.worker.proposers.dflash import DFlashProposer
from engine.worker.proposers.draft_cache import DrafterSetup
from engine.worker.proposers.draft_model import DraftModelProposer
from engine.worker.proposers.eagle3 import Eagle3Proposer
from engine.worker.proposers.model_proposer import ModelProposer
from engine.worker.proposers.mtp import MTPProposer


def load_proposer(spec: DraftSpec, runner: ModelRunner, scope: Scope, progress: Progress) -> ModelProposer:
    """Load a drafter for the target of `runner`. `scope`: of the target. Raises `ModelError` as `load_drafter` does."""
    options, target = runner.options, runner.model
    drafter = load_drafter(
        spec, target, runner.spec, scope, max_model_len=options.max_model_len, load_format=options.load_format,
        seed=options.seed, progress=progress,
    )  # fmt: skip
    setup = DrafterSetup(target, spec.for_rank(scope.shard), runner.kv_layout, options, runner.batch.state)
    if isinstance(drafter, Decoder):
        return DraftModelProposer(drafter, setup)
    if isinstance(drafter, Eagle3Head):
        return Eagle3Proposer(drafter, setup)
    if isinstance(drafter, BlockDrafter):
        return DFlashProposer(drafter, setup)
    return MTPProposer(drafter, setup)
