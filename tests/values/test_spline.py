"""B-splines on periodic meshes."""

import functools
import math

import numpy as np
import pytest
import scipy.interpolate
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemiops.kernels.mesh.spread import ROWS
from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch import spline
from nvalchemiops.torch.interactions.electrostatics import compute_bspline_moduli_1d
from tests.support.comparing import close_to_largest
from tests.support.systems import System, batch, triclinic

ORDERS = pytest.mark.parametrize("order", range(1, 11))
MESH = (10, 11, 17)
ONE = triclinic(6)
TWO = batch(triclinic(5), triclinic(4, seed=2))
SHUFFLE = torch.randperm(9, generator=torch.Generator().manual_seed(1))
TWO = System(TWO.positions[SHUFFLE], TWO.charges[SHUFFLE], TWO.cell, TWO.batch_idx[SHUFFLE])


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


close = functools.partial(close_to_largest, least=1.0)


def scipy_spline(order, x):
    """``M_order``, zero outside of 0 .. order."""
    if order == 1:
        return ((x >= 0.0) & (x < 1.0)).astype(float)
    return np.nan_to_num(scipy.interpolate.BSpline.basis_element(np.arange(order + 1.0), extrapolate=False)(x))


def slow_weights(positions, cell, mesh, order):
    """Weights (n_atoms, n_x, n_y, n_z) by the definition, over three periods to either side."""
    u = (positions @ torch.linalg.inv(cell) % 1.0).numpy() * np.array(mesh)
    axes = []
    for axis, n in enumerate(mesh):
        j = np.arange(n) + n * np.arange(-3, 4)[:, None]
        axes.append(torch.from_numpy(scipy_spline(order, u[:, axis, None, None] - j + order / 2).sum(1)))
    x, y, z = axes
    return x[:, :, None, None] * y[:, None, :, None] * z[:, None, None, :]


# -- weights --------------------------------------------------------------------------------------


@ORDERS
def test_weights_are_cardinal_splines(order, dtype):
    u = torch.linspace(-1.0, order + 1.0, 401, dtype=torch.float64).to(dtype)
    expected = torch.from_numpy(scipy_spline(order, u.double().numpy())).to(dtype)
    found = spline.bspline_weight(u.reshape(1, -1), order)
    assert found.shape == (1, 401) and found.dtype == dtype
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-14 if dtype == torch.float64 else 1e-6)


@ORDERS
def test_weights_add_up_to_one(order):
    t = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = sum(spline.bspline_weight(t + k, order) for k in range(order))
    torch.testing.assert_close(total, torch.ones_like(t), rtol=0, atol=1e-14)


@pytest.mark.parametrize("order", range(3, 11))
def test_derivatives_of_weights(order):
    """M_p' (u) = M_(p-1)(u) - M_(p-1)(u - 1)."""
    u = torch.linspace(0.05, order - 0.07, 60, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(spline.bspline_weight(u, order).sum(), u)
    close([slope], [(spline.bspline_weight(u, order - 1) - spline.bspline_weight(u - 1, order - 1)).detach()])
    assert torch.autograd.gradcheck(lambda u: spline.bspline_weight(u, order), u)


def test_what_is_no_number_has_no_weight():
    found = spline.bspline_weight(torch.tensor([math.nan, math.inf, -math.inf, 1.0]), 4)
    assert found[0].isnan() and found[3] > 0.1
    assert not (found[1:3] > 0).any()


# -- spreading and gathering ----------------------------------------------------------------------


@ORDERS
def test_spreading_equals_the_definition(order):
    """Of atoms in and out of a skewed cell."""
    weights = slow_weights(ONE.positions, ONE.cell[0], MESH, order)
    found = spline.spline_spread(ONE.positions, ONE.charges, ONE.cell[0], MESH, order)
    assert found.shape == MESH
    close([found], [torch.einsum("i,ixyz->xyz", ONE.charges, weights)])
    mesh = draw(*MESH)
    close([spline.spline_gather(ONE.positions, mesh, ONE.cell, order)], [torch.einsum("xyz,ixyz->i", mesh, weights)])


def test_a_mesh_of_several_bands_of_rows():
    """Each of which a thread of a CPU spreads to, in both precisions."""
    mesh_dims = (6, 2 * ROWS + 7, 10)
    cell = ONE.cell[0].float()
    positions, values = draw(60, 3, seed=1).float() @ cell, draw(60, seed=2).float()
    weights = slow_weights(positions.double(), cell.double(), mesh_dims, 6)
    expected = torch.einsum("i,ixyz->xyz", values.double(), weights)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-7)):
        found = spline.spline_spread(positions.to(dtype), values.to(dtype), cell.to(dtype), mesh_dims, 6)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


