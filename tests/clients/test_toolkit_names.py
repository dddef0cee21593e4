"""Names that nvalchemi-toolkit takes, called as it calls them: on Warp arrays, in place, and kernels by wp.launch."""

import importlib

import numpy as np
import pytest
import torch
import warp as wp
from ase.build import molecule
from ase.calculators.lj import LennardJones
from ase.optimize import FIRE, FIRE2

from nvalchemiops.dynamics import integrators as steps
from nvalchemiops.dynamics import utils
from nvalchemiops.dynamics.integrators.npt import vec9d
from nvalchemiops.dynamics.optimizers.fire import fire_step
from nvalchemiops.neighbors.base_dispatch import neighbor_list_strategy_run_args
from nvalchemiops.neighbors.rebuild_detection import check_batch_neighbor_list_rebuild
from nvalchemiops.segment_ops import segmented_max, segmented_mean, segmented_min, segmented_sum
from nvalchemiops.torch.fire2 import fire2_step_coord, fire2_step_coord_cell
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.neighbor_utils import allocate_cell_list

ELECTRO = "nvalchemiops.interactions.electrostatics"
PATHS = {
    f"{ELECTRO}._factory_common": ["_DerivState"],
    f"{ELECTRO}.ewald_kernels": ["BATCH_BLOCK_SIZE", "EIGHTPI"],
    "nvalchemiops.dynamics.integrators": ["langevin_baoab_finalize", "npt_barostat_half_step", "velocity_rescale"],
    "nvalchemiops.dynamics.integrators.npt": ["npt_velocity_half_step", "vec9d", "vec9f"],
    "nvalchemiops.dynamics.optimizers": ["fire_step", "fire_update"],
    "nvalchemiops.dynamics.utils": ["align_cell", "compute_cell_inverse", "wrap_positions_to_cell"],
    "nvalchemiops.dynamics.utils.cell_filter": ["stress_to_cell_force"],
    "nvalchemiops.dynamics.utils.thermostat_utils": ["compute_temperature", "initialize_velocities"],
    "nvalchemiops.torch.interactions.electrostatics.ewald": ["ensure_electrostatics_ops_registered"],
    "nvalchemiops.torch.interactions.electrostatics.pme": ["_prepare_alpha", "_prepare_cell", "register_pme_ops"],
}
FLOAT = torch.float64
SIZES = (3, 4)
IDX = torch.tensor([0] * 3 + [1] * 4, dtype=torch.int32)
CELLS = torch.tensor(
    [[[5.0, 0.3, 0], [1.0, 6, 0.2], [0.5, 0.7, 7]], [[6.0, 0, 0.4], [-1.0, 5, 0], [0.2, 1, 8]]], dtype=FLOAT
)
N = wp.int32


@pytest.fixture(autouse=True, scope="module")
def warp_is_ready():
    wp.init()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)


def arrays(*tensors):
    """As the client makes them: numbers, vectors, matrices, or nine numbers, by the trailing axes."""
    kinds = {(): wp.float64, (3,): wp.vec3d, (3, 3): wp.mat33d, (9,): vec9d}
    return [
        wp.from_torch(
            t, dtype=kinds[tuple(t.shape[1:])] if t.is_floating_point() else {torch.bool: wp.bool}.get(t.dtype, N)
        )
        for t in tensors
    ]


def scalars(tensor):
    return wp.from_torch(tensor, dtype=wp.float64)


class Systems:
    """Two systems with all that a step takes."""

    def __init__(self, dt=0.01):
        self.x, self.v, self.f = draw(7, 3) + 3.0, draw(7, 3, seed=1), draw(7, 3, seed=2)
        self.m, self.dt = 1.0 + draw(7, seed=3).abs(), torch.tensor([dt, 0.7 * dt], dtype=FLOAT)
        self.cells, self.rate = CELLS.clone(), 0.3 * draw(2, 3, 3, seed=4)
        self.rate += self.rate.mT.clone()
        self.counts, self.kt = torch.tensor(SIZES, dtype=torch.int32), torch.tensor([0.8, 1.2], dtype=FLOAT)

    def kinetic(self):
        return torch.zeros(2, dtype=FLOAT).index_add(0, IDX, 0.5 * self.m * self.v.square().sum(1))


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-10)


