"""What importing the library costs beyond importing torch and Warp: fresh processes, medians, interleaved.

Run: ``python benchmarks/import_time.py``. Asked: under 1 s.
"""

import statistics
import subprocess
import sys

CASES = {
    "torch and warp": "import torch, warp",
    "nvalchemiops": "import nvalchemiops",
    "nvalchemiops.torch": "import torch, warp; import nvalchemiops.torch",
    "autograd, kernel, neighbors, electrostatics": (
        "import torch, warp; import nvalchemiops.torch.autograd, nvalchemiops.torch.kernel, "
        "nvalchemiops.torch.neighbors, nvalchemiops.torch.interactions.electrostatics"
    ),
}
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def main(rounds: int = 7) -> None:
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, code in CASES.items():
            run = subprocess.run([sys.executable, "-c", TIMED.format(code)], capture_output=True, text=True, check=True)
            times[name].append(float(run.stdout.split()[-1]))
    base = statistics.median(times["torch and warp"])
    for name, values in times.items():
        median = statistics.median(values)
        beyond = (
            "" if name in ("torch and warp", "nvalchemiops") else f"   {median - base:6.3f} s beyond torch and warp"
        )
        print(f"{name:46s}{median:7.3f} s{beyond}")


if __name__ == "__main__":
    main()
