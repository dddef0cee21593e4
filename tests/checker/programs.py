"""Programs that are run under the checker, in a process of their own: ``python -m tests.checker.programs NAME``.

They are the problems that `tests/lanes` gives the kernels, on rows with fewer entries than a warp has lanes, as many,
and more; calls of the library, with two derivatives; and input that is wrong.
"""

import json
import sys
from collections.abc import Callable
from functools import partial

import torch
import warp as wp

from nvalchemiops.interactions.pair import sum as pairs
from nvalchemiops.layout import GPU, replaced_layout
from nvalchemiops.torch.interactions.electrostatics import ewald_real_space
from nvalchemiops.torch.neighbors.search import fill_neighbor_matrix
from tests.checker.launches import Fault
from tests.checker.session import checked
from tests.lanes import problems
from tests.lanes.test_calls import results
from tests.routes.test_pair_on_gpu import VARIANTS
from tests.support.cases import D3, MIXED, ONE, PAIRS, SUMS

NO_ATOMS = (problems.Rows.n_atoms, -1, 2**31 - 1)
"""Numbers that no atom has."""


def serial_search() -> None:
    """What a search does on a CPU before and after its kernels, with the lanes of a GPU in them."""
    with replaced_layout("cpu", GPU._replace(serial=True)):
        problems.searches()()


def rebuilt_search(room: int = 90) -> None:
    """Rows of some atoms and systems, in memory."""
    rows = problems.Rows("float64")
    n = rows.n_atoms
    x, system_of = rows.positions, rows.batch_idx.sort().values
    first = torch.cat([system_of.new_zeros(1), torch.bincount(system_of).cumsum(0).int()])
    targets = torch.arange(0, n, 3, dtype=torch.int32)
    query = (x, rows.cutoff, rows.cell, None, system_of, first, targets, False, 0, 0, 0.0, False)
    memory = [targets.new_zeros((len(targets), *rest)) for rest in ((room,), (), (room, 3))]
    fill_neighbor_matrix(*query, torch.arange(rows.n_systems) % 2 == 0, -1, *memory)


def calls() -> None:
    """Sums of all kinds, with two derivatives."""
    for case in (*SUMS, *PAIRS, D3):
        for dtype in (torch.float64, torch.float32):
            results(case, MIXED, dtype)


def bad_input() -> None:
    """Indices of what does not exist, in many rows: no memory beyond arrays is touched, and no race decides."""
    for precision in ("float64", "float32"):
        variant = next(v for v in pairs._EWALD if v.precision == precision and v.request.outputs == "wr")
        for bad in NO_ATOMS:
            problems.pair_sums(variant, bad)()
            problems.inspections(bad)()
        case, system = SUMS[0], ONE.to(getattr(torch, precision))
        near, alpha = case.near(ONE), system.cell.new_tensor([0.7])
        for atom, value in ((3, torch.nan), (1, torch.inf)):
            nowhere = system.positions.clone()
            nowhere[atom] = value
            ewald_real_space(nowhere, *system[1:3], alpha, **near, compute_forces=True)
        for bad in (len(nowhere), -1, 2**31 - 1):
            wrong = near["neighbor_list"].clone()
            wrong[1, ::7] = bad
            ewald_real_space(*system[:3], alpha, **near | {"neighbor_list": wrong}, compute_forces=True)


def run(*programs: Callable[[], object]) -> None:
    """One after the other."""
    for program in programs:
        program()


def programs_of_kernels() -> dict[str, list[Callable[[], object]]]:
    """Problems that run registered kernels, by the package of the first of these and by precision."""
    found: dict[str, list[Callable[[], object]]] = {}
    for (make, *arguments), names in problems.kernels_by_problem().items():
        _, package, part, *_ = problems.KERNELS[names[0]].func.__module__.split(".")
        name = f"{package}, {part}" + (", float32" if "float32" in names[0] else "")
        found.setdefault(name, []).append(partial(lambda make, arguments: make(*arguments)(), make, arguments))
    return found


PROGRAMS: dict[str, Callable[[], None]] = {
    **{name: partial(run, *programs) for name, programs in programs_of_kernels().items()},
    "generated": partial(run, *map(problems.pair_sums, VARIANTS.values()), problems.moment_sums(problems.MOMENTS)),
    "serial search": serial_search,
    "rebuilt search": rebuilt_search,
    "calls": calls,
    "bad input": bad_input,
}


def main() -> None:
    """Run the program that is named, and print what was found."""
    wp.config.quiet = True
    fault = None
    with checked() as done:
        try:
            PROGRAMS[sys.argv[1]]()
        except Fault as found:
            fault = str(found)
    print(json.dumps({"fault": fault, "launches": len(done)}))


if __name__ == "__main__":
    main()
