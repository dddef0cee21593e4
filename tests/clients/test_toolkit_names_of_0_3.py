"""Names that nvalchemi-toolkit takes since its release 0.3, called as it calls them: L-BFGS, bins, operators."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import warp as wp

from nvalchemiops.math import wpdivmod
from nvalchemiops.torch._warp_op_helpers import register_noop_fake, scoped_warp_stream, torch_custom_op
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.lbfgs import (
    LBFGSCellState,
    LBFGSState,
    lbfgs_prepare_cell_state,
    lbfgs_prepare_state,
    lbfgs_step_coord,
    lbfgs_step_coord_cell,
)
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.batch_cell_list import batch_build_cell_list, estimate_batch_cell_list_sizes
from nvalchemiops.torch.neighbors.neighbor_utils import allocate_cell_list
from nvalchemiops.warp_dispatch import register_overloads

FLOAT, INT = torch.float64, torch.int32
SIZES = (3, 1, 4)
IDX = torch.arange(3, dtype=INT).repeat_interleave(torch.tensor(SIZES))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


# -- L-BFGS -------------------------------------------------------------------------------------------


def valleys(seed=0):
    """Positive definite matrices of systems, and where they have their minima."""
    made = []
    for n, size in enumerate(SIZES):
        a = draw(3 * size, 3 * size, seed=seed + n)
        made.append((a @ a.T + 9.0 * torch.eye(3 * size, dtype=FLOAT), draw(size, 3, seed=seed + n + 9)))
    return made


def pull(x, made):
    parts = zip(x.split(SIZES), made)
    return torch.cat([-(h @ (p - low).reshape(-1)).reshape(-1, 3) for p, (h, low) in parts])


def dense_step(history, scale, force, maxstep):
    """The inverse Hessian as a matrix, updated pair by pair."""
    eye = np.eye(force.size)
    inverse = scale * eye
    for s, y in history:
        rho = 1.0 / (s @ y)
        inverse = (eye - rho * np.outer(s, y)) @ inverse @ (eye - rho * np.outer(y, s)) + rho * np.outer(s, s)
    move = (inverse @ force.ravel()).reshape(-1, 3)
    return move * min(1.0, maxstep / np.linalg.norm(move, axis=1).max())


@pytest.mark.parametrize("history_size", [1, 3])
def test_steps_are_those_of_matrices(history_size):
    """Of BFGS with a history of this length, of each system for itself."""
    made, x = valleys(), draw(8, 3, seed=20)
    state = lbfgs_prepare_state(8, 3, history_size=history_size)
    histories: list[Any] = [[], [], []]
    limited = set()
    for step in range(9):
        f, before = pull(x, made), x.clone()
        lbfgs_step_coord(x, f, state, IDX, maxstep=0.6)
        for n, parts in enumerate(zip(before.split(SIZES), f.split(SIZES), x.split(SIZES))):
            at, force, after = (p.numpy() for p in parts)
            if step:
                s, y = (at - histories[n][-1][2]).ravel(), (histories[n][-1][3] - force).ravel()
                histories[n][-1][:2] = s, y
            history = [(s, y) for s, y, *_ in histories[n]][-history_size:]
            scale = (history[-1][0] @ history[-1][1]) / (history[-1][1] @ history[-1][1]) if step else 1.0 / 70.0
            move = dense_step(history, scale, force, 0.6)
            np.testing.assert_allclose(after - at, move, atol=1e-10)
            whole = state.direction[IDX == n].numpy()
            longest = np.linalg.norm(whole, axis=1).max()
            of_step = {"gg": (force**2).sum(), "d0": scale, "dmax": longest, "dquad": (force * whole).sum()}
            for name, expected in (of_step | {"alpha_step": min(1.0, 0.6 / longest)}).items():
                np.testing.assert_allclose(getattr(state, name)[n], expected, rtol=1e-10)
            assert state.n_loop[n] == len(history)
            if history_size == 1 and history:
                (s, y), q = history[-1], force.ravel()
                first = (s @ q) / (s @ y)
                second = scale * (y @ (q - first * y)) / (s @ y)
                np.testing.assert_allclose([state.alpha_hist[n, 0], state.beta_hist[n, 0]], [first, second], rtol=1e-8)
            limited.add(bool(np.linalg.norm(move, axis=1).max() > 0.6 - 1e-12))
            histories[n].append([None, None, at, force])
    assert limited == {True, False}
    assert state.iteration.tolist() == [9] * 3 and state.history_count.tolist() == [history_size] * 3


def test_steps_enter_the_history_above_the_given_curvature():
    """By the angle of the step and the change of the gradient, whatever their lengths."""
    for share, enters in ((0.99, 1), (1.01, 0)):
        made, x = valleys()[:1], draw(3, 3, seed=20)
        state, idx = lbfgs_prepare_state(3, 1), torch.zeros(3, dtype=INT)
        before, f = x.clone(), -(made[0][0] @ (x - made[0][1]).reshape(-1)).reshape(3, 3)
        lbfgs_step_coord(x, f, state, idx)
        after = -(made[0][0] @ (x - made[0][1]).reshape(-1)).reshape(3, 3)
        cosine = torch.nn.functional.cosine_similarity((x - before).flatten(), (f - after).flatten(), dim=0).item()
        lbfgs_step_coord(x, after, state, idx, curvature_eps=share * cosine)
        assert state.history_count.tolist() == [enters]


def test_minima_are_found_and_systems_do_not_know_of_each_other():
    made, x = valleys(3), draw(8, 3, seed=21)
    state, alone = lbfgs_prepare_state(8, 3), lbfgs_prepare_state(3, 1)
    first = x[:3].clone()
    for _ in range(25):
        lbfgs_step_coord(first, pull(torch.cat([first, x[3:]]), made)[:3], alone, IDX[:3], maxstep=0.0)
        lbfgs_step_coord(x, pull(x, made), state, IDX, maxstep=-1.0)  # no limit
    torch.testing.assert_close(x, torch.cat([low for _, low in made]), atol=1e-8, rtol=0)
    assert torch.equal(first, x[:3])


def test_hills_are_left_downhill_and_systems_at_rest_stay():
    """One coordinate of each atom at the top of a cosine: no pair enters the history before the slope flattens."""
    x = torch.tensor([[0.01, 0.0, 0.0], [0.0, 2.0, 0.0]], dtype=FLOAT)
    state = lbfgs_prepare_state(2, 2, dtype=FLOAT)
    energies = []
    for _ in range(25):
        energies.append(x[0].cos().sum().item())
        lbfgs_step_coord(x, x.sin() * torch.tensor([[1.0], [0.0]]), state, torch.arange(2, dtype=INT))
    assert all(b <= a + 1e-12 for a, b in zip(energies, energies[1:])) and energies[-1] == pytest.approx(1.0)
    assert x[0, 0] == pytest.approx(np.pi) and x[1].tolist() == [0.0, 2.0, 0.0]


def test_single_precision_no_systems_and_states_of_the_client():
    """The client keeps all fields in a container of its own, and makes the state again by name."""
    x = draw(8, 3).float()
    state = lbfgs_prepare_state(8, 3, dtype=torch.float32)
    leading = {f.name: getattr(state, f.name).shape[0] for f in dataclasses.fields(state)}
    assert set(leading.values()) == {8, 3} and list(leading) == list(LBFGSState.__annotations__)
    for _ in range(60):
        again = LBFGSState(**{name: getattr(state, name) for name in leading})
        lbfgs_step_coord(x, pull(x.double(), valleys()).float(), again, IDX)
    torch.testing.assert_close(x.double(), torch.cat([low for _, low in valleys()]), atol=1e-3, rtol=0)
    nothing = torch.zeros(0, 3, dtype=FLOAT)
    for n in (0, 2):
        lbfgs_step_coord(nothing, nothing, lbfgs_prepare_state(0, n), torch.zeros(0, dtype=INT))
    with pytest.raises(NotImplementedError, match="compute_reductions"):
        lbfgs_step_coord(x, x, state, IDX, compute_reductions=False)


def crystals():
    """Sheared argon, of four atoms and of one, moved off the minimum: lattice vectors in columns, lower triangular."""
    cells = torch.tensor([[5.5, 0, 0], [0.3, 5.1, 0], [0.2, -0.3, 5.6]], dtype=FLOAT).repeat(2, 1, 1)
    cells[1] = torch.tensor([[3.9, 0, 0], [1.9, 3.3, 0], [1.8, 1.2, 3.2]], dtype=FLOAT)
    sites = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5], [0.1, 0.2, 0.3]], dtype=FLOAT)
    idx = torch.tensor([0] * 4 + [1], dtype=INT)
    x = (cells[idx] @ sites.unsqueeze(2)).squeeze(2) + 0.05 * draw(5, 3) * (idx == 0)[:, None]
    return x, cells, idx


def argon(x, columns, idx):
    """Energies, forces and stresses, of cells with lattice vectors in columns."""
    cells, pbc = columns.mT.contiguous(), torch.ones(len(columns), 3, dtype=torch.bool)
    matrix, _, shifts = neighbor_list(x, 8.0, cell=cells, pbc=pbc, batch_idx=idx)
    totals, forces, virials = lennard_jones(8.0, r_switch=6.0)(
        x, cells, neighbor_matrix=matrix, neighbor_matrix_shifts=shifts, batch_idx=idx, sigma=3.4, epsilon=0.0104,
        compute_forces=True, compute_virial=True, energy_reduction="system",
    )  # fmt: skip
    return totals, forces, -virials / torch.linalg.det(cells)[:, None, None]


def test_forces_on_atoms_and_cells_are_those_of_differences():
    x, cells, idx = crystals()
    ptr = torch.tensor([0, 4, 5], dtype=INT)
    rest = lbfgs_prepare_cell_state(ptr, cells, cell_force_scale=1.7)
    state = lbfgs_prepare_state(9, 2)
    for _ in range(3):  # away from the cell at the start
        _, f, stress = argon(x, cells, idx)
        lbfgs_step_coord_cell(x, cells, f, stress, state, rest, idx)
    assert (cells - rest.ref_cell).abs().max() > 0.02
    _, f, stress = argon(x, cells, idx)
    lbfgs_step_coord_cell(x.clone(), cells.clone(), f, stress, state, rest, idx)
    forces, base = rest.ext_forces.clone(), state.x_base.clone()
    assert rest.ext_batch_idx.tolist() == [0] * 6 + [1] * 3 and rest.ext_atom_ptr.tolist() == [0, 6, 9]
    assert rest.kappa.tolist() == [1.7 * 4, 1.7]

    def energy(rows):
        phi = torch.zeros(2, 3, 3, dtype=FLOAT)
        a, b = rows[[4, 7]] / rest.kappa[:, None], rows[[5, 8]] / rest.kappa[:, None]
        phi[:, :, 0], phi[:, 1:, 1], phi[:, 2, 2] = a, b[:, :2], b[:, 2]
        now = (phi[idx] @ rows[[0, 1, 2, 3, 6]].unsqueeze(2)).squeeze(2)
        return argon(now, phi @ rest.ref_cell, idx)[0].sum().item()

    for row, axis in ((0, 1), (6, 2), *((row, axis) for row in (4, 5, 7, 8) for axis in range(3))):
        values = []
        for sign in (1, -1):
            moved = base.clone()
            moved[row, axis] += sign * 2e-5
            values.append(energy(moved))
        assert forces[row, axis].item() == pytest.approx(-(values[0] - values[1]) / 4e-5, abs=1e-9)


def test_a_cell_that_the_caller_has_changed_stays_so():
    """At rest, whatever the cell was at the start. Cells of single precision relax in that of their atoms."""
    x, cells, idx = crystals()
    rest, state = lbfgs_prepare_cell_state(torch.tensor([0, 4, 5], dtype=INT), cells.float()), lbfgs_prepare_state(9, 2)
    assert {getattr(rest, name).dtype for name in ("ref_cell", "ref_cell_inv", "kappa", "ext_positions")} == {FLOAT}
    assert {getattr(state, name).dtype for name in ("iteration", "end", "n_loop", "history_count")} == {INT}
    y, larger = 1.1 * x, 1.1 * cells
    lbfgs_step_coord_cell(y, larger, 0.0 * x, 0.0 * cells, state, rest, idx)
    torch.testing.assert_close(y, 1.1 * x)
    torch.testing.assert_close(larger, 1.1 * cells)
    for _ in range(3):
        _, f, stress = argon(x, cells, idx)
        lbfgs_step_coord_cell(x, cells, f, stress, state, rest, idx)
        torch.testing.assert_close(rest.phi @ rest.ref_cell, cells)
        torch.testing.assert_close(rest.phi @ rest.phi_inv, torch.eye(3, dtype=FLOAT).expand(2, 3, 3))
    assert state.n_loop.tolist() == state.history_count.tolist() and state.n_loop.max() > 1


def test_cells_relax_with_their_atoms():
    x, cells, idx = crystals()
    rest = lbfgs_prepare_cell_state(torch.tensor([0, 4, 5], dtype=INT), cells)
    state = lbfgs_prepare_state(9, 2)
    again = LBFGSCellState(**{f.name: getattr(rest, f.name) for f in dataclasses.fields(rest)})
    for _ in range(60):
        _, f, stress = argon(x, cells, idx)
        lbfgs_step_coord_cell(x, cells, f, stress, state, again, idx)
    energies, f, stress = argon(x, cells, idx)
    assert f.abs().max() < 1e-7 and stress.abs().max() < 1e-7
    assert torch.triu(cells, 1).abs().max() == 0.0
    assert energies[0] / 4 == pytest.approx(energies[1].item(), abs=1e-5)  # both are close-packed now
    lbfgs_prepare_cell_state(torch.tensor([0, 4, 5], dtype=INT), cells, alignment_atol=1e-12)
    for row, column in ((0, 1), (0, 2), (1, 2)):
        skew = cells.clone()
        skew[1, row, column] = 0.1
        with pytest.raises(ValueError, match="lower triangular"):
            lbfgs_prepare_cell_state(torch.tensor([0, 4, 5], dtype=INT), skew, alignment_atol=1e-3)
        lbfgs_prepare_cell_state(torch.tensor([0, 4, 5], dtype=INT), skew)
    rest = lbfgs_prepare_cell_state(torch.tensor([0, 4, 4, 5], dtype=INT), cells[[0, 0, 1]])
    assert rest.kappa.tolist() == [4.0, 1.0, 1.0]  # a system without atoms has a cell, too
    with pytest.raises(ValueError, match="volume"):
        lbfgs_prepare_cell_state(torch.tensor([0, 4, 5], dtype=INT), 0.0 * cells)
    with pytest.raises(ValueError, match=r"`cell` must have shape \(n_systems, 3, 3\) = \(3, 3, 3\)"):
        lbfgs_prepare_cell_state(torch.tensor([0, 4, 5, 5], dtype=INT), cells)


# -- bins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cutoff", [2.0, 4.0, 9.0])
@pytest.mark.parametrize("room", [1.0, 0.4])
def test_bins_hold_all_pairs(cutoff, room):
    """Found as the client's kernel finds them: bins within the radius, with the images that `wpdivmod` gives."""
    cells = torch.tensor(
        [[[5.0, 0.3, 0], [1.0, 6, 0.2], [0.5, 0.7, 7]], [[6.0, 0, 0.4], [-2.0, 5, 0], [0.2, 1, 8]]], dtype=FLOAT
    )
    pbc = torch.tensor([[True, True, True], [True, False, True]])
    x, idx = 6.0 * draw(14, 3), torch.tensor([1, 0] * 7, dtype=INT)
    total, radius = estimate_batch_cell_list_sizes(cells, pbc, cutoff, min_cells_per_dimension=2)
    names = "per_axis", "radius", "shifts", "bins", "counts", "starts", "atoms"
    made = dict(zip(names, allocate_cell_list(14, max(int(room * total), 2), radius, x.device), strict=True))
    offsets = torch.zeros(2, dtype=INT)
    batch_build_cell_list(x, cutoff, cells, pbc, idx, *made.values(), min_cells_per_dimension=2, cell_offsets=offsets)
    assert all(t.dtype == INT for t in made.values()) and made["counts"].sum() == 14
    per_axis, radius, shifts, bins, counts, starts, atoms = (t.numpy() for t in made.values())
    found = set()
    for i in range(14):
        n = int(idx[i])
        reach = [range(-r, r + 1) for r in radius[n]]
        for step in np.stack(np.meshgrid(*reach, indexing="ij"), -1).reshape(-1, 3):
            image, place = np.divmod(bins[i] + step, per_axis[n])
            if (image[~pbc[n].numpy()] != 0).any():
                continue
            at = offsets[n] + place[0] + per_axis[n, 0] * (place[1] + per_axis[n, 1] * place[2])
            for j in atoms[starts[at] : starts[at] + counts[at]].tolist():
                shift = image + shifts[i] - shifts[j]
                vector = x[j].numpy() - x[i].numpy() + shift @ cells[n].numpy()
                if np.linalg.norm(vector) < cutoff and (i != j or shift.any()):
                    assert (i, j, *shift) not in found
                    found.add((i, j, *shift))
    pairs, _, images = neighbor_list(x, cutoff, cell=cells, pbc=pbc, batch_idx=idx, return_neighbor_list=True)
    assert found == set(zip(*pairs.tolist(), *images.T.tolist())) and found


