"""Ranks that run the cases of all topics: ``python -m tests.distributed.ranks RANK COUNT FOLDER WHICH``.

One set of processes runs all cases, each on groups of several sizes, because starting processes takes most of the time.
"""

import datetime
import importlib
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

SIZES = (1, 2, 3, 4, 7)
FEW = {
    *("exchanges_are_transposes", "neighbors_are_those_of_one_process", "what_ranks_do_differently_is_named"),
    *("rows_go_to_partners_only", "exclusions_of_owners", "atoms_where_a_group_sends_nothing_are_named"),
    *("charges_within_a_cutoff", "particle_mesh_sums", "dispersion", "trajectories_are_those_of_one_process"),
    *("networks_are_those_of_one_process", "runs_go_on_with_other_numbers_of_ranks"),
    *("no_memory_in_the_middle_of_a_call", "atoms_that_have_moved_too_far_are_told_later"),
    *("the_host_reads_nothing_in_a_step", "what_ranks_do_differently_is_named_later"),
    *("recorded_steps_have_the_same_bits", "a_new_division_is_recorded_again"),
    *("a_rank_that_fails_in_a_replay_is_named", "new_tensors_may_have_another_default_device"),
    *("rows_go_through_the_host",),
}
"""Cases of every day, for two ranks."""
TIMEOUT = 300


TOPICS = (
    *("division", "interactions", "modules", "agreement", "steps", "sources", "response", "lifetimes"),
    *("random_systems", "dynamics", "networks", "restarts", "pairs", "faults", "deferred", "recorded"),
)
"""Files with cases."""


def all_cases():
    """The cases of all topics by name, with sizes of groups on which they run and numbers of spare groups."""
    for topic in TOPICS:
        importlib.import_module(f"tests.distributed.{topic}")
    return importlib.import_module("tests.distributed.common").CASES


def run(module, folder, count, *arguments, ignore=(), seconds=TIMEOUT):
    """What ``count`` ranks print that run a module; they must end well, but for those to ``ignore``."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(count), str(folder), *arguments],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, text) in enumerate(zip(processes, said)):
        assert rank in ignore or process.returncode == 0, text[-5000:]
    return said


def start(rank, count, folder, seconds=TIMEOUT):
    """Join the other ranks."""
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", count)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)


if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    from tests.distributed.common import chosen, groups, spare

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
    rank, count, folder, which = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    chosen["which"] = which
    torch.set_num_threads(1)
    start(rank, count, folder)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    groups.update({size: dist.new_group(range(size), timeout=timeout) for size in SIZES if size <= count})
    for name, (case, sizes, n_spare) in all_cases().items():
        if which == "few":
            sizes = (2,) if name in FEW else ()
        for size in SIZES[min(sizes) > 1 :] if which == "all" else sizes:
            spare[:] = [dist.new_group(range(size), timeout=timeout) for _ in range(n_spare)]
            if rank < size:
                try:
                    case(groups[size])
                except BaseException:
                    Path(folder, f"failed_{rank}").write_text(f"{name}, {rank} of {size}:\n{traceback.format_exc()}")
                    os._exit(1)
            dist.barrier()
        if rank == 0:
            Path(folder, f"passed_{name}").touch()
    dist.destroy_process_group()
