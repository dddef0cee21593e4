"""DFT-D3 is the physics that it should be, whatever the form of its input."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from nvalchemiops.torch.interactions.dispersion import DFTD3, d3_dispersion, damping_parameters, dftd3, driver
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.comparing import within
from tests.support.molecules import (
    F64,
    PBE,
    PROGRAM,
    Atoms,
    batch,
    evaluate,
    molecule,
    parameters,
    program_batch,
    solid,
)

CUTOFF, COUNTED = 18.0, 12.0
ZERO = damping_parameters("pbe", "zero")
BOTH = pytest.mark.parametrize("damping", [PBE, ZERO], ids=["rational", "zero"])


def all_of(atoms, damping=PBE, cutoff=CUTOFF, counted=COUNTED, **options):
    """Energies of atoms, forces, coordination numbers, virial."""
    options = {"parameters": parameters(), "compute_forces": True, "compute_virial": True} | options
    return d3_dispersion(**atoms.arguments(), damping=damping, cutoff=cutoff, coordination_cutoff=counted, **options)


def crystal(size=0.1, seed=0):
    """Dry ice without symmetry, some molecules broken by the boundary."""
    return solid("dry ice", size) if seed == 0 else _moved(solid("dry ice", size), seed)


def _moved(atoms, seed):
    generator = torch.Generator().manual_seed(seed)
    return atoms._replace(
        positions=atoms.positions + 0.2 * torch.randn(atoms.positions.shape, generator=generator, dtype=F64)
    )


def two_crystals():
    return batch(crystal(), crystal(seed=1)._replace(cell=crystal().cell * 1.02))


def some_molecules():
    return [molecule(name) for name in ("CH3CH2OH", "H2O", "CO2", "CH3COOH", "O")]


@BOTH
def test_states_of_many_elements_give_the_same(damping, monkeypatch):
    """Their coefficients are summed in parts, so that kernels stay small."""
    sizes, make = set(), driver._pair_energy
    monkeypatch.setattr(driver, "MOST_OF_SIGN", 8)
    monkeypatch.setattr(driver, "_pair_energy", lambda *given: sizes.add(given[1:3]) or make(*given))
    atoms, several = two_crystals(), parameters().states(range(1, 11))
    assert 16 < several.vectors.shape[1] <= 32

    def results(states, dtype=F64):
        scale = damping._replace(s8=torch.tensor(damping.s8, dtype=dtype, requires_grad=True))
        x = atoms.positions.to(dtype, copy=True).requires_grad_()
        given = atoms._replace(positions=x, cell=atoms.cell.to(dtype))
        found = all_of(given, scale, parameters=states)
        return *found, *torch.autograd.grad(found[0].square().sum(), (x, scale.s8))

    within(results(several), results(parameters()), 1e-12)
    assert sizes == {(8, 8), (7, 1)}
    within(results(several, torch.float32), results(parameters(), torch.float32), 1e-5)
    (alone,) = results(several)[:1]
    (energies, _) = all_of(atoms, damping, parameters=several, compute_forces=False, compute_virial=False)
    within([energies], [alone], 1e-14)


@pytest.mark.parametrize(("n_positive", "n_negative"), [(60, 40), (25, 100), (97, 0), (50, 47)])
def test_each_coefficient_is_in_one_part(n_positive, n_negative, monkeypatch):
    """With those of its sign, filled up with zeros; derivatives are in the order of the coefficients."""
    sizes = set()

    def pair_energy(_, positive, negative, part, __):
        sizes.add((positive, negative))
        return SimpleNamespace(per_atom=[*range(part.shape[1]), "z"]), (part, positive), None

    def sum_pairs(_, __, of_pair, asked, **___):
        part, positive = of_pair
        signs = torch.ones(part.shape[1], dtype=F64)
        signs[positive:] = -1.0
        assert list(asked.gradients[0]) == list(range(part.shape[1]))
        return (part.square() * signs).sum(1), -part[:, :3], 2.0 * part * signs, part.sum(0)

    monkeypatch.setattr(driver, "_pair_energy", pair_energy)
    monkeypatch.setattr(driver, "sum_pairs", sum_pairs)
    given = torch.arange(1.0, 1.0 + 2 * (n_positive + n_negative), dtype=F64).view(2, -1)
    signs = torch.cat([torch.ones(n_positive, dtype=F64), -torch.ones(n_negative, dtype=F64)])
    of_states = SimpleNamespace(states=SimpleNamespace(n_positive=n_positive))
    settings = SimpleNamespace(ranges=driver.Ranges(driver.Range(), driver.Range(), driver.Range()))
    request = driver.PairRequest(forces=True, virial=True)
    energies, _, _, by_coefficient = driver._sum_of_parts(None, given, of_states, settings, request)
    assert torch.equal(energies, (given.square() * signs).sum(1))
    assert torch.equal(by_coefficient, 2.0 * given * signs)
    ((positive, negative),) = sizes
    assert positive == negative <= driver.MOST_OF_SIGN and positive % 8 == 0


# -- neighbors and batches in any form -------------------------------------------------------------


def list_of(atoms, cutoff, **options):
    found = neighbor_list(
        atoms.positions, cutoff, atoms.cell, atoms.pbc, atoms.batch_idx, return_neighbor_list=True, **options
    )
    return dict(zip(("neighbor_list", "neighbor_ptr", "neighbor_shifts"), found))


def test_no_cutoff_means_all_that_are_listed_or_all_pairs_of_molecules():
    atoms = two_crystals()
    near = list_of(atoms, CUTOFF)
    within(all_of(atoms, cutoff=None, counted=None, **near), all_of(atoms, counted=CUTOFF), 1e-15)
    within(all_of(atoms, cutoff=None, counted=COUNTED, **near), all_of(atoms), 1e-15)
    molecules = batch(*some_molecules())
    within(all_of(molecules, cutoff=None, counted=None), all_of(molecules, cutoff=1e3, counted=1e3), 1e-15)


def test_one_cell_for_all_systems():
    """Shared, in either shape, or one for each."""
    atoms = two_crystals()._replace(cell=None)
    one = 1.1 * crystal().cell
    expected = all_of(atoms, cell=one.expand(2, 3, 3), energy_reduction="system")
    for cell in (one, one[0]):
        within(all_of(atoms, cell=cell, energy_reduction="system"), expected, 0.0)


def test_a_search_reaches_as_far_as_triples():
    atoms = batch(*some_molecules())
    found = all_of(atoms, cutoff=4.0, counted=4.0, s9=1.0, three_body_cutoff=9.0)
    within(found, all_of(atoms, cutoff=4.0, counted=4.0, s9=1.0, three_body_cutoff=9.0, **list_of(atoms, 9.0)), 1e-15)
    short = all_of(atoms, cutoff=4.0, counted=4.0, s9=1.0)
    assert float((found[0] - short[0]).abs().max()) > 1e-8


def test_nothing_but_padding():
    nothing = Atoms(torch.zeros(3, 3, dtype=F64), torch.zeros(3, dtype=torch.int32))
    matrix = torch.full((3, 2), 3, dtype=torch.int32)
    found = all_of(nothing, neighbor_matrix=matrix)
    assert all(not part.any() for part in found)


# -- what clients do not give, or give oddly --------------------------------------------------------


@BOTH
def test_cells_that_are_none(damping):
    """Without a cell, with one that is far larger, with a dummy, and with zeros."""
    atoms = molecule("CH3COOH")
    expected = all_of(atoms, damping)
    aperiodic = torch.zeros(3, dtype=torch.bool)
    for size, pbc in ((0.0, aperiodic), (1.0, aperiodic), (1e4, aperiodic), (1e4, ~aperiodic)):
        within(all_of(atoms, damping, cell=size * torch.eye(3, dtype=F64), pbc=pbc), expected, 1e-15)
    near = list_of(atoms, CUTOFF)
    zero = {"cell": torch.zeros(3, 3, dtype=F64)}
    zero["neighbor_shifts"] = torch.zeros(near["neighbor_list"].shape[1], 3, dtype=torch.int32)
    within(all_of(atoms, damping, **near, **zero), expected, 1e-15)
    within(all_of(atoms, damping, cell=zero["cell"]), expected, 1e-15)


@BOTH
def test_lone_atoms(damping):
    """Without neighbors there is nothing, for all elements."""
    numbers = torch.arange(1, 95, dtype=torch.int32)
    apart = Atoms(100.0 * numbers[:, None] * torch.ones(3, dtype=F64), numbers)
    assert all(not part.any() for part in all_of(apart, damping))


def test_crowded_atoms():
    """Hundreds of neighbors within a bond, far more than any reference molecule has."""
    atoms = solid("fcc copper", 0.0)
    systems = [atoms._replace(positions=s * atoms.positions, cell=s * atoms.cell) for s in (0.25, 0.4, 0.6)]
    found = evaluate(batch(*systems), PBE, 12.0, 9.0)
    assert all(bool(part.isfinite().all()) for part in found)
    expected = program_batch(systems, PROGRAM["bj"](method="pbe"), 12.0, 9.0)
    torch.testing.assert_close(found.energy, expected.energy, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(found.virial, expected.virial, rtol=1e-9, atol=1e-9)
    *_, coordination, _ = all_of(batch(*systems), cutoff=12.0, counted=9.0)
    assert float(coordination.max()) > 400.0


def test_atoms_in_one_place():
    """Their forces have no direction, NaN; energies and all that is of others is right."""
    atoms = molecule("CH3COOH")
    far = molecule("H2O")._replace(positions=molecule("H2O").positions + 100.0)
    x = torch.cat([atoms.positions, far.positions])
    x[1] = x[0]
    together = Atoms(x, torch.cat([atoms.numbers, far.numbers]))
    energies, forces, coordination, _ = all_of(together)
    assert bool(energies.isfinite().all()) and bool(coordination.isfinite().all())
    assert forces.isnan().any(1).tolist() == [True, True] + [False] * (len(x) - 2)
    within([energies[-3:], forces[-3:]], all_of(far)[:2], 1e-15)
    # however close, as long as there is a distance
    for step in (1e-3, 1e-8, 1e-30):
        near = x.clone()
        near[1, 0] += step
        assert all(bool(part.isfinite().all()) for part in all_of(together._replace(positions=near)))


# -- ends of the sums ------------------------------------------------------------------------------


def derivatives(distance, numbers, **options):
    """Energy of a pair and its first two derivatives by the distance."""
    r = torch.tensor(distance, dtype=F64, requires_grad=True)
    positions = torch.stack([torch.zeros(3, dtype=F64), r * torch.tensor([0.6, 0.0, 0.8], dtype=F64)])
    pairs = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    near = {"neighbor_list": pairs, "neighbor_ptr": torch.tensor([0, 1, 2], dtype=torch.int32)}
    energies, _ = d3_dispersion(positions, numbers, parameters=parameters(), **near, **options)
    (first,) = torch.autograd.grad(energies.sum(), r, create_graph=True)
    (second,) = torch.autograd.grad(first, r)
    return torch.stack([energies.sum(), first, second]).detach()


@BOTH
@pytest.mark.parametrize("reach", ["pairs", "counted"])
def test_a_pair_goes_smoothly_through_its_cutoffs(damping, reach):
    """Energy, force and curvature are continuous where the smoothing begins and at both cutoffs."""
    numbers = torch.tensor([6, 19], dtype=torch.int32)
    # a short cutoff of counted pairs, where they still count
    cutoffs = {"cutoff": 20.0, "coordination_cutoff": 6.0, "smoothing": 2.0}
    at = cutoffs["cutoff" if reach == "pairs" else "coordination_cutoff"]
    step = 1e-6

    def look(distance):
        return derivatives(distance, numbers, damping=damping, **cutoffs)

    for place in (at - 2.0, at):
        below, here, above = (look(place + h) for h in (-step, 0.0, step))
        inside = look(place - 0.5).abs()
        assert float(inside.min()) > 1e-9
        # nothing changes by more than its derivative, and second derivatives by less than a tenth, times the step
        bound = 2.0 * step * torch.cat([inside[1:].clamp(min=1e-3), torch.tensor([0.1], dtype=F64)])
        assert bool(((above - below).abs() <= bound).all()) and bool(((here - below).abs() <= bound).all())
    assert not look(20.0 + step).any()


def test_without_smoothing_a_pair_jumps_by_its_energy():
    """So the test above can fail."""
    numbers = torch.tensor([6, 19], dtype=torch.int32)
    free = derivatives(20.0, numbers, damping=PBE, cutoff=100.0)
    below, above = (derivatives(20.0 + h, numbers, damping=PBE, cutoff=20.0) for h in (-1e-9, 1e-9))
    within([below], [free], 1e-13)
    assert float(free[0]) < -1e-6 and not above.any()


@BOTH
def test_molecules_do_not_feel_smoothing(damping):
    """Not by a bit, if they are smaller than where it begins."""
    atoms = batch(*some_molecules())
    smooth = all_of(atoms, damping, cutoff=60.0, counted=40.0, smoothing=5.0)
    within(smooth, all_of(atoms, damping, cutoff=60.0, counted=40.0), 1e-16)
    switched = s5(atoms, s5_smoothing_on=40.0, s5_smoothing_off=45.0)
    within(switched, s5(atoms), 1e-16)


def test_defaults_of_the_module():
    """Pinned, and written down where users look."""
    defaults = {name: p.default for name, p in inspect.signature(DFTD3.__init__).parameters.items()}
    assert (defaults["cutoff"], defaults["coordination_cutoff"], defaults["smoothing"]) == (60.0, 40.0, 5.0)
    zero = DFTD3("pbe", [6, 8], parameters(), damping="zero")
    assert [getattr(zero, name) for name in zero.kind._fields] == [*ZERO]
    model = DFTD3("pbe", [6, 8], parameters())
    atoms = solid("dry ice")
    found = model(*atoms[:3], compute_forces=True, compute_virial=True)
    within(found, all_of(atoms, cutoff=60.0, counted=40.0, smoothing=5.0), 0.0)
    assert "RationalDamping, elements=(6, 8), " in repr(model) and "cutoff=60, coordination_cutoff=40, " in repr(model)
    # the price of smoothing is less than that of the tail beyond the cutoff
    sharp, far = (evaluate(atoms, PBE, cutoff, 40.0).energy for cutoff in (60.0, 90.0))
    assert abs(float(found[0].sum() - sharp)) < abs(float(far - sharp))


def s5(atoms, **options):
    near = list_of(atoms, 60.0)
    near.pop("neighbor_shifts", None)
    return dftd3(
        atoms.positions,
        atoms.numbers,
        *PBE[:3],
        d3_params=parameters(),
        batch_idx=atoms.batch_idx,
        compute_virial=True,
        **near,
        **options,
    )


def test_smoothing_of_the_clients_function():
    """From ``s5_smoothing_on`` to ``s5_smoothing_off`` a quintic polynomial, of pair energies alone."""
    atoms = batch(Atoms(torch.tensor([[0.0, 0.0, 0.0], [0.0, 8.0, 0.0]], dtype=F64), torch.tensor([6, 8]).int()))
    plain = s5(atoms)
    for on, off in ((9.0, 12.0), (7.0, 9.0), (4.0, 10.0), (3.0, 7.0)):
        x = min(max((8.0 - on) / (off - on), 0.0), 1.0)
        found = s5(atoms, s5_smoothing_on=on, s5_smoothing_off=off)
        factor = 1.0 - 10.0 * x**3 + 15.0 * x**4 - 6.0 * x**5
        within([found[0], found[2]], [factor * plain[0], plain[2]], 1e-16)
        x = atoms.positions.clone().requires_grad_()
        (slope,) = torch.autograd.grad(s5(atoms._replace(positions=x), s5_smoothing_on=on, s5_smoothing_off=off)[0], x)
        within([found[1]], [-slope], 1e-15)


# -- derivatives that are returned, and precision ---------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"compute_forces": True}, {"compute_virial": True}])
def test_what_is_not_asked_for_changes_nothing(options):
    atoms = two_crystals()
    everything = all_of(atoms)
    found = all_of(atoms, **({"compute_forces": False, "compute_virial": False} | options))
    expected = [everything[0]] + [everything[1]] * ("compute_forces" in options) + [everything[2]]
    expected += [everything[3]] * ("compute_virial" in options)
    within(found, expected, 1e-16)
