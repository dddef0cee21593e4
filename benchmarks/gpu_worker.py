"""The processes of `gpu.py`: a device, what it can do, and answers to questions.

A question is a line of JSON. The answer is some lines ``row {...}``, as soon as each is known, and ``end {...}``, which
says what failed. The peer has our import name, so it answers in a process of its own, which runs this file, too.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

Row = dict[str, Any]
Call = Callable[[int], Any]
"""A call; its argument chooses the inputs."""

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories in a trace of torch.profiler
POISON = [2**k for k in range(9, 29, 2)]  # bytes; more than one block of each, for both pools of the allocator
BROKEN = ("CUDA", "cuda", "Warp", "capture")  # words in errors after which a process is not trusted any more


class Gpu:
    """What is done to a GPU; `StandIn` does the same to a CPU, so that all else is rehearsed there."""

    kind = "cuda"
    categories: tuple[str, ...] = KERNELS
    seconds_of_a_time = 0.25

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def burst(self, call: Callable[[], Any], count: int) -> float:
        """Seconds of a call, the mean of so many in a row, from before the first to the end of the last kernel."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        start.record()
        for _ in range(count):
            result = call()
        end.record()
        end.synchronize()
        del result
        return 1e-3 * start.elapsed_time(end) / count

    def capture(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What replays a step, and its results, which each replay writes again."""
        with self.aside():
            step(), step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        return graph.replay, results

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Another stream, between what comes before and after."""
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            yield
        here.wait_stream(side)

    @contextlib.contextmanager
    def waiting_is_an_error(self) -> Iterator[None]:
        """Of the host for the device."""
        self.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def poison(self) -> None:
        """Leave NaN in the memory that torch hands out next."""
        blocks = [torch.full((size // 4,), torch.nan, device=self.kind) for size in POISON for _ in range(3)]
        self.synchronize()
        blocks.clear()

    def peak(self, call: Callable[[], Any]) -> int:
        """Bytes that a call allocates at most, beyond what was there."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before

    def describe(self) -> Row:
        p = torch.cuda.get_device_properties(0)
        return {"device": p.name, "multiprocessors": p.multi_processor_count, "GiB": round(p.total_memory / 2**30, 1)}

    # -- the same everywhere ------------------------------------------------------------------------------

    def median(self, call: Call) -> float:
        """Seconds of a call after warm-up; inputs take turns."""
        numbers = itertools.count()
        for _ in range(4):  # the third of equal calls may be captured as a graph by the library itself
            call(next(numbers))
        once = self.burst(lambda: call(next(numbers)), 1)
        count = max(1, min(50, int(2e-3 / max(once, 1e-6))))
        times, begin = list[float](), time.perf_counter()
        while len(times) < 3 or (time.perf_counter() - begin < self.seconds_of_a_time and len(times) < 30):
            times.append(self.burst(lambda: call(next(numbers)), count))
        return statistics.median(times)

    def kernels(self, call: Call, count: int = 3) -> list[Row]:
        """The kernels of a call, longest first: microseconds and launches of a call, and how they were launched."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.kind == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        call(0)
        with torch.profiler.profile(activities=activities) as profile:
            for n in range(count):
                call(n)
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            profile.export_chrome_trace(path)
            with open(path) as file:
                return kernels_of(json.load(file), self.categories, count)


class StandIn(Gpu):
    """A CPU, with wall time for events and calls for graphs."""

    kind = "cpu"
    categories = ("cpu_op",)
    seconds_of_a_time = 0.01

    def synchronize(self) -> None:
        pass

    def burst(self, call: Callable[[], Any], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    def capture(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        results = step()

        def replay() -> None:
            for kept, new in zip(results, step()):
                kept.detach().copy_(new.detach())

        return replay, results

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def waiting_is_an_error(self) -> Iterator[None]:
        yield

    def poison(self) -> None:
        for size in POISON[:6]:
            torch.full((size // 4,), torch.nan)

    def peak(self, call: Callable[[], Any]) -> int:
        call()
        return 0

    def describe(self) -> Row:
        return {"device": "stand-in: CPU"}


def kernels_of(trace: Any, categories: tuple[str, ...], count: int) -> list[Row]:
    """Kernels in a trace of ``count`` calls, by `torch.profiler`."""
    found: dict[str, list[Row]] = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") in categories and "dur" in event:
            found[event["name"]].append(event)
    rows = []
    for name, events in found.items():
        row = {"kernel": name, "us": sum(e["dur"] for e in events) / count, "launches": len(events) / count}
        details = max(events, key=lambda e: e["dur"]).get("args", {})
        for key in ("grid", "block", "registers per thread", "shared memory", "est. achieved occupancy %"):
            if key in details:
                row[key] = details[key]
        rows.append(row)
    return sorted(rows, key=lambda row: -row["us"])


def limits(gpu: Gpu, tiny: bool) -> Iterator[Row]:
    """What the device can do: bytes and operations per second, and seconds of launches."""
    yield {"name": "device", **gpu.describe(), "torch": torch.__version__}
    torch.backends.cuda.matmul.allow_tf32 = False
    size = 2**20 if tiny else 2**30
    sources = [torch.rand(size // 4, device=gpu.kind) for _ in range(2)]
    target = torch.empty_like(sources[0])
    copied = gpu.median(lambda n: target.copy_(sources[n % 2]))
    yield {"name": "copy", "value": 2 * size / copied, "unit": "B/s", "seconds": copied}
    n = 128 if tiny else 8192
    for dtype in (torch.float32, torch.float64):
        a, b = (torch.rand(n, n, dtype=dtype, device=gpu.kind) for _ in range(2))
        product = gpu.median(lambda k: torch.mm(a if k % 2 else b, b))  # noqa: B023  # called at once
        kind = str(dtype).removeprefix("torch.")
        yield {"name": f"product, {kind}", "value": 2 * n**3 / product, "unit": "flop/s", "seconds": product}
    small = torch.zeros(32, device=gpu.kind)

    def hundred() -> list[torch.Tensor]:
        for _ in range(100):
            small.add_(1.0)
        return [small]

    launched = gpu.median(lambda n: hundred()) / 100
    yield {"name": "launch by torch", "seconds": launched}
    replay, _ = gpu.capture(hundred)
    yield {"name": "launch in a graph", "seconds": gpu.median(lambda n: replay()) / 100}
    begin = time.perf_counter()
    for _ in range(20):
        small.add_(1.0)
        gpu.synchronize()
    yield {"name": "launch and wait", "seconds": (time.perf_counter() - begin) / 20}


def answer(gpu: Gpu, tiny: bool, question: list[Any]) -> Iterator[Row]:
    match question:
        case ["version"]:
            import nvalchemiops

            yield {"version": nvalchemiops.__version__, "file": nvalchemiops.__file__}
        case ["limits"]:
            yield from limits(gpu, tiny)
        case ["known", "checks"]:
            import gpu_checks

            yield from ({"known": name} for name in gpu_checks.names())
        case ["check", name, dtype, references]:
            import gpu_checks

            yield from gpu_checks.check(gpu, tiny, name, dtype, references)
        case ["known" | "d3 table" | "warm" | "time" | "profile", *_]:
            import gpu_calls

            yield from gpu_calls.answer(gpu, tiny, question)
        case _:
            raise ValueError(f"no such question: {question}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--once", help="one question, for a profiler; rows are not printed")
    options = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    gpu = StandIn() if options.stand_in else Gpu()
    if options.stand_in:
        torch.set_num_threads(1)
    with contextlib.suppress(ImportError):
        from nvalchemiops._warp import quiet_warp  # which the peer does not have

        quiet_warp()
    for line in [options.once] if options.once else sys.stdin:
        end: Row = {}
        try:
            for row in answer(gpu, options.stand_in, json.loads(line)):
                print("row", json.dumps(row), file=out, flush=True)
        except Exception as error:
            traceback.print_exc()
            end["failed"] = f"{type(error).__name__}: {error}"[:500]
            end["broken"] = any(word in end["failed"] for word in BROKEN)
        print("end", json.dumps(end), file=out, flush=True)


if __name__ == "__main__":
    main()
