"""Several threads and processes at once: every result is the one that a single thread gets."""

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.utils.data
import warp as wp

from nvalchemiops import launch, loading
from nvalchemiops import threads as core
from nvalchemiops.torch.autograd import OutputSpec, live_recordings
from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb, ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.interactions.lj import lj_energy_forces_virial
from nvalchemiops.torch.kernel import differentiable_kernel
from nvalchemiops.torch.neighbors import VerletList, neighbor_list
from nvalchemiops.torch.spline import spline_gather, spline_spread
from tests.support.processes import python_says
from tests.support.systems import System, batch, crystal, triclinic

Results = list[torch.Tensor]
N_THREADS = 8
ROUNDS = 4


@wp.kernel
def cube(x: wp.array(dtype=wp.float64), y: wp.array(dtype=wp.float64)):
    y[wp.tid()] = x[wp.tid()] * x[wp.tid()] * x[wp.tid()]


@functools.cache
def on_a_tape():
    return differentiable_kernel(cube).op([OutputSpec("y", wp.float64, lambda x: x.shape)])


def system_of(number: int) -> System:
    """Each number is another system, of another size; some are batches."""
    one = crystal("rocksalt", 5.6, 2 + number % 2, 0.1 + 0.02 * number, seed=number)
    return batch(one, triclinic(4 + number, seed=number)) if number % 2 else one


def differentiated(results: torch.Tensor | tuple[torch.Tensor, ...], leaves: list[torch.Tensor]) -> Results:
    """Results, their gradients, and the gradients of these."""
    results = results if isinstance(results, tuple) else (results,)
    loss = sum((r / (1.0 + r.detach().abs())).square().sum() for r in results)
    slopes = torch.autograd.grad(loss, leaves, create_graph=True)
    curvature = torch.autograd.grad(sum(s.tanh().sum() for s in slopes), leaves)
    return [t.detach() for t in (*results, *slopes, *curvature)]


def leaves_of(system: System) -> list[torch.Tensor]:
    return [t.clone().requires_grad_() for t in (system.positions, system.charges, system.cell)]


def pairs_of(system: System) -> dict[str, torch.Tensor]:
    pairs, ptr, shifts = neighbor_list(
        system.positions, 4.5, system.cell, batch_idx=system.batch_idx, return_neighbor_list=True
    )
    return {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts, "batch_idx": system.batch_idx}


def lists(system: System) -> Results:
    found = neighbor_list(system.positions, 4.5, system.cell, batch_idx=system.batch_idx, return_vectors=True)
    verlet = VerletList(4.0, 0.5)
    for step in range(3):
        kept = verlet(system.positions + 0.2 * step, system.cell, batch_idx=system.batch_idx)
    return [*found, *kept]


def lennard_jones(system: System) -> Results:
    x, q, cell = leaves_of(system)
    return differentiated(lj_energy_forces_virial(x, 1.0 + 0.1 * q, 0.3, 4.5, cell, **pairs_of(system)), [x, q, cell])


def damped(system: System) -> Results:
    x, q, cell = leaves_of(system)
    return differentiated(dsf_coulomb(x, q, 4.5, 0.3, cell, system.batch_idx, compute_virial=True), [x, q, cell])


def ewald(system: System) -> Results:
    x, q, cell = leaves_of(system)
    options = {"compute_forces": True, "compute_virial": True, **pairs_of(system)}
    return differentiated(ewald_summation(x, q, cell, 0.6, k_cutoff=2.5, **options), [x, q, cell])


def on_a_mesh(system: System) -> Results:
    x, q, cell = leaves_of(system)
    options = {"mesh_dimensions": (10, 9, 12), "spline_order": 6, "compute_forces": True, **pairs_of(system)}
    return differentiated(particle_mesh_ewald(x, q, cell, 0.6, **options), [x, q, cell])


def without_gradients(system: System) -> Results:
    """Where results by cell are kept for the next call."""
    with torch.no_grad():
        found = ewald_summation(*system[:3], accuracy=1e-4, cutoff=5.0, compute_forces=True, batch_idx=system.batch_idx)
        mesh = particle_mesh_ewald(*system[:3], accuracy=1e-3, batch_idx=system.batch_idx)
    return [*found, mesh]


