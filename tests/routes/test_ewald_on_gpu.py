"""Ewald sums, Fourier sums and splines on a GPU, or on a CPU with the layout of one."""

import functools
import math

import pytest
import torch

from nvalchemiops.kernels.moments import count
from nvalchemiops.torch import launch as tensors
from nvalchemiops.torch import spline
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.electrostatics.potentials import power_law
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import MeshTerm
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import sorted_atoms
from nvalchemiops.torch.operators.fourier import fourier_gather, fourier_spread
from nvalchemiops.torch.operators.lattice import lattice_of
from nvalchemiops.torch.operators.mesh import mesh_columns, mesh_gather, mesh_spread
from nvalchemiops.torch.runtime import cache
from tests.support.cases import shuffled
from tests.support.gpu import assert_equal, assert_replays, waiting_is_an_error, with_derivatives
from tests.support.systems import ALL, batch, crystal, neighbors_of, triclinic

MESH = (10, 11, 12)

# 50 atoms in one of the systems: more than the lanes of a warp; and in no order
TWO = shuffled(batch(triclinic(5, charged=True), crystal("rocksalt", 5.6, 3, 0.2)), seed=2)


@functools.cache
def pairs_of_two():
    return neighbors_of(TWO, 5.0)


def ewald(x, q, cell, near, **options):
    return electrostatics.ewald_summation(x, q, cell, 0.7, miller_bounds=(2, 3, 2), **near, **options)


def bounded(x, q, cell, near, **options):
    return electrostatics.ewald_summation(x, q, cell, 0.7, k_cutoff=2.5, **near, **options)


def on_mesh(x, q, cell, near, **options):
    return electrostatics.particle_mesh_ewald(x, q, cell, 0.7, mesh_dimensions=MESH, spline_order=6, **near, **options)


def parts(x, q, cell, near, **options):
    """Of all parts one result, so that each is looked at by itself."""
    batch_idx = near["batch_idx"]
    pbc = torch.tensor([[True, True, False], [True, True, True]], device=x.device)
    return (
        electrostatics.ewald_real_space(x, q, cell, 0.7, **near, compute_forces=True)[1],
        electrostatics.ewald_reciprocal_space(
            x, q, cell, None, 0.7, batch_idx, miller_bounds=(2, 2, 2), compute_forces=True
        )[1],
        electrostatics.pme_reciprocal_space(x, q, cell, 0.7, MESH, None, 5, batch_idx, compute_forces=True)[1],
        electrostatics.compute_slab_correction(x, q, cell, pbc, batch_idx, compute_forces=True)[1],
    )


def splines(x, q, cell, near, **options):
    """Orders even and odd; gathered from a mesh that follows from what was spread."""
    batch_idx, values = near["batch_idx"], torch.stack([q, q.sin()], 1)
    spread = spline.spline_spread(x, q, cell, MESH, 6, batch_idx)
    channels = spline.spline_spread_channels(x, values, cell, MESH, 5, batch_idx)
    potential, forces = spline.spline_gather_with_force(x, q, spread, cell, 7, batch_idx)
    return spread, channels, potential, forces, spline.spline_gather_channels(x, channels, cell, 4, batch_idx)


SUMS = {"Ewald": ewald, "Ewald in a sphere": bounded, "PME": on_mesh, "parts": parts, "splines": splines}
EACH = pytest.mark.parametrize("name", SUMS)


def on(device, dtype=torch.float64, channels=False):
    system = TWO.to(dtype).to(torch.device(device))
    near = {name: value.to(device) for name, value in pairs_of_two().items()} | {"batch_idx": system.batch_idx}
    q = torch.stack([system.charges, system.charges.cos()], 1) if channels else system.charges
    return system.positions, q, system.cell, near


def results(name, device, dtype=torch.float64, channels=False):
    """Results, first and second derivatives of a loss of them."""
    x, q, cell, near = on(device, dtype, channels)
    leaves = [t.clone().requires_grad_() for t in (x, q, cell)]
    options = {} if name in ("parts", "splines") else ALL
    found = SUMS[name](*leaves, near, **options)
    return with_derivatives(found, leaves)


@EACH
def test_gpu_equals_cpu(name, dtype, gpu):
    """Forward, backward, and backward of that."""
    found = gpu(lambda device: results(name, device, dtype))
    energies, *others = [r.dtype for r in found]
    assert energies is (dtype if name in ("parts", "splines") else torch.float64) and set(others) == {dtype}
    expected = results(name, "cpu")
    assert all(r.isfinite().all() and r.any() for r in expected)
    # second derivatives in single precision lose digits to sums over a mesh
    assert_equal(found, expected, 1e-11 if dtype is torch.float64 else 2e-3)