@pytest.mark.parametrize("path", PATHS)
def test_paths(path):
    module = importlib.import_module(path)
    assert all(hasattr(module, name) for name in PATHS[path]) and not hasattr(module, "no_such_name")


# -- lists and sums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,)], ids=["numbers", "vectors"])
def test_segments(shape):
    values, idx = draw(6, *shape), torch.tensor([0, 0, 3, 3, 3, 1], dtype=torch.int32)
    parts = [values[idx == s] for s in range(4)]
    zeros = torch.zeros(4, *shape, dtype=FLOAT)
    for function, each, empty in (
        (segmented_sum, torch.sum, 0.0),
        (segmented_max, torch.amax, -torch.inf),
        (segmented_min, torch.amin, torch.inf),
    ):
        out = torch.full_like(zeros, empty)
        assert function(*arrays(values, idx, out)).ptr == out.data_ptr()
        close(out, torch.stack([each(p, 0) if len(p) else out[2] for p in parts]))
        assert (out[2] == empty).all()
    sums, counts, out = zeros.clone(), torch.zeros(4, dtype=torch.int32), zeros.clone()
    segmented_mean(*arrays(values, idx, sums, counts, out))
    assert counts.tolist() == [2, 1, 0, 3]
    close(out, torch.stack([p.mean(0) if len(p) else zeros[0] for p in parts]))
    ones = torch.zeros(4, dtype=torch.int32)
    segmented_sum(*arrays(torch.ones(6, dtype=torch.int32), idx, ones))
    assert ones.tolist() == [2, 1, 0, 3]


def test_stale_lists():
    """Flags are set, never cleared, and only the reference of stale systems moves."""
    reference = draw(7, 3)
    now = reference.clone()
    now[5, 0] += 0.6
    flags, before = torch.zeros(2, dtype=torch.bool), reference.clone()
    check_batch_neighbor_list_rebuild(
        *arrays(reference, now, IDX), skin_distance_threshold=0.5, rebuild_flags=arrays(flags)[0], wp_dtype=wp.float64,
        device="cpu", update_reference_positions=True,
    )  # fmt: skip
    assert flags.tolist() == [False, True]
    assert torch.equal(reference[:3], before[:3]) and torch.equal(reference[3:], now[3:])
    flags[0] = True
    again = *arrays(reference, now, IDX), 0.5, arrays(flags)[0]
    check_batch_neighbor_list_rebuild(*again)
    assert flags.tolist() == [True, True]


def test_methods_and_memory():
    assert neighbor_list_strategy_run_args("batch_cell_list_pair_centric")[0] == "batch_cell_list"
    assert neighbor_list_strategy_run_args("naive_tile")[0] == "naive"
    for method in ("no_such_method", None):
        with pytest.raises(ValueError, match="`method` must be"):
            neighbor_list_strategy_run_args(method)
    names = ("cells_per_dimension", "neighbor_search_radius", "atom_periodic_shifts", "atom_to_cell_mapping")
    names += ("atoms_per_cell_count", "cell_atom_start_indices", "cell_atom_list")
    scratch = dict(zip(names, allocate_cell_list(7, 64, torch.ones(2, 3, dtype=torch.int32), "cpu"), strict=True))
    x, pbc = Systems().x, torch.ones(2, 3, dtype=torch.bool)
    assert neighbor_list(x, 3.0, cell=CELLS, pbc=pbc, batch_idx=IDX, method="batch_cell_list", **scratch)[1].shape == (
        7,
    )


# -- dynamics -----------------------------------------------------------------------------------------