@given(
    order=st.integers(1, 10),
    more=st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 8)),
    n_atoms=st.integers(0, 7),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.5, 10.0, 1e4]),
)
@settings(max_examples=40)
def test_any_mesh_and_positions(order, more, n_atoms, seed, scale):
    """Down to a mesh of the size of the stencil, and far outside the cell; spread and gather are transposes."""
    mesh_dims = tuple(order + n for n in more)
    positions, values, cell = scale * draw(n_atoms, 3, seed=seed), draw(n_atoms, seed=seed), ONE.cell[0]
    found = spline.spline_spread(positions, values, cell, mesh_dims, order)
    mesh = draw(*mesh_dims, seed=seed)
    gathered = spline.spline_gather(positions, mesh, cell, order)
    if scale < 1e4:  # orders 1 and 2 make steps out of rounded coordinates
        weights = slow_weights(positions, cell, mesh_dims, order)
        close(
            [found, gathered],
            [torch.einsum("i,ixyz->xyz", values, weights), torch.einsum("xyz,ixyz->i", mesh, weights)],
        )
    close([(found * mesh).sum()], [(gathered * values).sum()])
    close([found.sum()], [values.sum()])


@ORDERS
def test_wrapping_changes_nothing(order):
    jumps = torch.tensor([[1.0, 0, 0], [0, -2, 0], [0, 0, 3], [-1, 1, 2], [5, -5, 1], [0, 0, 0]]).double() @ ONE.cell[0]
    # away from the steps of order 1
    inside, outside = ONE.positions + 0.01, ONE.positions + 0.01 + jumps
    found = [spline.spline_spread(x, ONE.charges, ONE.cell, MESH, order) for x in (inside, outside)]
    close(found[:1], found[1:], 1e-12)


def test_on_the_boundary_of_the_cell():
    """Coordinates that round to the end of the cell are its beginning."""
    cell = torch.eye(3, dtype=torch.float64) * 7.3
    x = torch.tensor([[0.0, 7.3, -7.3], [-1e-17, 1e-300, -1e-300], [7.3 - 1e-15, 14.6, 0.0]], dtype=torch.float64)
    for order in range(2, 11):
        mesh_dims = (10, 10, 10 if order % 2 else 16)
        found = spline.spline_spread(x, torch.ones(3).double(), cell, mesh_dims, order)
        origin = spline.spline_spread(torch.zeros(3, 3).double(), torch.ones(3).double(), cell, mesh_dims, order)
        close([found], [origin])


# -- batches, channels, shapes --------------------------------------------------------------------


