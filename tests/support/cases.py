"""Differentiable calls of the library, called alike: the table of cases that the contracts hold for.

Cells are skewed, atoms lie outside of them, systems carry net charge, and those of a batch differ in size and come in
no order.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, d3_dispersion
from nvalchemiops.torch.interactions.pair import damped_shifted_force, lennard_jones
from tests.support.comparing import leaves_of
from tests.support.systems import System, batch, neighbors_of, triclinic

CUTOFF = 3.0
# a set of wave vectors that does not change with the cell, or finite differences would see vectors come and go
BOUNDS = (2, 3, 2)
MESH = (8, 9, 10)
SLAB = torch.tensor([True, False, True])
LENNARD_JONES = lennard_jones(CUTOFF, r_switch=2.2)
DAMPED_SHIFTED_FORCE = damped_shifted_force(CUTOFF)
STATES = D3Parameters.load().states([6, 8])
STATES_ON_GPU = functools.cache(lambda: D3Parameters.load().states([6, 8], "cuda"))
D3_CUTOFFS = {"cutoff": CUTOFF, "coordination_cutoff": CUTOFF, "smoothing": 1.0}
# dispersion energies are small: in this unit they are of order one, and so are tolerances
D3_UNIT = 1e3


class Inputs(NamedTuple):
    """All that a result depends on continuously."""

    x: torch.Tensor  # (n_atoms, 3)
    a: torch.Tensor  # of atoms: charges or diameters; or two parameters of the damping
    cell: torch.Tensor  # (n_systems, 3, 3)
    b: torch.Tensor  # of systems: alpha; of atoms: depths; or two more parameters of the damping

    def leaves(self):
        return Inputs(*leaves_of(self))

    def grad(self, value, **options):
        return torch.autograd.grad(value, tuple(self), **{"materialize_grads": True, "allow_unused": True} | options)

    def moved(self, direction, step):
        return Inputs(*(t + step * d for t, d in zip(self, direction, strict=True)))


class Case(NamedTuple):
    """``call(x, a, cell, b, near, **options)`` returns energies and the ``outputs`` that are asked for, in order."""

    name: str
    function: Callable
    inputs: Callable[[System], Inputs]
    outputs: tuple[str, ...] = ("forces", "charge_gradients", "virial")
    of_atoms: tuple[str, ...] = ("x", "a")  # inputs with one entry for each atom
    of_systems: tuple[str, ...] = ("cell", "b")
    energies_in_float64: bool = False  # also those of positions in float32

    def call(self, *arguments, **options):
        found = self.function(*arguments, **options)
        return found if isinstance(found, tuple) else (found,)

    def energies(self, *arguments, **options):
        return self.call(*arguments, **options)[0]

    @property
    def everything(self):
        return {f"compute_{name}": True for name in self.outputs}

    def results(self, *arguments, **options):
        return self.call(*arguments, **self.everything, **options)

    def dtypes(self, dtype):
        """Dtypes of the results for positions of a dtype."""
        return [torch.float64 if self.energies_in_float64 else dtype, *[dtype] * len(self.outputs)]

    def near(self, system, **given):
        """Neighbors, with what tells the systems of a batch apart; and elements where they are needed."""
        near = given or neighbors_of(system, CUTOFF)
        near = near | ({"batch_idx": system.batch_idx} if len(system.cell) > 1 else {})
        return near | ({"numbers": torch.where(system.charges > 0, 6, 8).int()} if self.name.startswith("D3") else {})


# -- calls ----------------------------------------------------------------------------------------


def real_space(x, q, cell, alpha, near, **options):
    return electrostatics.ewald_real_space(x, q, cell, alpha, **near, **options)


def reciprocal_space(x, q, cell, alpha, near, **options):
    return electrostatics.ewald_reciprocal_space(
        x, q, cell, None, alpha, near.get("batch_idx"), miller_bounds=BOUNDS, **options
    )


def mesh(x, q, cell, alpha, near, spline_order=6, **options):
    return electrostatics.pme_reciprocal_space(
        x, q, cell, alpha, MESH, None, spline_order, near.get("batch_idx"), **options
    )


def slab(x, q, cell, alpha, near, **options):
    return electrostatics.compute_slab_correction(x, q, cell, SLAB, near.get("batch_idx"), **options)


def ewald(x, q, cell, alpha, near, **options):
    return electrostatics.ewald_summation(x, q, cell, alpha, miller_bounds=BOUNDS, **near, **options)


def pme(x, q, cell, alpha, near, spline_order=6, **options):
    return electrostatics.particle_mesh_ewald(x, q, cell, alpha, None, MESH, spline_order, **near, **options)


def pairs_of_diameters(x, sigma, cell, epsilon, near, **options):
    return LENNARD_JONES(x, cell, sigma=sigma, epsilon=epsilon, **near, **options)


def pairs_of_charges(x, q, cell, alpha, near, **options):
    return DAMPED_SHIFTED_FORCE(x, cell, q=q, alpha=alpha, **near, **options)


def dispersion(x, a, cell, b, near, **options):
    near = dict(near)
    damping = RationalDamping(*a.unbind(), *b.unbind())
    states = STATES if x.device.type == "cpu" else STATES_ON_GPU()
    found = d3_dispersion(x, near.pop("numbers"), damping, states, cell, **near, **D3_CUTOFFS, **options)
    # the coordination numbers are before the virial
    return tuple(D3_UNIT * t for k, t in enumerate(found) if k != (2 if options.get("compute_forces") else 1))


# -- what they depend on --------------------------------------------------------------------------


def charged(alpha):
    def inputs(system):
        of_systems = alpha + 0.05 * torch.arange(len(system.cell), dtype=torch.float64)
        return Inputs(system.positions, system.charges, system.cell, of_systems)

    return inputs


def with_diameters(system):
    order = torch.arange(len(system.charges), dtype=torch.float64)
    return Inputs(system.positions, 1.75 + 0.15 * torch.sin(7.0 * order), system.cell, 0.7 + 0.5 * torch.sin(order))


def with_damping(system):
    a, b = torch.tensor([0.43, 4.4, 0.79, 0.9], dtype=torch.float64).split(2)
    return Inputs(system.positions, a, system.cell, b)


PAIR_OUTPUTS = ("forces", "virial")
OF_CHARGES = functools.partial(Case, inputs=charged(0.7), energies_in_float64=True)
SUMS = [OF_CHARGES("Ewald", ewald), OF_CHARGES("PME", pme)]
PARTS = [
    OF_CHARGES("real space", real_space),
    OF_CHARGES("reciprocal space", reciprocal_space),
    OF_CHARGES("mesh", mesh),
    OF_CHARGES("slab", slab),
]
PAIRS = [
    Case("LJ", pairs_of_diameters, with_diameters, PAIR_OUTPUTS, ("x", "a", "b"), ("cell",)),
    Case("DSF", pairs_of_charges, charged(0.25), PAIR_OUTPUTS),
]
D3 = Case("D3", dispersion, with_damping, PAIR_OUTPUTS, ("x",), ("cell",))


def each(*cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


EACH = each(*SUMS, *PARTS, *PAIRS, D3)
EACH_WHOLE = each(*SUMS, *PAIRS, D3)
EACH_OF_ATOMS = each(*SUMS, *PAIRS)


# -- systems --------------------------------------------------------------------------------------


def spread_out(n_atoms, seed=1):
    """Atoms on a jittered grid, no two of them close, each moved by lattice vectors."""
    system = triclinic(n_atoms, charged=True, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cartesian_prod(*(torch.arange(2),) * 3)[:n_atoms].double() / 2
    jitter = 0.1 * torch.rand(n_atoms, 3, generator=generator, dtype=torch.float64)
    images = torch.randint(-2, 3, (n_atoms, 3), generator=generator)
    return system._replace(positions=(grid + jitter + images) @ system.cell[0])


def shuffled(system, seed=8):
    order = torch.randperm(len(system.charges), generator=torch.Generator().manual_seed(seed))
    return system._replace(**{name: getattr(system, name)[order] for name in ("positions", "charges", "batch_idx")})


def member(system, inputs, case, number):
    """One system of a batch: itself, its inputs, and its atoms."""
    mine = (system.batch_idx == number).nonzero().squeeze(1)
    here = slice(number, number + 1)
    alone = System(system.positions[mine], system.charges[mine], system.cell[here], torch.zeros(len(mine)).int())
    picked = {
        name: value[mine] if name in case.of_atoms else value[here] if name in case.of_systems else value
        for name, value in inputs._asdict().items()
    }
    return alone, Inputs(**picked), mine


ONE = spread_out(5)
SMALL = spread_out(3)
MIXED = shuffled(batch(spread_out(5), spread_out(2, seed=3), spread_out(4, seed=4)))
