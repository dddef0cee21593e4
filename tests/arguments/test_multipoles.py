"""Dipoles, quadrupoles and widths that are refused by name, or of which a part is dropped with a warning."""

import pytest
import torch

from nvalchemiops.notices import AccuracyWarning
from nvalchemiops.torch.interactions.electrostatics import (
    ewald_reciprocal_space,
    ewald_summation,
    pack_multipole_moments,
    particle_mesh_ewald,
    pme_reciprocal_space,
    power_law,
)
from tests.reference.multipoles import random_sources
from tests.support.multipoles import ALPHA, METHODS, geometry


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dipoles": torch.zeros(5, 2).double()}, "`dipoles` must have shape"),
        ({"dipoles": torch.zeros(5, 1, 3).double()}, "`dipoles` must have shape"),
        ({"quadrupoles": torch.zeros(5, 3).double()}, "`quadrupoles` must have shape"),
        ({"widths": torch.zeros(4).double()}, "`widths` must be a number or have shape"),
        ({"widths": -0.1}, "`widths` must be finite and non-negative"),
        ({"widths": torch.full((5,), torch.nan).double()}, "`widths` must be finite and non-negative"),
        ({"dipoles": None, "compute_dipole_gradients": True}, "`compute_dipole_gradients` needs `dipoles`"),
        ({"self_interaction": True}, r"`self_interaction` is infinite for points.* add q²/\(2 sqrt\(pi\) width\)"),
        ({"potential": power_law(6)}, "are for the Coulomb potential"),
        ({"surface_dielectric": -1.0}, "`surface_dielectric`"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    positions, cell = geometry()
    charges = torch.ones(5, dtype=torch.float64)
    arguments = {"dipoles": torch.zeros(5, 3, dtype=torch.float64), "alpha": 0.5, "k_cutoff": 3.0} | changes
    with pytest.raises((ValueError, TypeError), match=message):
        ewald_summation(positions, charges, cell, cutoff=5.0, **arguments)


def test_splines_of_too_low_an_order_are_refused():
    positions, cell = geometry()
    values = random_sources(5, seed=3)
    for names, order in ((("charges", "dipoles"), 3), (("charges", "quadrupoles"), 4)):
        sources = {name: values[name] for name in names}
        with pytest.raises(ValueError, match=f"`spline_order` must be at least {order + 1} with `{names[1]}`"):
            pme_reciprocal_space(
                positions, cell=cell, alpha=0.5, mesh_dimensions=(9, 9, 9), spline_order=order, **sources
            )
    with pytest.raises(TypeError, match="`dipoles` has dtype"):
        float32 = values["dipoles"].float()
        ewald_reciprocal_space(positions, values["charges"], cell, None, 0.5, k_cutoff=3.0, dipoles=float32)


@pytest.mark.parametrize("what", ["have a trace", "are not symmetric"])
def test_a_part_of_quadrupoles_is_dropped_with_a_warning(what, recwarn):
    positions, cell = geometry()
    values = random_sources(5, seed=3)
    more = torch.eye(3) if what == "have a trace" else torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0] * 3])
    found, known = (
        METHODS["ewald"](positions, cell=cell, alpha=ALPHA, **(values | {"quadrupoles": values["quadrupoles"] + part}))
        for part in (more, 0.0)
    )
    torch.testing.assert_close(found, known)
    (said,) = recwarn  # of this part alone, and none without it
    assert said.category is AccuracyWarning and what in str(said.message)


def test_moments_are_packed_with_a_warning_of_a_trace_but_not_of_rounding(recwarn):
    *others, quadrupoles = (moments.float() for moments in random_sources(20, seed=3).values())
    pack_multipole_moments(*others, quadrupoles)
    assert not recwarn.list
    with pytest.warns(AccuracyWarning, match="have a trace"):
        pack_multipole_moments(*others, quadrupoles + 1e-5 * torch.eye(3))


@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_sources_that_are_all_zero_have_no_energy_and_no_warning(function, recwarn):
    positions, cell = 5.0 * torch.rand(8, 3, dtype=torch.float64), 8.0 * torch.eye(3, dtype=torch.float64)
    zero = torch.zeros(8, 3, dtype=torch.float64)
    assert torch.equal(function(positions, zero[:, 0], cell, dipoles=zero), zero[:, 0])
    assert not recwarn.list