@pytest.mark.parametrize("order", [3, 4, 7])
def test_a_batch_equals_systems_alone(order):
    values, mesh = draw(9, 2), draw(2, 3, *MESH)
    inputs = (TWO.positions, values[:, 0], TWO.cell, MESH, order, TWO.batch_idx)
    single, channels = spline.spline_spread(*inputs), spline.spline_spread_channels(inputs[0], values, *inputs[2:])
    assert single.shape == (2, *MESH) and channels.shape == (2, 2, *MESH)
    gathered = spline.spline_gather(TWO.positions, mesh[:, 0], TWO.cell, order, TWO.batch_idx)
    several = spline.spline_gather_channels(TWO.positions, mesh, TWO.cell, order, TWO.batch_idx)
    potential, forces = spline.spline_gather_with_force(
        TWO.positions, values[:, 0], mesh[:, 0], TWO.cell, order, TWO.batch_idx
    )
    vectors = mesh.movedim(1, -1)
    fields = spline.spline_gather_vec3(TWO.positions, values[:, 0], vectors, TWO.cell, order, TWO.batch_idx)
    assert gathered.shape == (9,) and several.shape == (9, 3) and fields.shape == forces.shape == (9, 3)
    for number in range(2):
        mine = TWO.batch_idx == number
        x, q, cell = TWO.positions[mine], values[mine], TWO.cell[number]
        close(
            [single[number], channels[number], gathered[mine], several[mine], fields[mine]],
            [
                spline.spline_spread(x, q[:, 0], cell, MESH, order),
                spline.spline_spread_channels(x, q, cell, MESH, order),
                spline.spline_gather(x, mesh[number, 0], cell, order),
                spline.spline_gather_channels(x, mesh[number], cell, order),
                spline.spline_gather_vec3(x, q[:, 0], vectors[number], cell, order),
            ],
        )
        close(
            [potential[mine], forces[mine]], spline.spline_gather_with_force(x, q[:, 0], mesh[number, 0], cell, order)
        )


def test_one_system_with_an_index_has_a_leading_dimension():
    index = torch.zeros(6, dtype=torch.int32)
    found = spline.spline_spread(ONE.positions, ONE.charges, ONE.cell, MESH, 4, index)
    assert found.shape == (1, *MESH)
    assert torch.equal(found[0], spline.spline_spread(ONE.positions, ONE.charges, ONE.cell, MESH, 4))


def test_single_precision_follows_the_positions():
    system = ONE.to(torch.float32)
    mesh = draw(*MESH).float()

    def results(x, q, cell):
        on_mesh = mesh.to(cell)
        spread, gathered = spline.spline_spread(x, q, cell, MESH, 5), spline.spline_gather(x, on_mesh, cell, 5)
        return spread, gathered, *spline.spline_gather_with_force(x, q, on_mesh, cell, 5)

    pairs = [results(*s[:3]) for s in (system, system.to(torch.float64))]
    assert all(t.dtype == torch.float32 for t in pairs[0])
    for found, expected in zip(*pairs):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


def test_no_atoms():
    nothing, mesh = torch.zeros(0, 3).double(), draw(*MESH)
    assert not spline.spline_spread(nothing, nothing[:, 0], ONE.cell, MESH).any()
    assert spline.spline_gather(nothing, mesh, ONE.cell).shape == (0,)
    assert spline.spline_gather_gradient(nothing, nothing[:, 0], mesh, ONE.cell).shape == (0, 3)


def test_no_systems_and_no_channels():
    nothing, nowhere = torch.zeros(0, 3).double(), torch.zeros(0, 3, 3).double()
    none = {"batch_idx": torch.zeros(0, dtype=torch.int32)}
    assert spline.spline_spread(nothing, nothing[:, 0], nowhere, MESH, **none).shape == (0, *MESH)
    assert spline.spline_gather(nothing, draw(0, *MESH), nowhere, **none).shape == (0,)
    assert spline.spline_spread_channels(ONE.positions, draw(6, 0), ONE.cell[0], MESH).shape == (0, *MESH)
    assert spline.spline_gather_channels(ONE.positions, draw(0, *MESH), ONE.cell[0]).shape == (6, 0)


def test_strided_inputs_equal_contiguous_ones():
    x = torch.stack([ONE.positions, ONE.positions], 2)[..., 0]
    q = torch.stack([ONE.charges, ONE.charges], 1)[:, 0]
    mesh = draw(*MESH[::-1]).permute(2, 1, 0)
    assert not x.is_contiguous() and not mesh.is_contiguous()
    found = [spline.spline_spread(x, q, ONE.cell.mT.contiguous().mT, MESH), spline.spline_gather(x, mesh, ONE.cell)]
    expected = [
        spline.spline_spread(ONE.positions, ONE.charges, ONE.cell, MESH),
        spline.spline_gather(ONE.positions, mesh.contiguous(), ONE.cell),
    ]
    close(found, expected, 0.0)


