"""Step data of recurrent layers."""

from __future__ import annotations

from engine.models.attention import AttentionMetadata
from engine.models.recurrent import StateMetadata
from engine.worker.attention.group_attention import AttentionStep, CapturedPrefills, GroupAttention, Prefills
from kernels import DecodePlan, StateContext


class StateSteps(GroupAttention):
    """Step data of recurrent layers. They need neither plans nor tiles."""

    def __init__(self, index: int, padding_index: int, block_size: int) -> None:
        """`index`: of the state group. `padding_index`: of an attention group, whose slots tell padding apart."""
        self.index, self.tile_queries = index, 0
        self._padding_index, self._block_size = padding_index, block_size

    def plan(self, num_decodes: int, has_common_prefix: bool = False) -> DecodePlan | None:
        return None

    def metadata(self, step: AttentionStep, prefills: Prefills | CapturedPrefills | None) -> AttentionMetadata:
        tables, slots = step.block_tables[self.index], step.slot_mapping[self._padding_index]
        sequences = step.rows, step.query_start, step.context_lens
        only_decodes = step.num_decodes == len(step.rows) and step.decode_lens is None
        num_decodes = step.num_decodes if step.decode_lens is None else 0
        states = StateContext.of_step(
            tables,
            *sequences,
            len(slots),
            self._block_size,
            only_decodes=only_decodes,
            num_decodes=num_decodes,
            finds_sequences=not tables.is_cpu,
        )
        return StateMetadata(
            num_decodes=step.num_decodes,
            rows=step.rows,
            block_tables=tables,
            query_start=step.query_start,
            context_lens=step.context_lens,
            slot_mapping=slots,
            states=states,
        )
