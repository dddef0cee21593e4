"""What importing the library costs beyond importing torch and Warp: fresh processes, medians, interleaved.

Run: ``python benchmarks/import_time.py``. Asked: under 1 s.
"""

from common import in_new_process, in_turns

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
    programs = {name: TIMED.format(code) for name, code in CASES.items()}
    medians = in_turns({name: lambda code=code: in_new_process(code)[-1] for name, code in programs.items()}, rounds)
    base = medians["torch and warp"]
    for name, median in medians.items():
        beyond = (
            "" if name in ("torch and warp", "nvalchemiops") else f"   {median - base:6.3f} s beyond torch and warp"
        )
        print(f"{name:46s}{median:7.3f} s{beyond}")


if __name__ == "__main__":
    main()
