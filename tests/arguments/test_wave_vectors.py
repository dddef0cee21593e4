"""Ways to say which wave vectors a sum uses, and what the functions give that make them."""

import math

import numpy as np
import pytest
import torch

from nvalchemiops.interactions.electrostatics import k_vectors as core
from nvalchemiops.interactions.electrostatics.k_vectors import MOST_AT_ONCE
from nvalchemiops.torch.interactions.electrostatics import (
    ewald_reciprocal_space,
    ewald_summation,
    generate_ewald_miller_indices,
    generate_k_squared_pme,
    generate_k_vectors_ewald_summation,
    generate_k_vectors_pme,
    k_vectors_from_miller_indices,
)
from nvalchemiops.torch.interactions.electrostatics.k_vectors import _batches, _kept, chosen_points, points_within
from tests.support.comparing import close
from tests.support.systems import ALL, batch, csr, triclinic

SYSTEM = triclinic(5, charged=True)
LEFT = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]).double() @ triclinic(2, seed=9).cell[0]
ALPHA, K_CUTOFF = 0.7, 4.3


def waves(system=SYSTEM, k_vectors=None, **options):
    return ewald_reciprocal_space(*system[:3], k_vectors, ALPHA, batch_idx=system.batch_idx, **options, **ALL)


def differ(found, expected):
    return any((a - b).abs().max() > 1e-6 for a, b in zip(found, expected, strict=True))


def every_index(cell, k_cutoff, bound=12):
    """Miller indices of all wave vectors up to a length, k and -k, among far more than are needed."""
    miller = torch.cartesian_prod(*[torch.arange(-bound, bound + 1)] * 3)
    length = (2.0 * math.pi * miller.double() @ torch.linalg.inv(cell).T).norm(dim=1)
    return miller[(length <= k_cutoff) & (length > 0.0)]


def one_of_each(miller):
    """Half of them: the first index that is not zero is positive."""
    leading = torch.where(miller[:, 0] != 0, miller[:, 0], torch.where(miller[:, 1] != 0, miller[:, 1], miller[:, 2]))
    return miller[leading > 0]


def as_set(miller):
    return {tuple(row) for row in miller.tolist()}


# -- the same set, said in different ways ---------------------------------------------------------


def test_all_ways_to_say_the_same():
    cell = SYSTEM.cell[0]
    full = every_index(cell, K_CUTOFF)
    half = one_of_each(full)
    assert len(full) == 2 * len(half) > 100
    expected = waves(k_cutoff=K_CUTOFF)
    shuffled = full[torch.randperm(len(full), generator=torch.Generator().manual_seed(0))]
    for miller in (full, half, -half, shuffled, half.int(), torch.cat([half, full[:7]])):
        close(waves(miller_indices=miller), expected)
        close(waves(k_vectors=k_vectors_from_miller_indices(cell, miller)), expected)
        close(waves(k_vectors=k_vectors_from_miller_indices(cell, miller)[None]), expected)
    with_origin = torch.cat([torch.zeros(1, 3, dtype=torch.int64), half])
    close(waves(miller_indices=with_origin), expected)
    assert differ(waves(miller_indices=half[:-20]), expected)


@pytest.mark.parametrize("bounds", [(2, 3, 1), (0, 2, 2), (1, 0, 0), torch.tensor([3, 2, 2]), [2, 2, 2]])
def test_a_box(bounds):
    x, y, z = bounds if isinstance(bounds, (tuple, list)) else bounds.tolist()
    box = torch.cartesian_prod(*[torch.arange(-b, b + 1) for b in (x, y, z)])
    box = box[box.abs().sum(1) > 0]
    expected = waves(miller_indices=box)
    close(waves(miller_bounds=bounds), expected)
    found = generate_ewald_miller_indices(SYSTEM.cell, K_CUTOFF, bounds)
    assert as_set(found) == as_set(one_of_each(box))
    close(waves(miller_indices=found), expected)