def test_verlet_is_reversible_and_langevin_without_friction_is_verlet():
    a, b = Systems(0.1), Systems(0.1)
    spring = 1.0 + draw(7, 1, seed=5).abs()
    for _ in range(20):
        for s in (a, b):
            s.f.copy_(-spring * s.x)
        args = arrays(a.x, a.v, a.f, a.m, a.dt)
        steps.velocity_verlet_position_update(*args, batch_idx=arrays(IDX)[0])
        free = arrays(b.x, b.v, b.f, b.m, b.dt, b.kt, torch.zeros(2, dtype=FLOAT))
        steps.langevin_baoab_half_step(*free, 7, batch_idx=IDX.long())
        for s in (a, b):
            s.f.copy_(-spring * s.x)
            steps.velocity_verlet_velocity_finalize(*arrays(s.v, s.f, s.m, s.dt), batch_idx=arrays(IDX)[0])
    close(a.x, b.x)
    assert (a.x - Systems().x).abs().max() > 0.5
    a.v.neg_()
    for _ in range(20):
        steps.nhc_velocity_half_step(*arrays(a.v, a.f, a.m, a.dt), batch_idx=arrays(IDX)[0])
        steps.nhc_position_update(*arrays(a.x, a.v, a.dt), batch_idx=arrays(IDX)[0])
        a.f.copy_(-spring * a.x)
        steps.langevin_baoab_finalize(*arrays(a.v, a.f, a.m, a.dt), batch_idx=arrays(IDX)[0])
    close(a.x, Systems().x)
    close(a.v, -Systems().v)


def test_velocities():
    """A strong friction draws velocities of each system's temperature, as the initial draw; a weak one keeps a part."""
    n = 4000
    idx = torch.arange(2, dtype=torch.int32).repeat_interleave(n)
    m, kt = 1.0 + draw(2 * n).abs(), torch.tensor([0.5, 2.0], dtype=FLOAT)
    x, v, f = (torch.zeros(2 * n, 3, dtype=FLOAT) for _ in range(3))
    dt, friction = torch.full((2,), 0.1, dtype=FLOAT), torch.full((2,), 1e3, dtype=FLOAT)
    scratch = torch.zeros(2, 3, dtype=FLOAT), torch.zeros(2, dtype=FLOAT), torch.zeros(2, 3, dtype=FLOAT)
    seen = []
    for seed, strength in ((1, 1e3), (2, 1e3), (3, 5.0)):
        friction.fill_(strength)
        steps.langevin_baoab_half_step(*arrays(x, v, f, m, dt, kt, friction), seed, batch_idx=arrays(idx)[0])
        seen.append(v.clone())
    utils.initialize_velocities(*arrays(v, m, kt, *scratch), 3, False, batch_idx=arrays(idx)[0], num_systems=2)
    for drawn in (*seen, v):
        reduced = drawn * (m / kt.repeat_interleave(n)).sqrt()[:, None]
        for numbers in reduced.reshape(2, -1):
            assert abs(numbers.mean()) < 4 / np.sqrt(3 * n) and abs(numbers.var() - 1) < 4 * np.sqrt(2 / (3 * n))
            assert abs((numbers**4).mean() - 3) < 0.5
        assert abs(torch.corrcoef(reduced.reshape(2, -1))[0, 1]) < 4 / np.sqrt(3 * n)  # each system has its own
    expected = torch.eye(4, dtype=FLOAT)
    expected[1, 2] = expected[2, 1] = np.exp(-5.0 * 0.1)
    assert abs(torch.corrcoef(torch.stack([t.flatten() for t in (*seen, v)])) - expected).max() < 4 / np.sqrt(6 * n)
    utils.remove_com_motion(*arrays(v, m, *scratch), batch_idx=arrays(idx)[0], num_systems=2)
    assert torch.zeros(2, 3, dtype=FLOAT).index_add(0, idx, m[:, None] * v).abs().max() < 1e-10
    s, found, kelvin = Systems(), torch.zeros(2, dtype=FLOAT), torch.zeros(2, dtype=FLOAT)
    utils.compute_kinetic_energy(*arrays(s.v, s.m, found, IDX), num_systems=2)
    close(found, s.kinetic())
    for counts, degrees in ((s.counts, 3 * s.counts - 3), (torch.ones_like(s.counts), 3)):
        utils.compute_temperature(*arrays(found, kelvin, counts))
        close(kelvin, 2 * found / degrees)
    pointers = torch.tensor([0, 3, 7], dtype=torch.int32)
    steps.velocity_rescale(*arrays(s.v, torch.tensor([2.0, 3.0], dtype=FLOAT)), atom_ptr=arrays(pointers)[0])
    close(s.kinetic(), found * torch.tensor([4.0, 9.0], dtype=FLOAT))


