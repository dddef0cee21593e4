"""Compiled and exported graphs for batches of 3, 2 and 1 systems: what a data loader passes at the end of an epoch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim, export

from nvalchemiops.torch.interactions.dispersion import d3_dispersion, damping_parameters
from nvalchemiops.torch.interactions.electrostatics import (
    compute_slab_correction,
    coulomb_energy_forces,
    dsf_coulomb,
    ewald_real_space,
    ewald_reciprocal_space,
    ewald_summation,
    particle_mesh_ewald,
    pme_reciprocal_space,
)
from nvalchemiops.torch.interactions.lj import lj_energy_forces
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.spline import spline_gather, spline_spread
from tests.dispersion import cases
from tests.systems import System, batch, triclinic

CUTOFF, ALPHA, MESH = 4.0, 0.8, (8, 8, 8)
ALL = {"compute_forces": True, "compute_virial": True}
SLAB = torch.tensor([True, True, False])
STATES = cases.parameters().states([6, 8])
DAMPING = damping_parameters("pbe")


class Inputs(torch.nn.Module):
    """A call as a module, which is what is exported; with the number of systems for ops that have such an argument."""

    def __init__(self, call: Callable[..., Any], says_number: bool) -> None:
        super().__init__()
        self.call = call
        self.says_number = says_number

    def forward(self, x, q, cell, batch_idx, pairs, ptr, shifts):
        near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "batch_idx": batch_idx}
        number = {"num_systems": cell.shape[0]} if self.says_number else {}
        return self.call(x, q, cell, near, shifts, **number)


def potential(x, q, cell, near, shifts, **number):
    return lennard_jones(CUTOFF)(x, cell, sigma=2.2, epsilon=0.05, **near, neighbor_shifts=shifts, **number, **ALL)


def damped(x, q, cell, near, shifts, **number):
    return dsf_coulomb(x, q, CUTOFF, cell=cell, **near, unit_shifts=shifts, **number, compute_virial=True)


def dispersion(x, q, cell, near, shifts, **number):
    numbers = torch.where(q > 0, 6, 8)
    options = {**near, "neighbor_shifts": shifts, **number, **ALL, "energy_reduction": "system"}
    return d3_dispersion(x, numbers, DAMPING, STATES, cell, **options)


def ewald(x, q, cell, near, shifts):
    return ewald_summation(x, q, cell, ALPHA, k_cutoff=3.0, **near, neighbor_shifts=shifts, **ALL)


def estimated(x, q, cell, near, shifts):
    return ewald_summation(x, q, cell, cutoff=CUTOFF, accuracy=1e-3, **near, neighbor_shifts=shifts, **ALL)


def pme(x, q, cell, near, shifts):
    return particle_mesh_ewald(x, q, cell, ALPHA, mesh_dimensions=MESH, **near, neighbor_shifts=shifts, **ALL)


OPS: dict[str, tuple[Callable[..., Any], bool]] = {
    "potential, number given": (potential, True),
    "potential": (potential, False),
    "DSF, number given": (damped, True),
    "DSF": (damped, False),
    "D3, number given": (dispersion, True),
    "D3": (dispersion, False),
    "Lennard-Jones": (
        lambda x, q, c, near, shifts: lj_energy_forces(x, 2.2, 0.05, CUTOFF, c, **near, neighbor_shifts=shifts),
        False,
    ),
    "Coulomb": (
        lambda x, q, c, near, shifts: coulomb_energy_forces(x, q, c, CUTOFF, 0.3, **near, neighbor_shifts=shifts),
        False,
    ),
    "Ewald": (ewald, False),
    "Ewald estimated": (estimated, False),
    "real space": (
        lambda x, q, c, near, shifts: ewald_real_space(x, q, c, ALPHA, **near, neighbor_shifts=shifts, **ALL),
        False,
    ),
    "reciprocal space": (
        lambda x, q, c, near, _: ewald_reciprocal_space(x, q, c, None, ALPHA, near["batch_idx"], k_cutoff=3.0, **ALL),
        False,
    ),
    "PME": (pme, False),
    "mesh": (
        lambda x, q, c, near, _: pme_reciprocal_space(x, q, c, ALPHA, MESH, batch_idx=near["batch_idx"], **ALL),
        False,
    ),
    "slab": (lambda x, q, c, near, _: compute_slab_correction(x, q, c, SLAB, near["batch_idx"], **ALL), False),
    "splines": (
        lambda x, q, c, near, _: spline_gather(
            x, spline_spread(x, q, c, MESH, batch_idx=near["batch_idx"]), c, batch_idx=near["batch_idx"]
        ),
        False,
    ),
}

PARTS = [triclinic(5, charged=True), triclinic(3, seed=3), triclinic(4, seed=5)]


def batches() -> list[System]:
    """Of 3, 2 and 1 systems, the last one numbered and with a cell as the others have them."""
    last = PARTS[0]._replace(batch_idx=torch.zeros(5, dtype=torch.int32), cell=PARTS[0].cell.reshape(1, 3, 3))
    return [batch(*PARTS), batch(*PARTS[:2]), last]


def arguments(system: System) -> tuple[torch.Tensor, ...]:
    near = neighbor_list(system.positions, CUTOFF, system.cell, batch_idx=system.batch_idx, return_neighbor_list=True)
    return (*system, *near)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("op", "dynamic"), [*((op, None) for op in OPS), ("potential, number given", True), ("D3", True), ("PME", True)]
)
def test_one_compiled_function_takes_batches_of_three_two_and_one(op, dynamic):
    """A batch of one may be compiled for itself, but is no error."""
    torch._dynamo.reset()
    eager = Inputs(*OPS[op])
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for system in batches():
        assert_same(compiled(*arguments(system)), eager(*arguments(system)))


@pytest.mark.parametrize("op", ["potential, number given", "DSF", "D3, number given", "Ewald", "splines"])
def test_one_exported_program_takes_batches_of_three_and_two(op):
    """With names for the numbers of atoms, systems and pairs."""
    atoms, systems, pairs = Dim("atoms", min=2), Dim("systems", min=2), Dim("pairs", min=2)
    shapes = ({0: atoms}, {0: atoms}, {0: systems}, {0: atoms}, {1: pairs}, {0: atoms + 1}, {0: pairs})
    eager = Inputs(*OPS[op])
    three, two, _ = batches()
    program = export(eager, arguments(three), dynamic_shapes=shapes).module()
    for system in (two, three):
        assert_same(program(*arguments(system)), eager(*arguments(system)))
