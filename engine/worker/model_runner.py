"""Runs scheduled steps on the device: updates rows, prepares step tensors, runs the model, samples.

`launch` queues a step and returns at once; `StepHandle.read` waits for its tokens. The newest token of each request
stays on the device, so the next step can be launched before this one is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import kernels
from engine.core.batch import BlockMoves, SchedulerOutput
from engine.core.engine_request import Adapter
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.worker.adapter_slots import AdapterSlots
from engine.worker.block_store.block_copier import new_copier
from engine.worker.block_store.block_file import BlockFile, BlockFileOptions, NoPeers, Peers, open_block_file
from engine.worker.block_store.host_blocks import HostBlocks
from engine.worker.cuda_graphs import graph_sizes
from engine.worker.decode_step import DecodeStep
from engine.worker.executor import Executor, Padding, StepRequest
from engine.worker.expert_load import ExpertLoad
from engine.worker.forward_pass import EagerSteps, ForwardPass
from engine.worker.images import ImageReader, own_rows
from engine.worker.input_batch import InputBatch
from engine.worker.kv_cache import KVCacheLayout
from engine.worker.last_stage import LastStage
from engine.worker.mapped_memory import MappedMemory
from engine.worker.options import RunnerOptions
from engine.worker.parallel.communicator import StageLink
from engine.worker.proposers.model_proposer import ModelProposer
from engine.worker.proposers.proposer import DeviceProposer
from engine.worker.sampling.sampler import Sampler
from engine.worker.step_handle import StepHandle
from engine.worker.step_sampling import StepSampling


class ModelRunner:
    """Owns the device rows and what runs and samples a step. Not thread-safe.

    Use `startup.build_runner` to get a runner that is ready to step: it allocates the KV cache, captures the graphs and
    may reduce `max_model_len` to what the KV cache holds.
    """

    num_blocks: int = 0
    num_states: int = 0  # blocks of states of recurrent layers
    cache_bound: str = ""  # what limits `num_blocks`, for display
    step_seconds: Mapping[int, float] = MappingProxyType({})  # see `Runner`
    proposer: DeviceProposer | None = None  # see `use_proposer`

    def __init__(self, model: Decoder, spec: ModelSpec, options: RunnerOptions, link: StageLink | None = None) -> None:
        """`link`: the connection to the other stages of a pipeline."""
        self.model, self.spec, self.options, self._link = model, spec, options, link
        self.device, self.block_size, self.max_model_len = options.device, options.block_size, options.max_model_len
        max_seqs, max_blocks = options.max_num_seqs, -(-options.max_model_len // options.block_size)
        self.kv_layout = KVCacheLayout.of_model(model.spec, options, model.stage)
        self.cache_groups = self.kv_layout.groups
        self.mapped: MappedMemory | None = None  # of weights, KV cache and graphs; None: they are in PyTorch's own
        self.host: HostBlocks | None = None
        if options.host_cache_bytes:
            self.host = HostBlocks(self.device, self.kv_layout.pool_bytes(), options.host_reserve_bytes)
        self.adapters: AdapterSlots | None = None
        if options.adapters is not None:
            self.adapters = AdapterSlots(model, spec, options.adapters, options.dtype, self.device)
        self.batch = InputBatch(
            max_seqs, len(self.cache_groups), max_blocks, self.device, options.num_step_buffers, options.max_step_drafts
        )
        if self.adapters is not None:
            self.batch.slot_of = self.adapters.slot_of
        self.forward = ForwardPass(model, self.kv_layout, options, self.batch.state, link, self.adapters)
        self.images: ImageReader | None = None
        if spec.vision is not None:
            self.images = ImageReader(model, self.device, own_rows(spec.vision, options.max_num_batched_tokens))
            self.batch.shift_of = self.images.shift_of
        step = self.forward.step
        self.sampler = Sampler(
            self.batch, step, spec.eos_token_ids, spec.vocab_size, options.max_model_len, options.num_stages
        )
        self.decode_step = DecodeStep(self.forward, self.sampler, options, graph_sizes(options.max_decodes)[-1])
        self.executors: list[Executor] = []  # the first one that a step fits runs it; if none, it runs eagerly
        self._eager = EagerSteps(self.forward, self.images)
        self._sampling = StepSampling(self.batch, step, self.sampler, options)
        self._last_stage = LastStage(self.forward, self.batch, self.sampler, self._sampling, spec)
        self._file_thread = ThreadPoolExecutor(1, "prefix cache file")
        self._expert_load: ExpertLoad | None = None
        if options.expert_load_interval:
            self._expert_load = ExpertLoad(model, options.expert_load_interval, self.device)

    def use_proposer(self, proposer: DeviceProposer) -> None:
        """Let a drafter propose after each step that asks for it. Call it before steps are captured."""
        assert self.model.stage.is_last
        self.proposer = proposer
        hidden = None if proposer.layers is None else self.forward.keep_hidden(proposer.layers)
        self._sampling.use(proposer, hidden, self.options.max_request_drafts)

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.kv_layout.memory_of_block + self.num_states * self.kv_layout.state_bytes

    @property
    def device_name(self) -> str:
        """The device, for display."""
        count = kernels.num_threads(self.device.torch_device)
        return self.device.name + (f", {count} thread{'s' if count > 1 else ''}" if count else "")

    @property
    def attention_backend(self) -> str:
        """The attention implementation, for display."""
        return kernels.attention_backend(self.device.torch_device)

    def open_block_file(self, options: BlockFileOptions, peers: Peers | None = None) -> BlockFile | None:
        """Open a file of a pool's blocks, see `block_file.open_block_file`. `peers`: the other ranks' files, if any."""
        copier = new_copier(options.pool, options.buffer_bytes, self.forward.kv_cache, self.kv_layout, self.device)
        file = open_block_file(options, copier, peers or NoPeers(), self._file_thread)
        if file is not None and self.host is not None:
            file.use_host(self.host, options.pool)
        return file

    def close(self) -> None:
        """Release the device's memory."""
        self._file_thread.shutdown()
        kernels.FORMS.release(self)
        self.release_cache()
        if self.adapters is not None:
            self.adapters.close()
        if self.host is not None:
            self.host.close()
        if self.mapped is not None:
            self.mapped.close()
            self.mapped = None

    def release_cache(self) -> None:
        """Release the KV cache, and the captured steps, which hold its addresses."""
        self.executors = []
        self.forward.kv_cache = []
        if self.host is not None:
            self.host.detach()
        if self.proposer is not None:
            self.proposer.release()
        if self.images is not None:
            self.images.clear()

    def allocate_cache(self, num_blocks: int, num_states: int = 0, dtype: torch.dtype | None = None) -> None:
        """Allocate a KV cache of so many blocks and states. `dtype`: overrides the cache's dtype."""
        layout = self.kv_layout if dtype is None else replace(self.kv_layout, dtype=dtype)
        self.forward.kv_cache = layout.allocate(num_blocks, self.device, num_states)
        if self.proposer is not None:
            self.proposer.allocate(num_blocks)

    def block_parts(self) -> list[list[Tensor]]:
        """See `KVCacheLayout.block_parts`."""
        drafter = self.proposer.cache.layers if isinstance(self.proposer, ModelProposer) else ()
        return self.kv_layout.block_parts(self.forward.kv_cache, drafter)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget all rows and all steps in flight after a failed step. Raises if the device itself has failed."""
        self.device.synchronize()
        self.batch.clear()
        self.sampler.clear()
        self._sampling.clear()
        for kept in (self.images, self.host):
            if kept is not None:
                kept.clear()
        self.device.reset_peak_memory()

    @torch.inference_mode()
    def move_blocks(self, moves: BlockMoves) -> None:
        """Queue copies between the KV cache and host memory, beside later steps."""
        self._host.move(moves)

    def finished_loads(self) -> list[int]:
        """See `HostBlocks.finished_loads`."""
        return self._host.finished_loads()

    def wait_for_load(self) -> None:
        """See `HostBlocks.wait_for_load`."""
        self._host.wait_for_load()

    @property
    def num_host_slots(self) -> list[int]:
        """See `HostBlocks.num_slots`."""
        return self._host.num_slots

    @property
    def _host(self) -> HostBlocks:
        assert self.host is not None
        return self.host

    def load_adapter(self, adapter: Adapter) -> Future[Any]:
        """See `AdapterSlots.load`."""
        return self._slots.load(adapter)

    def drop_adapter(self, adapter: Adapter) -> None:
        """See `AdapterSlots.drop`."""
        self._slots.drop(adapter)

    @property
    def num_adapter_parts(self) -> int:
        """See `AdapterSlots.num_parts`."""
        return self._slots.num_parts

    def place_adapter(self, adapter: Adapter, slot: int, part: int, num_parts: int) -> None:
        """See `AdapterSlots.place`."""
        self._slots.place(adapter, slot, part, num_parts)

    @property
    def _slots(self) -> AdapterSlots:
        assert self.adapters is not None
        return self.adapters

    def update_rows(self, output: SchedulerOutput) -> None:
        """Free the rows of removed requests and give rows to new ones."""
        removed, added = self.batch.apply(output)
        if removed or added:
            self.sampler.update_rows(removed, added)

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> StepHandle:
        """Queue a step. Does not wait for the device."""
        if output.moves is not None:
            self.move_blocks(output.moves)
        self.update_rows(output)
        if self.images is not None and output.encoder is not None:
            self.images.forget(output.encoder.forgotten)
        step = self._last_stage.request(output)
        if self.adapters is not None and self.batch.members(output.batch).has_adapters:
            step = step._replace(has_adapters=True)
        if self.images is not None and self.images.has_part(self.batch, output.batch):
            step = step._replace(has_images=True)
        if self._expert_load is not None and not step.only_decodes and self._expert_load.begin():
            step = step._replace(counts_experts=True)
        if output.rewinds:
            self.batch.rewind(output.rewinds)
        executor, padding = self._executor(step)
        packed = self.batch.pack(output, *padding)
        if self._link is not None:
            self._link.receive(packed.num_tokens)
        computed = executor.run(step, packed)
        handle = StepHandle(output, encoding=None if self.images is None else self.images.take_stopwatch())
        if packed.members.samples.has_drafts and not padding.splits:
            self._last_stage.expand_samples(packed, output.num_proposals > 0)
        if step.counts_experts and self._expert_load is not None:
            handle.expert_counts = self._expert_load.end()
        if computed.is_graph:  # other launches keep the device waiting anyway
            handle.device_waited = self._sampling.device_waits
        if self.model.stage.is_last:
            self._last_stage.complete(handle, step, packed, computed)
        else:
            assert self._link is not None
            assert computed.hidden is not None
            self._link.send(computed.hidden)
            self._sampling.skip(handle, packed)
        if self.host is not None:
            self.host.after_launch()
        return handle

    def _executor(self, step: StepRequest) -> tuple[Executor, Padding]:
        """Return what runs the step, and the size for which it is packed: the same in all ranks and stages."""
        if step.has_images:
            return self._eager, self._eager.fits(step)
        for executor in self.executors:
            padding = executor.fits(step)
            if padding is not None and self.batch.packed_size(step.output, *padding) <= executor.max_words:
                return executor, padding
        return self._eager, self._eager.fits(step)
