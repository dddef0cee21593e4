"""Every ready-made potential, once: how it is made, random parameters, and the textbook formula."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from nvalchemiops.torch.interactions import pair as potentials
from nvalchemiops.torch.neighbors import neighbor_list
from tests.reference import pair as ref
from tests.reference.pair import Parameters
from tests.support.systems import System, batch, triclinic

SPECIES = 3
SWITCH = 0.7
"""Where switched potentials begin to be switched off, as part of the cutoff."""


class Draw:
    """Random parameters for a system."""

    def __init__(self, system, seed):
        self.rng = np.random.default_rng(seed)
        self.system = system

    def between(self, low, high, *shape):
        return torch.as_tensor(self.rng.uniform(low, high, shape))

    def atoms(self, **ranges):
        n_atoms = len(self.system.positions)
        return Parameters(atom={name: self.between(*r, n_atoms) for name, r in ranges.items()})

    def systems(self, **ranges):
        n_systems = len(self.system.cell)
        return Parameters(system={name: self.between(*r, n_systems) for name, r in ranges.items()})

    def tables(self, **ranges):
        species = torch.as_tensor(self.rng.integers(0, SPECIES, len(self.system.positions)))
        # not symmetric: [a, b] and [b, a] are averaged
        return Parameters(
            table={name: self.between(*r, SPECIES, SPECIES) for name, r in ranges.items()}, species=species
        )

    def charges(self, **ranges):
        return self.systems(**ranges)._replace(atom={"q": self.system.charges.clone()})


class Case(NamedTuple):
    name: str
    make: Callable[[float], potentials.PairPotential]  # by cutoff
    draw: Callable[[Draw], Parameters]
    pair: Callable  # (r, values of the pair, cutoff)
    alone: Callable | None = None  # (values of the atom, cutoff)
    shifted: bool = False
    switched: bool = False

    def parameters(self, system, seed=0):
        return self.draw(Draw(system, seed))

    def reference(self, positions, cell, parameters, pairs, cutoff):
        r_switch = SWITCH * cutoff if self.switched else None
        return ref.energies(self.pair, positions, cell, parameters, pairs, cutoff, self.shifted, r_switch, self.alone)

    def evaluate(self, positions, cell, parameters, cutoff, batch_idx=None, **options):
        if parameters.species is not None:
            options["species"] = parameters.species.to(positions.device)
        values = {name: value.to(positions) for name, value in parameters.values.items()}
        return self.make(cutoff)(positions, cell, batch_idx=batch_idx, **values, **options)


def _lj(rule):
    return lambda r, p, rc: ref.lennard_jones(r, *rule(p.sigma1, p.sigma2, p.epsilon1, p.epsilon2))


SIGMA_EPSILON = {"sigma": (1.4, 1.8), "epsilon": (0.5, 1.5)}
MORSE = {"depth": (0.5, 1.5), "steepness": (0.8, 1.6), "r0": (1.5, 2.5)}
BUCKINGHAM = {"A": (200.0, 400.0), "rho": (0.3, 0.4), "C": (5.0, 10.0)}
HUGGINS = {"A": (0.5, 1.0), "sigma": (1.5, 2.0), "rho": (0.3, 0.4), "C": (5.0, 10.0), "D": (1.0, 3.0)}
SOFT = {"scale": (0.2, 0.9), "softness": (0.3, 0.7)}


def _morse(r, p, rc):
    return ref.morse(r, p.depth, p.steepness, p.r0)


def _buckingham(r, p, rc):
    return ref.buckingham(r, p.A, p.rho, p.C)


def _huggins(r, p, rc):
    return ref.born_mayer_huggins(r, p.A, p.sigma, p.rho, p.C, p.D)


def _of_charges(formula, name=None, reaches=False):
    """A formula of two charges, of one parameter of the system if named, and of the cutoff if it reaches there."""
    return lambda r, p, rc: formula(r, p.q1, p.q2, *([getattr(p, name)] if name else []), *([rc] if reaches else []))


def _wolf_self(p, rc):
    return ref.wolf_self(p.q, p.alpha, rc)


def in_tables(potential):
    """With parameters by pairs of species."""
    return functools.partial(potential, tables=True)


TABLE = [
    Case("lj", potentials.lennard_jones, lambda d: d.atoms(**SIGMA_EPSILON), _lj(ref.lorentz_berthelot)),
    Case(
        "lj geometric shifted",
        lambda rc: potentials.lennard_jones(rc, mixing="geometric", shifted=True),
        lambda d: d.atoms(**SIGMA_EPSILON),
        _lj(ref.geometric),
        shifted=True,
    ),
    Case(
        "lj waldman-hagler switched",
        lambda rc: potentials.lennard_jones(rc, mixing="waldman-hagler", r_switch=SWITCH * rc),
        lambda d: d.atoms(**SIGMA_EPSILON),
        _lj(ref.waldman_hagler),
        switched=True,
    ),
    Case(
        "lj tables",
        lambda rc: potentials.lennard_jones(rc, mixing=None),
        lambda d: d.tables(**SIGMA_EPSILON),
        lambda r, p, rc: ref.lennard_jones(r, p.sigma, p.epsilon),
    ),
    Case(
        "mie 9-6",
        lambda rc: potentials.lennard_jones(rc, repulsive=9, attractive=6),
        lambda d: d.atoms(**SIGMA_EPSILON),
        lambda r, p, rc: ref.mie(r, *ref.lorentz_berthelot(p.sigma1, p.sigma2, p.epsilon1, p.epsilon2), 9, 6),
    ),
    Case(
        "soft core",
        potentials.soft_core_lennard_jones,
        lambda d: d.systems(**SOFT)._replace(atom=d.atoms(**SIGMA_EPSILON).atom),
        lambda r, p, rc: ref.soft_core(
            r, *ref.lorentz_berthelot(p.sigma1, p.sigma2, p.epsilon1, p.epsilon2), p.scale, p.softness
        ),
    ),
    Case("coulomb", potentials.coulomb, lambda d: d.charges(), _of_charges(ref.coulomb)),
    Case(
        "coulomb shifted and switched",
        lambda rc: potentials.coulomb(rc, shifted=True, r_switch=SWITCH * rc),
        lambda d: d.charges(),
        _of_charges(ref.coulomb),
        shifted=True,
        switched=True,
    ),
    Case(
        "ewald real space",
        potentials.ewald_real_space,
        lambda d: d.charges(alpha=(0.3, 0.6)),
        _of_charges(ref.ewald_real_space, "alpha"),
    ),
    Case(
        "wolf", potentials.wolf, lambda d: d.charges(alpha=(0.2, 0.4)), _of_charges(ref.wolf, "alpha", True), _wolf_self
    ),
    Case(
        "damped shifted force",
        potentials.damped_shifted_force,
        lambda d: d.charges(alpha=(0.2, 0.4)),
        _of_charges(ref.damped_shifted_force, "alpha", True),
        _wolf_self,
    ),
    Case(
        "reaction field",
        potentials.reaction_field,
        lambda d: d.charges(dielectric=(2.0, 80.0)),
        _of_charges(ref.reaction_field, "dielectric", True),
    ),
    Case("yukawa", potentials.yukawa, lambda d: d.charges(kappa=(0.3, 0.8)), _of_charges(ref.yukawa, "kappa")),
    Case("morse", potentials.morse, lambda d: d.systems(**MORSE), _morse),
    Case("morse tables", in_tables(potentials.morse), lambda d: d.tables(**MORSE), _morse),
    Case("buckingham", potentials.buckingham, lambda d: d.systems(**BUCKINGHAM), _buckingham),
    Case("buckingham tables", in_tables(potentials.buckingham), lambda d: d.tables(**BUCKINGHAM), _buckingham),
    Case("born-mayer-huggins", potentials.born_mayer_huggins, lambda d: d.systems(**HUGGINS), _huggins),
    Case(
        "born-mayer-huggins tables", in_tables(potentials.born_mayer_huggins), lambda d: d.tables(**HUGGINS), _huggins
    ),
    Case(
        "zbl",
        potentials.ziegler_biersack_littmark,
        lambda d: d.atoms(z=(1.0, 20.0)),
        lambda r, p, rc: ref.ziegler_biersack_littmark(r, p.z1, p.z2),
    ),
]
BY_NAME = {case.name: case for case in TABLE}
CASES = pytest.mark.parametrize("case", TABLE, ids=list(BY_NAME))

# -- systems --------------------------------------------------------------------------------------


def pair_of_systems():
    """Two unequal systems, charged, outside of their skewed cells, the second one left-handed, atoms in any order."""
    first, second = triclinic(6, charged=True, seed=1), triclinic(4, charged=True, seed=2)
    second = second._replace(cell=second.cell[:, [1, 0, 2]])
    both = batch(first, second)
    order = torch.as_tensor(np.random.default_rng(0).permutation(10))
    return System(both.positions[order], both.charges[order], both.cell, both.batch_idx[order])


SYSTEMS = {"one": lambda: triclinic(6, charged=True, seed=1), "two": pair_of_systems}


def find_pairs(system, cutoff, **options):
    """Pairs for the reference, with room for atoms that move or cells that are strained a little."""
    return ref.find_pairs(system.positions, system.cell, system.batch_idx, cutoff + 0.2, **options)


# -- formats --------------------------------------------------------------------------------------


def as_list(system, cutoff, half=False):
    pairs, ptr, shifts = neighbor_list(
        system.positions, cutoff, system.cell, batch_idx=system.batch_idx, return_neighbor_list=True, half_fill=half
    )
    found = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
    return {**found, "half_list": True} if half else found


def as_matrix(system, cutoff, **options):
    matrix, _, shifts = neighbor_list(system.positions, cutoff, system.cell, batch_idx=system.batch_idx, **options)
    return {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "fill_value": options.get("fill_value")}


def from_pairs(pairs):
    """The reference's own pairs as a list, for atoms in any order."""
    order = torch.argsort(pairs.i, stable=True)
    columns = torch.stack([pairs.i, pairs.j])[:, order].to(torch.int32)
    return {"neighbor_list": columns, "neighbor_shifts": pairs.shift[order].to(torch.int32)}


# -- comparison -----------------------------------------------------------------------------------

ROUNDING = 1e-12
"""Relative to the largest entry: sums of about a hundred terms, some of which cancel, in another order."""


def close(found, expected, tolerance=ROUNDING):
    for a, b in zip(found, expected, strict=True):
        assert b.isfinite().all() and b.abs().sum() > 0
        scale = b.detach().abs().max().item()
        torch.testing.assert_close(a.to("cpu", b.dtype), b, rtol=tolerance, atol=tolerance * scale)
