"""The GPU's attention checks, run on the CPU, where both sides are the twin: the checks themselves must be right."""

from benchmarks.check_attention import all_errors


def test_the_checks_pass_on_the_twin():
    errors = dict(all_errors("cpu", contexts=[1, 300, 17, 64], queries=[1, 130, 17, 5]))
    assert len(errors) == 24 * 3 + 5 * 4
    assert max(errors.values()) < 6e-3