# -- forces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [3, 4, 6, 8, 10])
def test_forces_are_minus_charge_times_the_gradient_of_the_potential(order):
    """Cartesian, in a skewed cell; the potential is not multiplied by charges."""
    mesh, x = draw(*MESH), ONE.positions.clone().requires_grad_()
    potential, forces = spline.spline_gather_with_force(ONE.positions, ONE.charges, mesh, ONE.cell, order)
    expected = spline.spline_gather(x, mesh, ONE.cell, order)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    close([potential, forces], [expected.detach(), -ONE.charges[:, None] * slope])
    alone = spline.spline_gather_gradient(ONE.positions, ONE.charges, mesh, ONE.cell, order)
    assert torch.equal(alone, forces)
    h, (i, axis) = 1e-5, (2, 1)
    step = torch.zeros(6, 3).double()
    step[i, axis] = h
    up, down = (spline.spline_gather(ONE.positions + s * step, mesh, ONE.cell, order)[i] for s in (1, -1))
    # of second order; a spline of order 3 has jumps in what it leaves
    assert forces[i, axis].item() == pytest.approx(-ONE.charges[i].item() * (up - down).item() / (2 * h), abs=1e-4)


def test_vectors_are_multiplied_by_charges():
    mesh = draw(*MESH, 3)
    found = spline.spline_gather_vec3(ONE.positions, ONE.charges, mesh, ONE.cell)
    columns = [ONE.charges * spline.spline_gather(ONE.positions, mesh[..., a], ONE.cell) for a in range(3)]
    close([found], [torch.stack(columns, 1)])


# -- derivatives ----------------------------------------------------------------------------------

# away from mesh points and from the middle between them, where splines are glued together
X, CELL = ONE.positions[:3] + 0.05, ONE.cell
Q, FIELD = draw(3), draw(6, 7, 6)
SMALL = (6, 7, 6)


@pytest.mark.parametrize("order", [3, 4, 5, 6, 10])
def test_first_and_second_derivatives_by_everything(order):
    """First ones from order 3 on, second ones from order 4 on, and of forces from order 5 on."""
    small = tuple(max(n, order) for n in SMALL)

    def spread(x, q, cell):
        return spline.spline_spread(x, q, cell, small, order)

    def gather(x, mesh, cell):
        return spline.spline_gather(x, mesh, cell, order)

    def forces(x, q, mesh, cell):
        return spline.spline_gather_gradient(x, q, mesh, cell, order)

    options = {"eps": 1e-6, "atol": 1e-5, "rtol": 1e-5, "fast_mode": True}
    for function, inputs, lost in (
        (spread, (X, Q, CELL), 0),
        (gather, (X, draw(*small), CELL), 0),
        (forces, (X, Q, draw(*small), CELL), 1),
    ):
        leaves = tuple(t.clone().requires_grad_() for t in inputs)
        if order - lost >= 3:
            assert torch.autograd.gradcheck(function, leaves, **options)
        if order - lost >= 4:
            assert torch.autograd.gradgradcheck(function, leaves, **options)


@pytest.mark.parametrize("order", range(1, 7))
def test_derivatives_end_with_an_error(order):
    """p - 1 of them, the last in pieces; the next one says so, and is not zero."""
    x = X.clone().requires_grad_()
    value = (spline.spline_gather(x, draw(8, 8, 8), CELL, order) * Q).sum()
    for k in range(order - 1):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        value = (slope * draw(3, 3, seed=k)).sum()
    with pytest.raises(NotDifferentiableError, match=f"order {order}"):
        torch.autograd.grad(value, x, create_graph=True)
    # spreading likewise
    value = (spline.spline_spread(x, Q, CELL, (8, 8, 8), order) * draw(8, 8, 8)).sum()
    for k in range(order - 1):
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        value = (slope * draw(3, 3, seed=k)).sum()
    with pytest.raises(NotDifferentiableError, match=f"order {order}"):
        torch.autograd.grad(value, x)


