"""What the API process asks the engine for."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.pooling_params import UNSAMPLED, PoolingParams
from engine.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One answer to one prompt, or one embedding. Built once by the input processor, then carried unchanged through messages,
    the engine, the scheduler and the runner.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = UNSAMPLED
    pooling: PoolingParams | None = None  # set: the request wants its prompt's embedding; `sampling` is UNSAMPLED
    cache_salt: str = ""  # requests share cached blocks only with requests of the same salt
    priority: int = 0  # lower values are scheduled first
    owner: str = ""  # requests of different owners get fair parts of the engine
    deadline: float = 0.0  # monotonic seconds, the same clock in all processes; 0: none
    arrival: float = 0.0  # when it came to the server, by that clock; 0: when it comes to the engine
