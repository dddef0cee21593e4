"""Potentials at atoms through receivers against dense sums; functions of packed moments against values of 0.5.0."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from nvalchemiops.notices import AccuracyWarning, NvalchemiopsWarning
from nvalchemiops.torch import record
from nvalchemiops.torch.interactions.electrostatics import (
    electrostatic_potential,
    estimate_multipole_ewald_parameters,
    estimate_multipole_pme_parameters,
    ewald_reciprocal_space,
    ewald_summation,
    features,
    generate_k_vectors_ewald_summation,
    induced_moments,
    infer_l_max,
    multipole_electrostatic_energy,
    multipole_electrostatic_features,
    multipole_ewald_summation,
    multipole_particle_mesh_ewald,
    pack_multipole_moments,
    particle_mesh_ewald,
    prepare_wave_vectors,
    unpack_multipole_moments,
)
from nvalchemiops.torch.neighbors import neighbor_list
from tests.reference.multipoles import (
    Field,
    _own_field,
    added,
    energies,
    everything,
    ewald_field,
    open_field,
    scaled,
    screening,
    sources,
    traceless,
    wave_field,
)
from tests.support.comparing import close, close_to_largest, derivative_along, weighted
from tests.support.mistakes import assert_named
from tests.values.test_multipole_references import ENOUGH, system

FINE = {"alpha": 0.9, "k_cutoff": 11.0, "cutoff": 7.2}


def other_sources(given):
    """Dipoles and quadrupoles as arguments."""
    return {"dipoles": given.dipoles, "quadrupoles": given.quadrupoles}


def test_prepared_k_vectors_are_those_up_to_the_same_length():
    positions, given, cell = system(neutral=False, channels=1)
    options = {**other_sources(given), "alpha": 0.6, "cutoff": 6.0}
    for k_cutoff in (3.0, 5.0):
        prepared = prepare_wave_vectors(cell, k_cutoff)
        found = electrostatic_potential(positions, given.charges, cell, miller_indices=prepared, **options)
        close(found[:2], electrostatic_potential(positions, given.charges, cell, k_cutoff=k_cutoff, **options)[:2], 0.0)


def as_field(found, receiver=0):
    return Field(*(part[:, receiver] for part in found))


def test_points_see_the_sum_of_all_images():
    """By k-vectors, on a mesh, and in open space; with channels, in a charged cell."""
    positions, given, cell = system(neutral=False, channels=2)
    exact = ewald_field(positions, given, cell, **ENOUGH)
    options = {**other_sources(given), "derivatives": 2}
    found = electrostatic_potential(positions, given.charges, cell, **options, **FINE)
    close_to_largest(as_field(found), exact, 1e-12)
    mesh = {"method": "pme", "mesh_dimensions": (40, 40, 40), "spline_order": 8, "alpha": 0.9, "cutoff": 7.2}
    close_to_largest(as_field(electrostatic_potential(positions, given.charges, cell, **options, **mesh)), exact, 1e-6)
    molecule = positions / 3.0
    found = electrostatic_potential(molecule, given.charges, **options)
    close_to_largest(as_field(found), open_field(molecule, given), 1e-12)
    assert all(part.is_contiguous() for part in found), "as of compiled graphs"


def test_parameters_are_chosen():
    """For Gaussians as wide as the widest of sources and receivers, whose pairs reach farthest."""
    positions, given, cell = system()
    exact = ewald_field(positions, given, cell, **ENOUGH)
    found = electrostatic_potential(positions, given.charges, cell, **other_sources(given), accuracy=1e-8)
    assert found.second is None
    close_to_largest([found.potential[:, 0], found.gradient[:, 0]], exact[:2], 1e-5)
    wide = {**other_sources(given), "widths": 0.2, "receiver_widths": [1.5, 0.3]}
    exact = electrostatic_potential(positions, given.charges, cell, **wide, alpha=0.45, k_cutoff=6.0, cutoff=13.0)
    found = electrostatic_potential(positions, given.charges, cell, **wide, accuracy=1e-8)
    close_to_largest(found[:2], exact[:2], 1e-5)


def test_energy_is_that_of_sources_in_the_potential():
    positions, given, cell = system(channels=2)
    found = as_field(
        electrostatic_potential(positions, given.charges, cell, **other_sources(given), derivatives=2, **FINE)
    )
    exact = energies(ewald_field(positions, given, cell, **ENOUGH), given)
    close_to_largest([energies(found, given)], [exact], 1e-12)


@pytest.mark.parametrize("own", [False, True])
def test_receivers_of_several_widths_by_k_vectors_alone(own):
    positions, given, cell = system(neutral=False)
    given = given._replace(widths=torch.full((4,), 0.5, dtype=torch.float64))
    found = features.reciprocal_potential(
        positions,
        given.charges,
        cell,
        **other_sources(given),
        widths=0.5,
        receiver_widths=[0.5, 0.8],
        k_cutoff=13.0,
        derivatives=2,
        self_interaction=own,
    )
    for n, width in enumerate((0.5, 0.8)):
        receivers = torch.full((4,), width, dtype=torch.float64)
        exact = wave_field(positions, given, cell, 13.0, receivers=receivers)
        if not own:
            exact = added(exact, scaled(-1.0, _own_field(screening(receivers, given.widths), given)))
        close_to_largest(as_field(found, n), exact, 1e-12)


def test_gaussians_of_different_widths():
    """Charges and dipoles, some of them points, seen by points and by Gaussians; an atom sees itself, or not."""
    positions, given, cell = system(0.4, neutral=False, channels=2)
    given = given._replace(quadrupoles=0.0 * given.quadrupoles)
    for own in (False, True):
        if not own:
            given = given._replace(widths=given.widths * torch.tensor([1.0, 0.0, 1.0, 0.0]))
        found = electrostatic_potential(
            positions,
            given.charges,
            cell,
            dipoles=given.dipoles,
            widths=given.widths,
            receiver_widths=[0.3, 0.6],
            self_interaction=own,
            **FINE,
        )
        for n, width in enumerate((0.3, 0.6)):
            receivers = torch.full((4,), width, dtype=torch.float64)
            exact = ewald_field(positions, given, cell, **ENOUGH, receivers=receivers, own=own)
            close_to_largest([found.potential[:, n], found.gradient[:, n]], exact[:2], 1e-10)


PAIRS = {
    "exclusions": torch.tensor([[0, 2], [3, 1]]),
    "exclusion_factors": torch.tensor([0.0, 0.3], dtype=torch.float64),
}
SLAB = {"pbc": torch.tensor([True, False, True]), "slab_correction": True}
MEDIUM = {"surface_dielectric": 2.0}


@pytest.mark.parametrize("case", ["points", "Gaussians", "open", "mesh"])
def test_potential_is_the_gradient_of_an_energy_with_exclusions_slabs_and_surfaces(case):
    """By charges, dipoles and quadrupoles; charged, with channels."""
    positions, given, cell = system(0.4 if case == "Gaussians" else None, neutral=False, channels=2)
    positions[2] += 0.7 * cell[1]  # in the slab an excluded pair is closest across the vacuum, where none is excluded
    leaves = [values.clone().requires_grad_() for values in given[:3]]
    widths = given.widths if case == "Gaussians" else None
    named = dict(zip(("charges", "dipoles", "quadrupoles"), leaves))
    if case == "open":
        x, options = positions / 3.0, PAIRS
        factors = [(0, 3, 0.0), (2, 1, 0.3)]
        there = sources(x, *leaves)
        energy = energies(open_field(x, there, exclusions=factors), there).sum()
        found = electrostatic_potential(x, *leaves[:1], **other_sources(there), derivatives=2, **options)
    else:
        whole, chosen = ewald_summation, FINE
        options = {**PAIRS, **(MEDIUM if case == "Gaussians" else SLAB), "widths": widths}
        by_mesh = {"mesh_dimensions": (24, 24, 24), "spline_order": 8, "alpha": 0.7, "cutoff": 7.2}
        if case == "mesh":
            whole, chosen = particle_mesh_ewald, by_mesh
        energy = whole(positions, cell=cell, **named, **options, **chosen).sum()
        chosen = {**chosen, "method": "pme"} if case == "mesh" else chosen
        found = electrostatic_potential(positions, cell=cell, **named, **options, derivatives=2, **chosen)
    exact = torch.autograd.grad(energy, leaves)
    field = as_field(found)
    close_to_largest((field.potential, field.gradient), exact[:2], 1e-11)
    close_to_largest([traceless(0.5 * field.hessian)], [traceless(exact[2])], 1e-11)


@pytest.mark.parametrize("around", [SLAB, MEDIUM], ids=["slab", "medium"])
def test_a_receiver_is_an_atom_without_a_charge(around):
    """At the same place, with the width of the receiver, excluded from the atom itself."""
    positions, given, cell = system(0.4, neutral=False)
    n, charges = len(positions), given.charges[:, 0]
    options = {**around, **FINE}
    receivers = electrostatic_potential(
        positions, charges, cell, widths=given.widths, receiver_widths=[0.7], derivatives=0, **options
    )
    twins = torch.cat([charges, torch.zeros(n)]).requires_grad_()
    widths = torch.cat([given.widths, torch.full((n,), 0.7, dtype=torch.float64)])
    pairs = torch.stack([torch.arange(n), torch.arange(n, 2 * n)])
    energy = ewald_summation(positions.repeat(2, 1), twins, cell, widths=widths, exclusions=pairs, **options).sum()
    (exact,) = torch.autograd.grad(energy, twins)
    close_to_largest([receivers.potential[:, 0]], [exact[n:]], 1e-11)


def test_derivatives_of_potentials():
    """A loss on potential and field: gradients by positions, charges, dipoles and cell, and second ones."""
    positions, given, cell = system(n_atoms=2)
    leaves = [t.clone().requires_grad_() for t in (positions, given.charges, given.dipoles, cell)]

    def loss(x, q, mu, h):
        found = electrostatic_potential(x, q, h, dipoles=mu, **FINE)
        return weighted([found.potential.sin(), found.gradient.sin()])

    slopes = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    seconds = torch.autograd.grad(weighted(slopes), leaves)
    for place, leaf in enumerate(leaves):
        direction = torch.sin(3.3 * torch.arange(leaf.numel(), dtype=leaf.dtype) + 0.5).view(leaf.shape)

        def at(value, place=place):
            return [leaf.detach() if n != place else value for n, leaf in enumerate(leaves)]

        def first(value, at=at):
            there = [t.detach().requires_grad_() for t in at(value)]
            return weighted(torch.autograd.grad(loss(*there), there))

        by_difference = derivative_along(lambda v, at=at: loss(*at(v)).detach(), leaf.detach(), direction, 1e-3)
        close([(slopes[place].detach() * direction).sum()], [by_difference], 1e-7)
        if place in (0, 2):
            close([(seconds[place] * direction).sum()], [derivative_along(first, leaf.detach(), direction, 1e-3)], 1e-6)


def test_trained_receivers_in_a_list_have_gradients():
    """Each may be a parameter of its own, beside numbers and in another precision; values may change between calls."""
    positions, given, cell = system(n_atoms=2)
    plain = {**FINE, "derivatives": 0}

    def loss(widths):
        return (
            electrostatic_potential(positions, given.charges, cell, receiver_widths=widths, **plain)
            .potential.sin()
            .sum()
        )

    for first in (0.4, 0.5):
        together = torch.tensor([first, 0.3, 0.25], dtype=torch.float64, requires_grad=True)
        (of_all,) = torch.autograd.grad(loss(together), together)
        one = torch.tensor([first], dtype=torch.float64, requires_grad=True)
        other = torch.tensor(0.25, dtype=torch.float32, requires_grad=True)
        value = loss([one, 0.3, other])
        close([value], [loss(together)], 1e-14)
        of_one, of_other = torch.autograd.grad(value, (one, other))
        close([of_one[0], of_other], [of_all[0], of_all[2].float()], 1e-6)
        close([loss([first, 0.3, torch.tensor(0.25)])], [value], 1e-14)


BAD = {
    "derivatives": ({"derivatives": 3}, ValueError, "`derivatives` must be 0, 1 or 2"),
    "method": ({"method": "fast"}, ValueError, "`method`"),
    "indices": ({"miller_indices": torch.ones(1, 3).int(), "method": "pme"}, ValueError, "`miller_indices` are for"),
    "empty": ({"receiver_widths": []}, ValueError, "`receiver_widths`"),
    "negative": ({"receiver_widths": [-1.0]}, ValueError, "`receiver_widths`"),
    "trained": (
        {"receiver_widths": [torch.ones(1, requires_grad=True), torch.ones(2)]},
        TypeError,
        "`receiver_widths` must be a number",
    ),
    "number": ({"receiver_widths": 0.5}, TypeError, "`receiver_widths` must be a sequence"),
    "table": ({"receiver_widths": torch.ones(2, 2)}, ValueError, "`receiver_widths` must have shape"),
    "points": ({"self_interaction": True}, ValueError, "`self_interaction` is infinite for points"),
    "charges": ({"charges": torch.ones(3)}, ValueError, "`charges` must have shape"),
    "cutoff": ({"cutoff": -1.0}, ValueError, "`cutoff`"),
    "slab": ({"slab_correction": True}, ValueError, "`slab_correction` needs a `cell`"),
    "surface": ({"surface_dielectric": 2.0}, ValueError, "`surface_dielectric` needs a `cell`"),
    "atom": ({"exclusions": torch.tensor([[0], [2]])}, ValueError, "`exclusions` must hold atoms"),
    "systems": (
        {"exclusions": torch.tensor([[0], [1]]), "batch_idx": torch.tensor([0, 1], dtype=torch.int32)},
        ValueError,
        "`exclusions` joins atoms of different systems",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    changed, error, message = BAD[name]
    arguments = {"positions": torch.eye(3)[:2], "charges": torch.ones(2), **changed}
    with pytest.raises(error, match=message):
        electrostatic_potential(**arguments)


@pytest.mark.parametrize(
    ("method", "given"),
    [("ewald", {"mesh_dimensions": (8, 8, 8)}), ("ewald", {"spline_order": 5}), ("pme", {"k_cutoff": 2.0})],
)
def test_parameters_of_the_other_method_are_not_used(method, given):
    positions, charges, cell = torch.eye(3)[:2].double(), torch.ones(2).double(), 5.0 * torch.eye(3).double()
    with pytest.warns(NvalchemiopsWarning, match=f"`{next(iter(given))}` is not used: .*'{method}'"):
        found = electrostatic_potential(positions, charges, cell, method=method, **given)
    close(found[:2], electrostatic_potential(positions, charges, cell, method=method)[:2], 0.0)


# -- packed moments: values of nvalchemi-toolkit-ops 0.5.0 -----------------------------------------

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
"""Made by the scripts beside the values."""


OTHER_CONSTANTS = 2e-8
"""Relative; e²/4πε₀ of 0.5.0 is smaller by 8e-9."""


def stored(name):
    return json.loads((REFERENCE / name).read_text())


@pytest.fixture(scope="module")
def toolkit():
    values = stored("toolkit_multipoles.json")
    x, q, mu, second, cell = (
        torch.tensor(values[name], dtype=torch.float64)
        for name in ("positions", "charges", "dipoles", "second", "cell")
    )
    return values, x, (q, mu, traceless(second)), cell


@pytest.mark.parametrize("order", [0, 1, 2])
def test_packed_moments_and_energies_are_those_of_0_5_0(toolkit, order):
    values, x, moments, cell = toolkit
    values = values[str(order)]
    packed = pack_multipole_moments(*moments[: order + 1])
    assert infer_l_max(packed) == order
    close([packed], [torch.tensor(values["packed"], dtype=torch.float64)], 1e-14)
    for own in (False, True):
        options = {"sigma": 0.6, "k_cutoff": 10.0, "include_self_interaction": own}
        found = multipole_electrostatic_energy(x, packed, cell, **options)
        close_to_largest([found], [torch.tensor(values[f"energy {own}"], dtype=torch.float64)], OTHER_CONSTANTS)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_features_are_those_of_0_5_0(toolkit, order, mode):
    """But for second derivatives without the own Gaussian, from which 0.5.0 takes off something else (see below)."""
    values, x, moments, cell = toolkit
    packed = pack_multipole_moments(*moments[: order + 1])
    for own in (False, True):
        options = {"sigma": 0.6, "k_cutoff": 10.0, "include_self_interaction": own, "feature_normalize": mode}
        found = multipole_electrostatic_features(
            x, packed, cell, receiver_sigmas=[0.5, 0.9], feature_max_l=2, **options
        )
        exact = torch.tensor(values[str(order)][f"features {own} {mode}"], dtype=torch.float64)
        shown = 18 if own or order < 2 else 8
        close_to_largest([found[:, :shown]], [exact[:, :shown]], OTHER_CONSTANTS)


@pytest.mark.filterwarnings("ignore:.*out of reach of splines:UserWarning")
@pytest.mark.parametrize("ratio", [1.0, 8.0])
def test_parameters_are_those_of_0_5_0(toolkit, ratio):
    values = toolkit[0][f"parameters {ratio}"]
    x, cell = torch.rand(200, 3, dtype=torch.float64) * 20.0, 20.0 * torch.eye(3, dtype=torch.float64)
    options = {"accuracy": 1e-8, "cost_ratio": ratio}
    ewald = estimate_multipole_ewald_parameters(x, cell, 0.5, **options)
    found = (ewald.alpha, ewald.real_space_cutoff, ewald.reciprocal_space_cutoff)
    close(torch.cat(found), torch.tensor(values[:3], dtype=torch.float64), 1e-6)
    pme = estimate_multipole_pme_parameters(x, cell, 0.5, **options)
    close([pme.alpha], [ewald.alpha])
    assert all(0.4 < ours / theirs < 2.5 for ours, theirs in zip(pme.mesh_dimensions, values[4:]))
    with pytest.raises(ValueError, match="`fft_padding_fraction`"):
        estimate_multipole_pme_parameters(x, cell, 0.5, **options, fft_padding_fraction=-1.0)
    with pytest.raises(ValueError, match="`sigma` is too large"):
        estimate_multipole_ewald_parameters(x, cell, 5.0)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_sums_with_pairs_are_those_of_0_5_0(toolkit, order):
    """By Ewald's sum, and on a mesh in a rectangular cell: in the skewed one its mesh is wrong by a percent."""
    values, x, (q, *others), cell = toolkit
    values, box = values[str(order)], torch.diag(cell.diagonal())
    for name, charges in (("neutral", q - q.mean()), ("charged", q)):
        packed = pack_multipole_moments(charges, *others[:order])
        found = multipole_ewald_summation(x, packed, cell, *near(x, cell), sigma=0.6, alpha=1.4, k_cutoff=10.0)
        exact = multipole_electrostatic_energy(x, packed, cell, sigma=0.6, k_cutoff=12.0)
        close_to_largest([found], [exact], 1e-10)
        close_to_largest([found], [torch.tensor(values[f"ewald {name}"], dtype=torch.float64)], 1e-6)
        mesh = {"mesh_dimensions": (40, 40, 40), "spline_order": 8}
        found = multipole_particle_mesh_ewald(x, packed, cell, *near(x, cell), sigma=0.6, alpha=1.4, **mesh)
        close_to_largest([found], [exact], 6e-6)
        found = multipole_particle_mesh_ewald(x, packed, box, *near(x, box), sigma=0.6, alpha=1.4, **mesh)
        close_to_largest([found], [torch.tensor(values[f"mesh {name}"], dtype=torch.float64)], 6e-6)