def test_generated_vectors_are_those_of_their_box():
    """More than those up to the cutoff: the box that holds them."""
    k_vectors = generate_k_vectors_ewald_summation(SYSTEM.cell, K_CUTOFF)
    miller = generate_ewald_miller_indices(SYSTEM.cell, K_CUTOFF)
    bounds = miller.abs().amax(0).tolist()
    expected = waves(miller_bounds=bounds)
    close(waves(k_vectors=k_vectors), expected)
    close(waves(miller_indices=miller), expected)
    inside = k_vectors[k_vectors.norm(dim=1) <= K_CUTOFF]
    close(waves(k_vectors=inside), waves(k_cutoff=K_CUTOFF))


def test_the_length_at_the_cutoff_belongs():
    """Shells of a cubic crystal are whole, however their lengths round."""
    system = SYSTEM._replace(cell=torch.eye(3).double()[None] * 5.0)
    for shell in (1, 2, 3, 9, 14):
        length = 2.0 * math.pi / 5.0 * math.sqrt(shell)
        miller = torch.cartesian_prod(*[torch.arange(-4, 5)] * 3)
        miller = miller[(miller.square().sum(1) <= shell) & (miller.abs().sum(1) > 0)]
        close(waves(system, k_cutoff=length), waves(system, miller_indices=miller))


def test_systems_of_a_batch_have_their_own():
    systems = [SYSTEM, triclinic(4, seed=5)._replace(cell=1.5 * triclinic(4, seed=5).cell), triclinic(6, seed=6)]
    together = batch(*systems)
    lengths = torch.tensor([4.3, 3.0, 5.0]).double()
    found = waves(together, k_cutoff=lengths)
    singles = [waves(s, k_cutoff=k) for s, k in zip(systems, lengths.tolist())]
    close(found, [torch.cat(parts) for parts in zip(*singles)])
    # a common list of indices, and the vectors of each of the cells
    miller = generate_ewald_miller_indices(together.cell, lengths)
    k_vectors = generate_k_vectors_ewald_summation(together.cell, lengths)
    assert k_vectors.shape == (3, len(miller), 3)
    expected = [torch.cat(parts) for parts in zip(*[waves(s, miller_indices=miller) for s in systems])]
    close(waves(together, miller_indices=miller), expected)
    close(waves(together, k_vectors=k_vectors), expected)
    close(waves(together, miller_bounds=miller.abs().amax(0).tolist()), expected)
    # different lists for different cells, padded to one shape by the origin
    lists = [one_of_each(every_index(s.cell[0], k)) for s, k in zip(systems, lengths.tolist())]
    longest = max(map(len, lists))
    padded = [
        torch.nn.functional.pad(k_vectors_from_miller_indices(s.cell, m), (0, 0, 0, longest - len(m)))
        for s, m in zip(systems, lists)
    ]
    close(waves(together, k_vectors=torch.stack(padded)), found)


def without_padding(points, begin, system, weights):
    """The points without those of no weight at the end, which belong to the last system."""
    last = int(begin[-2])
    end = last + 1 + int(points[last + 1 :].any(1).sum())
    assert not points[end:].any() and not weights[end:].any() and (system[end:] == len(begin) - 2).all()
    assert begin[-1] == len(points) == len(system) == len(weights)
    return points[:end], begin.clamp(max=end), system[:end], weights[:end]


def test_points_of_many_systems_are_those_of_each():
    """Systems that are looked at together, one that has too many points for that, and one without a lattice."""
    generator = torch.Generator().manual_seed(3)
    cell = 6.0 * torch.eye(3).double() + torch.randn(40, 3, 3, generator=generator, dtype=torch.float64)
    lengths = 2.0 + torch.rand(40, generator=generator, dtype=torch.float64)
    lengths[7], cell[11] = 30.0, 0.2 * torch.eye(3)
    _kept.clear()
    for nothing in (False, True):
        if nothing:
            cell[20, 0] = 0.0
        points, begin, system, weights = without_padding(
            *points_within(cell, lengths)
        )  # some are known the second time
        assert begin[0] == 0 and begin[-1] == len(points) and begin.diff().max() > MOST_AT_ONCE
        assert begin[12] - begin[11] == 1 and weights[begin[20] : begin[21]].isnan().all() == nothing
        for number, (h, k) in enumerate(zip(cell, lengths)):
            _kept.clear()
            here = slice(begin[number], begin[number + 1])
            alone, _, _, weights_alone = without_padding(*points_within(h[None], k[None]))
            assert torch.equal(points[here], alone)
            torch.testing.assert_close(weights[here], weights_alone, rtol=0.0, atol=0.0, equal_nan=True)
            assert not points[here][0].any() and (system[here] == number).all()
        points_within(cell[:18], lengths[:18])


