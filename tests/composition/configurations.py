"""Configurations that together contain every pair of features that can be on at the same time."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from tests.composition.features import BY_NAME, CHECKPOINTS, FEATURES, MODEL_DRAFTERS, reason_against

PROCESS_COST = 12  # pairs that a configuration with more processes must gain, since these start slowly
TRIES = 300  # random configurations; the one with the most new pairs is taken
REQUESTS = frozenset(feature.name for feature in FEATURES if feature.kind == "request")
MODELS = [feature.name for feature in FEATURES if feature.kind == "model"]
WEIGHTS = [feature.name for feature in FEATURES if feature.kind == "weights"]
DRAFTER, *OTHER_DRAFTERS = MODEL_DRAFTERS  # the others are in configurations for their own pairs only
SETTINGS = [feature.name for feature in FEATURES if feature.kind == "setting" and feature.name not in OTHER_DRAFTERS]
# Settings that multiply the processes: at most one in a configuration, unless it is there for a pair of them.
PROCESSES = ["tensor parallel", "pipeline parallel", "data parallel"]
RESTARTING = ["sleep", "prefix-cache file", "step isolation"]  # settings that start or try several times


_REFUSED_WITH = {name: {other for other in BY_NAME if reason_against(name, other) is not None} for name in BY_NAME}


@dataclass(frozen=True)
class Configuration:
    """A checkpoint and the features that are on, among them the checkpoint's own and those of requests."""

    checkpoint: str
    features: frozenset[str]

    def __contains__(self, feature: str) -> bool:
        return feature in self.features

    def __str__(self) -> str:
        shown = [name for name in BY_NAME if name in self.features - REQUESTS - CHECKPOINTS[self.checkpoint].features]
        return ", ".join([self.checkpoint, *shown])

    @property
    def pairs(self) -> set[frozenset[str]]:
        return {frozenset(pair) for pair in combinations(sorted(self.features), 2)}


def possible_pairs() -> set[frozenset[str]]:
    """Return all pairs of features that can be on at the same time."""
    pairs = combinations([feature.name for feature in FEATURES], 2)
    return {frozenset(pair) for pair in pairs if reason_against(*pair) is None}


def pairs_of_drafters() -> set[frozenset[str]]:
    """Return the possible pairs of block drafters and of rejection sampling."""
    return {pair for pair in possible_pairs() if not pair.isdisjoint(OTHER_DRAFTERS)}


def quick_pairs() -> set[frozenset[str]]:
    """Return the possible pairs without those of a weight format and a kind of model, of either and draft models or a
    way to run processes, or of two ways: these need many configurations, which start slowly. Without those that start
    processes again and again, too: tests/engine has test_rank_isolation.py, test_prefix_cache_ranks.py and
    test_sleep.py. `pairs_of_drafters` are apart.
    """
    weights, models, ways = set(WEIGHTS), set(MODELS), {*PROCESSES, "async engine"}
    on_ranks = {frozenset({name, other}) for name in PROCESSES for other in RESTARTING}
    return {
        pair
        for pair in possible_pairs() - on_ranks - pairs_of_drafters()
        if not (pair & weights and pair & models)
        and not (DRAFTER in pair and pair & (weights | models))
        and not (pair & ways and pair & (weights | models))
        and not (pair & ways and pair <= ways | {"offline"})
    }


def covering(pairs: set[frozenset[str]]) -> list[Configuration]:
    """Return few configurations that contain each of the pairs, always the same."""
    draw, missing, found = random.Random(0), set(pairs), []
    while missing:
        first = min(missing, key=sorted)
        candidates = [each for each in (_around(first, draw) for _ in range(TRIES)) if first <= each.features]
        assert candidates, f"no checkpoint has {sorted(first)}"
        partners: dict[str, set[str]] = defaultdict(set)  # of each feature in the missing pairs
        for one, other in missing:
            partners[one].add(other)
        best = max(candidates, key=lambda each: _gain(each.features, partners))
        best = _without_what_adds_nothing(best, missing, kept=first)
        missing -= best.pairs
        found.append(best)
    return found


def _gain(features: frozenset[str], partners: dict[str, set[str]]) -> int:
    """Return how many missing pairs a configuration has, less the cost of its processes."""
    num_pairs = sum(len(partners[name] & features) for name in features)
    return num_pairs - PROCESS_COST * len(features.intersection(PROCESSES))


def _without_what_adds_nothing(
    configuration: Configuration, missing: set[frozenset[str]], kept: frozenset[str]
) -> Configuration:
    """Return the configuration without slow settings all of whose missing pairs others have."""
    features = configuration.features
    for name in (*RESTARTING, *PROCESSES):
        fewer = Configuration(configuration.checkpoint, features - {name})
        has_engine = fewer.features & {"async engine", "offline"}
        if has_engine and name not in kept and missing & fewer.pairs == missing & Configuration("", features).pairs:
            features = fewer.features
    return Configuration(configuration.checkpoint, features)


def _around(pair: frozenset[str], draw: random.Random) -> Configuration:
    """Return a random configuration with this pair."""
    models = {name for name in pair if BY_NAME[name].kind == "model"}
    checkpoint = draw.choice(
        [
            name
            for name, own in CHECKPOINTS.items()
            if models <= own.features
            and own.stacks_experts <= _is_float(pair)
            and (own.has_full_attention or pair.isdisjoint(MODEL_DRAFTERS))
        ]
    )
    chosen = set(pair)
    for name in CHECKPOINTS[checkpoint].features:
        if not _fits(name, chosen - {name}):
            return Configuration(checkpoint, frozenset())
        chosen.add(name)
    formats = [name for name in WEIGHTS if not (CHECKPOINTS[checkpoint].stacks_experts and BY_NAME[name].checkpoint)]
    _add(chosen, draw.sample(formats, len(formats)), most=1)
    settings = draw.sample(SETTINGS, draw.randrange(4, len(SETTINGS)))
    if chosen & set(PROCESSES):
        settings = [name for name in settings if name not in PROCESSES]
    else:
        spared = draw.sample(PROCESSES, len(PROCESSES) - 1)
        settings = [name for name in settings if name not in spared]
    if chosen.union(settings) & set(PROCESSES):
        settings = [name for name in settings if name not in RESTARTING]
    if not CHECKPOINTS[checkpoint].has_full_attention:
        settings = [name for name in settings if name != DRAFTER]
    _add(chosen, settings, most=len(settings))
    if not chosen & {"async engine", "offline"}:
        chosen.add("async engine" if "data parallel" in chosen else "offline")
    _add(chosen, sorted(REQUESTS), most=len(REQUESTS))
    return Configuration(checkpoint, frozenset(chosen))


def _is_float(features: Iterable[str]) -> bool:
    """Return whether a checkpoint with these features stores float weights."""
    return not any(BY_NAME[name].checkpoint for name in features)


def _add(chosen: set[str], names: Iterable[str], most: int) -> None:
    for name in names:
        if most and name not in chosen and _fits(name, chosen):
            chosen.add(name)
            most -= 1


def _fits(name: str, chosen: Iterable[str]) -> bool:
    return _REFUSED_WITH[name].isdisjoint(chosen)