def chains(s, n_links):
    given = (*arrays(3 * s.counts, s.kt, torch.tensor([0.3, 0.5], dtype=FLOAT)), n_links)
    masses = wp.to_torch(steps.nhc_compute_masses(*given, None, 2, "cpu", wp.float64))
    in_memory = steps.nhc_compute_masses(*given, masses=scalars(torch.zeros_like(masses)), num_systems=2)
    close(wp.to_torch(in_memory), masses)
    return 0.1 * draw(2, n_links, seed=6), 2.0 * draw(2, n_links, seed=7), masses


def thermostat(s, eta, eta_dot, masses, nloops=1):
    ke2, scale, unused = (torch.zeros(2, dtype=FLOAT) for _ in range(3))
    steps.nhc_thermostat_chain_update(
        *arrays(s.v, s.m), scalars(eta), scalars(eta_dot), scalars(masses),
        *arrays(s.kt, s.dt, 3 * s.counts.to(FLOAT), ke2, scale, unused, unused), nloops, arrays(IDX)[0], 2,
    )  # fmt: skip
    close(ke2, 2 * s.kinetic())
    return scale


@pytest.mark.parametrize("n_links", [1, 3])
def test_chains(n_links):
    """Reversible, exact to third order in a step, and with the energy that chains conserve."""
    errors = []
    for dt in (0.08, 0.04):
        s = Systems(dt)
        eta, eta_dot, masses = chains(s, n_links)
        close(masses[:, 0], 3 * s.counts * s.kt * torch.tensor([0.09, 0.25], dtype=FLOAT))

        def energy(s=s, eta=eta, eta_dot=eta_dot, masses=masses):
            of_links = 0.5 * (masses * eta_dot**2).sum(1) + s.kt * (3 * s.counts * eta[:, 0] + eta[:, 1:].sum(1))
            return s.kinetic() + of_links

        start = [t.clone() for t in (s.v, eta, eta_dot)]
        before = energy()
        scale = thermostat(s, eta, eta_dot, masses)
        assert (scale - 1).abs().max() > 1e-3
        errors.append((energy() - before).abs())
        s.v.neg_(), eta_dot.neg_()
        thermostat(s, eta, eta_dot, masses)
        for now, then in zip((-s.v, eta, -eta_dot), start):
            close(now, then)
    assert (errors[1] < errors[0] / 6).all()  # the third order's 8
    s = Systems(1e-6)
    for of_atoms in (True, False):
        eta, eta_dot, masses = chains(s, n_links)
        push = (2 * s.kinetic() - 3 * s.counts * s.kt) / masses[:, 0]
        push = push - eta_dot[:, 0] * eta_dot[:, 1] if n_links > 1 else push
        before = eta_dot.clone()
        if of_atoms:
            thermostat(s, eta, eta_dot, masses)
        else:
            given = scalars(eta), scalars(eta_dot), *arrays(s.kinetic(), s.kt), scalars(masses)
            steps.npt_thermostat_half_step(*given, *arrays(s.counts), n_links, arrays(s.dt)[0])
        torch.testing.assert_close((eta_dot - before)[:, 0], 0.5 * s.dt * push, rtol=1e-3, atol=0)


def test_loops_divide_the_step_of_a_chain():
    whole, halves = Systems(0.08), Systems(0.04)
    eta, eta_dot, masses = chains(whole, 3)
    parts = eta.clone(), eta_dot.clone()
    scale = thermostat(whole, eta, eta_dot, masses, nloops=2)
    close(scale, thermostat(halves, *parts, masses) * thermostat(halves, *parts, masses))
    for one, other in zip((whole.v, eta, eta_dot), (halves.v, *parts)):
        close(one, other)