@pytest.mark.parametrize("step", [1e-6, 1e-4, 1e-2])
def test_cells_that_change_a_little_have_exactly_their_k_vectors(step):
    """Points of the call before are used again for systems whose k-vectors are the same, and for no others."""
    generator = torch.Generator().manual_seed(5)
    cell = torch.stack([5.0 * torch.eye(3).double(), SYSTEM.cell[0], 4.0 * torch.eye(3).double(), SYSTEM.cell[0]])
    cell[2, 2, 0] = 3.0
    cubic = 2.0 * math.pi * 9.0**0.5 / 5.0  # the length of (2, 2, 1) and (3, 0, 0)
    lengths = torch.tensor([cubic, K_CUTOFF, K_CUTOFF, 1e-9], dtype=torch.float64)
    n_kept = 0
    for _ in range(40):
        _kept.clear()
        before = _batches.find(lengths.numpy().tobytes())
        points, begin, _, weights = without_padding(*points_within(cell, lengths))
        expected = core.points_within(cell.numpy(), lengths.numpy())
        assert np.array_equal(points, expected.points) and np.array_equal(begin, expected.begin)
        assert np.array_equal(weights, expected.weights)
        after = _batches.find(lengths.numpy().tobytes())
        n_kept += before is not None and sum(a is b for a, b in zip(after.each, before.each))
        cell = cell + step * cell @ (2.0 * torch.rand(4, 3, 3, generator=generator, dtype=torch.float64) - 1.0)
    assert n_kept > 39 if step > 1e-3 else n_kept > 100


@pytest.mark.parametrize("tiny", [0.0, 1e-300, 1e-109, float("nan"), float("inf")])
@pytest.mark.parametrize("huge", [0.0, 1e5, 1e150])
def test_a_cell_without_volume_in_a_batch_has_weights_that_are_nan(tiny, huge):
    """As on a GPU, where cells are not checked beforehand; other systems keep their vectors, without warnings."""
    broken = torch.tensor([[tiny, 0.0, 0.0], [huge, tiny, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    lengths = torch.tensor([K_CUTOFF, K_CUTOFF], dtype=torch.float64)
    _, begin, _, weights = without_padding(*chosen_points(torch.stack([broken, SYSTEM.cell[0]]), lengths))
    alone = without_padding(*chosen_points(SYSTEM.cell, lengths[:1]))
    is_needle = tiny == 1e-109 and huge == 0.0  # regular: all of its k-vectors but the origin are longer
    first = int(begin[1])
    assert begin[2] == first + len(alone[3]) and weights[:first].isnan().all() != is_needle
    close([weights[first:]], [alone[3]], 0.0)


# -- gradients, when they were made for another cell ----------------------------------------------


@pytest.mark.parametrize("source", ["miller_indices", "miller_bounds", "k_vectors"])
def test_cell_gradients_with_cached_wave_vectors_equal_differences(source):
    """All nine components, of a cell that requires them: cached data are no constants of the energy."""
    cell = SYSTEM.cell.clone().requires_grad_()
    miller = generate_ewald_miller_indices(SYSTEM.cell, K_CUTOFF)
    cached = {
        "miller_indices": miller,
        "miller_bounds": tuple(miller.abs().amax(0).tolist()),
        "k_vectors": k_vectors_from_miller_indices(SYSTEM.cell, miller),
    }[source]
    options = {"alpha": ALPHA, **csr(SYSTEM, 5.0)}
    energies, forces, virial = ewald_summation(
        *SYSTEM[:2], cell, **{source: cached}, **options, compute_forces=True, compute_virial=True
    )
    (slope,) = torch.autograd.grad(energies.sum(), cell)

    def energy(moved):
        return ewald_summation(SYSTEM.positions, SYSTEM.charges, moved, miller_indices=miller, **options).sum().item()

    expected, h = torch.zeros(1, 3, 3, dtype=torch.float64), 1e-4
    for a in range(3):
        for b in range(3):
            step = torch.zeros(1, 3, 3, dtype=torch.float64)
            step[0, a, b] = h
            expected[0, a, b] = (energy(SYSTEM.cell + step) - energy(SYSTEM.cell - step)) / (2.0 * h)
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-6)
    by_strain = SYSTEM.positions.mT @ forces - SYSTEM.cell.mT @ slope
    torch.testing.assert_close(virial, by_strain, rtol=1e-10, atol=1e-10)


def test_integer_indices_stay_exact_as_the_cell_moves():
    """Cached once, used for a trajectory: equal to those of the new cell, with virial and gradients."""
    miller = generate_ewald_miller_indices(SYSTEM.cell, K_CUTOFF)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        deform = torch.eye(3).double() + 0.05 * torch.randn(3, 3, dtype=torch.float64, generator=generator)
        moved = SYSTEM._replace(positions=SYSTEM.positions @ deform, cell=SYSTEM.cell @ deform)
        expected = waves(moved, k_vectors=k_vectors_from_miller_indices(moved.cell, miller))
        close(waves(moved, miller_indices=miller), expected)


def test_vectors_of_another_cell_are_an_error():
    k_vectors = generate_k_vectors_ewald_summation(SYSTEM.cell, K_CUTOFF)
    for other in (1.01 * SYSTEM.cell, SYSTEM.cell.mT, SYSTEM.cell + 0.02):
        moved = SYSTEM._replace(cell=other.contiguous())
        with pytest.raises(ValueError, match=r"`k_vectors`.*`miller_indices`"):
            waves(moved, k_vectors=k_vectors)
        with pytest.raises(ValueError, match="`k_vectors`"):
            ewald_summation(*moved[:3], ALPHA, k_vectors)
    # another basis of the same lattice has the same vectors
    basis = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [-1.0, 0.0, -1.0]]).double() @ SYSTEM.cell
    close(waves(SYSTEM._replace(cell=basis), k_vectors=k_vectors), waves(k_vectors=k_vectors), 1e-10)


