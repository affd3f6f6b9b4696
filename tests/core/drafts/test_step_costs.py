"""The times of steps, as they are shown."""

from __future__ import annotations

from engine.core.drafts.step_costs import LEAST, StepCosts


def test_times_are_shown_by_size() -> None:
    costs = StepCosts({2: 0.004, 4: 0.0045})
    for _ in range(LEAST):
        costs.record(2, has_drafts=False, seconds=0.005)
        costs.record(3, has_drafts=True, seconds=0.007)
    assert str(costs) == "device 2: 4.00, 4: 4.50; plain 2: 5.00; with drafts 4: 7.00"
