"""The references for multipoles agree with each other: derivatives, charges in their place, k-vectors alone."""

import functools
import math

import torch

from tests.reference.ewald import ewald
from tests.reference.multipoles import (
    Field,
    Sources,
    bare,
    by_charges,
    complementary,
    energies,
    everything,
    ewald_field,
    open_field,
    random_sources,
    sources,
    tensors,
    wave_field,
)
from tests.support.comparing import close, close_to_largest
from tests.support.systems import triclinic

ENOUGH = {"alpha": 0.9, "real_cutoff": 7.2, "k_cutoff": 11.0}


def system(width=None, neutral=True, n_atoms=4, channels=None):
    """Positions and sources in a skewed cell."""
    atoms = triclinic(n_atoms)
    given = random_sources(n_atoms, channels, seed=5, width=width, neutral=neutral)
    return atoms.positions, sources(atoms.positions, **given), atoms.cell[0]


def test_tensors_are_derivatives():
    """Each from the one before, by autograd."""
    r = torch.tensor([0.4, -0.9, 1.1], dtype=torch.float64)
    for parts in (bare, functools.partial(complementary, a=0.8)):

        def up_to_third(x, parts=parts):
            return tensors(x, parts(x.norm()))[:4]

        slopes = torch.autograd.functional.jacobian(up_to_third, r)
        close(slopes, tensors(r, parts(r.norm()))[1:])


def test_multipoles_are_charges_close_together():
    """In open space, points and Gaussians; then in a cell."""
    positions, given, cell = system()
    molecule = 2.0 * torch.eye(3, dtype=torch.float64).index_fill(0, torch.tensor([1]), 0.7)
    smooth = system(0.5)[1]

    def near(x, s):
        return open_field(x, s)

    def whole(x, s):
        return open_field(x, s, own=True)

    def repeated(x, s):
        if len(x) == 2:
            return ewald_field(x, s, cell, **ENOUGH)
        potential = ewald(x, s.charges[:, 0], cell, *ENOUGH.values())
        return Field(potential.unsqueeze(1), 0.0, 0.0)

    def part(given, n):
        return Sources(*(values[:n] for values in given))

    for field_of, x, there, options, tolerance in (
        (near, molecule, part(given, 3), {"step": 0.16, "levels": 4}, 1e-6),
        (whole, molecule, part(smooth, 3), {"own": True, "step": 0.2, "levels": 4}, 1e-7),
        (repeated, positions[:2], part(given, 2), {"step": 0.2, "levels": 3}, 1e-5),
    ):
        exact = energies(field_of(x, there), there).sum()
        assert abs(by_charges(field_of, x, there, **options) - exact) < tolerance


def test_ewald_sum_does_not_depend_on_alpha():
    """Not for charged cells of points and Gaussians either; with the gradients by all that enters."""
    for width in (None, 0.4):
        positions, given, cell = system(width, neutral=False)
        if width is not None:
            given = given._replace(widths=given.widths * torch.tensor([0.0, 1.0, 1.0, 0.0]))
        found = [
            everything(functools.partial(ewald_field, **values), positions, given, cell)
            for values in (
                {"alpha": 0.9, "real_cutoff": 6.9, "k_cutoff": 10.0},
                {"alpha": 1.1, "real_cutoff": 5.7, "k_cutoff": 12.2},
            )
        ]
        close_to_largest(found[0], found[1], 1e-8)


def test_gaussians_are_a_sum_over_waves():
    """Without any splitting: the definition of the energy of a field of smooth charges, whose mean is left out."""
    positions, given, cell = system(0.6, neutral=False, channels=2)
    receivers = torch.tensor([0.9, 0.3, 0.7, 0.5], dtype=torch.float64)
    for seen in (None, receivers):
        by_waves = wave_field(positions, given, cell, 15.0, receivers=seen)
        by_ewald = ewald_field(positions, given, cell, **{**ENOUGH, "real_cutoff": 10.0}, receivers=seen, own=True)
        close_to_largest(by_ewald, by_waves, 1e-10)
    assert float(energies(by_waves, given).sum()) != 0.0


def test_field_is_the_gradient_by_the_sources():
    """``dE/dq`` is the potential, ``dE/dμ`` its gradient, ``dE/dQ`` half its second derivatives."""
    positions, given, cell = system(0.5, neutral=False)
    found = everything(lambda x, s, c: ewald_field(x, s, c, **ENOUGH), positions, given, cell)
    field = ewald_field(positions, given, cell, **ENOUGH)
    close_to_largest(
        (found.charge_gradients, found.dipole_gradients, found.quadrupole_gradients),
        (field.potential, field.gradient, 0.5 * field.hessian),
        1e-11,
    )


def test_exclusions_leave_the_images():
    """An excluded pair: the periodic sum less the pair alone in open space, with a factor."""
    positions, given, cell = system(0.3, n_atoms=2)
    bonded = ((0, 1, 0.25),)
    whole, less = (
        energies(ewald_field(positions, given, cell, **ENOUGH, exclusions=pairs), given).sum() for pairs in ((), bonded)
    )
    apart = (positions[1] - positions[0]) @ torch.linalg.inv(cell)
    images = torch.cartesian_prod(*[torch.arange(-1.0, 2.0, dtype=torch.float64)] * 3)
    vectors = (apart - apart.round() + images) @ cell
    near = vectors[vectors.norm(dim=1).argmin()]
    pair = torch.stack([torch.zeros(3, dtype=torch.float64), near])
    close([whole - less], [0.75 * energies(open_field(pair, given), given).sum()], 1e-11)


def test_known_energies():
    """Two dipoles, a charge and a quadrupole: Stone, eqs. (3.2.x); a Gaussian with itself."""
    x = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]], dtype=torch.float64)
    along = torch.tensor([[0.0, 0.0, 1.5], [0.0, 0.0, 2.0]], dtype=torch.float64)
    given = sources(x, dipoles=along)
    close([energies(open_field(x, given), given).sum()], [torch.tensor(-2 * 1.5 * 2.0 / 8.0, dtype=torch.float64)])
    linear = torch.diag(torch.tensor([-1.0, -1.0, 2.0], dtype=torch.float64))
    given = sources(x, torch.tensor([1.0, 0.0], dtype=torch.float64), quadrupoles=torch.stack([0.0 * linear, linear]))
    # Θ_zz = 3/2 Q_zz = 3, and q Θ_zz / R³
    close([energies(open_field(x, given), given).sum()], [torch.tensor(3.0 / 8.0, dtype=torch.float64)])
    given = Sources(
        *sources(x, torch.tensor([1.0, 0.0], dtype=torch.float64))[:3], torch.tensor([0.7, 0.7], dtype=torch.float64)
    )
    own = energies(open_field(x, given, own=True), given).sum()
    close([own], [torch.tensor(0.5 / (math.sqrt(math.pi) * 0.7), dtype=torch.float64)])
