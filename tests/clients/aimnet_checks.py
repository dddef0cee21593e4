"""AIMNet: its adaptive lists, long-range Coulomb (DSF, Ewald, PME) with create_graph, and DFT-D3."""

import numpy as np
import pytest
import torch

lr = pytest.importorskip("aimnet.modules.lr")
from aimnet import nbops
from aimnet.calculators.neighbors import AdaptiveNeighborList
from ase.build import bulk
from dftd3.interface import DispersionModel, RationalDampingParam

from tests.clients.common import as_set, pairs, structures

SYSTEMS = structures()


@pytest.mark.parametrize("density", [0.2, 0.002])
@pytest.mark.parametrize("name", SYSTEMS)
def test_adaptive_lists(name, density):
    atoms = SYSTEMS[name]
    cell, pbc = (
        (torch.tensor(atoms.cell.array)[None], torch.tensor(atoms.pbc)[None]) if atoms.pbc.any() else (None, None)
    )
    build = AdaptiveNeighborList(5.0, density=density)
    for _ in range(2):
        matrix, counts, shifts = build(
            torch.tensor(atoms.positions), cell, pbc, torch.zeros(len(atoms), dtype=torch.int32)
        )
    i, slot = (torch.arange(matrix.shape[1]) < counts[:, None]).nonzero().T
    found = shifts[i, slot] if shifts is not None else torch.zeros(len(i), 3)
    assert as_set(i, matrix[i, slot], found) == pairs(atoms, 5.0)


def crystal():
    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    atoms.rattle(0.1, seed=1)
    charges = torch.tensor(np.where(atoms.numbers == 11, 0.9, -0.9))
    return atoms, charges


def flat_inputs(atoms, charges, cutoff):
    """Flat inputs with a padding atom, as the calculator makes them."""
    n = len(atoms)
    x = torch.tensor(atoms.positions, requires_grad=True)
    cell = torch.tensor(atoms.cell.array[None], requires_grad=True)
    build = AdaptiveNeighborList(cutoff)
    matrix, _, shifts = build(
        x.detach(), cell.detach(), torch.ones(1, 3, dtype=torch.bool), torch.zeros(n, dtype=torch.int32)
    )

    def pad(t, value=0):
        return torch.cat([t, torch.full_like(t[:1], value)])

    data = {
        "coord": pad(x),
        "charges": pad(charges),
        "mol_idx": torch.zeros(n + 1, dtype=torch.int64),
        "cell": cell,
        "nbmat_lr": pad(matrix, n),
        "shifts_lr": pad(shifts),
        "nbmat": pad(matrix, n),
        "shifts": pad(shifts),
        "numbers": pad(torch.tensor(atoms.numbers)),
    }
    return nbops.calc_masks(nbops.set_nb_mode(data)), x, cell


@pytest.mark.parametrize("method", ["ewald", "pme"])
@pytest.mark.parametrize("accuracy", [1e-6, 1e-4])
def test_long_range(method, accuracy):
    """Energy against ASE's geometry by the Madelung constant; forces, charges that depend on positions, Hessians."""
    module = lr.LRCoulomb(method=method, ewald_accuracy=accuracy, subtract_sr=False)
    perfect = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    charges = torch.tensor(np.where(perfect.numbers == 11, 1.0, -1.0))
    data, _, _ = flat_inputs(perfect, charges, 9.0)
    energy = module._coul_nvalchemi(data, backend=method)
    madelung = -1.747564594633 * 14.3996454785 / 2.82 * 4
    np.testing.assert_allclose(energy.item(), madelung, rtol=10 * accuracy)

    atoms, charges = crystal()
    data, x, cell = flat_inputs(atoms, charges, 9.0)
    moving = charges * (1.0 + 0.1 * torch.sin(x).sum(1))
    data["charges"] = torch.cat([moving - moving.mean(), torch.zeros(1, dtype=x.dtype)])
    energy = module._coul_nvalchemi(data, backend=method)
    forces, of_cell = torch.autograd.grad(energy.sum(), (x, cell), create_graph=True)
    other = torch.autograd.grad(forces[0].sum(), x, retain_graph=True)[0]
    assert torch.isfinite(other).all() and torch.isfinite(of_cell).all()

    def at(step):
        data, moved, _ = flat_inputs(atoms, charges, 9.0)
        shifted = moved.detach().clone()
        shifted[0, 0] += step
        data["coord"] = torch.cat([shifted, torch.zeros(1, 3, dtype=shifted.dtype)])
        q = charges * (1.0 + 0.1 * torch.sin(shifted).sum(1))
        data["charges"] = torch.cat([q - q.mean(), torch.zeros(1, dtype=q.dtype)])
        return float(module._coul_nvalchemi(data, backend=method))

    slope = (at(1e-3) - at(-1e-3)) / 2e-3
    np.testing.assert_allclose(float(forces[0, 0]), slope, rtol=1e-3, atol=1e-3)