def test_a_system_without_atoms_has_parameters():
    """Beside others, which are as alone."""
    x, (packed, *_), cell = system(n_atoms=6)
    alone = [cell, *near(x, cell)]
    beside = [torch.stack([cell, 2.0 * cell]), *near(x, cell)]
    options = {"sigma": 0.3, "accuracy": 1e-5}
    for function in (multipole_ewald_summation, multipole_particle_mesh_ewald):
        expected = function(x, packed, *alone, **options)
        found = function(x, packed, *beside, **options, batch_idx=torch.zeros(6, dtype=torch.int32))
        close_to_largest([found], [expected], 1e-4)


@pytest.mark.parametrize("function", [multipole_ewald_summation, multipole_particle_mesh_ewald])
def test_lists_below_the_cutoff_of_the_estimate_warn(function):
    """The error is 1e-6^((4/9.5)^2). Not lists without more pairs, of a molecule, alpha that is given, nor NaN."""
    x = 8.0 * torch.rand(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cell = 8.0 * torch.eye(3, dtype=torch.float64)
    packed = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).repeat(15, 1)
    given = {"sigma": 0.4, "accuracy": 1e-6}
    exact = multipole_electrostatic_energy(x, packed, cell, sigma=0.4, k_cutoff=14.0).sum()
    with pytest.warns(AccuracyWarning, match="shorter than `real_space_cutoff`.* about 0.09; it must reach 9.5"):
        short = function(x, packed, cell, *near(x, cell, 4.0), **given)
    assert abs(short.sum() / exact - 1.0) > 2e-4
    listed = near(x, cell, 4.0)
    recorded = record(lambda x: function(x, packed, cell, *listed, **given | {"accuracy": torch.tensor(1e-6)}))
    with pytest.warns(AccuracyWarning, match="must reach 9.5"):
        assert torch.equal(recorded(x), short)
    with warnings.catch_warnings(action="error"):
        close_to_largest([function(x, packed, cell, *near(x, cell, 9.6), **given).sum()], [exact], 1e-4)
        function(x, packed, cell, *near(x, cell, 4.0), **given, alpha=1.0)
        molecule, wide = x / 4.0, 2.0 * cell
        function(molecule, packed, wide, *near(molecule, wide, 11.0), sigma=0.4, accuracy=1e-2)
        x = x.index_fill(0, torch.tensor([3]), torch.nan)
        assert function(x, packed, cell, *near(x.nan_to_num(), cell, 4.0), **given).isnan().any()