def test_forces_of_the_lowest_orders():
    """A spline of order 1 has no slope at all."""
    with pytest.raises(NotDifferentiableError, match="order 1"):
        spline.spline_gather_gradient(X, Q, FIELD, CELL, 1)
    assert spline.spline_gather_gradient(X, Q, FIELD, CELL, 2).isfinite().all()


def test_values_differentiate_where_positions_do_not():
    """Spreading is linear in values, whatever the order."""
    q = Q.clone().requires_grad_()
    weights = draw(*SMALL)
    (slope,) = torch.autograd.grad((spline.spline_spread(X, q, CELL, SMALL, 1) * weights).sum(), q)
    assert torch.equal(slope, spline.spline_gather(X, weights, CELL, 1))


def test_gradients_in_a_batch_and_of_channels_equal_a_loop():
    values, mesh = draw(9, 2).requires_grad_(), draw(2, 2, *MESH).requires_grad_()
    x, cell = TWO.positions.clone().requires_grad_(), TWO.cell.clone().requires_grad_()

    def loss(spread, gathered):
        return spread.square().sum() + gathered.sin().sum()

    together = loss(
        spline.spline_spread_channels(x, values, cell, MESH, 5, TWO.batch_idx),
        spline.spline_gather_channels(x, mesh, cell, 5, TWO.batch_idx),
    )
    singly = 0.0
    for number in range(2):
        mine = TWO.batch_idx == number
        for c in range(2):
            singly = singly + loss(
                spline.spline_spread(x[mine], values[mine, c], cell[number], MESH, 5),
                spline.spline_gather(x[mine], mesh[number, c], cell[number], 5),
            )
    inputs = (x, values, mesh, cell)
    first = [torch.autograd.grad(value, inputs, create_graph=True) for value in (together, singly)]
    close(*first)
    close(*(torch.autograd.grad(sum(f.square().sum() for f in slopes), inputs) for slopes in first), 1e-10)


