"""`Electrostatics`: the right sum for each kind of system, the faster method, and what it says about its choice."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from nvalchemiops.interactions.electrostatics import error_models
from nvalchemiops.torch import System
from nvalchemiops.torch.interactions.electrostatics import (
    Electrostatics,
    EwaldSummation,
    ParticleMeshEwald,
    driver,
    ewald_summation,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy import methods
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import Sizes
from nvalchemiops.torch.runtime.context import hidden_values
from tests.support.comparing import close
from tests.support.systems import ALL, crystal

F64 = torch.float64
SALT = crystal("rocksalt", 5.64, 3, 0.2)
CRYSTAL = System(SALT.positions, SALT.charges, SALT.cell[0])
SLAB = CRYSTAL._replace(
    cell=CRYSTAL.cell * torch.tensor([1.0, 1.0, 3.0], dtype=F64)[:, None], pbc=torch.tensor([True, True, False])
)
MOLECULE = System(SALT.positions, SALT.charges)
CPU = error_models.COSTS["cpu"]
NAMED = {"ewald": EwaldSummation, "pme": ParticleMeshEwald}


def cubic(n_atoms, length=None):
    """Sizes of one cubic system."""
    length = n_atoms ** (1.0 / 3.0) if length is None else length
    return Sizes(length * np.eye(3)[None], np.array([float(n_atoms)]), np.array([length / n_atoms ** (1.0 / 3.0)]))


def make_cheap(monkeypatch, method):
    """Let the costs say that this method is far faster."""
    slow = {"ewald": "call_of_mesh", "pme": "call_of_k_vectors"}[method]
    monkeypatch.setitem(error_models.COSTS, "cpu", CPU._replace(**{slow: 1e12}))


@pytest.mark.parametrize("method", NAMED)
@pytest.mark.parametrize("accuracy", [1e-3, 1e-6])
def test_the_cheap_method_is_used_and_is_accurate(method, accuracy, monkeypatch):
    make_cheap(monkeypatch, method)
    found = Electrostatics(accuracy)(CRYSTAL, **ALL)
    close(found, NAMED[method](accuracy=accuracy)(CRYSTAL, **ALL), 0.0)
    exact = ewald_summation(*CRYSTAL[:3], accuracy=1e-12, compute_forces=True)[1]
    assert (found.forces - exact).norm() < 3.0 * accuracy * exact.norm()
    other = next(name for name in NAMED if name != method)
    close(Electrostatics(accuracy, other)(CRYSTAL, **ALL), NAMED[other](accuracy=accuracy)(CRYSTAL, **ALL), 0.0)


def test_a_molecule_is_summed_over_all_pairs():
    x, q = MOLECULE.positions, MOLECULE.charges
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    expected = 0.5 * q * (q / distance).sum(1)
    for system in (MOLECULE, CRYSTAL._replace(pbc=torch.zeros(3, dtype=torch.bool))):
        close([Electrostatics()(system)[0]], [expected], 1e-12)


def test_a_slab_is_corrected():
    expected = ewald_summation(*SLAB[:3], pbc=SLAB.pbc, slab_correction=True, **ALL)
    assert Electrostatics()._method_for(SLAB, 1e-6, False) == "ewald"
    close(Electrostatics()(SLAB, **ALL), expected, 0.0)
    for module in (
        EwaldSummation(),
        Electrostatics.estimate(SLAB, 1e-8),
        ParticleMeshEwald.estimate(SLAB, accuracy=1e-8),
    ):
        close(module(SLAB, **ALL), expected, 1e-5)
        close(module(*SLAB[:3], pbc=SLAB.pbc, **ALL), expected, 1e-5)
        with pytest.raises(ValueError, match="slab_correction=True"):
            module(SLAB, slab_correction=False)
    for module in (Electrostatics(), EwaldSummation()):
        with pytest.raises(ValueError, match="`pbc`: the slab correction is for at most one open axis"):
            module(CRYSTAL._replace(pbc=torch.tensor([True, False, False])))


@pytest.mark.parametrize("axis", range(3))
def test_periodicity_in_any_form(axis):
    """As `ewald_summation` takes it: bools in sequences and arrays, for one system or several."""
    pbc = [k != axis for k in range(3)]
    cell = CRYSTAL.cell * torch.tensor([1.0 if is_periodic else 3.0 for is_periodic in pbc], dtype=F64)[:, None]
    expected = ewald_summation(*CRYSTAL[:2], cell, pbc=torch.tensor(pbc), slab_correction=True, **ALL)
    for form in (pbc, tuple(pbc), np.array(pbc), [pbc], torch.tensor([pbc])):
        close(Electrostatics()(*CRYSTAL[:2], cell, pbc=form, **ALL), expected, 0.0)
        close(Electrostatics()(CRYSTAL._replace(cell=cell, pbc=form), **ALL), expected, 0.0)
    close(Electrostatics()(*CRYSTAL[:3], pbc=True), Electrostatics()(*CRYSTAL[:3]), 0.0)


@pytest.mark.parametrize("module", [Electrostatics(method="ewald"), Electrostatics.estimate(SLAB)])
def test_slabs_where_values_of_pbc_are_not_read(module):
    """On a GPU they are read, although that waits; elsewhere any system for which `pbc` is given is corrected."""
    with hidden_values():
        close([module(SLAB).energies], [Electrostatics(1e-9)(SLAB).energies], 1e-5)
    near = SLAB.neighbors(11.0)
    expected = module(SLAB, near).energies
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    close([compiled(SLAB, near).energies], [expected], 1e-9)
    of_each = torch.stack([SLAB.pbc, torch.ones_like(SLAB.pbc)])
    crystal_ = module(SLAB._replace(pbc=None), near).energies
    mapped = torch.func.vmap(lambda pbc: module(SLAB._replace(pbc=pbc), near).energies)(of_each)
    close([mapped], [torch.stack([expected, crystal_])], 1e-9)
    close([compiled(SLAB._replace(pbc=of_each[1]), near).energies], [crystal_], 1e-9)


@pytest.mark.parametrize("system", [SLAB, CRYSTAL._replace(pbc=torch.ones(3, dtype=torch.bool))])
def test_tracers_follow_sums_with_the_slab_correction(system):
    """They read ``pbc`` as an array: what they trace of a tensor has no values."""
    module, near = EwaldSummation(0.5, 3.0), system._replace(pbc=None).neighbors(5.0)

    def energies(x, pbc):
        return module(system._replace(positions=x, pbc=pbc), near, slab_correction=True).energies

    traced = make_fx(energies)(system.positions, system.pbc)
    close([traced(system.positions, system.pbc)], [energies(system.positions, system.pbc)], 1e-12)


@pytest.mark.parametrize("method", [None, "pme"])
def test_any_batch(method):
    """A crystal, a slab and a molecule in one call, as each alone."""
    n = CRYSTAL.positions.shape[0]
    parts = [CRYSTAL._replace(pbc=torch.ones(3, dtype=torch.bool)), SLAB, MOLECULE]
    batch = System(
        torch.cat([p.positions for p in parts]),
        torch.cat([p.charges for p in parts]),
        torch.stack([CRYSTAL.cell, SLAB.cell, torch.zeros(3, 3, dtype=F64)]),
        torch.arange(3, dtype=torch.int32).repeat_interleave(n),
        torch.tensor([[True] * 3, [True, True, False], [False] * 3]),
    )
    electrostatics = Electrostatics(1e-9, method)
    found = electrostatics(batch, compute_forces=True).forces.split(n)
    for forces, alone in zip(found, parts):
        expected = electrostatics(alone, compute_forces=True).forces
        assert (forces - expected).norm() < 1e-8 * expected.norm()
    text = electrostatics.explain(batch)
    assert text.startswith(f"1 open system: all pairs, exactly\n2 periodic systems, {2 * n} atoms, accuracy 1e-09")


def test_small_systems_use_k_vectors_and_large_ones_a_mesh():
    for accuracy in (1e-2, 1e-4, 1e-6):
        found = [methods.method_of_one(n, accuracy, CPU, False) for n in (1, 64, 512, 8192, 10**6)]
        assert found == ["ewald", "ewald", "ewald", "pme", "pme"]
    # no mesh reaches this accuracy
    assert methods.method_of_one(10**6, 1e-18, CPU, False) == "ewald"


@pytest.mark.parametrize("n_atoms", [64, 4096])
@pytest.mark.parametrize("length", [1e-3, 1.0, 1e4])
def test_units_do_not_matter(n_atoms, length):
    for accuracy in (1e-3, 1e-6):
        found = methods.ways(cubic(n_atoms, length), accuracy, CPU, True)
        expected = methods.ways(cubic(n_atoms), accuracy, CPU, True)
        for way, other in zip(found, expected):
            assert way.method == other.method and way.time == pytest.approx(other.time, rel=0.2)


def test_cells_that_change_a_little_leave_the_choice_of_a_batch_alone():
    rng = np.random.default_rng(0)
    for n_systems in (2, 8):
        count = rng.integers(300, 3000, n_systems).astype(float)
        cell = 10.1 * np.eye(3) * (count[:, None, None] / 500.0) ** (1.0 / 3.0)
        chosen = set()
        for scale in np.linspace(0.999, 1.001, 9):
            lengths = scale * cell
            spacing = (np.linalg.det(lengths) / count) ** (1.0 / 3.0)
            chosen.add(methods.method_of_several(Sizes(lengths, count, spacing), 1e-6, CPU, True))
        assert len(chosen) == 1


@pytest.mark.parametrize("method", NAMED)
def test_a_batch_of_a_slab_a_crystal_and_a_molecule_where_reading_waits(method):
    """As on a GPU, where a given slab correction alone must not wait to look for molecules."""
    parts = [SLAB, CRYSTAL._replace(pbc=torch.ones(3, dtype=torch.bool)), SLAB._replace(pbc=torch.zeros(3).bool())]
    tensors = (torch.cat([getattr(part, name) for part in parts]) for name in ("positions", "charges"))
    of_atom = torch.repeat_interleave(torch.arange(3), torch.tensor([len(part.charges) for part in parts])).int()
    pbc = torch.stack([torch.as_tensor(part.pbc) for part in parts])
    batch = System(*tensors, torch.stack([part.cell for part in parts]), of_atom, pbc)
    module = Electrostatics(method=method)
    expected = module(batch, energy_reduction="system").energies
    with hidden_values():
        for _ in range(3):
            close([module(batch, energy_reduction="system").energies], [expected], 1e-6)


def test_the_list_of_a_batch_reaches_to_its_longest_cutoff(monkeypatch):
    """A dilute system lengthens the list of a dense one, so a mesh with a common cutoff takes less time."""
    n = len(CRYSTAL.charges)
    pair = System(CRYSTAL.positions[:2], CRYSTAL.charges[:2], 30.0 * torch.eye(3, dtype=F64))
    batch = System(
        *(torch.cat([getattr(CRYSTAL, name), getattr(pair, name)]) for name in ("positions", "charges")),
        torch.stack([CRYSTAL.cell, pair.cell]),
        torch.tensor([0] * n + [1] * 2, dtype=torch.int32),
    )
    lists = []
    chosen = driver.choose_splitting

    def noted(*arguments):
        found = chosen(*arguments)
        lists.append(found.rows.neighbors.shape[0])
        return found

    monkeypatch.setattr(driver, "choose_splitting", noted)
    count = np.array([n, 2.0])
    sizes = Sizes(batch.cell.numpy(), count, error_models.average_distance(count, batch.volume.numpy()))
    for method in NAMED:
        Electrostatics(method=method)(batch)
        (way,) = [way for way in methods.ways(sizes, 1e-6, CPU, True) if way.method == method]
        n_pairs = way.times["pairs"] / (1e-9 * error_models.COSTS["cpu"].pair)
        assert lists[-1] == pytest.approx(n_pairs, rel=0.3)


@pytest.mark.parametrize("method", [None, *NAMED])
def test_estimate_gives_the_choice_of_the_named_module(method):
    found = Electrostatics.estimate(CRYSTAL, 1e-5, method=method, real_space_cutoff=4.0)
    expected = NAMED[method or "ewald"].estimate(CRYSTAL, accuracy=1e-5, real_space_cutoff=4.0)
    assert type(found) is type(expected)
    assert torch.equal(found.alpha, expected.alpha) and found.cutoff == expected.cutoff
    near = CRYSTAL.neighbors(found.cutoff)
    close(found(CRYSTAL, near, **ALL), expected(CRYSTAL, near, **ALL), 0.0)


@pytest.mark.parametrize("method", [None, *NAMED])
def test_estimates_for_batches_with_molecules_are_those_of_the_others(method):
    """A molecule between two crystals, with a cell of zeros."""
    x, cell, n = CRYSTAL.positions, CRYSTAL.cell, len(CRYSTAL.charges)
    cells, pbc = torch.stack([cell, 0.0 * cell, 1.1 * cell]), torch.ones(3, 3, dtype=torch.bool)
    pbc[1] = False
    of_atom = torch.arange(3, dtype=torch.int32).repeat_interleave(n)
    batch = System(torch.cat([x, x, 1.1 * x]), CRYSTAL.charges.repeat(3), cells, of_atom, pbc)
    found = Electrostatics.estimate(batch, 1e-5, method=method)
    inside = of_atom != 1
    crystals = System(batch.positions[inside], batch.charges[inside], cells[[0, 2]], of_atom[inside] // 2)
    expected = Electrostatics.estimate(crystals, 1e-5, method=method)
    if method == "pme":
        found = ParticleMeshEwald.estimate(batch, accuracy=1e-5, real_space_cutoff=[5.0, 1.0, 6.0])
        expected = ParticleMeshEwald.estimate(crystals, accuracy=1e-5, real_space_cutoff=[5.0, 6.0])
        with pytest.raises(ValueError, match=r"`real_space_cutoff` must be a number or have shape \(3,\), got \(2,\)"):
            ParticleMeshEwald.estimate(batch, real_space_cutoff=torch.ones(2))
    assert type(found) is type(expected) and found.cutoff == expected.cutoff
    assert torch.equal(found.alpha[[0, 2]], expected.alpha) and found.alpha.shape == (3,)
    energies = found(batch, energy_reduction="system").energies
    close(energies[[0, 2]], expected(crystals, energy_reduction="system").energies)
    close(found.prepare(batch)(batch, energy_reduction="system").energies, energies)


def test_explain_shows_the_choice_and_the_alternative():
    text = Electrostatics(1e-5).explain(CRYSTAL).splitlines()
    assert text[0] == f"1 periodic system, {len(CRYSTAL.charges)} atoms, accuracy 1e-05"
    used, other = text[2].split(), text[3].split()
    assert used[:2] == ["used", "ewald"] and other[0] == "pme"
    forced = Electrostatics(1e-5, "pme").explain(CRYSTAL, CRYSTAL.neighbors(6.0))
    assert forced.splitlines()[2].split()[:2] == ["used", "pme"] and "neighbors" not in forced
    assert Electrostatics().explain(MOLECULE) == "1 open system: all pairs, exactly"
    assert Electrostatics(1e-5).explain(CRYSTAL._replace(pbc=True)).splitlines() == text
    # a list that is not searched may be longer; parameters as shown are those of `estimate`, which is for given lists
    estimate = EwaldSummation.estimate(CRYSTAL._replace(charges=None), accuracy=1e-5)
    listed = Electrostatics(1e-5).explain(CRYSTAL, CRYSTAL.neighbors(estimate.cutoff)).splitlines()[2].split()
    assert float(used[2]) < 0.95 * estimate.cutoff and float(used[3]) > 1.05 * float(estimate.alpha)
    used = listed
    assert f"{float(estimate.alpha):.3g}" in used and f"{estimate.cutoff:.3g}" in used


@pytest.mark.parametrize("reach", [5.0, 12.0])
def test_explain_shows_the_parameters_for_the_given_reach(reach):
    sizes = cubic(500, 25.0)
    for way in methods.ways(sizes, 1e-6, CPU, False, reach):
        free = next(w for w in methods.ways(sizes, 1e-6, CPU, False) if w.method == way.method)
        assert way.cutoff == reach
        # alpha follows a short reach; a long one only adds pairs
        expected = error_models.alpha_for_cutoff(
            np.minimum(reach, free.cutoff), sizes.spacing, error_models.Target(1e-6)
        )
        assert way.alpha == pytest.approx(expected)
        assert 1e-7 < way.error < 2e-6
        assert way.times["pairs"] == pytest.approx(free.times["pairs"] * (reach / free.cutoff.item()) ** 3)
    # the row of what is used, also with a list or the cutoff of the module
    given = Electrostatics().explain(CRYSTAL, CRYSTAL.neighbors(reach)).splitlines()[2].split()
    chosen = Electrostatics(cutoff=reach).explain(CRYSTAL).splitlines()[2].split()
    assert given[2] == chosen[2] == f"{reach:.3g}"


def test_explain_raises_where_calls_do():
    for wrong, message in (
        ({"pbc": torch.tensor([True, False, False])}, "at most one open axis"),
        ({"cell": CRYSTAL.cell.expand(2, 3, 3)}, "do not fit"),
        ({"cell": torch.nan * CRYSTAL.cell}, "do not fit"),
        ({"batch_idx": torch.full((len(CRYSTAL.charges),), -1, dtype=torch.int32)}, "do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            Electrostatics().explain(CRYSTAL._replace(**wrong))


def test_further_sources_and_tensors_in_the_place_of_a_system():
    generator = torch.Generator().manual_seed(0)
    dipoles = torch.randn(len(CRYSTAL.charges), 3, generator=generator, dtype=F64)
    polar = CRYSTAL._replace(dipoles=dipoles)
    options = {"compute_forces": True, "compute_dipole_gradients": True}
    close(Electrostatics()(polar, **options), EwaldSummation()(polar, **options), 0.0)
    given = CRYSTAL[:3]
    close([Electrostatics(1e-5)(*given)], [ewald_summation(*given, accuracy=1e-5)], 0.0)


def test_settings_are_saved():
    module = Electrostatics(1e-4, "pme", cutoff=7.0)
    other = Electrostatics()
    other.load_state_dict(module.state_dict())
    assert repr(other) == repr(module) == "Electrostatics(accuracy=0.0001, method='pme', cutoff=7.0)"
    assert repr(Electrostatics(1e-4, "PME", cutoff=7.0)) == repr(module)
    # the name that ASE's calculator and the command have for the default
    assert repr(Electrostatics(method="auto")) == repr(Electrostatics())
    fixed = ParticleMeshEwald(torch.tensor([0.3, 0.35]), (8, 9, 10), 6, 7.0)
    parts = "alpha=0.3 to 0.35, mesh_dimensions=(8, 9, 10), spline_order=6, cutoff=7, accuracy=1e-06"
    assert repr(fixed) == f"ParticleMeshEwald({parts})"


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="`method` must be one of 'auto', 'ewald', 'pme', got 'fmm'"):
        Electrostatics(method="fmm")
    with pytest.raises(ValueError, match="`accuracy`"):
        Electrostatics(2.0)
    with pytest.raises(ValueError, match="`charges` of the system is needed"):
        Electrostatics()(System(CRYSTAL.positions))
    with pytest.raises(ValueError, match="`cell`"):
        Electrostatics()(*CRYSTAL[:2], torch.eye(4, dtype=F64))
    with pytest.raises(ValueError, match="`batch_idx`"):
        Electrostatics()(*CRYSTAL[:2], CRYSTAL.cell.expand(2, 3, 3))
    n = len(CRYSTAL.charges)
    for batch_idx in (torch.full((n,), -1, dtype=torch.int32), torch.zeros(n), [0] * n):
        with pytest.raises((ValueError, TypeError), match="`batch_idx`"):
            Electrostatics()(*CRYSTAL[:2], CRYSTAL.cell.expand(2, 3, 3), batch_idx=batch_idx)
    with pytest.raises(ValueError, match="`positions` is on meta"):
        Electrostatics()(*(t.to("meta") for t in CRYSTAL[:3]))