def test_a_list_that_is_not_full_warns():
    """Other atoms of the cell only, each row cut, no shifts: the sum over what is there, with a warning."""
    atoms, charges = crystal()
    data, _, _ = flat_inputs(atoms, charges, 9.0)
    n = len(atoms)
    rows = [[j for j in range(n) if j != i][:5] for i in range(n)]
    data["nbmat_lr"] = torch.tensor([*rows, [n] * 5], dtype=torch.int32)
    data["shifts_lr"] = torch.zeros(n + 1, 5, 3, dtype=torch.int32)
    module = lr.LRCoulomb(method="ewald", subtract_sr=False)
    with pytest.warns(UserWarning, match="full|list"):
        energy = module._coul_nvalchemi(data, backend="ewald")
    assert torch.isfinite(energy).all()


def test_damped_shifted_force():
    molecule = SYSTEMS["ethanol"]
    n = len(molecule)
    q = torch.tensor(np.random.default_rng(0).normal(size=n))
    module = lr.LRCoulomb(method="dsf", dsf_rc=9.0, subtract_sr=False)
    x = torch.tensor(molecule.positions)
    data = {
        "coord": torch.cat([x, torch.zeros(1, 3, dtype=x.dtype)]),
        "charges": torch.cat([q, torch.zeros(1, dtype=q.dtype)]),
        "mol_idx": torch.zeros(n + 1, dtype=torch.int64),
        "numbers": torch.tensor([*molecule.numbers, 0]),
    }
    matrix, _, _ = AdaptiveNeighborList(9.0)(x)
    data["nbmat_lr"] = data["nbmat"] = torch.cat([matrix, torch.full_like(matrix[:1], n)])
    data = nbops.calc_masks(nbops.set_nb_mode(data))
    energy, terms = module._coul_dsf_nvalchemi(data, compute_forces=True, compute_virial=False)
    np.testing.assert_allclose(float(energy), float(module._coul_dsf_torch(data)), rtol=1e-5)
    assert torch.isfinite(terms.forces).all()


def test_dispersion():
    atoms = SYSTEMS["benzene"]
    n = len(atoms)
    module = lr.DFTD3(0.7875, 0.4289, 4.4407, cutoff=15.0)
    x = torch.tensor(atoms.positions, dtype=torch.float32)
    matrix, _, _ = AdaptiveNeighborList(15.0)(x)
    found = lr._call_dftd3_kernel(
        coord=x,
        numbers=torch.tensor(atoms.numbers, dtype=torch.int32),
        batch_idx=torch.zeros(n, dtype=torch.int32),
        neighbor_matrix=matrix,
        neighbor_matrix_shifts=None,
        fill_value=n,
        num_systems=1,
        cell=None,
        rcov=module.rcov,
        r4r2=module.r4r2,
        c6_reference=module.c6ab,
        coord_num_ref=module.cn_ref,
        a1=module.a1,
        a2=module.a2,
        s8=module.s8,
        s6=module.s6,
        smoothing_on=module.smoothing_on,
        smoothing_off=module.smoothing_off,
        compute_virial=False,
    )
    damping = RationalDampingParam(s6=1.0, s8=0.7875, a1=0.4289, a2=4.4407, s9=0.0)
    expected = DispersionModel(atoms.numbers, atoms.positions / 0.529177210903).get_dispersion(damping, grad=True)
    np.testing.assert_allclose(float(found[0].sum()), expected["energy"] * 27.211386245988, rtol=1e-4)
    np.testing.assert_allclose(found[1], -expected["gradient"] * 27.211386245988 / 0.529177210903, atol=2e-6)