@pytest.mark.parametrize("name", ["Ewald", "PME"])
def test_channels_on_a_gpu(name, gpu):
    found = gpu(lambda device: results(name, device, channels=True))
    assert_equal(found, results(name, "cpu", channels=True), 1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Ewald", "PME"])
def test_estimates_on_a_gpu_are_accurate(name):
    """What is left open is chosen for the device, so results differ by the accuracy."""
    function = {"Ewald": electrostatics.ewald_summation, "PME": electrostatics.particle_mesh_ewald}[name]
    system = crystal("rocksalt", 5.64, 3, 0.3)
    exact = electrostatics.ewald_summation(*system[:3], accuracy=1e-10, compute_forces=True)[1]
    found = function(*system.to(torch.device("cuda"))[:3], accuracy=1e-5, compute_forces=True)[1].cpu()
    assert (found - exact).norm() / exact.norm() < 3e-5


@EACH
def test_bits_repeat_on_a_gpu(name, dtype, gpu):
    gpu.assert_bits_repeat(lambda device: results(name, device, dtype))


def step_on_gpu(name):
    """A function without arguments that has positions to move, as captured graphs want it."""
    x, q, cell, near = on("cuda")
    x = x.requires_grad_()

    def step():
        found = SUMS[name](x, q, cell, near, **({} if name == "splines" else ALL))
        return (*torch.autograd.grad(sum(r.square().sum() for r in found), x), *(r.detach() for r in found))

    return x, step


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["PME", "Ewald", "splines"])
def test_nothing_waits_for_the_gpu(name):
    """With alpha, mesh or bounds of wave vectors, and a list given."""
    _, step = step_on_gpu(name)
    expected = step()
    with waiting_is_an_error():
        found = step()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["PME", "Ewald", "splines"])
def test_a_side_stream(name):
    """Work of the stream that is current, in its order."""
    x, step = step_on_gpu(name)
    expected = step()
    side = torch.cuda.Stream()
    with torch.no_grad():
        x += 0.3
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        with torch.no_grad():
            x -= 0.3
        found = step()
    torch.cuda.current_stream().wait_stream(side)
    # positions went there and back
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
def test_what_is_kept_is_not_read_before_it_is_there():
    """By another stream, while the one on which it is made is still busy."""
    _, step = step_on_gpu("PME")
    expected = step()
    torch.cuda.synchronize()
    cache._kept.clear()
    cache._recognized.clear()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000_000)
        step()
    found = step()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["PME", "Ewald", "splines"])
def test_a_captured_graph_replays(name):
    x, step = step_on_gpu(name)
    assert_replays(step, x)


def test_what_a_gpu_is_not_asked_is_answered_by_nan(gpu):
    """A singular cell, open axes: not read, so neither an error nor a number."""

    def energies(device):
        x, q, cell, near = on(device)
        flat = cell.clone()
        flat[0, 1] = flat[0, 0]
        pbc = torch.tensor([[True, True, False], [True, True, True]], device=device)
        yield electrostatics.particle_mesh_ewald(x, q, flat, 0.7, mesh_dimensions=MESH, **near)
        yield electrostatics.particle_mesh_ewald(x, q, cell, 0.7, mesh_dimensions=MESH, pbc=pbc, **near)

    first = TWO.batch_idx == 0
    singular, open_axes = gpu(energies)
    assert not singular[first].isfinite().any()
    assert open_axes[first].isnan().all() and open_axes[~first].isfinite().all()


def fourier_problem(derivatives):
    """Coordinates, plan, moments and field of two systems with 33 and 37 points."""
    generator = torch.Generator().manual_seed(0)
    n_atoms = len(TWO.charges)
    coordinates = 3.0 * torch.randn(n_atoms, 3, generator=generator, dtype=torch.float64)
    points = torch.randint(0, 6, (70, 3), generator=generator).int()
    plan = (*sorted_atoms(TWO.batch_idx, 2, n_atoms, torch.device("cpu")), points, torch.tensor([0, 33, 70]).int())
    moments = torch.randn(n_atoms, 2, count(derivatives), generator=generator, dtype=torch.float64)
    field = torch.randn(2, 70, 4, 2, generator=generator, dtype=torch.float64)
    return coordinates, plan, moments, field


@pytest.mark.parametrize("derivatives", [0, 1, 2, 3])
def test_fourier_sums_on_a_gpu(derivatives, gpu):
    """The ops by themselves."""
    coordinates, plan, moments, field = fourier_problem(derivatives)

    def both(device):
        for op, values in ((fourier_spread, moments), (fourier_gather, field)):
            yield op(*(t.to(device) for t in (values, coordinates, *plan)), derivatives)

    assert_equal(gpu(both), both("cpu"), 1e-12 if gpu.is_real else 1e-13)