def splines(system: System) -> Results:
    x, q, cell = leaves_of(system)
    mesh = spline_spread(x, q, cell, (8, 9, 10), 5, system.batch_idx)
    return differentiated(spline_gather(x, mesh, cell, 5, system.batch_idx), [x, q, cell])


def recorded(system: System) -> Results:
    x = system.charges.clone().requires_grad_()
    y = on_a_tape()(x)
    return [y.detach(), *torch.autograd.grad(y.sum(), x)]


JOBS: list[Callable[[System], Results]] = [
    lists, lennard_jones, damped, ewald, on_a_mesh, without_gradients, splines, recorded,
]  # fmt: skip


# torch's Fourier transforms round differently with another number of threads, and second derivatives of Ewald sums by a
# plan, which adds up in another order
BY_OTHER_ROUNDING = (on_a_mesh, without_gradients, ewald)


def agree(job: int, found: Results, expected: Results) -> bool:
    """The same to the last bit, as far as every sum is the library's own."""
    if len(found) != len(expected):
        return False
    if JOBS[job] in BY_OTHER_ROUNDING:
        return all(torch.allclose(a, b, rtol=0, atol=1e-12 * float(b.abs().max())) for a, b in zip(found, expected))
    return all(torch.equal(a, b) for a, b in zip(found, expected))


def at_once(expected: dict[tuple[int, int], Results], rounds: int = ROUNDS, in_step: bool = False) -> list[str]:
    """Run every job in eight threads, each on another system, and beginning with another job unless ``in_step``.

    What went wrong is returned; results that are not expected yet become so.
    """
    wrong, start = [], threading.Barrier(N_THREADS)

    def work(thread: int) -> None:
        start.wait()
        for number in range(rounds * len(JOBS)):
            job, which = (number + (0 if in_step else thread)) % len(JOBS), (3 * thread + number) % N_THREADS
            try:
                found = JOBS[job](system_of(which))
                if not agree(job, found, expected.setdefault((job, which), found)):
                    wrong.append(f"{JOBS[job].__name__} of system {which}")
            except Exception as error:
                wrong.append(f"{JOBS[job].__name__}: {error!r}")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@functools.cache
def serial_results() -> dict[tuple[int, int], Results]:
    return {(job, which): function(system_of(which)) for job, function in enumerate(JOBS) for which in range(N_THREADS)}


@pytest.mark.later_cases("each launch on two")
@pytest.mark.parametrize("of_each", [1, 2], ids=["one thread each", "each launch on two"])
def test_eight_threads_get_what_one_gets(of_each, threads, always_split):
    """Different ops, differentiated twice, on different systems."""
    expected = dict(serial_results())
    recordings = live_recordings()
    threads(of_each)
    assert at_once(expected) == []
    assert live_recordings() == recordings


@pytest.mark.later
def test_the_first_calls_of_a_process_may_come_from_eight_threads_at_once():
    """Kernels are written, loaded and found by all of them; what they get is what one thread gets afterwards."""
    script = """
        import json
        from tests.resources.test_concurrency import JOBS, agree, at_once, system_of
        found = {}
        wrong = at_once(found, rounds=1, in_step=True)
        wrong += [JOBS[j].__name__ for (j, n), first in found.items() if not agree(j, JOBS[j](system_of(n)), first)]
        print(json.dumps([len(found), wrong]))
    """
    assert python_says(script) == [len(JOBS) * N_THREADS, []]


