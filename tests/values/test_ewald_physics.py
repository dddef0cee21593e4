"""Sums over all images are the physics they claim to be: constants, symmetries, derivatives, batches, channels."""

import itertools
import json
import math
import pathlib

import numpy as np
import pytest
import torch

from nvalchemiops.torch.interactions import electrostatics
from tests.reference.ewald import everything
from tests.support.comparing import close
from tests.support.sums import METHODS, SUMS, relative_error, summed
from tests.support.systems import (
    ALL,
    MADELUNG,
    System,
    batch,
    compound,
    crystal,
    csr,
    disordered,
    random_rotation,
    triclinic,
)

# -- Madelung constants ---------------------------------------------------------------------------

NACL, CSCL, ZNS = (MADELUNG[name][1] for name in ("rocksalt", "cesiumchloride", "zincblende"))
WIGNER = 2.8372974794806196  # lone charges on a simple cubic lattice in their background: E = -WIGNER q² / 2a

# Energies of a unit cell, in units of 1/a. NaCl, CsCl and ZnS hold the potentials of the lattices that fluorite is
# made of (A. Naor, Z. Kristallogr. 110, 112 (1958)): E = 4 E(ZnS) - E(NaCl). In the same way CaTiO3 is the charges of
# its sites on simple cubic lattices, E = 16 s + 8 f3 - 24 f1 with
#   s - f3 = E(CsCl),  s + 3 f1 + 3 f2 + f3 = 2 s (a lattice of half the constant),  s - 3 f1 + 3 f2 - f3 = -2 M(NaCl).
# In the literature these are 11.636575 and 49.5098 (Q. C. Johnson and D. H. Templeton, J. Chem. Phys. 34, 2004 (1961)).
ENERGIES = {
    "fluorite": -16.0 / math.sqrt(3.0) * ZNS + 2.0 * NACL,
    "perovskite": -24.0 * WIGNER + 32.0 / math.sqrt(3.0) * CSCL - 8.0 * NACL,
    # 1.641321627 for the nearest distance sqrt(3/8) a, and two pairs of ions: D. H. Templeton, J. Chem. Phys. 21,
    # 2097 (1953); here with the digits of M. P. Tosi, Solid State Phys. 16, 1 (1964), and later sums
    "wurtzite": -2.0 * 1.64132162737 / math.sqrt(3.0 / 8.0),
    "rocksalt": -2.0 * NACL,
    "cesiumchloride": -2.0 / math.sqrt(3.0) * CSCL,
    "zincblende": -4.0 / math.sqrt(3.0) * ZNS,
}


@METHODS
@pytest.mark.parametrize("structure", ENERGIES)
def test_madelung_constants(structure, method):
    system = crystal(structure) if structure in MADELUNG else compound(structure)
    energy = summed(method, system).sum().item()
    assert energy == pytest.approx(ENERGIES[structure], rel={"ewald": 1e-10, "pme": 1e-8}[method])


@pytest.mark.parametrize("structure", ENERGIES)
def test_madelung_constants_by_default_splines(structure):
    system = crystal(structure) if structure in MADELUNG else compound(structure)
    energy = (
        electrostatics.particle_mesh_ewald(system.positions, system.charges, system.cell, accuracy=1e-6).sum().item()
    )
    assert energy == pytest.approx(ENERGIES[structure], rel=1e-6)


# -- against another implementation ---------------------------------------------------------------

STORED = json.loads((pathlib.Path(__file__).parents[1] / "reference" / "torchpme_values.json").read_text())