def test_pressure():
    s, virial, kinetic, pressure = (
        Systems(),
        draw(2, 9, seed=8),
        torch.zeros(2, 9, dtype=FLOAT),
        torch.zeros(2, 9, dtype=FLOAT),
    )
    volume, scalar = torch.zeros(2, dtype=FLOAT), torch.zeros(2, dtype=FLOAT)
    moments = torch.stack([(s.m[IDX == k, None] * s.v[IDX == k]).T @ s.v[IDX == k] for k in range(2)])
    steps.compute_kinetic_tensor(*arrays(s.v, s.m), scalars(kinetic), batch_idx=arrays(IDX)[0])
    close(kinetic.view(2, 3, 3), moments)
    args = *arrays(s.v, s.m, virial, CELLS), scalars(kinetic), *arrays(pressure, volume)
    assert steps.compute_pressure_tensor(*args, batch_idx=arrays(IDX)[0]).ptr == pressure.data_ptr()
    close(pressure.view(2, 3, 3), (moments + virial.view(2, 3, 3)) / torch.linalg.det(CELLS)[:, None, None])
    kinetic *= 2  # of more atoms elsewhere
    steps.compute_pressure_tensor(*args, batch_idx=arrays(IDX)[0], compute_kinetic=False)
    steps.compute_scalar_pressure(*arrays(pressure, scalar))
    close(scalar, ((2 * moments.flatten(1) + virial)[:, ::4].sum(1) / 3) / volume)


@pytest.mark.parametrize("mode", ["isotropic", "anisotropic", "triclinic"])
def test_ideal_gas_at_constant_pressure(mode):
    """Its enthalpy, with the kinetic energy of the cell, is conserved to second order: halve dt, divide by four.

    Forces of a field that is uniform add their work, which fractional coordinates do not feel on average: none here.
    """
    drifts = []
    for dt in (0.02, 0.01):
        s = Systems(dt)
        s.f.zero_()
        mass, target = torch.zeros(2, dtype=FLOAT), torch.tensor([0.3, 0.1], dtype=FLOAT)
        steps.compute_barostat_mass(*arrays(s.kt, torch.tensor([0.5, 0.4], dtype=FLOAT), s.counts, mass))
        close(mass, 3 * (s.counts + 1) * s.kt * torch.tensor([0.25, 0.16], dtype=FLOAT))
        mass /= 3
        rate = torch.zeros(2, 3, 3, dtype=FLOAT)
        wanted = {
            "isotropic": target,
            "anisotropic": target[:, None].expand(2, 3).contiguous(),
            "triclinic": (target[:, None, None] * torch.eye(3, dtype=FLOAT)).reshape(2, 9),
        }[mode]
        buffers = torch.zeros(2, 9, dtype=FLOAT), torch.zeros(2, 9, dtype=FLOAT)
        volume = torch.zeros(2, dtype=FLOAT)

        def press(s=s, rate=rate, wanted=wanted, mass=mass, buffers=buffers, volume=volume):
            virial = torch.zeros(2, 9, dtype=FLOAT)
            steps.compute_pressure_tensor(
                *arrays(s.v, s.m, virial, s.cells),
                scalars(buffers[0]),
                *arrays(buffers[1], volume),
                batch_idx=arrays(IDX)[0],
            )
            args = arrays(rate, buffers[1], wanted, volume, mass, s.kinetic(), s.counts, s.dt)
            (steps.nph_barostat_half_step if mode == "isotropic" else steps.npt_barostat_half_step)(*args)

        def kick(s=s, rate=rate, volume=volume):
            args = *arrays(s.v, s.m, s.f, rate, volume), 7, arrays(s.dt)[0]
            steps.nph_velocity_half_step(*args, *arrays(IDX, s.counts), mode=mode)

        def enthalpy(s=s, rate=rate, mass=mass, target=target):
            return s.kinetic() + 0.5 * mass * rate.square().sum((1, 2)) + target * torch.linalg.det(s.cells)

        values = [enthalpy()]
        for _ in range(int(0.6 / dt)):
            press(), kick()
            steps.npt_position_update(*arrays(s.x, s.v, s.cells, rate, s.dt), batch_idx=arrays(IDX)[0])
            steps.npt_cell_update(*arrays(s.cells, rate, s.dt))
            kick(), press()
            values.append(enthalpy())
        drifts.append((torch.stack(values) - values[0]).abs().amax(0))
        assert (torch.linalg.det(s.cells) / torch.linalg.det(CELLS) - 1).abs().min() > 0.05
    assert (drifts[1] < 0.28 * drifts[0]).all() and (drifts[0] < 0.5).all()