def near(positions, cell, cutoff=7.5):
    pairs, ptr, shifts = neighbor_list(positions, cutoff, cell, return_neighbor_list=True)
    return pairs[1], ptr, shifts


def test_padded_k_vectors_of_a_batch(toolkit):
    """With the number of those that count; what 0.5.0 prepares besides changes nothing."""
    _, x, (q, *_), cell = toolkit
    cells = torch.stack([cell, 1.1 * cell])
    k_vectors = torch.zeros(2, 900, 3, dtype=torch.float64)
    counts = []
    for n, h in enumerate(cells):
        found = generate_k_vectors_ewald_summation(h, 6.0)
        found = found[found.norm(dim=1) <= 6.0]
        counts.append(len(found))
        k_vectors[n, : len(found)] = found
        k_vectors[n, len(found) :] = found[0]
    batch_idx = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int32)
    packed = pack_multipole_moments(q)
    options = {"batch_idx": batch_idx, "sigma": 0.6}
    exact = multipole_electrostatic_energy(x, packed, cells, k_cutoff=6.0, **options)
    found = multipole_electrostatic_energy(
        x,
        packed,
        cells,
        k_vectors=k_vectors,
        valid_k_counts=torch.tensor(counts, dtype=torch.int32),
        source_overlap_constants=torch.ones(3, dtype=torch.float64),
        **options,
    )
    close([found], [exact], 1e-12)


