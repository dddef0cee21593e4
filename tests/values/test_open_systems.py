"""Batches of periodic systems and of molecules, which are summed over all pairs; `pbc` says which is which."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nvalchemiops.torch.graph import Graph
from nvalchemiops.torch.interactions.electrostatics import (
    Electrostatics,
    EwaldSummation,
    ParticleMeshEwald,
    coulomb_energy,
    electrostatic_potential,
    generate_k_vectors_ewald_summation,
    generate_k_vectors_pme,
    power_law,
    prepare_mesh,
    prepare_wave_vectors,
)
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.runtime.context import hidden_values
from nvalchemiops.torch.systems import System
from tests.support.comparing import close
from tests.support.sums import METHODS, SUMS

COUNTS = (7, 5, 9, 1)
"""Atoms of a crystal, a molecule, another crystal and an ion."""
OPEN = (False, True, False, True)
SPLIT = {"ewald": {"k_cutoff": 8.0}, "pme": {"mesh_dimensions": (20, 20, 20)}}


@pytest.fixture
def batch():
    """Positions, charges, cells and the rest, atoms of all systems in any order."""
    generator = torch.Generator().manual_seed(4)
    options = {"generator": generator, "dtype": torch.float64}
    n_atoms = sum(COUNTS)
    cells = torch.zeros(4, 3, 3, dtype=torch.float64)
    cells[0], cells[2] = 6.0 * torch.eye(3), 7.0 * torch.eye(3)
    cells[2, 0, 1] = 1.0
    of_atom = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), torch.tensor(COUNTS))
    of_atom = of_atom[torch.randperm(n_atoms, generator=generator)]
    # on a grid, so that no pair is close
    grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3).double()[:n_atoms] * 2.0
    positions = grid + 0.3 * torch.rand(n_atoms, 3, **options)
    pbc = torch.tensor(OPEN)[:, None].expand(4, 3).logical_not()
    return positions, torch.randn(n_atoms, **options), cells, of_atom, pbc


def alone(method, batch, system, **options):
    """The same of one system, molecules as direct sums in plain torch; energy, forces."""
    positions, charges, cells, of_atom, _ = batch
    own = of_atom == system
    x, q = positions[own].requires_grad_(), charges[own]
    if not OPEN[system]:
        energies, forces = SUMS[method](x, q, cells[system], compute_forces=True, **options)[:2]
        return energies.sum(), forces
    i, j = torch.triu_indices(x.shape[0], x.shape[0], 1)
    energy = (q[i] * q[j] / (x[i] - x[j]).norm(dim=1)).sum() + 0.0 * x.sum()
    return energy, -torch.autograd.grad(energy, x)[0]


@METHODS
def test_each_system_of_a_mixed_batch_is_as_alone(method, batch):
    positions, charges, cells, of_atom, pbc = batch
    options = {"alpha": 0.7, "cutoff": 6.5, **SPLIT[method]}
    x = positions.clone().requires_grad_()
    energies, forces, virial = SUMS[method](
        x, charges, cells, batch_idx=of_atom, pbc=pbc, energy_reduction="system", **options,
        compute_forces=True, compute_virial=True,
    )  # fmt: skip
    for system in range(4):
        energy, known = alone(method, batch, system, **options)
        close([energies[system]], [energy])
        close(forces[of_atom == system], known)
    (gradient,) = torch.autograd.grad(energies.sum(), x)
    close(gradient, -forces.detach())
    # the trace of a molecule's virial is its energy, as for all sums of 1/r
    close([virial[1].trace()], [energies[1]])
    assert torch.equal(virial[3], torch.zeros(3, 3, dtype=torch.float64))


@METHODS
@pytest.mark.parametrize("make", [lambda pbc: pbc.int().tolist(), lambda pbc: pbc.int().numpy()], ids=["list", "array"])
def test_periodicity_may_be_integers(method, make, batch):
    positions, charges, cells, of_atom, pbc = batch
    options = {"alpha": 0.7, "cutoff": 6.5, "batch_idx": of_atom, **SPLIT[method]}
    found, known = [SUMS[method](positions, charges, cells, pbc=axes, **options) for axes in (make(pbc), pbc)]
    assert torch.equal(found, known)
    found, known = [SUMS[method](positions, charges, None, pbc=axes) for axes in (make(pbc[1, 0]), pbc[1])]
    assert torch.equal(found, known)


@METHODS
def test_open_systems_are_found_where_reading_waits(method, batch):
    """As on a GPU: a batch with open systems, and one without cells. A change of ``pbc`` is noticed."""
    positions, charges, cells, of_atom, pbc = batch
    options = {"alpha": 0.7, "cutoff": 6.5, "batch_idx": of_atom, **SPLIT[method]}
    every = torch.ones_like(pbc)

    def call(pbc):
        regular = torch.where(pbc.any(1)[:, None, None] & (cells == 0).all(-1, keepdim=True), torch.eye(3), cells)
        return SUMS[method](positions, charges, regular.double(), pbc=pbc, **options)

    known, whole = [call(pbc), call(every)], SUMS[method](positions, charges, None, pbc=pbc[1])
    with hidden_values():
        changing = pbc.clone()
        for k in (0, 1, 1, 0):
            changing.copy_((pbc, every)[k])
            close([call(changing)], [known[k]], 1e-12)
        close([SUMS[method](positions, charges, None, pbc=pbc[1])], [whole], 1e-12)


def test_k_vectors_that_all_systems_share(batch):
    """With or without an axis for systems."""
    positions, charges, cells, of_atom, pbc = batch
    cells[2] = cells[0]
    given = generate_k_vectors_ewald_summation(cells[0], 5.0)
    options = {"batch_idx": of_atom, "pbc": pbc, "alpha": 0.7, "cutoff": 6.5}
    shared, known = (SUMS["ewald"](positions, charges, cells, **options, k_vectors=k) for k in (given[None], given))
    close(shared, known, 0.0)


def test_k_vectors_of_each_system(batch):
    """In a part of them, those of molecules are of no lattice."""
    positions, charges, cells, of_atom, pbc = batch
    options = {"batch_idx": of_atom, "pbc": pbc, "alpha": 0.7, "cutoff": 6.5}
    each = torch.full((4, 3000, 3), 0.1, dtype=torch.float64)
    for system in (0, 2):
        found = generate_k_vectors_ewald_summation(cells[system], 8.0)
        each[system] = torch.nn.functional.pad(found, (0, 0, 0, 3000 - len(found)))
    close(*(SUMS["ewald"](positions, charges, cells, **options, **k) for k in ({"k_vectors": each}, SPLIT["ewald"])))
    with pytest.raises(ValueError, match=r"`k_vectors` must have shape \(4, n_k, 3\)"):
        SUMS["ewald"](positions, charges, cells, **options, k_vectors=each[:2])


def test_exclusions_and_one_alpha_each_in_a_mixed_batch(batch):
    positions, charges, cells, of_atom, pbc = batch
    crystal, molecule = ((of_atom == system).nonzero().squeeze(1) for system in (0, 1))
    pairs = torch.stack([molecule[:2], crystal[:2], molecule[2:4]], 1)
    factors = torch.tensor([0.0, 0.3, 0.5], dtype=torch.float64)
    alphas = torch.tensor([0.7, 1.0, 0.8, 1.0], dtype=torch.float64)
    excluded = {"exclusions": pairs, "exclusion_factors": factors}
    energies = SUMS["ewald"](
        positions, charges, cells, batch_idx=of_atom, pbc=pbc, alpha=alphas, cutoff=6.5, k_cutoff=9.0,
        energy_reduction="system", **excluded,
    )  # fmt: skip
    known, _ = alone("ewald", batch, 1)
    for pair, factor in ((pairs[:, 0], 0.0), (pairs[:, 2], 0.5)):
        known = known - (1.0 - factor) * charges[pair].prod() / (positions[pair[0]] - positions[pair[1]]).norm()
    close([energies[1]], [known])
    own = of_atom == 0
    of_crystal = {"exclusions": torch.tensor([[0], [1]]), "exclusion_factors": factors[1:2]}
    known = SUMS["ewald"](positions[own], charges[own], cells[0], alpha=0.7, cutoff=6.5, k_cutoff=9.0, **of_crystal)
    close([energies[0]], [known.sum()])
    with pytest.raises(ValueError, match="different systems"):
        across = torch.stack([molecule[:1], crystal[:1]])
        SUMS["ewald"](positions, charges, cells, batch_idx=of_atom, pbc=pbc, alpha=0.7, exclusions=across)


def test_sources_and_potentials_in_a_mixed_batch(batch):
    positions, charges, cells, of_atom, pbc = batch
    dipoles = torch.randn(len(charges), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sources, options = {"dipoles": dipoles, "widths": 0.4}, {"alpha": 0.7, "cutoff": 6.5, "k_cutoff": 8.0}
    by_system = {"batch_idx": of_atom, "pbc": pbc}
    energies, by_charges, by_dipoles = SUMS["ewald"](
        positions, charges, cells, **by_system, **sources, **options, self_interaction=True,
        compute_charge_gradients=True, compute_dipole_gradients=True,
    )  # fmt: skip
    found = electrostatic_potential(positions, charges, cells, **by_system, **sources, **options, self_interaction=True)
    close(found.potential[:, 0], by_charges)
    close(found.gradient[:, 0], by_dipoles)
    close(0.5 * (charges * by_charges + (dipoles * by_dipoles).sum(1)), energies)
    own = of_atom == 1
    of_molecule = electrostatic_potential(
        positions[own], charges[own], dipoles=dipoles[own], widths=0.4, self_interaction=True
    )
    close(found.potential[own], of_molecule.potential)
    close(found.gradient[own], of_molecule.gradient)


@METHODS
def test_second_derivatives_and_hybrid_forces_of_a_molecule_by_its_periodicity(method, batch):
    positions, charges, _, of_atom, _ = batch
    own = of_atom == 1
    x, q = positions[own].requires_grad_(), charges[own].requires_grad_()
    options = {"pbc": [False] * 3, "compute_forces": True}
    energies, forces = SUMS[method](x, q, torch.zeros(3, 3, dtype=torch.float64), **options)
    known = coulomb_energy(x, q, None, 100.0)
    close([energies.sum()], [known.sum()])
    weights = torch.randn(forces.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (gradient,) = torch.autograd.grad(known.sum(), x, create_graph=True)
    for found, expected in zip(
        torch.autograd.grad((weights * forces).sum(), (x, q)), torch.autograd.grad(-(weights * gradient).sum(), (x, q))
    ):
        close(found, expected)
    fixed, explicit = SUMS[method](x, q, torch.zeros(3, 3, dtype=torch.float64), hybrid_forces=True, **options)
    close(explicit, forces)
    assert torch.autograd.grad(fixed.sum(), x, allow_unused=True, retain_graph=True)[0] is None
    close(torch.autograd.grad(fixed.sum(), q)[0], torch.autograd.grad(coulomb_energy(x, q, None, 100.0).sum(), q)[0])


def test_what_does_not_fit_a_mixed_batch_is_named(batch):
    positions, charges, cells, of_atom, pbc = batch
    options = {"batch_idx": of_atom, "pbc": pbc, "alpha": 0.7, "cutoff": 6.5}
    with pytest.raises(ValueError, match="pbc"):
        SUMS["ewald"](positions, charges, cells, **options, k_cutoff=8.0, potential=power_law(6))
    prepared = prepare_mesh(cells + torch.eye(3), 0.7, (12, 12, 12))
    with pytest.raises(ValueError, match="prepared"):
        SUMS["pme"](positions, charges, cells, **options, prepared=prepared)
    with pytest.raises(ValueError, match="open axes"):
        one_open = pbc.clone()
        one_open[0, 2] = False
        SUMS["ewald"](positions, charges, cells, **{**options, "pbc": one_open}, k_cutoff=8.0)


def test_data_prepared_for_all_systems_of_a_mixed_batch(batch):
    positions, charges, cells, of_atom, pbc = batch
    cells = torch.where(pbc.any(1)[:, None, None], cells, torch.eye(3, dtype=torch.float64))
    alpha = torch.tensor([0.7, 1.0, 0.8, 1.0], dtype=torch.float64)
    options = {"batch_idx": of_atom, "pbc": pbc, "cutoff": 6.5, "compute_forces": True, "compute_virial": True}
    mesh = (12, 14, 16)
    squares = generate_k_vectors_pme(cells, mesh)[1]
    vectors, prepared = prepare_wave_vectors(cells, 8.0), prepare_mesh(cells, alpha, mesh, 8)
    by_vectors, by_mesh = {"alpha": alpha, "miller_indices": vectors}, {"alpha": alpha, "mesh_dimensions": mesh}
    recomputed = {**by_mesh, "k_squared": squares, "volume": cells.det()}
    for method, given, known in (
        ("ewald", by_vectors, {"alpha": alpha, "k_cutoff": 8.0}),
        ("pme", {"prepared": prepared}, by_mesh),
        ("pme", recomputed, by_mesh),
    ):
        found, expected = (SUMS[method](positions, charges, cells, **options, **some) for some in (given, known))
        close(found, expected)
    with pytest.raises(ValueError, match="2 systems, but there are 4"):
        others = {**by_vectors, "miller_indices": prepare_wave_vectors(cells[:2], 8.0)}
        SUMS["ewald"](positions, charges, cells, **options, **others)
    with pytest.raises(ValueError, match="2 cells, but the batch has 4"):
        SUMS["pme"](positions, charges, cells, **options, prepared=prepare_mesh(cells[:2], 0.7, mesh))
    with pytest.raises(ValueError, match="volume"):
        SUMS["pme"](positions, charges, cells, **options, **{**recomputed, "volume": cells.det()[:3]})


@METHODS
@pytest.mark.parametrize("form", ["list", "list with pointers", "matrix"])
@pytest.mark.parametrize("padding", [None, -1, 21, 22, 99])
def test_neighbors_of_the_whole_batch_serve_its_periodic_systems(method, form, padding, batch):
    """Padding is no pair, also if it is the number of an atom without pairs."""
    positions, charges, cells, of_atom, pbc = batch
    order = of_atom.argsort(stable=True)
    positions, charges, of_atom = positions[order], charges[order], of_atom[order]
    search = {"pbc": pbc, "batch_idx": of_atom, "return_neighbor_list": form != "matrix"}
    found = neighbor_list(positions, 6.5, cells, **search)
    if form == "matrix":
        matrix = found[0] if padding is None else torch.where(found[0] == len(charges), padding, found[0])
        given = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": found[2]}
    else:
        # as of JAX, where lists have a capacity: behind the last row
        more = torch.full((2, 0 if padding is None else 5), padding or 0, dtype=torch.int32)
        more[0] = len(charges)
        shifts = torch.cat([found[2], torch.zeros(more.shape[1], 3, dtype=torch.int32)])
        given = {"neighbor_list": torch.cat([found[0], more], 1), "neighbor_shifts": shifts}
        given |= {"neighbor_ptr": found[1]} if "pointers" in form else {}
    options = {"batch_idx": of_atom, "pbc": pbc, "alpha": 0.7, "compute_forces": True, **SPLIT[method]}
    known = SUMS[method](positions, charges, cells, **options, cutoff=6.5)
    close(SUMS[method](positions, charges, cells, **options, **given, mask_value=padding), known)
    if form == "matrix" and padding in (-1, 99):
        with pytest.raises(ValueError, match="does not exist"):
            SUMS[method](positions, charges, cells, **options, **given)


def test_lists_without_pairs_serve_a_mixed_batch(batch):
    positions, charges, cells, of_atom, pbc = batch
    options = {"batch_idx": of_atom, "pbc": pbc, "alpha": 0.7, "k_cutoff": 8.0}
    no_pairs = {
        "neighbor_list": torch.zeros(2, 0, dtype=torch.int32),
        "neighbor_ptr": torch.zeros(1, dtype=torch.int32),
    }
    by_list = SUMS["ewald"](
        positions, charges, cells, **options, **no_pairs, neighbor_shifts=torch.zeros(0, 3, dtype=torch.int32)
    )
    no_rows = {"neighbor_matrix": torch.zeros(0, 4, dtype=torch.int32)}
    by_matrix = SUMS["ewald"](
        positions, charges, cells, **options, **no_rows, neighbor_matrix_shifts=torch.zeros(0, 4, 3, dtype=torch.int32)
    )
    close(by_list, by_matrix)
    is_molecule = of_atom == 1
    close(by_list[is_molecule], SUMS["ewald"](positions, charges, cells, **options, cutoff=6.5)[is_molecule])


@METHODS
def test_parameters_of_three_systems_stay_those_of_three(method, batch):
    """Three numbers of a mesh, or of a box of k-vectors, are not one for each system."""
    positions, charges, cells, of_atom, pbc = batch
    first = of_atom < 3
    system = positions[first], charges[first], cells[:3]
    options = {"batch_idx": of_atom[first], "pbc": pbc[:3].tolist(), "cutoff": 6.5}
    sizes = {"ewald": {"miller_bounds": (6, 6, 6)}, "pme": {"mesh_dimensions": (20, 20, 20)}}[method]
    known = SUMS[method](*system, **options, alpha=0.7, **sizes)
    tensors = {name: torch.tensor(values) for name, values in sizes.items()}
    close(SUMS[method](*system, **options, alpha=[0.7, 0.8, 0.7], **tensors), known)
    spacing = {"ewald": {"k_cutoff": [5.0, 1.0, 5.0]}, "pme": {"mesh_spacing": torch.full((3, 3), 0.4)}}[method]
    same = {"ewald": {"k_cutoff": 5.0}, "pme": {"mesh_spacing": 0.4}}[method]
    close(SUMS[method](*system, **options, alpha=0.7, **spacing), SUMS[method](*system, **options, alpha=0.7, **same))
    for name in ("alpha", *spacing):
        with pytest.raises(ValueError, match=f"`{name}` must"):
            # as many as there are periodic systems
            SUMS[method](*system, **{**options, "alpha": 0.7, name: torch.full((2,), 0.7)})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("exclusions", {"exclusions": torch.tensor([[0], [-1]])}),
        ("exclusions", {"exclusions": torch.tensor([[0], [99]])}),
        ("exclusions", {"exclusions": torch.tensor([0, 1])}),
        ("exclusion_factors", {"exclusions": torch.zeros(2, 0, dtype=torch.int32), "exclusion_factors": torch.ones(3)}),
        ("neighbor_list", {"neighbor_list": torch.zeros(3, 4, dtype=torch.int32)}),
        ("batch_idx", {"neighbor_list": torch.cartesian_prod(torch.arange(22), torch.arange(22)).T}),
        ("neighbor_ptr", {"neighbor_list": torch.ones(2, 7).int(), "neighbor_ptr": torch.full((23,), 7).int()}),
        ("batch_idx", {"batch_idx": None}),
        ("cell", {"cell": torch.zeros(0, 3, 3, dtype=torch.float64), "pbc": False}),
        ("cell", {"cell": torch.zeros(4, 3, 3, dtype=torch.bfloat16), "pbc": False}),
        ("positions", {"positions": [[0.0, 0.0, 0.0]]}),
        ("charges", {"charges": torch.ones(3, dtype=torch.float64)}),
        ("dipoles", {"dipoles": torch.ones(3, 3, dtype=torch.float64)}),
        ("alpha", {"alpha": -1.0, "pbc": False}),
        ("cutoff", {"cutoff": -1.0, "pbc": False}),
        ("surface_dielectric", {"surface_dielectric": -1.0, "pbc": False}),
        ("slab_correction", {"slab_correction": "no", "pbc": False}),
    ],
)
def test_bad_arguments_of_a_mixed_batch_are_named(name, options, batch):
    arguments = dict(zip(("positions", "charges", "cell", "batch_idx", "pbc"), batch))
    if "neighbor_list" in options:
        options = {**options, "neighbor_shifts": torch.zeros(options["neighbor_list"].shape[1], 3, dtype=torch.int32)}
    for function in (SUMS["ewald"], electrostatic_potential):
        with pytest.raises((ValueError, TypeError), match=f"`{name}`"):
            function(**{**arguments, "alpha": 0.7, "k_cutoff": 8.0, **options})


def test_molecules_have_no_derivatives_by_cells_and_alphas(batch):
    """As in a batch where another system is periodic: zeros, and no error."""
    positions, charges, cells, of_atom, _ = batch
    cells.requires_grad_()
    alphas = torch.full((4,), 0.7, dtype=torch.float64, requires_grad=True)
    energies = SUMS["ewald"](positions, charges, cells, batch_idx=of_atom, pbc=False, alpha=alphas, k_cutoff=8.0)
    for gradient in torch.autograd.grad(energies.sum(), (cells, alphas)):
        assert not gradient.any()


@pytest.mark.parametrize("with_cells", [True, False])
@METHODS
def test_transforms_of_batches_with_molecules(method, with_cells, batch):
    """Also without a cell, where all slices of vmap have pairs up to the extent of the largest one."""
    positions, charges, cells, of_atom, pbc = batch
    options = {"alpha": 0.7, "cutoff": 6.5, **SPLIT[method]} if with_cells else {}
    cell, axes = (cells, pbc) if with_cells else (None, False)

    def energies(x):
        return SUMS[method](x, charges, cell, batch_idx=of_atom, pbc=axes, **options)

    stretched = torch.stack([positions, 1.1 * positions, positions + 0.2])
    close(torch.vmap(energies)(stretched), torch.stack([energies(x) for x in stretched]))
    leaf, shift = positions.clone().requires_grad_(), charges[:, None].expand(-1, 3)
    (slope,) = torch.autograd.grad(energies(leaf).sum(), leaf, create_graph=True)
    (curvature,) = torch.autograd.grad((slope * shift).sum(), leaf)
    gradient = torch.func.grad(lambda x: energies(x).sum())
    found = torch.func.jvp(gradient, (positions,), (shift,))
    close(found, (slope.detach(), curvature))


def test_vmap_over_systems_or_neighbors_of_a_batch_with_molecules(batch):
    positions, charges, cells, of_atom, pbc = batch
    matrix, _, shifts = neighbor_list(positions, 6.5, cells, pbc, of_atom)

    def energies(of_atom, matrix):
        near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
        return SUMS["ewald"](positions, charges, cells, 0.7, k_cutoff=8.0, batch_idx=of_atom, pbc=pbc, **near)

    for mapped in ((0, None), (None, 0)):
        slices = [value if axis is None else value[None] for value, axis in zip((of_atom, matrix), mapped)]
        with pytest.raises(ValueError, match=r"`pbc`.*`vmap`"):
            torch.vmap(energies, mapped)(*slices)
    with pytest.raises(ValueError, match="if `vmap` maps over `pbc` or `batch_idx`"):
        torch.vmap(lambda of_atom: SUMS["ewald"](positions, charges, None, batch_idx=of_atom, pbc=False))(of_atom[None])


def test_transforms_of_molecules_alone_and_among_crystals(batch):
    """Derivatives as those of a backward pass, and a larger molecule in another slice of `vmap`."""
    positions, charges, cells, of_atom, pbc = batch
    xs = torch.stack([positions, 1.5 * positions])

    def molecules(x):
        return Electrostatics()(System(x, charges, batch_idx=of_atom)).energies.sum()

    def crystals_and_molecules(x):
        return Electrostatics(1e-6)(System(x, charges, cells, of_atom, pbc)).energies.sum()

    expected = torch.stack([torch.autograd.functional.jacobian(molecules, x) for x in xs])
    close(torch.vmap(torch.func.grad(molecules))(xs), expected)
    close(torch.func.jacfwd(molecules)(positions), expected[0])
    expected = torch.autograd.functional.jacobian(crystals_and_molecules, positions)
    close(torch.func.grad(crystals_and_molecules)(positions), expected)
    for energy in (molecules, crystals_and_molecules):
        with FlopCounterMode(display=False):  # a dispatch mode
            counted = energy(positions)
        close([counted], [energy(positions)])


@pytest.mark.parametrize("module", [EwaldSummation, ParticleMeshEwald])
def test_a_system_without_a_cell_is_open(module, batch):
    """One molecule, and several: the sum over all pairs, with all derivatives, whatever parameters the module has."""
    positions, charges, _, of_atom, _ = batch
    asked = {"compute_forces": True, "compute_charge_gradients": True, "compute_virial": True}
    for system in (System(positions, charges), System(positions, charges, batch_idx=of_atom)):
        i, j = torch.triu_indices(len(charges), len(charges), 1)
        is_inside = 1.0 if system.batch_idx is None else of_atom[i] == of_atom[j]
        expected = (is_inside * charges[i] * charges[j] / (positions[i] - positions[j]).norm(dim=1)).sum()
        for configured in (module(), module(0.7, cutoff=3.0), module(accuracy=1e-3), module.estimate(system)):
            found = configured(system, **asked, energy_reduction="system")
            assert found.virial.shape == (len(found.energies), 3, 3)
            torch.testing.assert_close(found.energies.sum(), expected, rtol=1e-12, atol=0.0)
        near = system._replace(batch_idx=None).neighbors(2.5)
        for results in (
            configured(system, near, **asked),
            configured(system._replace(pbc=torch.zeros(3).bool()), **asked),
        ):
            torch.testing.assert_close(results.forces, found.forces, rtol=1e-12, atol=1e-12)
        x = positions.clone().requires_grad_()
        energies = configured(system._replace(positions=x)).energies
        close(-torch.autograd.grad(energies.sum(), x)[0], found.forces)


@METHODS
def test_a_cell_is_missed_unless_no_system_is_periodic(method, batch):
    positions, charges, cells, of_atom, pbc = batch
    by_cell = SUMS[method](positions, charges, cells, batch_idx=of_atom, pbc=False)
    close(SUMS[method](positions, charges, batch_idx=of_atom, pbc=torch.zeros(4, 3).bool()), by_cell)
    for periodic in ({}, {"pbc": True}, {"pbc": pbc}):
        with pytest.raises(ValueError, match=r"`cell` is required.*pbc=False"):
            SUMS[method](positions, charges, None, batch_idx=of_atom, **periodic)
    with pytest.raises(ValueError, match="`batch_idx` has the negative entry"):
        SUMS[method](positions, charges, None, batch_idx=of_atom - 1, pbc=False)
    with pytest.raises(ValueError, match="`batch_idx`"):
        SUMS[method](positions, charges, None, batch_idx=of_atom, pbc=torch.zeros(3, 3).bool())


def test_potentials_of_molecules_need_no_cell(batch):
    positions, charges, _, of_atom, pbc = batch
    known = electrostatic_potential(positions, charges, None, of_atom)
    for is_open in (False, torch.zeros_like(pbc)):
        found = electrostatic_potential(positions, charges, None, of_atom, pbc=is_open)
        close(found[:2], known[:2])
    with pytest.raises(ValueError, match="`pbc` needs a `cell`"):
        electrostatic_potential(positions, charges, None, of_atom, pbc=pbc)


OF_SOURCES = {
    "charges": (),
    "dipoles": ("dipoles",),
    "widths": ("widths",),
    "all": ("dipoles", "quadrupoles", "widths"),
}


@pytest.mark.parametrize("names", OF_SOURCES.values(), ids=OF_SOURCES)
def test_virials_of_a_molecule_are_differentiated(names, batch):
    """To second order, by finite differences; a cell along open axes has no effect."""
    positions, charges, _, of_atom, _ = batch
    own = of_atom == 1
    x, q = positions[own].requires_grad_(), charges[own].requires_grad_()
    cell = 8.0 * torch.eye(3, dtype=torch.float64)
    values = {
        "dipoles": x.detach().sin(),
        "quadrupoles": torch.stack([x.detach().cos(), x.detach().sin(), x.detach().tan() * 0.1], 1),
        "widths": 0.3 + 0.1 * q.detach().abs(),
    }
    symmetric = values["quadrupoles"] + values["quadrupoles"].mT
    traces = symmetric.diagonal(dim1=1, dim2=2).mean(1)
    values["quadrupoles"] = symmetric - traces[:, None, None] * torch.eye(3, dtype=torch.float64)
    given = [values[name].requires_grad_() for name in names]

    def results(x, q, *given):
        options = {
            "pbc": torch.tensor([False] * 3),
            "compute_virial": True,
            **SPLIT["ewald"],
            **dict(zip(names, given)),
        }
        return SUMS["ewald"](x, q, cell.requires_grad_(), 0.7, **options)

    def virial(*given):
        return results(*given)[1]

    if not names:
        i, j = torch.triu_indices(len(x), len(x), 1)
        d = x[i] - x[j]
        close([virial(x, q)[0]], [torch.einsum("p,pa,pb->ab", q[i] * q[j] / d.norm(dim=1) ** 3, d, d)], 1e-12)
    assert torch.autograd.gradcheck(virial, (x, q, *given), fast_mode=True)
    assert torch.autograd.gradgradcheck(virial, (x, q, *given), fast_mode=True)
    assert not torch.autograd.grad(sum(t.square().sum() for t in results(x, q, *given)), cell)[0].any()


@pytest.mark.parametrize("in_batch", [False, True])
def test_edges_of_a_graph_without_cells(batch, in_batch):
    """All pairs of one system, or of each, that are closer than the cutoff."""
    positions, _, _, of_atom, _ = batch
    graph = Graph(System(positions, batch_idx=of_atom if in_batch else None), 3.0)
    near = (torch.cdist(positions, positions) < 3.0) & (of_atom[:, None] == of_atom if in_batch else True)
    receivers, senders = near.fill_diagonal_(False).nonzero().T
    order = (graph.receivers * len(positions) + graph.senders).argsort()
    assert torch.equal(graph.receivers[order], receivers) and torch.equal(graph.senders[order], senders)
    close(graph.vectors, graph.at_senders(positions) - graph.at_receivers(positions), 1e-14)
    close(graph.to_receivers(graph.distances), (torch.cdist(positions, positions) * near).sum(1))
    of_system = graph.sum(positions)
    assert torch.equal(graph.at_atoms(of_system), of_system[of_atom.long() if in_batch else torch.zeros(22).long()])