def test_vectors_that_are_made_inside_a_compiled_graph():
    """Their number, which the graph learns when it runs, follows from the largest indices."""
    x, q, cell = SYSTEM[:3]

    def energies(cell):
        k_vectors = generate_k_vectors_ewald_summation(cell, K_CUTOFF, (2, 3, 2))
        return ewald_reciprocal_space(x, q, cell, k_vectors, ALPHA)

    compiled = torch.compile(energies, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(cell), energies(cell))
    nothing = ewald_reciprocal_space(x, q, cell, cell[0, :0], ALPHA)
    assert nothing.shape == q.shape and not torch.equal(nothing, energies(cell))


def test_gradients_of_the_vectors_themselves():
    """`k_vectors_from_miller_indices` is differentiable in the cell."""
    miller = generate_ewald_miller_indices(SYSTEM.cell, 2.0)
    cell = SYSTEM.cell.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda c: k_vectors_from_miller_indices(c, miller), (cell,))


# -- what is made ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [SYSTEM.cell[0], LEFT, torch.diag(torch.tensor([3.0, 9.0, 5.0])).double()])
@pytest.mark.parametrize("k_cutoff", [2.0, 4.3])
def test_a_half_space_that_holds_all_vectors_up_to_the_cutoff(cell, k_cutoff):
    k_vectors = generate_k_vectors_ewald_summation(cell, k_cutoff)
    miller = generate_ewald_miller_indices(cell, k_cutoff)
    assert k_vectors.shape == miller.shape == (len(miller), 3) and not miller.is_floating_point()
    found = as_set(miller)
    assert len(found) == len(miller)
    assert (0, 0, 0) not in found
    assert not any((-x, -y, -z) in found for x, y, z in found)
    assert as_set(one_of_each(miller)) == found
    assert as_set(one_of_each(every_index(cell, k_cutoff))) <= found
    torch.testing.assert_close(k_vectors @ cell.T, 2.0 * math.pi * miller.double(), rtol=0, atol=1e-10)
    # a cell as (1, 3, 3) is one system as well
    torch.testing.assert_close(generate_k_vectors_ewald_summation(cell[None], k_cutoff), k_vectors, rtol=0, atol=0)