@METHODS
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("theirs", ["ewald", "pme"])
def test_torch_pme_gives_the_same(name, theirs, method):
    system = System.of(*(STORED[name][key] for key in ("positions", "charges", "cell")))
    energies, forces, slopes = summed(method, system, compute_forces=True, compute_charge_gradients=True)
    expected = [torch.tensor(STORED[name][theirs][key], dtype=torch.float64) for key in ("energy", "forces")]
    potentials = torch.tensor(STORED[name][theirs]["potentials"], dtype=torch.float64)
    # their Ewald sum converged to 1e-11 or so, their mesh to 1e-8
    close((energies.sum(), forces, slopes), (*expected, potentials), {"ewald": 1e-8, "pme": 1e-7}[theirs])


@METHODS
@pytest.mark.parametrize("given", [True, False])
def test_a_given_alpha_is_used(given, method):
    """Far from convergence alpha shows in the result."""
    system = in_cell(CELLS["full"])
    alpha, cutoff, k_cutoff = 0.35, 3.0, 9.0
    neighbors = csr(system, cutoff) if given else {"cutoff": cutoff}
    parameters = {"k_cutoff": k_cutoff} if method == "ewald" else {"mesh_dimensions": (32, 32, 36)}
    found = summed(method, system, alpha=alpha, **neighbors, **parameters, **ALL)
    energies, forces, slopes, virial = everything(*system[:2], system.cell[0], alpha, cutoff, k_cutoff)
    close(found, (energies.detach(), forces, slopes, virial[None]), {"ewald": 1e-10, "pme": 1e-7}[method])
    assert abs(found[0].sum() / summed("ewald", system).sum() - 1.0) > 1e-3


# -- symmetries -----------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("alpha", [0.45, 0.6, 0.8, 1.1])
def test_nothing_depends_on_alpha(alpha, method):
    system = triclinic(6, charged=True)
    expected = summed("ewald", system, **ALL)
    close(summed(method, system, alpha=alpha, **ALL), expected, {"ewald": 1e-10, "pme": 2e-8}[method])