def test_a_kernel_is_made_once_however_many_threads_ask():
    """Of two kernels with one name in one module, Warp would build the second one only."""
    before, made, entered = len(launch.registered_kernels()), [], threading.Barrier(N_THREADS)

    @launch.kernel_variants(())
    def factory():
        made.append(threading.get_ident())
        time.sleep(0.05)  # long enough for the others to come and find nothing kept yet
        return object()

    found = []

    def ask():
        entered.wait()
        found.append(factory())

    try:
        askers = [threading.Thread(target=ask) for _ in range(N_THREADS)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
    finally:
        del loading._registered[before:]
    assert len(made) == 1 and len(found) == N_THREADS and len(set(map(id, found))) == 1


def test_threads_that_outlive_the_main_thread_work_alone():
    """Python starts no work in pools once the main thread has ended."""
    script = """
        import json, threading
        from nvalchemiops import threads as core

        def run(pieces):
            done = []
            core.run(lambda: done.extend(pieces), 2)
            return sorted(done)

        def work():
            before = run(iter(range(3)))
            main.join()
            print(json.dumps([before, run(iter(range(3)))]))

        main = threading.main_thread()
        threading.Thread(target=work).start()
    """
    assert python_says(script) == [[0, 1, 2]] * 2


def test_where_the_system_has_no_more_threads_one_does_the_work(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    done = []
    monkeypatch.setattr(core, "_pool", None)
    monkeypatch.setattr(core, "_pool_size", 0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        core._run_in_pool(lambda: done.append(threading.get_ident()), 3)
    core.pool(1).submit(lambda: None).result()
    assert done == [threading.get_ident()]  # what could not start does not start later


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_other_threads_are_busy_waits_for_none_of_them():
    """They are not there, and would never open what they hold."""
    script = """
        import json, os, threading
        from nvalchemiops import _warp, loading
        from nvalchemiops.torch import kernel

        locks = {"warp": lambda: _warp._lock, "ops": lambda: kernel._ops_lock, "kernels": lambda: loading._lock}
        held, leave = threading.Barrier(len(locks) + 1), threading.Event()

        def hold(lock):
            with lock():
                held.wait(60)
                leave.wait(60)

        holders = [threading.Thread(target=hold, args=(lock,)) for lock in locks.values()]
        for holder in holders:
            holder.start()
        held.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(sum(2**k for k, lock in enumerate(locks.values()) if not lock().acquire(timeout=1)))
        _, status = os.waitpid(child, 0)
        leave.set()
        for holder in holders:
            holder.join()
        stuck = os.waitstatus_to_exitcode(status)
        print(json.dumps([name for k, name in enumerate(locks) if stuck & 2**k]))
    """
    assert python_says(script) == []


# -- workers of a data loader ---------------------------------------------------------------------


class Structures(torch.utils.data.Dataset):
    """What people put into a dataset: neighbors, and targets from an Ewald sum."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        system = system_of(2 * number)
        pairs, _, shifts = neighbor_list(system.positions, 4.5, system.cell[0], return_neighbor_list=True)
        x = system.positions.clone().requires_grad_()
        energies = ewald_summation(x, system.charges, system.cell, accuracy=1e-5)
        (slope,) = torch.autograd.grad(energies.sum(), x)
        return {"pairs": pairs, "shifts": shifts, "energy": energies.detach(), "forces": -slope}


def first_of(samples: list) -> dict[str, torch.Tensor]:
    return samples[0]


@pytest.mark.everyday_cases("fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # of Python 3.12, about every fork
@pytest.mark.parametrize("start", multiprocessing.get_all_start_methods())
def test_workers_of_a_data_loader_compute_the_same(start, threads):
    """Forked or spawned from a process that has used everything, in several threads."""
    threads(2)
    dataset = Structures()
    expected = [dataset[number] for number in range(len(dataset))]
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=1, num_workers=2, multiprocessing_context=start, collate_fn=first_of, timeout=240
    )
    found = list(copied(loader))
    assert len(found) == len(expected)
    for sample, right in zip(found, expected):
        assert sample.keys() == right.keys()
        assert all(torch.equal(sample[name], right[name]) for name in right)
    # and this process is as good as before
    assert all(torch.equal(a, b) for a, b in zip(dataset[1].values(), expected[1].values()))


def copied(loader: torch.utils.data.DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    """Samples in memory of their own: that of workers goes with them."""
    for sample in loader:
        yield {name: tensor.clone() for name, tensor in sample.items()}