def test_vectors_of_several_cells():
    cells = torch.stack([SYSTEM.cell[0], 1.4 * LEFT, torch.eye(3).double() * 4.0])
    lengths = torch.tensor([3.0, 2.0, 4.0]).double()
    k_vectors = generate_k_vectors_ewald_summation(cells, lengths)
    miller = generate_ewald_miller_indices(cells, lengths)
    assert k_vectors.shape == (3, len(miller), 3)
    for n in range(3):
        assert as_set(one_of_each(every_index(cells[n], lengths[n].item()))) <= as_set(miller)
        torch.testing.assert_close(k_vectors[n], k_vectors_from_miller_indices(cells[n], miller))
    bounds = (2, 1, 3)
    assert generate_k_vectors_ewald_summation(cells, lengths, bounds).shape == (3, (5 * 3 * 7 - 1) // 2, 3)


def test_vectors_keep_their_dtype(dtype):
    cell = SYSTEM.cell.to(dtype)
    assert generate_k_vectors_ewald_summation(cell, 3.0).dtype == dtype
    assert {t.dtype for t in generate_k_vectors_pme(cell, (4, 5, 6))} == {dtype}
    moved = SYSTEM.to(dtype)
    k_vectors = generate_k_vectors_ewald_summation(moved.cell, K_CUTOFF)
    found = waves(moved, k_vectors=k_vectors)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-12}[dtype]
    energies, *others = waves(k_vectors=k_vectors_from_miller_indices(SYSTEM.cell, _of(k_vectors)))
    close(found, [energies, *[t.to(dtype) for t in others]], tolerance)


def _of(k_vectors):
    return (k_vectors.double() @ SYSTEM.cell[0].T / (2.0 * math.pi)).round().long()


@pytest.mark.parametrize("mesh", [(4, 5, 6), (5, 4, 7), (1, 2, 3), (8, 8, 8)])
def test_vectors_of_a_mesh_are_in_the_order_of_the_fourier_transform(mesh):
    """A wave at mesh points transforms to its own place, and only there."""
    cell = SYSTEM.cell[0]
    k_vectors, k_squared = generate_k_vectors_pme(cell, mesh)
    half = (mesh[0], mesh[1], mesh[2] // 2 + 1)
    assert k_vectors.shape == (*half, 3) and k_squared.shape == half
    torch.testing.assert_close(k_squared, k_vectors.square().sum(-1), rtol=1e-12, atol=2e-12)
    assert k_squared[0, 0, 0] == 1e-12 and (k_squared.flatten()[1:] > 1e-3).all()
    torch.testing.assert_close(generate_k_squared_pme(cell, mesh), k_squared, rtol=0, atol=0)
    reciprocal = 2.0 * math.pi * torch.linalg.inv(cell)
    for given, times in ((reciprocal, 1.0), (3.0 * reciprocal, 9.0)):
        found = generate_k_squared_pme(cell, mesh, reciprocal_cell=given).flatten()
        torch.testing.assert_close(found[1:], times * k_squared.flatten()[1:], rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="`reciprocal_cell` is for 2 systems"):
        generate_k_vectors_pme(cell, mesh, torch.stack([reciprocal, 3.0 * reciprocal]))
    steps = [torch.arange(n).double() / n for n in mesh]
    points = torch.cartesian_prod(*steps).reshape(-1, 3) @ cell
    for place in ((0, 0, 0), (mesh[0] - 1, mesh[1] // 2, half[2] - 1), (mesh[0] // 2, mesh[1] - 1, 0)):
        wave = torch.exp(1j * (points @ k_vectors[place])).reshape(mesh)
        there = torch.fft.fftn(wave)[:, :, : half[2]].abs()
        assert there[place].item() == pytest.approx(math.prod(mesh))
        assert there.sum().item() == pytest.approx(math.prod(mesh))
    # frequencies are those of numpy, but for the sign of the one in the middle, which is its own opposite
    numbers = k_vectors @ cell.T / (2.0 * math.pi)
    for axis, n in enumerate(mesh[:2]):
        expected = torch.fft.fftfreq(n, 1.0 / n, dtype=torch.float64)
        column = numbers.movedim(axis, 0)[:, 0, 0, axis]
        torch.testing.assert_close(column.where(2 * column.abs().round() != n, -column.abs()), expected)


def test_poisson_equation_with_squares_of_a_mesh(dtype):
    """Callers divide by the squares, and take derivatives by the cell, where the density has no average."""
    cells = torch.stack([SYSTEM.cell[0], LEFT]).to(dtype).requires_grad_()
    mesh = (4, 5, 6)
    density = torch.randn(2, *mesh, generator=torch.Generator().manual_seed(0), dtype=dtype)
    waves = torch.fft.rfftn(density - density.mean((1, 2, 3), keepdim=True), dim=(1, 2, 3))
    k_vectors, k_squared = generate_k_vectors_pme(cells, mesh)
    assert (k_squared[:, 0, 0, 0] == torch.tensor(1e-12, dtype=dtype)).all()
    energies = (waves.abs().square() / k_squared).flatten(1)
    (slope,) = torch.autograd.grad(energies.sum(), cells, retain_graph=True)
    squares = k_vectors.square().sum(-1).flatten(1)[:, 1:]
    expected = waves.abs().square().flatten(1)[:, 1:] / squares
    torch.testing.assert_close(energies[:, 1:], expected)
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), cells)[0])


