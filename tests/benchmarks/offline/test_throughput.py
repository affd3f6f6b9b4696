"""The sizes of `quire bench throughput`: a CPU gets a workload that it ends within a minute."""

from benchmarks.offline.throughput import SizedWorkload, WorkloadFlags, requests_of


def test_a_cpu_gets_a_small_workload() -> None:
    assert WorkloadFlags().sized(on_cpu=True) == SizedWorkload(16, 128, 64, num_runs=1)
    assert WorkloadFlags().sized(on_cpu=False) == SizedWorkload(256, 1024, 128, num_runs=3)


def test_what_is_given_holds_on_every_device() -> None:
    flags = WorkloadFlags(num_prompts=5, input_len=7, output_len=9, num_runs=2)
    sized = flags.sized(on_cpu=True)
    assert (sized.input_len, sized.output_len, sized.num_runs) == (7, 9, 2)
    assert [(len(each.prompt), each.output_len) for each in requests_of(flags, sized, 100)] == [(7, 9)] * 5
    assert len(requests_of(WorkloadFlags(), sized, 100)) == 16