# -- kernels and operators ----------------------------------------------------------------------------


@wp.kernel(enable_backward=False)
def divided(a: wp.array(dtype=wp.int32), b: int, out: wp.array(dtype=wp.vec2i)):
    i = wp.tid()
    q, r = wpdivmod(a[i], b)
    out[i] = wp.vec2i(q, r)


@wp.kernel(enable_backward=False)
def doubled(x: wp.array(dtype=Any), out: wp.array(dtype=Any)):
    i = wp.tid()
    out[i] = x[i] + x[i]


@pytest.mark.later  # kernels of its own are compiled
def test_kernels_and_operators_of_the_client():
    kernels = register_overloads(doubled, lambda t: [wp.array(dtype=t)] * 2, dtypes=(wp.float32, wp.float64))
    assert list(kernels) == [wp.float32, wp.float64]
    of_pairs = register_overloads(doubled, lambda v, s: [wp.array(dtype=v)] * 2)
    assert list(of_pairs) == [wp.vec3f, wp.vec3d]
    assert list(register_overloads(doubled, lambda v, s: [wp.array(dtype=v)] * 2, key_fn=lambda v, s: s)) == [
        wp.float32,
        wp.float64,
    ]

    @torch_custom_op("nvalchemiops_test::doubled_out", mutates_args=("out",))
    def doubled_out(x: torch.Tensor, out: torch.Tensor) -> None:
        kind = {torch.float32: wp.float32, torch.float64: wp.float64}[x.dtype]
        with scoped_warp_stream(x.device), scoped_warp_stream("cpu", torch_stream=None):
            arrays = [wp.from_torch(t, dtype=kind, requires_grad=False) for t in (x, out)]
            wp.launch(kernels[kind], dim=len(x), inputs=arrays, device=arrays[0].device)

    register_noop_fake(doubled_out)
    a = np.arange(-7, 8, dtype=np.int32)
    for b in (3, -3, 1):
        out = wp.zeros(len(a), dtype=wp.vec2i, device="cpu")
        wp.launch(divided, dim=len(a), inputs=[wp.array(a, device="cpu"), b, out], device="cpu")
        np.testing.assert_array_equal(out.numpy(), np.stack(np.divmod(a, b), 1))
    assert str(wpdivmod(-7, 3)) == str(divmod(-7, 3))  # outside of kernels, too

    def outside(x):
        out = torch.empty_like(x)
        doubled_out(x, out)
        return out + 1.0

    for x in (draw(5), draw(5).float()):
        assert torch.equal(outside(x), 2 * x + 1.0)
        assert torch.equal(torch.compile(outside, backend="aot_eager", fullgraph=True)(x), 2 * x + 1.0)