def test_atoms_at_rest_follow_the_cell():
    """And a chain adds its friction to velocities."""
    s, fractional = Systems(0.5), torch.linalg.solve(CELLS.mT[IDX], Systems().x)
    s.v.zero_()
    steps.npt_position_update(*arrays(s.x, s.v, s.cells, s.rate, s.dt), batch_idx=arrays(IDX)[0])
    steps.npt_cell_update(*arrays(s.cells, s.rate, s.dt))
    assert (s.cells - CELLS).abs().max() > 0.1
    close(torch.linalg.solve(s.cells.mT[IDX], s.x), fractional)
    s, t, links = Systems(), Systems(), draw(2, 3, seed=9)
    volume = torch.ones(2, dtype=FLOAT)
    steps.npt_velocity_half_step(
        *arrays(s.v, s.m, 0 * s.f, s.rate, volume), scalars(links), 7, arrays(s.dt)[0], *arrays(IDX, s.counts, CELLS),
        "triclinic",
    )  # fmt: skip
    steps.nph_velocity_half_step(
        *arrays(t.v, t.m, 0 * t.f, t.rate, volume), 7, arrays(t.dt)[0], *arrays(IDX, t.counts, CELLS), mode="triclinic"
    )
    close(s.v, t.v * torch.exp(-0.5 * s.dt * links[:, 0])[IDX, None])
    with pytest.raises(ValueError, match="`mode` must be"):
        steps.nph_velocity_half_step(*arrays(t.v, t.m, t.f, t.rate, volume), 7, arrays(t.dt)[0], mode="cubic")


# -- cells --------------------------------------------------------------------------------------------


def test_wrapping():
    s, columns = Systems(), CELLS.mT.contiguous()
    s.x += draw(7, 3, seed=5) * 20
    before, inverse = s.x.clone(), torch.zeros_like(columns)
    utils.compute_cell_inverse(*arrays(columns, inverse))
    utils.wrap_positions_to_cell(*arrays(s.x, columns, inverse, IDX))
    inside, moved = (torch.linalg.solve(columns[IDX], t) for t in (s.x, s.x - before))
    assert ((inside > -1e-12) & (inside < 1)).all() and moved.abs().max() > 1
    close(moved, moved.round(), 1e-10)


def test_aligned_cells():
    """Rotated, not mirrored, also if they are left-handed; what is aligned stays."""
    s = Systems()
    s.cells[1, 2] *= -1
    before, cells, transform = s.x.clone(), s.cells.clone(), torch.zeros_like(CELLS)
    x, cell, rotation = arrays(s.x, s.cells, transform)
    utils.align_cell(x, cell=cell, transform=rotation, batch_idx=arrays(IDX)[0], device="cpu")
    close(s.cells, s.cells.tril())
    assert (s.cells.diagonal(dim1=1, dim2=2)[:, :2] > 0).all()
    close(torch.linalg.det(s.cells), torch.linalg.det(cells))
    close(torch.linalg.det(transform), torch.ones(2, dtype=FLOAT))
    close(s.cells @ s.cells.mT, cells @ cells.mT)
    close(torch.linalg.solve(s.cells.mT[IDX], s.x), torch.linalg.solve(cells.mT[IDX], before))
    aligned = s.cells.clone()
    utils.align_cell(x, cell, rotation, arrays(IDX)[0])
    close((s.cells, transform), (aligned, torch.eye(3, dtype=FLOAT).expand(2, 3, 3)))
    s.cells[:, 2] = 0.0  # of a slab
    utils.align_cell(x, cell, rotation, arrays(IDX)[0])
    close(transform @ transform.mT, torch.eye(3, dtype=FLOAT).expand(2, 3, 3))