def test_own_second_derivatives_are_those_of_an_atom_alone():
    """A single Gaussian in a large cell sees no second derivatives but those of its images."""
    second = traceless(torch.randn(1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    packed = pack_multipole_moments(torch.zeros(1).double(), torch.zeros(1, 3).double(), second)
    place = torch.zeros(1, 3, dtype=torch.float64), packed, 14.0 * torch.eye(3, dtype=torch.float64)
    options = {"sigma": 0.8, "receiver_sigmas": [0.7], "k_cutoff": 8.0, "feature_max_l": 2, "feature_normalize": 0}
    whole, alone = (
        multipole_electrostatic_features(*place, **options, include_self_interaction=own)[:, 4:].abs().max()
        for own in (True, False)
    )
    assert alone < 1e-3 * whole


def test_sources_may_be_negative_views():
    """As of an imaginary part of what was conjugated."""
    positions, given, cell = system(neutral=False, channels=1)
    options = {**FINE, "derivatives": 2}
    found = electrostatic_potential(torch._neg_view(-positions), torch._neg_view(-given.charges), cell, **options)
    close(found, electrostatic_potential(positions, given.charges, cell, **options))


def test_packed_moments_have_gradients():
    moments = [torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in ((), (3,), (3, 3))]
    with pytest.warns(AccuracyWarning, match="trace"):
        packed = pack_multipole_moments(*moments)
    assert all(g is not None for g in torch.autograd.grad(packed.sum(), moments))
    exact = [moments[0], moments[1], traceless(moments[2])]
    for order in range(3):
        found = unpack_multipole_moments(packed[:, : (order + 1) ** 2])
        close(found[: order + 1], exact[: order + 1])
        assert found[order + 1 :] == (None,) * (2 - order)


def test_mistakes_beside_packed_moments_are_named():
    x, q, second, cell = torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3, 3), torch.eye(3)
    packed, waves = torch.zeros(2, 9), {"sigma": 1.0, "k_cutoff": 1.0}

    def features_of(**options):
        return multipole_electrostatic_features(x, packed, cell, **{**waves, "receiver_sigmas": [1.0], **options})

    assert_named(
        [
            (message, call, error, message)
            for error, message, call in (
                (ValueError, "`multipole_moments` must have shape", lambda: unpack_multipole_moments(packed[None])),
                (
                    ValueError,
                    "`multipole_moments` must have shape",
                    lambda: multipole_electrostatic_energy(x, packed[:1], cell, **waves),
                ),
                (
                    ValueError,
                    "`quadrupoles` need `dipoles`",
                    lambda: pack_multipole_moments(q, None, second),
                ),
                (ValueError, "`charges` must have shape", lambda: pack_multipole_moments(q[None])),
                (ValueError, "`dipoles` must have shape", lambda: pack_multipole_moments(q, x[:1])),
                (ValueError, "1, 4 or 9", lambda: infer_l_max(torch.zeros(3, 5))),
                (
                    ValueError,
                    "`valid_k_counts` needs `k_vectors` of shape",
                    lambda: multipole_electrostatic_energy(x, packed, cell, **waves, valid_k_counts=torch.ones(1)),
                ),
                (
                    NotImplementedError,
                    "`normalize` must be 0",
                    lambda: multipole_electrostatic_energy(x, packed, cell, **waves, normalize=1),
                ),
                (NotImplementedError, "`density_normalize` must be 0", lambda: features_of(density_normalize="none")),
                (NotImplementedError, "`cache`", lambda: features_of(cache=1)),
                (ValueError, "`feature_normalize` must be 0, 1 or 2", lambda: features_of(feature_normalize=1.5)),
                (ValueError, "`feature_normalize` must be 0, 1 or 2", lambda: features_of(feature_normalize=None)),
                (ValueError, "`feature_max_l` must be 0, 1 or 2", lambda: features_of(feature_max_l=3)),
                (ValueError, "`receiver_sigmas` must not be empty", lambda: features_of(receiver_sigmas=[])),
                (TypeError, "`receiver_sigmas` must be a sequence", lambda: features_of(receiver_sigmas=0.5)),
                (ValueError, "`k_cutoff` or `k_vectors` is needed", lambda: features_of(k_cutoff=None)),
                (
                    ValueError,
                    "`accuracy` must be below 1",
                    lambda: estimate_multipole_ewald_parameters(x, cell, 1.0, accuracy=1.0),
                ),
            )
        ]
    )


# -- OpenMM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cubic", "triclinic"])
def test_molecules_are_those_of_openmm(name):
    """Permanent multipoles, and with induced dipoles: energies, forces, and the dipoles."""
    values = stored("openmm_multipoles.json")[name]
    names = ("positions", "charges", "dipoles", "quadrupoles", "polarizabilities")
    x, q, mu, second, alpha = (torch.tensor(values[key], dtype=torch.float64) for key in names)
    q, second = q - q.mean(), traceless(second)
    given = sources(x, q, mu, second)
    permanent = everything(open_field, x, given)
    known = values["open"]
    close([permanent.energies.sum()], [torch.tensor(known["energy"], dtype=torch.float64)], 1e-9)
    close_to_largest([permanent.forces], [torch.tensor(known["forces"], dtype=torch.float64)], 1e-9)

    def energy(induced, x):
        there = sources(x, q, mu + induced, second)
        found = electrostatic_potential(x, there.charges, **other_sources(there), derivatives=2)
        return energies(as_field(found), there).sum()

    x.requires_grad_()
    found = induced_moments(energy, (x,), polarizabilities=alpha, tolerance=1e-11)
    known = values["open induced"]
    (slope,) = torch.autograd.grad(found.energies.sum(), x)
    close([found.energies.detach()[0]], [torch.tensor(known["energy"], dtype=torch.float64)], 1e-9)
    close_to_largest(
        [-slope, found.dipoles.detach()],
        [torch.tensor(known[key], dtype=torch.float64) for key in ("forces", "dipoles")],
        1e-7,
    )


@pytest.mark.parametrize("name", ["cubic", "triclinic"])
def test_crystals_are_those_of_openmm(name):
    """On the same mesh with the same splines; its errors are percents of the forces (make_openmm_multipoles.py)."""
    stored_values = stored("openmm_multipoles.json")
    values = stored_values[name]
    names = ("positions", "charges", "dipoles", "quadrupoles", "polarizabilities", "cell")
    x, q, mu, second, alpha, cell = (torch.tensor(values[key], dtype=torch.float64) for key in names)
    q, second, mesh = q - q.mean(), traceless(second), stored_values["mesh"]
    x = x + 0.5 / mesh * cell.sum(0)
    options = {"alpha": stored_values["alpha"], "mesh_dimensions": (mesh,) * 3, "spline_order": 5}
    near = neighbor_list(x, stored_values["cutoff"], cell, return_neighbor_list=True)
    options |= {"cutoff": stored_values["cutoff"], "quadrupoles": second}
    options |= dict(zip(("neighbor_list", "neighbor_ptr", "neighbor_shifts"), near))

    def energy(induced):
        return particle_mesh_ewald(x, q, cell, dipoles=mu + induced, **options)

    found = induced_moments(energy, polarizabilities=alpha, tolerance=1e-9)
    induced = found.dipoles
    close_to_largest([induced], [torch.tensor(values["periodic induced"]["dipoles"], dtype=torch.float64)], 1e-5)
    whole = {"periodic": mu, "periodic induced": mu + induced}
    for place, dipoles in whole.items():
        energies_of_atoms, forces = particle_mesh_ewald(x, q, cell, dipoles=dipoles, **options, compute_forces=True)
        own = 0.5 * (induced.square().sum(1) / alpha).sum() if place == "periodic induced" else 0.0
        known = values[place]
        close([energies_of_atoms.sum() + own], [torch.tensor(known["energy"], dtype=torch.float64)], 2e-6)
        close_to_largest([forces], [torch.tensor(known["forces"], dtype=torch.float64)], 1e-6)


def test_latent_ewald_is_a_reciprocal_sum():
    """Gaussians of standard deviation σ/√2 that keep their self energy: alpha = 1/(√2 σ), as latent Ewald sums have it.

    Their charges have a sum, for which there is no background.
    """
    positions, given, cell = system(channels=3)
    sigma, k_cutoff = 1.0, 2.0 * torch.pi / 1.2
    charges = given.charges + 0.3
    found = ewald_reciprocal_space(
        positions,
        charges,
        cell,
        None,
        alpha=2.0**-0.5 / sigma,
        k_cutoff=k_cutoff,
        energy_reduction="system",
        self_interaction=True,
        widths=sigma / 2.0**0.5,
    )
    miller = torch.cartesian_prod(*[torch.arange(-8.0, 9.0, dtype=torch.float64)] * 3)
    k = 2.0 * torch.pi * miller @ torch.linalg.inv(cell).mT
    k = k[(k.norm(dim=1) > 1e-9) & (k.norm(dim=1) <= k_cutoff)]
    k2 = k.square().sum(1)
    phase = positions @ k.mT
    power = (phase.cos().mT @ charges).square() + (phase.sin().mT @ charges).square()
    volume = torch.linalg.det(cell).abs()
    exact = 2.0 * torch.pi / volume * ((torch.exp(-0.5 * sigma**2 * k2) / k2)[:, None] * power).sum(0)
    close([found[0]], [exact], 1e-11)
