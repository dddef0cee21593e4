"""Maxwell-Boltzmann velocities, momenta, kinetic energies, degrees of freedom, and chains as an operator."""

import numpy as np
import pytest
import scipy.stats
import torch

from nvalchemiops.constants import ASE_TIME_IN_FEMTOSECOND, BOLTZMANN_EV_PER_KELVIN, FEMTOSECOND, GIGAPASCAL, KELVIN
from nvalchemiops.torch.dynamics import (
    csvr,
    degrees_of_freedom,
    kinetic_energy,
    kinetic_tensor,
    maxwell_boltzmann,
    nve,
    remove_momentum,
    remove_rotation,
    temperature,
)
from nvalchemiops.torch.operators.chains import chain_steps, move_chains
from nvalchemiops.torch.systems import System
from tests.support.mistakes import assert_named
from tests.support.on_device import on_gpu, pretended_gpu

from .systems import float64, springs

SIZES = (5, 0, 1, 7)
BATCH = torch.arange(4, dtype=torch.int32).repeat_interleave(torch.tensor(SIZES))
N = len(BATCH)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=float64)


MASSES = 1.0 + numbers(N).abs()
MASSES[[1, 8]] = torch.inf
MOVING = MASSES.isfinite()


def test_maxwell_boltzmann_velocities_have_the_variance_kt_over_m():
    n = 20_000
    masses = torch.tensor([1.0, 4.0, 9.0, torch.inf], dtype=float64).repeat(n // 4)
    batch_idx = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(n // 2)
    kt = torch.tensor([0.5, 2.0], dtype=float64)
    velocities = maxwell_boltzmann(masses, kt, batch_idx, seed=3)
    assert not velocities[3::4].any()
    reduced = velocities * (masses / kt[batch_idx.long()]).sqrt().unsqueeze(1)
    for part in (reduced[masses == m] for m in (1.0, 4.0, 9.0)):
        assert scipy.stats.kstest(part.flatten().numpy(), "norm").pvalue > 1e-3
    for system, rows in enumerate((slice(0, n // 2), slice(n // 2, n))):
        alone = maxwell_boltzmann(masses[rows], float(kt[system]), seed=3, keys=torch.tensor([system]))
        assert torch.equal(velocities[rows], alone)
    assert maxwell_boltzmann(masses.float(), 1.0).dtype == torch.float32


def test_kinetic_energies_of_atoms_that_move():
    velocities = numbers(N, 3)
    tensor, energies = (f(velocities, MASSES, BATCH, 4) for f in (kinetic_tensor, kinetic_energy))
    for system in range(4):
        of = (BATCH == system) & MOVING
        expected = 0.5 * torch.einsum("i,ia,ib->ab", MASSES[of], velocities[of], velocities[of])
        assert (tensor[system] - expected).abs().max() < 1e-13
        assert (energies[system] - expected.trace()).abs() < 1e-13


def test_degrees_of_freedom_and_temperatures():
    expected = torch.tensor([12.0, 0.0, 3.0, 18.0], dtype=float64)
    assert torch.equal(degrees_of_freedom(MASSES, BATCH, 4), expected)
    removed = torch.tensor([3.0, 3.0, 3.0, 7.0], dtype=float64)
    assert torch.equal(
        degrees_of_freedom(MASSES, BATCH, 4, removed=removed), torch.tensor([9.0, 0.0, 0.0, 11.0], dtype=float64)
    )
    velocities = numbers(N, 3)
    found = temperature(velocities, MASSES, BATCH, 4, removed=removed)
    energies = kinetic_energy(velocities, MASSES, BATCH, 4)
    assert torch.equal(found[[0, 3]], 2.0 * energies[[0, 3]] / torch.tensor([9.0, 11.0], dtype=float64))
    assert found[1] == 0.0


def test_a_single_atom_without_momentum_is_at_rest():
    """Exactly, whatever its mass: what rounding leaves would have a temperature, which thermostats would raise."""
    n = 20
    masses, batch_idx = 1.0 + numbers(n, seed=1).abs(), torch.arange(n, dtype=torch.int32)
    assert not remove_momentum(numbers(n, 3), masses, batch_idx).any()
    system = System(numbers(n, 3), batch_idx=batch_idx, pbc=torch.zeros(n, 3, dtype=torch.bool))
    state = csvr(0.1, 0.5).start(system, springs(1.0), masses=masses)
    assert not state.velocities.any() and not state.extra["degrees_of_freedom"].any()


@pytest.mark.parametrize("rotates", ["", "not", "not about the axis"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_what_rests_as_a_whole_has_fewer_degrees_of_freedom(n, rotates):
    """An isolated system stays without angular momentum: a thermostat that counts the rotation makes it too hot.

    One with images along a single axis stays without that about this axis.
    """
    pbc = torch.tensor([[False, False, False], [False, True, False], [True, True, False]])
    cells, batch_idx = 9.0 + numbers(3, 3, 3), torch.arange(3, dtype=torch.int32).repeat_interleave(n)
    masses, positions = 1.0 + numbers(n).abs(), 9.0 + numbers(n, 3, seed=1)
    along = cells[1, 1:2]  # moving along it, atoms do not turn about it
    velocities = remove_momentum(numbers(n, 1, seed=2) * along if "axis" in rotates else numbers(n, 3, seed=2), masses)
    if rotates == "not":
        velocities = remove_rotation(velocities, positions, masses)

    momenta = masses.unsqueeze(1) * torch.eye(3 * n, dtype=float64).view(-1, n, 3)
    arms = positions - masses @ positions / masses.sum()
    angular = torch.linalg.cross(arms.expand_as(momenta), momenta).sum(1)
    conserved = [angular * (rotates == "not"), angular @ along.mT * ("not" in rotates), angular[:, :0]]
    counts = [3 * n - int(torch.linalg.matrix_rank(torch.cat([momenta.sum(1), of], 1), tol=1e-9)) for of in conserved]

    for cell, axes, expected in ((None, pbc, counts[:1] * 3), (cells, None, counts[2:] * 3), (cells, pbc, counts)):
        system = System(positions.repeat(3, 1), cell=cell, pbc=axes, batch_idx=batch_idx)
        state = nve(0.1).start(system, springs(1.0), masses=masses.repeat(3), velocities=velocities.repeat(3, 1))
        assert state.extra["degrees_of_freedom"][:, 0].tolist() == expected


def test_momentum_and_rotation_are_removed():
    velocities, positions = numbers(N, 3), 3.0 * numbers(N, 3, seed=1)
    still = remove_momentum(velocities, MASSES, BATCH, 4)
    weights = torch.where(MOVING, MASSES, 0.0).unsqueeze(1)
    for system in range(4):
        of = BATCH == system
        assert (weights[of] * still[of]).sum(0).abs().max() < 1e-13
    assert not still[~MOVING].any()
    masses = 1.0 + numbers(N).abs()
    positions[-7:, :2] = 0.0  # the last one is linear
    still = remove_rotation(remove_momentum(velocities, masses, BATCH, 4), positions, masses, BATCH, 4)
    for system in range(4):
        of = BATCH == system
        momenta = masses[of].unsqueeze(1) * still[of]
        assert torch.linalg.cross(positions[of], momenta).sum(0).abs().max() < 1e-11
        assert momenta.sum(0).abs().max() < 1e-12
    # only a rotation was removed: relative velocities along the line of two atoms are the same
    bond = positions[0] - positions[1]
    assert ((still - velocities)[0] - (still - velocities)[1]) @ bond < 1e-12
    assert torch.equal(remove_rotation(velocities, positions, MASSES, BATCH, 4)[BATCH == 0], velocities[BATCH == 0])


CALLS = {
    "maxwell_boltzmann": lambda *batch: maxwell_boltzmann(MASSES, 1.0, *batch, seed=3),
    "degrees_of_freedom": lambda *batch: degrees_of_freedom(MASSES, *batch),
    "kinetic_energy": lambda *batch: kinetic_energy(numbers(N, 3), MASSES, *batch),
    "temperature": lambda *batch: temperature(numbers(N, 3), MASSES, *batch),
    "remove_momentum": lambda *batch: remove_momentum(numbers(N, 3), MASSES, *batch),
    "remove_rotation": lambda *batch: remove_rotation(numbers(N, 3), numbers(N, 3, seed=1), MASSES, *batch),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_systems_are_of_any_integer_dtype_and_in_range(name):
    call = CALLS[name]
    assert torch.equal(call(BATCH.long()), call(BATCH, 4))
    for batch in ((BATCH, 3), (BATCH, 1), (BATCH - 1, 4), (BATCH[1:], 4)):
        with pytest.raises(ValueError, match="batch_idx"):
            call(*batch)
    with pytest.raises(TypeError, match="batch_idx"):
        call(BATCH.tolist())


def test_units():
    """The kinetic energy of one atom of hydrogen at 1 km/s, and of a pressure of 1 GPa in 1 nm³."""
    assert abs(1.0 / FEMTOSECOND - ASE_TIME_IN_FEMTOSECOND) < 1e-12 and KELVIN == BOLTZMANN_EV_PER_KELVIN
    speed = torch.tensor([[0.01 / FEMTOSECOND, 0.0, 0.0]], dtype=float64)  # 1 km/s is 0.01 angstrom/fs
    energy = kinetic_energy(speed, torch.tensor([1.008], dtype=float64))
    assert abs(energy.item() / (0.5 * 1.008 * 1.66053906892e-27 * 1e6 / 1.602176634e-19) - 1.0) < 1e-9
    assert abs(1000.0 * GIGAPASCAL - 1e-18 / 1.602176634e-19) < 1e-9


def test_seeds_have_64_bits():
    """Those of torch, and times in nanoseconds, do not fit into 32 bits."""
    for seed, same in ((torch.tensor(7), 7), (2**40 + 1, 2**40 + 1), (2**64 - 1, -1), (np.uint64(2**63), -(2**63))):
        found = maxwell_boltzmann(MASSES, 1.0, BATCH, 4, seed=seed)
        assert torch.equal(found, maxwell_boltzmann(MASSES, 1.0, BATCH, 4, seed=torch.full((4,), same)))
        assert not torch.equal(found, maxwell_boltzmann(MASSES, 1.0, BATCH, 4, seed=1))


def test_seeds_and_keys_in_any_form():
    batch = torch.tensor([0, 1], dtype=torch.int32)

    def drawn(seed, keys=None):
        return maxwell_boltzmann(torch.ones(2, dtype=float64), 1.0, batch, 2, seed=seed, keys=keys)

    for seed in (np.int64(3), np.array(3), torch.tensor(3), [3, 3], np.array([3, 3]), torch.tensor([3, 3])):
        assert torch.equal(drawn(seed), drawn(3))
    for keys in ((0, 5), np.array([0, 5], dtype=np.uint32)):
        assert torch.equal(drawn(3, keys), drawn(3, torch.tensor([0, 5])))


@pytest.mark.parametrize(
    "arguments",
    (
        {"masses": torch.tensor([12, 16])},
        {"masses": torch.tensor([1.0, 0.0])},
        {"masses": [1.0, 2.0]},
        {"temperature": torch.ones(3)},
        {"temperature": -0.1},
        {"temperature": torch.nan},
        {"temperature": None},
        {"temperature": torch.zeros((), requires_grad=True)},  # noise has no derivative there
        {"seed": 1.5},
        {"seed": 2**64},
        {"keys": torch.ones(2)},
        {"keys": 2**32},
        {"keys": -1},
        {"seed": [1.5]},
        {"seed": [1, 2]},
        {"keys": [-1]},
        {"keys": np.array([2**32])},
    ),
)
def test_bad_arguments_are_named(arguments):
    given = {"masses": torch.ones(2, dtype=float64), "temperature": 1.0} | arguments
    with pytest.raises((ValueError, TypeError), match=f"`{next(iter(arguments))}`"):
        maxwell_boltzmann(**given)


def test_arrays_of_numpy_are_named():
    """Each call with one argument that is not a tensor."""
    v, x, m = numbers(N, 3), numbers(N, 3, seed=1), MASSES
    of_two = {"velocities": v, "masses": m}
    calls = (kinetic_energy, of_two), (temperature, of_two), (remove_momentum, of_two)
    assert_named(
        (
            f"{call.__name__}, {name}",
            lambda call=call, values=values, name=name: call(**values | {name: values[name].numpy()}),
            TypeError,
            f"`{name}` must be a torch.Tensor, got ndarray: use torch.as_tensor",
        )
        for call, values in (*calls, (remove_rotation, of_two | {"positions": x}))
        for name in values
    )


@pytest.mark.parametrize("length", (1, 2, 3, 5))
def test_the_kernel_of_chains_is_the_same_steps_with_the_same_derivatives(length):
    states = numbers(2, 3, length)
    others = [*(numbers(3, 3, seed=4).abs() + 0.1), numbers(3, length, seed=5).abs() + 0.1]
    inputs = [*states, *others, torch.tensor([0.1, 0.2, 0.3], dtype=float64)]
    for found, expected in zip(move_chains(*inputs, 2), chain_steps(*inputs, 2)):
        assert (found - expected).abs().max() < 1e-13 * expected.abs().max().clamp(min=1.0)
    # the temperature is not used by a chain of one
    inputs = [tensor.requires_grad_(length > 1 or n != 4) for n, tensor in enumerate(inputs)]
    assert torch.autograd.gradcheck(lambda *t: move_chains(*t, 2), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *t: move_chains(*t, 1), inputs, fast_mode=True, atol=1e-4)


def test_seeds_on_a_cpu_are_those_of_atoms_on_a_gpu():
    masses, systems = on_gpu((torch.ones(4, dtype=torch.float64), torch.tensor([0, 0, 1, 1], dtype=torch.int32)))
    with pretended_gpu():
        found = maxwell_boltzmann(masses, 0.1, systems, 2, seed=torch.tensor([5, 6]), keys=torch.tensor([3, 4]))
        assert found.device == masses.device
        for keys in ([3, 2**32], torch.tensor([3, -4])):
            with pytest.raises(ValueError, match="`keys` must be numbers"):
                maxwell_boltzmann(masses, 0.1, systems, 2, seed=5, keys=keys)