def test_forces_on_cells():
    """The gradient of an energy with respect to the lattice vectors, from its stress."""
    fractional, cells, strain = (
        draw(4, 3),
        CELLS[:1].clone().requires_grad_(),
        torch.zeros(3, 3, dtype=FLOAT, requires_grad=True),
    )

    def energy(cell):
        x = fractional @ cell
        return (x[:2] - x[2:]).square().sum().sin() + torch.linalg.det(cell).log()

    (gradient,) = torch.autograd.grad(energy(cells[0]), cells)
    symmetric = torch.eye(3, dtype=FLOAT) + 0.5 * (strain + strain.T)
    (by_strain,) = torch.autograd.grad(energy(CELLS[0] @ symmetric), strain)
    volume, found = torch.linalg.det(CELLS[:1]), torch.zeros(1, 3, 3, dtype=FLOAT)
    stress = by_strain[None] / volume
    for aligned in (False, True):
        utils.stress_to_cell_force(*arrays(stress, CELLS[:1].clone(), volume, found), keep_aligned=aligned)
        close(found, -gradient.tril() if aligned else -gradient)


# -- relaxation -----------------------------------------------------------------------------------------


def clusters():
    for n in range(2):
        atoms = molecule("CH3CH2OH")
        atoms.rattle(0.05 * (n + 1), seed=n)
        atoms.calc = LennardJones(sigma=0.9, epsilon=0.3, rc=20.0)
        yield atoms


@pytest.mark.parametrize("version", [1, 2])
def test_fire_step_by_step(version):
    """As ASE relaxes each alone; of FIRE 2.0 the steps before one goes uphill, where ASE evaluates forces twice."""
    n_steps, systems, batch = 60 if version == 1 else 9, list(clusters()), list(clusters())
    sizes = torch.tensor([len(a) for a in batch])
    idx = torch.arange(2, dtype=torch.int32).repeat_interleave(sizes)
    x = torch.tensor(np.concatenate([a.positions for a in batch]))
    v, dt, alpha = torch.zeros_like(x), torch.full((2,), 0.05, dtype=FLOAT), torch.full((2,), 0.1, dtype=FLOAT)
    counts, ones, maxstep = (
        torch.zeros(2, dtype=torch.int32),
        torch.ones(len(x), dtype=FLOAT),
        torch.full((2,), 9.0, dtype=FLOAT),
    )
    fixed = [torch.full((2,), value, dtype=FLOAT) for value in (0.1, 0.99, 1e-9, 1.0)]
    n_min, factors = (
        torch.full((2,), 5, dtype=torch.int32),
        [torch.full((2,), value, dtype=FLOAT) for value in (0.5, 1.1)],
    )
    products = {name: arrays(torch.zeros(2, dtype=FLOAT))[0] for name in ("vf", "vv", "ff")}
    for n_step in range(n_steps):
        for atoms, positions in zip(batch, x.split(sizes.tolist())):
            atoms.positions = positions.numpy()
        f = torch.tensor(np.concatenate([a.get_forces() for a in batch]))
        if version == 1:
            given = arrays(x, v, f, ones, alpha, dt, *fixed, maxstep, counts, n_min, *factors, torch.zeros_like(counts))
            fire_step(*given, **products, batch_idx=arrays(idx)[0])
        else:
            options = {"delaystep": 5, "dtgrow": 1.1, "dtshrink": 0.5, "alphashrink": 0.99, "alpha0": 0.1, "tmax": 1.0}
            given = {"vf": (f * v).sum(1), "v_sumsq": (v * v).sum(1), "f_sumsq": (f * f).sum(1)}
            given = {k: torch.zeros(2, dtype=FLOAT).index_add(0, idx.long(), p) for k, p in given.items()}
            given["compute_reductions"] = n_step % 2 == 0
            fire2_step_coord(x, v, f, idx, alpha, dt, counts, tmin=1e-3, maxstep=9.0, **options, **given)
    for n, (atoms, positions) in enumerate(zip(systems, x.split(sizes.tolist()))):
        if version == 1:
            optimizer = FIRE(atoms, logfile=None, dt=0.05, maxstep=9.0)
        else:
            optimizer = FIRE2(atoms, logfile=None, dt=0.05, maxstep=9.0, Nmin=5, dtmin=1e-3, astart=0.1)
        optimizer.run(fmax=0.0, steps=n_steps)
        np.testing.assert_allclose(positions.numpy(), atoms.positions, atol=1e-9)
        np.testing.assert_allclose(dt[n].item(), optimizer.dt)
        assert optimizer.Nsteps == counts[n]
    assert version == 2 or (dt < 0.05).any() or (dt > 0.05).any()


