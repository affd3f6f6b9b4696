"""LoRA adapters as callers of Quire name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from engine.core.engine_request import Adapter
from engine.models.lora import adapter_version, read_adapter_config

OF_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # OWNER/NAME


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for requests of `LLM`, as in vLLM: its name, a number that has no effect, and its folder or its
    name on the Hub.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


LoRARequests: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None


def find_adapter(name: str, path: str) -> Adapter:
    """Return the adapter in a folder, or of the Hub, as it is now. Raises `ModelError` if its files are missing or of
    another kind.

    Reads only the small file. The engine reads and checks the weights.
    """
    folder = Path(path).expanduser()
    if OF_HUB.fullmatch(path) and not folder.exists():
        from engine.models.download import download_adapter  # takes a tenth of a second

        folder = download_adapter(path)
    version = adapter_version(folder)
    read_adapter_config(folder)
    return Adapter(name, str(folder.resolve()), version)


def adapters_of(given: LoRARequests, count: int, enabled: bool) -> list[Adapter | None]:
    """Return the adapter of each of `count` prompts. Raises `ValueError`, or `ModelError` for unusable folders."""
    each = [given] * count if given is None or isinstance(given, LoRARequest) else list(given)
    if len(each) != count:
        raise ValueError(f"lora_request must be one, or one for each prompt ({count}), got {len(each)}")
    if any(each) and not enabled:
        raise ValueError("lora_request needs LLM(…, enable_lora=True)")
    found = {one: find_adapter(one.lora_name, one.lora_path) for one in dict.fromkeys(each) if one is not None}
    return [None if one is None else found[one] for one in each]