def test_vectors_of_meshes_of_several_cells():
    cells = torch.stack([SYSTEM.cell[0], LEFT])
    k_vectors, k_squared = generate_k_vectors_pme(cells, (4, 5, 6))
    assert k_vectors.shape == (2, 4, 5, 4, 3) and k_squared.shape == (2, 4, 5, 4)
    for n in range(2):
        close((k_vectors[n], k_squared[n]), generate_k_vectors_pme(cells[n], (4, 5, 6)))
        close((k_vectors[n], k_squared[n]), generate_k_vectors_pme(cells[n : n + 1], (4, 5, 6)))
    reciprocal = 2.0 * math.pi * torch.linalg.inv(cells)
    close(generate_k_vectors_pme(cells, (4, 5, 6), reciprocal), (k_vectors, k_squared))


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "argument", "call"),
    [
        (ValueError, "k_cutoff", lambda cell: generate_ewald_miller_indices(cell, -1.0)),
        (ValueError, "k_cutoff", lambda cell: generate_ewald_miller_indices(cell, torch.ones(2))),
        (ValueError, "miller_bounds", lambda cell: generate_ewald_miller_indices(cell, 1.0, (1, 1))),
        (ValueError, "miller_bounds", lambda cell: generate_ewald_miller_indices(cell, 1.0, (1, -1, 1))),
        (ValueError, "cell", lambda cell: generate_k_vectors_ewald_summation(cell[0, :2], 1.0)),
        (ValueError, "cell", lambda cell: generate_k_vectors_ewald_summation(cell * 0.0, 1.0)),
        (TypeError, "cell", lambda cell: generate_k_vectors_ewald_summation(cell.int(), 1.0)),
        (TypeError, "miller_indices", lambda cell: k_vectors_from_miller_indices(cell, torch.ones(3, 3))),
        (ValueError, "miller_indices", lambda cell: k_vectors_from_miller_indices(cell, torch.ones(3, 2).long())),
        (ValueError, "mesh_dimensions", lambda cell: generate_k_vectors_pme(cell, (4, 4))),
        (ValueError, "mesh_dimensions", lambda cell: generate_k_vectors_pme(cell, (4, 0, 4))),
        (TypeError, "mesh_dimensions", lambda cell: generate_k_vectors_pme(cell, 4)),
        (ValueError, "miller_indices", lambda cell: waves(miller_indices=torch.ones(3, 2).long())),
        (ValueError, "miller_indices", lambda cell: waves(miller_indices=torch.tensor([[0, 1, 2**20 + 1]]))),
        (ValueError, "k_vectors", lambda cell: waves()),
        (ValueError, "k_vectors", lambda cell: waves(miller_indices=torch.ones(1, 3).long(), miller_bounds=(1, 1, 1))),
    ],
)
def test_bad_input_is_an_error_that_names_the_argument(error, argument, call):
    with pytest.raises(error, match=f"`{argument}`"):
        call(SYSTEM.cell)
