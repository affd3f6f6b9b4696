"""CPU time of a decode step in the scheduler, `schedule()` and `update()`: python tests/core/bench_scheduler.py [running]"""

import gc
import statistics
import sys
from time import perf_counter

from engine.core.batch import StepResult
from engine.core.request import Request
from engine.core.sampling_params import SamplingParams
from engine.core.scheduler import Scheduler


def main(num_running: int, num_steps: int = 500, enable_prefix_caching: bool = True) -> None:
    scheduler = Scheduler(16 * 1024, 16, num_running, 8192, 4096, enable_prefix_caching)
    sampling = SamplingParams(max_tokens=num_steps + 100, stop_token_ids=[7])
    for i in range(num_running):
        scheduler.add(Request(str(i), [i] * (20 + i % 16), sampling, frozenset({1, 2}), seed=i))
    schedule_times, update_times = [], []
    in_flight = None
    gc.freeze()
    for _ in range(num_steps):
        start = perf_counter()
        output = scheduler.schedule()
        middle = perf_counter()
        if in_flight is not None:
            result = StepResult([1000 + i for i in range(len(in_flight.scheduled))])
            begin = perf_counter()
            news = scheduler.update(in_flight, result)
            end = perf_counter()
            schedule_times.append(middle - start)
            update_times.append(end - begin)
            del news  # not in the time: whoever reads it frees it
        in_flight = output
    assert output.num_decodes == num_running
    for name, times in (("schedule", schedule_times), ("update", update_times)):
        times = sorted(times[50:])
        print(
            f"{num_running} running, prefix caching {'on' if enable_prefix_caching else 'off'}: {name} "
            f"min {times[0] * 1e6:.0f} µs, median {statistics.median(times) * 1e6:.0f} µs, max {times[-1] * 1e6:.0f} µs"
        )


if __name__ == "__main__":
    for caching in (True, False):
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 256, enable_prefix_caching=caching)