def test_uphill_steps_are_taken_back_and_moves_are_limited():
    """And atoms at rest without forces stay."""
    x, v, f = (torch.zeros(3, 3, dtype=FLOAT) for _ in range(3))
    v[0, 0], f[0, 0], f[1, 1] = 1.0, -2.0, 50.0
    state = [torch.full((3,), value, dtype=FLOAT) for value in (0.05, 0.4, 0.1, 0.99, 0.01, 1.0, 0.2)]
    integers = [torch.full((3,), value, dtype=torch.int32) for value in (3, 5)]
    last = [torch.full((3,), value, dtype=FLOAT) for value in (0.5, 1.1)]
    idx, masses = torch.arange(3, dtype=torch.int32), torch.tensor([4.0, 1.0, 1.0], dtype=FLOAT)
    args = x, v, f, masses, *state, *integers, *last, torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="`compute_reductions=False` needs"):
        fire_step(*arrays(*args), batch_idx=arrays(idx)[0], compute_reductions=False)
    fire_step(*arrays(*args), batch_idx=arrays(idx)[0])
    # back by half a step, then on from rest; and the limit, not 8
    close(x.diagonal(), torch.tensor([-0.5 * 0.4 - 0.2 * 0.2 * 2.0 / 4.0, 0.2, 0.0], dtype=FLOAT))
    assert state[0].tolist() == [0.1, 0.05, 0.05] and state[1].tolist() == [0.2, 0.4, 0.4]
    assert integers[0].tolist() == [0, 3, 3]


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_fire_of_cells(scale):
    """Rows of the cell are atoms more; atoms make their own moves, then keep their fractional coordinates."""
    s, cells = Systems(), CELLS.clone()
    force, of_cell = draw(2, 3, 3, seed=5), torch.zeros(2, 3, 3, dtype=FLOAT)
    rows, pulls = torch.cat([s.v, of_cell.reshape(6, 3)]), torch.cat([s.f, force.reshape(6, 3) / scale])
    idx = torch.cat([IDX, torch.tensor([0] * 3 + [1] * 3, dtype=torch.int32)])
    state, alone = (
        (*(torch.full((2,), value, dtype=FLOAT) for value in (0.1, 0.05)), torch.zeros(2, dtype=torch.int32))
        for _ in range(2)
    )
    options = {} if scale == 1.0 else {"cell_force_scale": scale, "ext_positions": torch.empty(13, 3)}
    for _ in range(2):  # at first cells are at rest
        lattice, x, moves = cells.clone(), s.x.clone(), torch.zeros(13, 3, dtype=FLOAT)
        fire2_step_coord_cell(s.x, s.v, s.f, cells, of_cell, force, IDX, *state, maxstep=9.0, **options)
        fire2_step_coord(moves, rows, pulls, idx, *alone, maxstep=9.0)
        close(cells - lattice, moves[7:].reshape(2, 3, 3) / scale)
        close(of_cell, rows[7:].reshape(2, 3, 3) / scale)
        close(s.v, rows[:7])
        close(torch.linalg.solve(cells.mT[IDX], s.x), torch.linalg.solve(lattice.mT[IDX], x + moves[:7]))