# integers of determinant 1 or -1 that make another basis of the same lattice
BASES = {
    "b -> b + a": [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
    "c -> c - 2 a + b": [[1, 0, 0], [0, 1, 0], [-2, 1, 1]],
    "left-handed": [[1, 0, 0], [0, 1, 0], [0, 0, -1]],
    "axes exchanged": [[0, 1, 0], [1, 0, 0], [0, 0, 1]],
    "axes permuted": [[0, 1, 0], [0, 0, 1], [1, 0, 0]],
}


@METHODS
@pytest.mark.parametrize("change", [*BASES, "origin", "wrapping", "order of atoms", "supercell"])
def test_only_the_crystal_matters(change, method):
    system = triclinic(6, charged=True)
    x, q, cell = system.positions, system.charges, system.cell[0]
    expected = summed(method, system, **ALL)
    generator = torch.Generator().manual_seed(0)
    order, copies = torch.arange(6), 1
    if change == "origin":
        x = x + torch.tensor([0.37, -1.2, 5.1])
    elif change == "wrapping":
        x = x + torch.randint(-4, 5, x.shape, generator=generator).double() @ cell
    elif change == "order of atoms":
        order = torch.randperm(6, generator=generator)
        x, q = x[order], q[order]
    elif change == "supercell":
        repeats = torch.tensor([2, 1, 3])
        images = torch.cartesian_prod(*[torch.arange(n) for n in repeats]).double() @ cell
        copies = len(images)
        x, q = (images[:, None] + x).reshape(-1, 3), q.repeat(copies)
        cell = cell * repeats[:, None]
        order = order.repeat(copies)
    else:
        cell = torch.tensor(BASES[change], dtype=torch.float64) @ cell
    changed = System.of(x.numpy(), q.numpy(), cell.numpy())
    energies, forces, slopes, virial = summed(method, changed, **ALL)
    expected = (*(t[order] for t in expected[:3]), expected[3] * copies)
    # another basis has another mesh: those of the finest splines agree to about 1e-9 of the forces
    close((energies, forces, slopes, virial), expected, {"ewald": 1e-9, "pme": 2e-8}[method])


@METHODS
@pytest.mark.parametrize("accuracy", [1e-6, 1e-9])
def test_orientation_and_origin_do_not_matter(accuracy, method):
    """Rotations and shifts of everything, by 20 each: a splitting by the size of the cell alone cannot tell."""
    system = disordered("triclinic")
    options = {"accuracy": accuracy, "compute_forces": True, "compute_virial": True}
    energies, forces, virial = summed(method, system, **options)
    rng = np.random.default_rng(3)
    for _ in range(20):
        turn, shift = torch.tensor(random_rotation(rng)), torch.tensor(rng.normal(scale=30.0, size=3))
        turned = system._replace(positions=system.positions @ turn + shift, cell=system.cell @ turn)
        e, f, w = summed(method, turned, **options)
        if method == "ewald":  # the very same wave vectors and pairs
            close((e, f, w), (energies, forces @ turn, turn.T @ virial @ turn), 1e-9)
        assert relative_error(f, forces @ turn) < 3.0 * accuracy
        assert relative_error(w, turn.T @ virial @ turn) < 3.0 * accuracy
        assert relative_error(e.sum(), energies.sum()) < 3.0 * accuracy


# -- a mesh equals exact wave vectors ---------------------------------------------------------------

RIGHT = [[5.0, 0.0, 0.0], [2.0, 4.5, 0.0], [-1.5, 2.2, 4.0]]
CELLS = {
    "one shear": [[5.0, 0.0, 0.0], [3.0, 4.0, 0.0], [0.0, 0.0, 4.5]],
    "lower triangle": RIGHT,
    "upper triangle": np.transpose(RIGHT).tolist(),
    "full": [[4.0, 1.1, -0.7], [-1.3, 4.4, 0.9], [0.6, -1.6, 5.2]],
    "left-handed": [RIGHT[1], RIGHT[0], RIGHT[2]],
}


def in_cell(cell, n_atoms=6, total=0.0, seed=5):
    rng = np.random.default_rng(seed)
    charges = rng.normal(size=n_atoms)
    fractional = (np.arange(n_atoms)[:, None] * [0.37, 0.61, 0.83] + rng.normal(scale=0.02, size=(n_atoms, 3))) % 1.0
    fractional += rng.integers(-1, 2, (n_atoms, 3))
    return System.of(fractional @ np.array(cell), charges + (total - charges.sum()) / n_atoms, cell)


@pytest.mark.parametrize("shape", CELLS)
@pytest.mark.parametrize("order", [5, 6, 8])
def test_the_mesh_equals_exact_wave_vectors_in_skewed_cells(shape, order):
    """Energies, forces, dE/dq and virial, and by autograd all nine components of dE/dcell."""
    system = in_cell(CELLS[shape], total=0.7)
    results = []
    for method, options in (("ewald", {}), ("pme", {"mesh_dimensions": (54, 54, 54), "spline_order": order})):
        inputs = [t.clone().requires_grad_() for t in system[:3]]
        found = SUMS[method](*inputs, alpha=0.75, accuracy=1e-11, cutoff=7.0, **options, **ALL)
        slopes = torch.autograd.grad(found[0].sum(), inputs)
        close((-slopes[0], slopes[1]), found[1:3], 1e-10)
        results.append([t.detach() for t in (*found, slopes[2])])
    # the spline error of order p at this mesh is (alpha h)^(p-1), about 0.07^(p-1), times small numbers
    close(results[1], results[0], {5: 5e-6, 6: 5e-7, 8: 2e-8}[order])


# -- charged cells --------------------------------------------------------------------------------


def background(system, alpha):
    volume = torch.linalg.det(system.cell[0]).abs()
    return -math.pi * system.charges.sum().square() / (2.0 * alpha**2 * volume)


@METHODS
@pytest.mark.parametrize("total", [1.0, -3.0])
def test_energy_of_a_charged_cell_is_the_neutral_formula_and_its_background(method, total):
    """The neutral formula, of pairs, wave vectors and self energies, is written out here: the reference has all."""
    system = in_cell(CELLS["full"], total=total)
    alpha, cutoff = 0.8, 8.0
    assert system.charges.sum().item() == pytest.approx(total)
    pairs = electrostatics.ewald_real_space(*system[:3], alpha, cutoff=cutoff).sum()
    miller = torch.cartesian_prod(*[torch.arange(-13, 14)] * 3).double()
    k = 2.0 * math.pi * miller[miller.abs().sum(1) > 0] @ torch.linalg.inv(system.cell[0]).T
    k2, phase = k.square().sum(1), k @ system.positions.T
    power = (phase.cos() @ system.charges).square() + (phase.sin() @ system.charges).square()
    volume = torch.linalg.det(system.cell[0]).abs()
    waves = (2.0 * math.pi / volume * torch.exp(-k2 / (4.0 * alpha**2)) / k2 * power).sum()
    neutral = pairs + waves - alpha / math.sqrt(math.pi) * system.charges.square().sum()
    expected = neutral + background(system, alpha)
    assert abs(background(system, alpha)) > 0.01  # it is no small matter
    found = summed(method, system, alpha=alpha, cutoff=cutoff).sum()
    torch.testing.assert_close(found, expected, rtol={"ewald": 1e-10, "pme": 1e-8}[method], atol=0.0)


@METHODS
def test_the_virial_of_a_coulomb_system_is_its_energy(method):
    """1/r is homogeneous of degree -1, so that the trace of W is E."""
    energies, virial = summed(method, triclinic(6, charged=True), compute_virial=True)
    torch.testing.assert_close(virial.diagonal(dim1=1, dim2=2).sum(), energies.sum(), rtol=1e-8, atol=0.0)


# -- batches --------------------------------------------------------------------------------------


def mixed_sizes(shape):
    """6 atoms in a cell of 5 A, and 100 in one of 60 A."""
    unit = np.array(CELLS["full"]) / 5.0 if shape == "triclinic" else np.diag([1.0, 1.1, 0.9])
    small = in_cell(5.0 * unit)
    rng = np.random.default_rng(2)
    large = System.of(rng.random((100, 3)) @ unit * 60.0, np.tile([1.0, -1.0], 50), 60.0 * unit)
    return small, large


@METHODS
@pytest.mark.parametrize("shape", ["orthorhombic", "triclinic"])
@pytest.mark.parametrize("accuracy", [1e-4, 1e-8])
@pytest.mark.parametrize("small_first", [True, False])
def test_a_batch_of_small_and_large_cells_meets_the_accuracy_in_each(shape, accuracy, small_first, method):
    systems = mixed_sizes(shape)
    if not small_first:
        systems = systems[::-1]
    together = batch(*systems)
    _, forces, virial = summed(method, together, accuracy=accuracy, compute_forces=True, compute_virial=True)
    for n, system in enumerate(systems):
        _, exact, exact_virial = summed("ewald", system, compute_forces=True, compute_virial=True)
        single = summed(method, system, accuracy=accuracy, compute_forces=True)[1]
        mine = forces[together.batch_idx == n]
        assert relative_error(mine, exact) < 3.0 * accuracy
        assert relative_error(mine, single) < 3.0 * accuracy
        # the accuracy is that of forces; virials of so few atoms are up to 21 times worse, wrong meshes are far worse
        assert relative_error(virial[n], exact_virial[0]) < 25.0 * accuracy


@METHODS
def test_nothing_but_zeros(method):
    for system in (
        System.of(np.zeros((0, 3)), [], np.eye(3) * 4.0),
        triclinic(4)._replace(charges=torch.zeros(4, dtype=torch.float64)),
    ):
        energies, forces, slopes, virial = summed(method, system, accuracy=1e-6, **ALL)
        assert forces.shape == system.positions.shape and virial.shape == (1, 3, 3)
        assert energies.shape == slopes.shape == system.charges.shape
        assert not any(t.any() for t in (energies, forces, slopes, virial))


# -- channels -------------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("n_channels", [1, 3, 20])
def test_channels_are_a_loop_over_charges(n_channels, method):
    """20 channels are more than one kernel takes at once."""
    together = batch(triclinic(5, seed=1), triclinic(3, seed=2))
    charges = torch.randn(8, n_channels, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {"alpha": 0.8, "cutoff": 5.0}
    options |= {"k_cutoff": 5.0} if method == "ewald" else {"mesh_dimensions": (16, 16, 16)}
    energies, forces, slopes, virial = summed(method, together._replace(charges=charges), **options, **ALL)
    loop = [summed(method, together._replace(charges=q), **options, **ALL) for q in charges.T.contiguous()]
    expected = [list(parts) for parts in zip(*loop)]
    assert energies.shape == slopes.shape == (8, n_channels) and virial.shape == (2, 3, 3)
    close((energies, slopes), [torch.stack(expected[n], 1) for n in (0, 2)], 1e-12)
    close((forces, virial), [sum(expected[n]) for n in (1, 3)], 1e-12)
    per_system = summed(method, together._replace(charges=charges), energy_reduction="system", **options)
    torch.testing.assert_close(per_system, torch.stack([energies[:5].sum(0), energies[5:].sum(0)]))


# -- sizes ----------------------------------------------------------------------------------------


def peak_memory(function):
    """Bytes by which the memory of this process grew at most, as the kernel of Linux counts."""
    status, clear = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")

    def size(kind):
        line = next(line for line in status.read_text().splitlines() if line.startswith(kind))
        return 1024 * int(line.split()[1])

    try:
        clear.write_text("5")  # forget the peak until now
    except OSError:
        pytest.skip("peak memory is known on Linux only")
    before = size("VmRSS")
    function()
    return size("VmHWM") - before


def test_memory_is_that_of_atoms_and_of_wave_vectors_not_of_their_product():
    """20,000 atoms at an accuracy of 1e-6, forward and backward: an array of both would be some 10 GB."""
    atoms = crystal("rocksalt", 5.64, (25, 20, 20), 0.1)
    x = atoms.positions.requires_grad_()
    k_cutoff = electrostatics.estimate_ewald_parameters(x, atoms.cell).reciprocal_space_cutoff
    assert 8 * len(x) * len(electrostatics.generate_ewald_miller_indices(atoms.cell, k_cutoff)) > 1e9
    assert peak_memory(lambda: electrostatics.ewald_summation(x, atoms.charges, atoms.cell).sum().backward()) < 2**30


# -- the simplest system --------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize(("i", "j"), list(itertools.combinations(range(3), 2)))
def test_two_ions_far_apart_attract_along_the_line_between_them(i, j, method):
    """In a large cell: E = -1/r up to the interaction of images, F = 1/r² towards each other."""
    length, r = 60.0, 2.0
    direction = torch.zeros(3, dtype=torch.float64)
    direction[i] = direction[j] = math.sqrt(0.5)
    positions = torch.stack([torch.zeros(3).double(), r * direction])
    system = System.of(positions.numpy(), [1.0, -1.0], np.eye(3) * length)
    energies, forces = summed(method, system, compute_forces=True, accuracy=1e-8)
    # dipoles p = 2 in a cubic lattice: -2 π p²/3V = 4e-5 to the energy, 4 π p/3V to the force
    volume = length**3
    assert energies.sum().item() == pytest.approx(-1.0 / r - 2.0 * math.pi * r**2 / (3.0 * volume), abs=1e-7)
    expected = (1.0 / r**2 - 4.0 * math.pi * r / (3.0 * volume)) * direction
    torch.testing.assert_close(forces[0], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(forces[1], -expected, rtol=0, atol=1e-6)