# -- Fourier space --------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("n", [10, 11, 14])
def test_deconvolution_makes_plane_waves_exact_at_mesh_points(order, n):
    """Values at mesh points, as coefficients of splines, and gathered there again."""
    factor = spline.compute_bspline_deconvolution((n, n + 1, n), order)
    assert factor.shape == (n, n + 1, n) and factor.dtype == torch.float64
    dims, cell = (n, n + 1, n), torch.diag(torch.tensor([3.0, 4.0, 5.0])).double()
    grids = [torch.arange(size).double() / size for size in dims]
    fractional = torch.cartesian_prod(*grids)
    picks = torch.randperm(len(fractional), generator=torch.Generator().manual_seed(0))[:40]
    for miller in ([1, 0, 0], [2, -1, 3], [n // 2 - 1, 2, -2]):
        wave = torch.cos(2.0 * torch.pi * fractional @ torch.tensor(miller).double() + 0.3)
        # spreading and gathering both: the factor is 1 / b²
        coefficients = torch.fft.fftn(wave.reshape(dims)) * factor
        spread = torch.zeros(dims).double()
        x = fractional @ cell
        spread = spline.spline_spread(x, torch.fft.ifftn(coefficients).real.flatten().contiguous(), cell, dims, order)
        close([spline.spline_gather(x[picks], spread, cell, order)], [wave[picks]], 1e-11)


@ORDERS
@pytest.mark.parametrize("n", [1, 4, 7, 8, 16])
def test_deconvolution_along_an_axis(order, n):
    """The transform of the centred spline at integers, by FFT."""
    j = np.arange(-order, order + 1)
    kernel = np.zeros(n)
    np.add.at(kernel, j % n, scipy_spline(order, j + order / 2.0))
    found = spline.compute_bspline_deconvolution_1d(n, order)
    np.testing.assert_allclose(found.numpy(), 1.0 / np.fft.fft(kernel).real ** 2, rtol=1e-12)


@ORDERS
def test_moduli_are_powers_of_sinc(order):
    for miller in (torch.arange(-6, 7), torch.arange(-6, 7).double(), torch.arange(12).reshape(3, 4).float()):
        found = compute_bspline_moduli_1d(miller, 13, order)
        assert found.shape == miller.shape
        assert found.dtype == (torch.float64 if miller.dtype == torch.float64 else torch.float32)
        expected = np.sinc(miller.double().numpy() / 13.0) ** order
        np.testing.assert_allclose(
            found.double().numpy(), expected, rtol=1e-12 if found.dtype == torch.float64 else 5e-6
        )


# -- reproducible ---------------------------------------------------------------------------------


def test_threads_and_runs_do_not_change_a_bit(threads, always_split, dtype):
    system = triclinic(200).to(dtype)
    mesh = draw(2, 12, 13, 14).to(dtype)
    found = []
    for number in (1, 2, 3, 2):
        threads(number)
        x = system.positions.clone().requires_grad_()
        spread = spline.spline_spread(x, system.charges, system.cell, (12, 13, 14), 5)
        gathered = spline.spline_gather_channels(x, mesh, system.cell, 5)
        (slope,) = torch.autograd.grad((spread * mesh[0]).sum() + gathered.square().sum(), x)
        found.append([spread.detach(), gathered.detach(), slope])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("what", ["results", "gradients"])
def test_compiled_equals_eager(what):
    def function(x, q, mesh, cell):
        spread = spline.spline_spread(x, q, cell, SMALL, 5)
        potential, forces = spline.spline_gather_with_force(x, q, mesh, cell, 5)
        return spread.square().sum() + potential.sin().sum() + forces.square().sum()

    results = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (X, Q, FIELD, CELL)]
        value = call(*leaves)
        results.append([value.detach()] if what == "results" else torch.autograd.grad(value, leaves))
    close(*results)


# -- bad input ------------------------------------------------------------------------------------

SPREAD = {"positions": X, "values": Q, "cell": CELL, "mesh_dims": SMALL}
GATHER = {"positions": X, "mesh": FIELD, "cell": CELL}
MODULI = {"miller_indices": Q, "mesh_N": 4, "spline_order": 4}
FORCES = {"positions": X, "charges": Q, "mesh": FIELD, "cell": CELL}


@pytest.mark.parametrize(
    ("function", "given", "error", "argument", "options"),
    [
        (spline.spline_spread, SPREAD, ValueError, "mesh_dims", {"mesh_dims": (3, 6, 6)}),
        (spline.spline_spread, SPREAD, ValueError, "mesh_dims", {"mesh_dims": (6, 6)}),
        (spline.spline_spread, SPREAD, TypeError, "mesh_dims", {"mesh_dims": 6}),
        (spline.spline_spread, SPREAD, TypeError, "mesh_dims", {"mesh_dims": (6.0, 6, 6)}),
        (spline.spline_spread, SPREAD, ValueError, "spline_order", {"spline_order": 0}),
        (spline.spline_spread, SPREAD, ValueError, "spline_order", {"spline_order": 11}),
        (spline.spline_spread, SPREAD, TypeError, "spline_order", {"spline_order": 4.0}),
        (spline.spline_spread, SPREAD, ValueError, "values", {"values": Q[:2]}),
        (spline.spline_spread, SPREAD, ValueError, "values", {"values": Q[:, None]}),
        (spline.spline_spread, SPREAD, TypeError, "values", {"values": Q.float()}),
        (spline.spline_spread, SPREAD, TypeError, "values", {"values": [1.0, 2.0, 3.0]}),
        (spline.spline_spread, SPREAD, ValueError, "positions", {"positions": X[:, :2]}),
        (spline.spline_spread, SPREAD, TypeError, "positions", {"positions": X.half()}),
        (spline.spline_spread, SPREAD, TypeError, "cell", {"cell": CELL.bfloat16()}),
        (spline.spline_spread, SPREAD, ValueError, "cell", {"cell": CELL * 0.0}),
        (spline.spline_spread, SPREAD, ValueError, "batch_idx", {"cell": CELL.expand(2, 3, 3)}),
        (spline.spline_spread, SPREAD, ValueError, "batch_idx", {"batch_idx": torch.tensor([0, 0, -1])}),
        (
            spline.spline_spread,
            SPREAD,
            ValueError,
            "`cell` is for 2 systems, but there are 3",
            {"cell": CELL.expand(2, 3, 3), "batch_idx": torch.tensor([0, 0, 1]), "num_systems": 3},
        ),
        (spline.spline_spread, SPREAD, ValueError, "cell_inv_t", {"cell_inv_t": X[:2]}),
        (spline.spline_spread, SPREAD, ValueError, "cell_inv_t", {"cell_inv_t": CELL.expand(7, 3, 3)}),
        (spline.spline_spread, SPREAD, TypeError, "cell_inv_t", {"cell_inv_t": 0.5}),
        (spline.spline_spread, SPREAD, TypeError, "unknown", {"unknown": 1}),
        (spline.spline_spread_channels, SPREAD, ValueError, "values", {}),
        (spline.spline_gather, GATHER, ValueError, "mesh", {"mesh": FIELD[0]}),
        (spline.spline_gather, GATHER, TypeError, "mesh", {"mesh": FIELD.float()}),
        (spline.spline_gather, GATHER, TypeError, "mesh", {"mesh": None}),
        (spline.spline_gather, GATHER, ValueError, "mesh", {"mesh": FIELD[:3]}),
        (spline.spline_gather, GATHER, ValueError, "mesh", {"batch_idx": torch.tensor([0, 0, 0])}),
        (spline.spline_gather_channels, GATHER, ValueError, "mesh", {}),
        (spline.spline_gather_with_force, FORCES, ValueError, "charges", {"charges": Q[:2]}),
        (spline.spline_gather_gradient, FORCES, TypeError, "charges", {"charges": Q.bfloat16()}),
        (spline.spline_gather_vec3, FORCES, ValueError, "mesh", {}),
        (spline.bspline_weight, {"u": Q, "order": 4}, ValueError, "order", {"order": 11}),
        (spline.bspline_weight, {"u": Q, "order": 4}, TypeError, "u", {"u": 0.5}),
        (spline.compute_bspline_deconvolution_1d, {"n": 6}, ValueError, "n", {"n": 0}),
        (spline.compute_bspline_deconvolution, {"mesh_dims": SMALL}, ValueError, "mesh_dims", {"mesh_dims": (0, 6, 6)}),
        (compute_bspline_moduli_1d, MODULI, ValueError, "mesh_N", {"mesh_N": 0}),
        (compute_bspline_moduli_1d, MODULI, TypeError, "miller_indices", {"miller_indices": [1, 2]}),
    ],
)
def test_bad_input_is_an_error_that_names_the_argument(function, given, error, argument, options):
    with pytest.raises(error, match=argument):
        function(**{**given, **options})


def test_a_prepared_inverse_changes_nothing():
    """It never costs the gradient by the cell either."""
    cell = CELL.clone().requires_grad_()
    wrong = 3.0 * torch.eye(3).double()
    for options in ({}, {"cell_inv_t": wrong}, {"cell_inv_t": wrong[None]}):
        found = spline.spline_spread(X, Q, cell, SMALL, **options)
        assert torch.equal(found.detach(), spline.spline_spread(X, Q, CELL, SMALL))
        assert torch.autograd.grad(found.square().sum(), cell)[0].any()
        forces = spline.spline_gather_gradient(X, Q, FIELD, cell, **options)
        assert torch.equal(forces.detach(), spline.spline_gather_gradient(X, Q, FIELD, CELL))
        assert torch.autograd.grad(forces.square().sum(), cell)[0].any()
