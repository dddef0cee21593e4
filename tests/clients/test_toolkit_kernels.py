"""Kernels with names of nvalchemi-toolkit, launched by their arguments as it launches them."""

import numpy as np
import pytest
import torch
import warp as wp
from ase.build import bulk

from nvalchemiops.interactions import lj
from nvalchemiops.interactions.electrostatics.ewald_kernels import BATCH_BLOCK_SIZE, EIGHTPI
from nvalchemiops.interactions.electrostatics.ewald_recip_factory import (
    alloc_ewald_recip_sentinels,
    get_ewald_recip_kernel,
)
from nvalchemiops.neighbors.rows import NOWHERE
from nvalchemiops.neighbors.search import NOT_FINITE
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.electrostatics import ewald, pme
from nvalchemiops.torch.interactions.electrostatics._util import _InjectChargeGrad
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.spline import spline_gather, spline_gather_with_force, spline_spread
from tests.clients.test_toolkit_names import (
    CELLS,
    FLOAT,
    IDX,
    SIZES,
    N,
    Systems,
    arrays,
    close,
    draw,
    scalars,
    warp_is_ready,  # noqa: F401  # a fixture
)


@pytest.mark.parametrize("half", [False, True])
def test_lennard_jones_kernels(half):
    systems = [bulk("Ar", "hcp", a=3.6, c=6.2), bulk("Ar", "fcc", a=5.2, cubic=True)]
    x = torch.tensor(np.concatenate([a.positions for a in systems])) + 0.1 * draw(6, 3)
    cells, pbc = torch.tensor(np.stack([a.cell.array for a in systems])), torch.ones(2, 3, dtype=torch.bool)
    idx = torch.tensor([0] * 2 + [1] * 4, dtype=torch.int32)
    matrix, counts, shifts = neighbor_list(x, 6.5, cell=cells, pbc=pbc, batch_idx=idx, half_fill=half)
    given = {"sigma": 3.4, "epsilon": 0.0104, "cell": cells, "batch_idx": idx}
    full = neighbor_list(x, 6.5, cell=cells, pbc=pbc, batch_idx=idx)
    expected = lennard_jones(6.5, r_switch=5.0)(
        x, **given, neighbor_matrix=full[0], neighbor_matrix_shifts=full[2], compute_forces=True, compute_virial=True,
        energy_reduction="atom",
    )  # fmt: skip
    parameters = [wp.array([value], dtype=wp.float64) for value in (0.0104, 3.4, 6.5, 1.5)]
    energies, forces, virial = (
        torch.zeros(6, dtype=FLOAT),
        torch.zeros(6, 3, dtype=FLOAT),
        torch.zeros(2, 9, dtype=FLOAT),
    )
    near = wp.from_torch(matrix, dtype=N), wp.from_torch(shifts.contiguous(), dtype=wp.vec3i)
    wp.launch(
        lj._batch_lj_energy_forces_virial_matrix_kernel_overload[wp.float64],
        dim=6,
        inputs=[
            *arrays(x, cells), *near, *arrays(counts, idx), *parameters, wp.bool(half), N(6), *arrays(energies, forces),
            scalars(virial),
        ],
        device="cpu",
    )  # fmt: skip
    close(energies, expected[0], 1e-11)
    close(forces, expected[1], 1e-11)
    close(virial.view(2, 3, 3), expected[2], 1e-11)
    if half:
        return
    with pytest.raises(ValueError, match="`scalar` must be"):
        _ = lj._batch_lj_energy_forces_matrix_kernel_overload[wp.int32]
    x, cells, energies, forces = x.float(), cells.float(), torch.zeros(6), torch.zeros(6, 3)
    inputs = [
        wp.from_torch(x, dtype=wp.vec3f), wp.from_torch(cells, dtype=wp.mat33f), *near, *arrays(counts, idx),
        *(wp.array([p.numpy()[0]], dtype=wp.float32) for p in parameters), wp.bool(False), N(6),
        wp.from_torch(energies), wp.from_torch(forces, dtype=wp.vec3f),
    ]  # fmt: skip
    wp.launch(lj._batch_lj_energy_forces_matrix_kernel_overload[wp.float32], dim=6, inputs=inputs, device="cpu")
    torch.testing.assert_close(forces.to(FLOAT), expected[1], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(energies.to(FLOAT), expected[0], atol=1e-6, rtol=1e-4)


def test_lennard_jones_of_atoms_that_are_lost():
    """A position that is no number, with an empty row, too, and the mark of an atom without neighbors, give NaN."""
    x = torch.tensor([[0.0, 0, 0], [4, 0, 0], [torch.nan, 0, 0], [4, 9, 0], [8, 9, 0], [0, 20, 0]], dtype=FLOAT)
    x = torch.cat([x, x[2:3]])
    # an atom itself, without a shift, is padding, as in all sums over pairs
    matrix = torch.tensor([[1, 7], [0, 1], [3, 7], [2, 4], [3, 7], [5, 7], [7, 7]], dtype=torch.int32)
    shifts = torch.zeros(7, 2, 3, dtype=torch.int32)
    shifts[5, 0] = NOWHERE
    counts, idx = torch.tensor([1, 2, 1, 2, 1, NOT_FINITE, 0], dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    parameters = [wp.array([value], dtype=wp.float64) for value in (0.0104, 3.4, 6.5, 1.5)]
    energies, forces = torch.zeros(7, dtype=FLOAT), torch.zeros(7, 3, dtype=FLOAT)
    near = wp.from_torch(matrix, dtype=N), wp.from_torch(shifts, dtype=wp.vec3i), *arrays(counts, idx)
    inputs = [*arrays(x, CELLS[:1]), *near, *parameters, wp.bool(False), N(7), *arrays(energies, forces)]
    wp.launch(lj._batch_lj_energy_forces_matrix_kernel_overload[wp.float64], dim=7, inputs=inputs, device="cpu")
    lost = [False, False, True, True, False, True, True]
    assert energies.isnan().tolist() == lost and forces.isnan().all(1).tolist() == lost
    half = 2.0 * 0.0104 * ((3.4 / 4.0) ** 12 - (3.4 / 4.0) ** 6)
    close(energies[[0, 1, 4]], torch.full((3,), half, dtype=FLOAT), 1e-12)


@pytest.mark.parametrize("batched", [False, True])
def test_ewald_kernels(batched):
    """Structure factors, what atoms get from them, and virials, put together as the client does."""
    s, q, alpha = Systems(), 1.0 + draw(7, seed=5), torch.tensor([0.5, 0.6], dtype=FLOAT)
    n, n_atoms, idx = (2, 7, IDX) if batched else (1, 3, None)
    x, q, cells, alpha = (
        s.x[:n_atoms].contiguous(),
        q[:n_atoms].contiguous(),
        CELLS[:n].contiguous(),
        alpha[:n].contiguous(),
    )
    k = electrostatics.generate_k_vectors_ewald_summation(cells, 6.0).reshape(n, -1, 3).contiguous()
    exact = ewald.ewald_reciprocal_space(
        x, q, cells, k if batched else k[0], alpha, idx, True, True, True
    )  # fmt: skip
    with pytest.raises(ValueError, match="`order`"):
        get_ewald_recip_kernel(wp.float64, order="backward")
    kernels = get_ewald_recip_kernel(wp.float64, batched=batched, deriv_state=None, cell_grad=True, order="forward")
    n_k = k.shape[1]
    cosines, sines = (torch.zeros(n_k, n_atoms, dtype=FLOAT) for _ in range(2))
    re, im, total = torch.zeros(n, n_k, dtype=FLOAT), torch.zeros(n, n_k, dtype=FLOAT), torch.zeros(n, dtype=FLOAT)
    waves, flat = wp.from_torch(k, dtype=wp.vec3d), wp.from_torch(k[0].contiguous(), dtype=wp.vec3d)
    factors, phases = [scalars(re), scalars(im)], [scalars(cosines), scalars(sines)]
    if batched:
        ends = torch.tensor([3, 7], dtype=torch.int32)
        ranges = arrays(ends - torch.tensor(SIZES, dtype=torch.int32), ends)
        blocks = -(-max(SIZES) // BATCH_BLOCK_SIZE)
        inputs = [*arrays(x, q), waves, *arrays(cells, alpha), *ranges, *arrays(total), *phases, *factors]
        wp.launch(kernels.fill, dim=(n_k, n, blocks), inputs=inputs, device="cpu")
    else:
        inputs = [*arrays(x, q), flat, *arrays(cells, alpha, total), *phases, scalars(re[0]), scalars(im[0])]
        wp.launch(kernels.fill, dim=n_k, inputs=inputs, device="cpu")
    energies, forces, gradients = (
        torch.zeros(n_atoms, dtype=FLOAT),
        torch.zeros(n_atoms, 3, dtype=FLOAT),
        torch.zeros(n_atoms, dtype=FLOAT),
    )
    none = alloc_ewald_recip_sentinels(wp.float64, "cpu")
    systems = arrays(IDX)[0] if batched else wp.empty((0,), dtype=N, device="cpu")
    inputs = [
        arrays(q)[0],
        systems,
        waves,
        *phases,
        *factors,
        none["grad_energy"],
        *arrays(energies, forces, gradients),
    ]
    wp.launch(kernels.compute, dim=n_atoms, inputs=inputs, device="cpu")
    volume, virial = torch.linalg.det(cells), torch.zeros(n, 3, 3, dtype=FLOAT)
    if batched:
        inputs = [waves, *arrays(alpha, volume), *factors, *arrays(virial)]
        wp.launch(kernels.virial, dim=(n_k, n), inputs=inputs, device="cpu")
        energies = ewald.ewald_energy_corrections_batch(energies, q, IDX, volume, alpha, total)
    else:
        inputs = [flat, *arrays(alpha, volume), scalars(re[0]), scalars(im[0]), *arrays(virial)]
        wp.launch(kernels.virial, dim=n_k, inputs=inputs, device="cpu")
        energies = ewald.ewald_energy_corrections(energies, q, volume, alpha, total)
    places = idx if batched else torch.zeros(3, dtype=torch.int32)
    background = np.pi * total / (alpha**2 * volume)
    gradients -= 2 * alpha[places] / np.sqrt(np.pi) * q + background[places]
    virial -= (0.5 * background * total)[:, None, None] * torch.eye(3, dtype=FLOAT)
    for found, expected in zip((energies, forces, gradients, virial), exact, strict=True):
        close(found, expected, 1e-10)
    assert EIGHTPI == 8 * np.pi


@pytest.mark.parametrize("batched", [False, True])
def test_parts_of_pme(batched):
    """Spread, transform, convolve, gather and correct, as the client does; derivatives are those returned."""
    s, alpha = Systems(), torch.tensor([0.5, 0.6], dtype=FLOAT)
    n, n_atoms, idx = (2, 7, IDX) if batched else (1, 3, None)
    places = IDX[:n_atoms]
    x, q = s.x[:n_atoms].requires_grad_(), (1.0 + draw(7, seed=5))[:n_atoms].requires_grad_()
    strain, mesh, order = torch.zeros(n, 3, 3, dtype=FLOAT, requires_grad=True), ((24, 28, 27), (8, 9, 8))[batched], 6
    deformed = torch.eye(3, dtype=FLOAT) + strain
    cells, count = pme._prepare_cell(CELLS[:n] @ deformed)
    at = (x.unsqueeze(1) @ deformed[places]).squeeze(1)
    alpha = pme._prepare_alpha(alpha[:n], count, FLOAT, x.device)
    inverse = torch.linalg.inv(cells)
    waves, squares = electrostatics.generate_k_vectors_pme(
        cells, mesh_dimensions=mesh, reciprocal_cell=2 * np.pi * inverse
    )
    axes = [torch.fft.fftfreq(m, d=1 / m, dtype=FLOAT) for m in mesh[:2]] + [
        torch.fft.rfftfreq(mesh[2], d=1 / mesh[2], dtype=FLOAT)
    ]
    moduli = [pme.compute_bspline_moduli_1d(axis, m, order) for axis, m in zip(axes, mesh)]
    volume, dims = torch.linalg.det(cells).abs(), (1, 2, 3) if batched else (0, 1, 2)
    common = {"spline_order": order, "batch_idx": idx, "cell_inv_t": inverse.mT.contiguous()}
    spectrum = torch.fft.rfftn(spline_spread(at, q, cells, mesh_dims=mesh, **common), dim=dims)
    pme.register_pme_ops()
    field = torch.ops.nvalchemiops.pme_fused_convolve(spectrum, squares, *moduli, alpha, volume, batched, False)
    potential = torch.fft.irfftn(field, norm="forward", s=mesh, dim=dims)
    values, pull = spline_gather_with_force(at, q, potential, cells, **common)
    close(spline_gather(at, potential, cells, **common), values)
    total = torch.zeros(n, dtype=FLOAT).index_add(0, places, q)
    of_system = volume, alpha, total
    if batched:
        energies, gradients = pme._batch_pme_energy_corrections_with_charge_grad(values, q, idx, *of_system)
        close(pme._batch_pme_energy_corrections(values, q, idx, *of_system), energies)
    else:
        energies, gradients = pme._pme_energy_corrections_with_charge_grad(values, q, *of_system)
        close(pme._pme_energy_corrections(values, q, *of_system), energies)
    virial = pme._compute_pme_reciprocal_virial(
        mesh_fft_raw=spectrum, convolved_mesh=field, k_vectors=waves, k_squared=squares, alpha=alpha,
        mesh_dimensions=mesh, is_batch=batched, device=x.device, dtype=FLOAT,
    )  # fmt: skip
    background = 0.5 * np.pi * total**2 / (alpha**2 * volume)
    virial = virial - background[:, None, None] * torch.eye(3, dtype=FLOAT)
    slopes = torch.autograd.grad(energies.sum(), (x, q, strain), retain_graph=True)
    for found, expected in zip((2 * pull, gradients, virial), (-slopes[0], slopes[1], -slopes[2]), strict=True):
        close(found, expected, 1e-10)
    exact = ewald.ewald_reciprocal_space(x, q, CELLS[:n], None, alpha, idx, True, True, True, k_cutoff=9.0)
    error = 0.05 if batched else 1e-5  # of the mesh; a coarse one has waves that are their own images
    for found, expected in zip((energies, 2 * pull, gradients, virial), exact, strict=True):
        torch.testing.assert_close(found, expected, atol=error, rtol=error)
    injected = _InjectChargeGrad.apply(energies.detach(), q, gradients, idx)
    close(injected, energies)
    close(torch.autograd.grad(injected.sum(), q)[0], slopes[1], 1e-10)