@pytest.mark.parametrize(("order", "derivatives"), [(1, 0), (3, 1), (6, 2), (8, 3), (10, 1)])
def test_splines_on_a_gpu(order, derivatives, dtype, gpu):
    """The ops by themselves, in orders beyond the usual ones."""
    generator = torch.Generator().manual_seed(0)
    n_atoms = len(TWO.charges)
    coordinates = 20.0 * torch.randn(n_atoms, 3, generator=generator, dtype=torch.float64)
    moments = torch.randn(n_atoms, 2, count(derivatives), generator=generator, dtype=torch.float64).to(dtype)
    field = torch.randn(2, 2, *MESH, generator=generator, dtype=torch.float64).to(dtype)

    def both(device):
        u, batch_idx = coordinates.to(device), TWO.batch_idx.to(device)
        columns = mesh_columns(u, batch_idx, 2, MESH, order)
        for op, values in ((mesh_spread, moments), (mesh_gather, field)):
            yield op(values.to(device), u, batch_idx, 2, *columns, MESH, order, derivatives)

    assert_equal(gpu(both), both("cpu"), 1e-6 if dtype is torch.float32 else 1e-12 if gpu.is_real else 1e-13)


# -- the influence function of a mesh ------------------------------------------------------------------


@pytest.mark.parametrize("planes", [None, ((2, 5), (1, 4))], ids=["all", "some"])
@pytest.mark.parametrize("exponent", [1, 4, 6, 10])
def test_the_kernel_of_the_influence_function_agrees_with_its_formula(exponent, planes, gpu):
    """The formula in torch's operations is used where a derivative by cells is asked for."""

    def both(device):
        torch.manual_seed(3)
        cell = 9.0 * torch.eye(3, dtype=torch.float64) + 3.0 * torch.rand(3, 3, 3, dtype=torch.float64)
        lattice = lattice_of(cell.to(device), None, 0)
        alpha = torch.tensor([0.4, 0.5, 0.3], dtype=torch.float64, device=device)
        term = MeshTerm(power_law(exponent), alpha, (8, 8, 6), 5)
        tabulated, single = term.influence(lattice, True, planes), term.influence(lattice, False, planes, torch.float32)
        assert tabulated.value.shape[-1] == 1 and single.derivative is None and single.value.dtype is torch.float32
        alpha.requires_grad_()
        formula = term.influence(lattice, True, planes)
        assert formula.value.requires_grad and formula.value.shape[-1] == 2
        return [*(t.expand_as(formula.value) for t in (*tabulated, single.value)), *(t.detach() for t in formula)]

    value, derivative, single, *formula = gpu(both)
    # a recurrence that subtracts nearly equal numbers, more of them for high powers
    assert_equal((value, derivative), formula, 1e-13 * exponent, least=0.0)
    assert_equal((single,), (value,), 1e-6, least=0.0)


@pytest.mark.parametrize("exponent", [1, 6])
def test_an_open_graph_does_not_change_a_mesh_sum(exponent, gpu):
    """Without one meshes are multiplied in place; in a graph of positions by tables, in one of cells by a formula."""
    x, q, cell, near = TWO.positions, TWO.charges, TWO.cell, pairs_of_two()
    options = {"compute_forces": True, "compute_virial": True, "potential": power_law(exponent)}

    def results(device, tracked, dtype=torch.float64):
        given = [t.to(device, dtype) for t in (x, q, cell)]
        if tracked is not None:
            given[tracked].requires_grad_()
        lists = {name: t.to(device) for name, t in (near | {"batch_idx": TWO.batch_idx}).items()}
        return [t.detach() for t in on_mesh(*given, lists, **options)]

    expected = gpu(lambda device: results(device, None))
    assert_equal(gpu(lambda device: results(device, None, torch.float32)), expected, 1e-4)
    for tracked in range(3):
        assert_equal(gpu(lambda device, n=tracked: results(device, n)), expected, 1e-12)


def test_an_array_of_meshes_has_no_axis_of_all_points(gpu, monkeypatch):
    """Kernels count along an axis with 32 bits: so 1,024 meshes of 128 x 128 x 128 points have sums as well."""
    x, q, cell, near = TWO.positions, TWO.charges, TWO.cell, pairs_of_two() | {"batch_idx": TWO.batch_idx}
    mesh = (20, 22, 26)  # that no other test has, whose arrays are known
    monkeypatch.setattr(tensors, "MOST_ELEMENTS", math.prod(mesh) - 1)

    def results(device):
        given = [t.to(device) for t in (x, q, cell)]
        options = {"mesh_dimensions": mesh, "compute_forces": True, "compute_virial": True}
        return electrostatics.particle_mesh_ewald(*given, 0.7, **options, **{k: t.to(device) for k, t in near.items()})

    assert all(t.isfinite().all() for t in gpu(results))
