"""The GPU's attention checks, run on the CPU, where the twins take the kernels' place: the checks themselves must be right."""

import math

import torch

from benchmarks import check_attention

SMALL = {"contexts": [1, 300, 17, 64], "queries": [1, 130, 17, 5]}


def test_the_checks_pass_on_the_twins():
    torch.manual_seed(0)
    found = list(check_attention.attention_errors("cpu", **SMALL))
    assert len({name for name, _, _ in found}) == len(found) > 140
    found += [*check_attention.rounding_errors("cpu", **SMALL), *check_attention.product_errors("cpu")]
    assert [(name, error) for name, error, limit in found if not error <= limit] == []


def test_the_checks_fail_where_a_kernel_is_wrong(monkeypatch):
    """Wrong scales, a key too few, and a kernel that does not even run."""
    right = check_attention.kernels.paged_attention_decode

    def unscaled(*args, kv_scale=None, **options):
        return right(*args, kv_scale=None if kv_scale is None else 2 * kv_scale, **options)

    def short(*args, **options):
        query, key_cache, value_cache, tables, rows, lens = args
        return right(query, key_cache, value_cache, tables, rows, lens - 1, **options)

    def broken(*args, **options):
        raise RuntimeError("out of resource")

    for wrong, kinds in ((unscaled, {"fp8"}), (short, {"fp8", "bf16"}), (broken, {"fp8", "bf16"})):
        monkeypatch.setattr(check_attention.kernels, "paged_attention_decode", wrong)
        errors = check_attention.attention_errors("cpu", **SMALL)
        failed = [name for name, error, limit in errors if not (error <= limit) or math.isnan(error)]
        assert {"fp8" if "fp8" in name else "bf16" for name in failed} == kinds
        assert not [name for name in failed if name.startswith("prefill")]
