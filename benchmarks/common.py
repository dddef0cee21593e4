"""What benchmarks share: timing, and a peer in an interpreter of its own."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

BURST = 0.01  # seconds of calls in a row: a short call alone would mostly find the caches of the others
PAUSE = 0.005  # before them: threads of the contender before still spin for milliseconds, and hold a core


class Peer:
    """The 0.5.0 release in an interpreter of its own, which runs ``script --serve``."""

    def __init__(self, python: str, script: str, device: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.process: Any = subprocess.Popen(
            [python, os.path.abspath(script), "--serve", "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            env=environment,
        )
        self.version = self.ask("")

    def ask(self, *question: Any) -> Any:
        print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = next(line for line in self.process.stdout if line.startswith("answer "))
        return json.loads(answer.removeprefix("answer "))


def seconds(call: Callable[[], Any], device: str = "cpu") -> float:
    """Wall time of a call, the mean of a short burst; on a GPU until the last kernel has ended."""
    total, calls = 0.0, 0
    time.sleep(PAUSE)
    call()  # the first call after another contender pays for the caches that this one left
    while total < BURST:
        if device == "cpu":
            start = time.perf_counter()
            result = call()
            total += time.perf_counter() - start
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = call()
            end.record()
            end.synchronize()
            total += 1e-3 * start.elapsed_time(end)
        del result  # freed outside of the time
        calls += 1
    return total / calls
