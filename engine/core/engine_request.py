"""The request that an API process sends to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.params.pooling import UNSAMPLED, PoolingParams
from engine.core.params.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter in a folder of this machine."""

    name: str
    path: str
    version: str  # hexadecimal SHA-256, which changes with the files


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ImageInput:
    """An image in a prompt: its patches, and the placeholder tokens that stand for it."""

    start: int  # index of the first placeholder in the prompt
    num_tokens: int  # placeholders
    grid: tuple[int, int]  # rows and columns of patches
    patches: bytes  # uint8 [frames, rows · columns, 3, P, P], in the order in which the model's encoder merges them
    digest: str  # hexadecimal SHA-256 of the grid and the patches
    sees_both_ways: bool = False  # each of its tokens sees the others, so a step computes it to its end or not at all
    num_frames: int = 1  # 2: two frames of a video
    # Its time in a video whose frames follow each other without text, in positions from the first one's; else None.
    moment: int | None = None

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for one completion of one prompt, or for one embedding.

    The input processor builds it; messages, the engine, the scheduler and the runner pass it on unchanged.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = UNSAMPLED
    pooling: PoolingParams | None = None  # set: the request wants its prompt's embedding; `sampling` is UNSAMPLED
    cache_salt: str = ""  # requests share cached blocks only with requests that have the same salt
    priority: int = 0  # lower values are scheduled first
    tenant: str = ""  # API key, user or client address: the engine is fair between tenants
    # Monotonic seconds, the same clock in all processes; 0: none. `AsyncEngine` ends the request then.
    deadline: float = 0.0
    arrival: float = 0.0  # when it reached the server, by that clock; 0: when it reaches the engine
    # Names of the prompt's tokens in the prefix cache, if tokens alone do not say what is computed: for a placeholder
    # 63 bits of a hash of its content, else the token. None: the prompt's tokens.
    name_ids: list[int] | None = None
    adapter: Adapter | None = None  # None: the base model alone
    images: tuple[ImageInput, ...] = ()  # in the order of their placeholders; `name_ids` name their content

    @property
    def cache_scope(self) -> str:
        """A text that is equal for requests that may use each other's cached blocks: for choosing a replica."""
        return self.cache_salt if self.adapter is None else f"{self.cache_salt}\0{self.adapter.version}"

    @property
    def prompt_name_ids(self) -> list[int]:
        """Ids that name the prompt's tokens in the prefix cache."""
        return self.prompt_token_ids if self.name_ids is None else self.name_ids
