"""Connections between the ranks of a model: process groups, and how they are renewed after a failed step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from engine.models.shard import Shard, Stage
from engine.models.spec import ModelSpec
from engine.worker.block_store.block_file import BlockFileOptions
from engine.worker.device import CudaDevice
from engine.worker.options import RunnerOptions
from engine.worker.parallel.communicator import GroupCommunicator, Neighbour, StageLink
from engine.worker.parallel.gpu_communicator import GpuCommunicator
from engine.worker.parallel.losses import Losses
from engine.worker.parallel.rank_files import of_rank
from engine.worker.startup import Membership

START_SECONDS = 600  # time for the ranks to connect
MEET_SECONDS = 0.01  # between rank 0's looks at which ranks are about to connect


@dataclass(frozen=True, slots=True)
class Build:
    """The first message to a follower."""

    rank: int  # the global rank
    shard: Shard
    stage: Stage
    device_index: int  # of its GPU
    one_host: bool  # all ranks of its stage are on one host
    rendezvous: str  # a URL for the ranks to connect
    folder: Path
    spec: ModelSpec
    options: RunnerOptions

    def own_file(self, options: BlockFileOptions, folder: Path | None = None) -> BlockFileOptions:
        """Return the options of this rank's block file. `folder`: the model's, if it differs from rank 0's."""
        return of_rank(options, self.rank, f"{self.shard}, {self.stage}", folder or options.folder)


def join(build: Build, losses: Losses | None, attempt: int = 0) -> Membership:
    """Connect to the other ranks, using this rank's device. `attempt`: how often they have connected before.

    Raises `RankLostError` in rank 0, which has `losses`, if one is lost before it connects.
    """
    device = build.options.device
    if isinstance(device, CudaDevice):
        device = CudaDevice(build.device_index)
        torch.cuda.set_device(device.torch_device)
    size, timeout = build.shard.size * build.stage.count, timedelta(seconds=START_SECONDS)
    store, *_ = next(rendezvous(build.rendezvous, build.rank, size, timeout=timeout))
    store = PrefixStore(str(attempt), store)  # it may still hold what the ranks wrote before
    store.set(f"rank {build.rank}", "")
    if losses is not None:  # PyTorch's own wait for the ranks ends for none that is lost
        while not store.check([f"rank {rank}" for rank in range(size)]):
            losses.check(MEET_SECONDS)
    dist.init_process_group(
        "nccl" if device.is_accelerator else "gloo",
        store=store,
        rank=build.rank,
        world_size=size,
        timeout=timeout,
        device_id=device.torch_device if device.is_accelerator else None,
    )
    return membership(build, replace(build.options, device=device))


def membership(build: Build, options: RunnerOptions) -> Membership:
    """Return the connections of a rank in the process group of all."""
    device, size, stage = options.device, build.shard.size, build.stage
    share_memory = device.is_accelerator and build.one_host and size > 1
    communicator = GpuCommunicator if share_memory else GroupCommunicator
    if stage.count == 1:
        return Membership(options, communicator(device.torch_device), None)
    stages = [dist.new_group(list(range(first, first + size))) for first in range(0, size * stage.count, size)]
    ranks = stages[build.rank // size]
    # Each stage's ranks follow those of the next stage.
    pairs = [dist.new_group([rank, rank + size]) for rank in range(size * (stage.count - 1))]
    before = None if stage.is_first else Neighbour(build.rank + size, pairs[build.rank])
    after = None if stage.is_last else Neighbour(build.rank - size, pairs[build.rank - size])
    num_tokens = 0 if stage.is_first else max(options.max_num_batched_tokens, options.max_decodes)
    buffer = torch.empty(num_tokens, build.spec.hidden_size, dtype=options.dtype, device=device.torch_device)
    link = StageLink(before, after, buffer)
    return Membership(options, communicator(device.torch_device, ranks), link)


class Connections:
    """A rank's connections to the others. Call it to connect.

    On CPUs the ranks connect anew after a failed step. A rank that leaves closes its sockets, and so ends the waits of
    ranks that are still in a collective of that step. On GPUs no wait can be ended, and graphs hold the connections:
    they stay, so a step can be dropped only where all ranks have left it at the same collective.
    """

    def __init__(self, build: Build, losses: Losses | None = None) -> None:
        """`losses`: of rank 0."""
        self._build, self._losses, self._num_renewals = build, losses, 0
        self._member: Membership | None = None
        self.are_renewed = not build.options.device.is_accelerator  # after a failed step
        # With several stages on GPUs, others may have sent what this one has not received.
        self.survive_failures = self.are_renewed or build.stage.count == 1

    def __call__(self) -> Membership:
        self._member = join(self._build, self._losses)
        return self._member

    def leave(self) -> None:
        """Leave the process groups, if they can be renewed. Ranks that wait for this one get an exception."""
        if self.are_renewed and dist.is_initialized():
            communicator, link = self._parts
            communicator.leave()
            if link is not None:
                link.leave()
            dist.destroy_process_group()

    def renew(self, url: str) -> None:
        """Connect the ranks anew, all at the same time, if they can. `url`: as `Build.rendezvous`."""
        if not self.are_renewed:
            return
        self.leave()
        self._num_renewals += 1
        communicator, link = self._parts
        self._member = join(replace(self._build, rendezvous=url), self._losses, self._num_renewals)
        new_communicator, new_link = self._parts
        communicator.adopt(new_communicator)
        if link is not None and new_link is not None:
            link.adopt(new_link)
        self._member = replace(self._member, communicator=communicator, link=link)

    @property
    def _parts(self) -> tuple[GroupCommunicator, StageLink | None]:
        assert self._member is not None
        assert isinstance(self._member.communicator, GroupCommunicator)
        return self._member.communicator, self._member.link
