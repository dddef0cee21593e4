"""Trajectories of ASE's integrators, step by step, from the same start and with ASE's forces and ours."""

import ase.units
import pytest
import torch
from ase.md.nose_hoover_chain import MTKNPT, IsotropicMTKNPT, MaskedMTKNPT, NoseHooverChainNVT
from ase.md.verlet import VelocityVerlet

from nvalchemiops.ase import Calculator, Pair
from nvalchemiops.torch.dynamics import maxwell_boltzmann, nose_hoover, npt, nve
from nvalchemiops.torch.systems import System

from .systems import SOFT, argon, crystal

DT, KELVIN = 4.0 * ase.units.fs, 60.0
PRESSURE = 0.02 * ase.units.GPa
KT = ase.units.kB * KELVIN
SAME = {"thermostat_time": 20 * DT, "barostat_time": 50 * DT}


def moving_atoms(sheared):
    atoms = crystal(sheared=sheared)
    atoms.calc = Calculator(Pair(SOFT, sigma=3.4, epsilon=0.0104))
    atoms.set_velocities(maxwell_boltzmann(torch.tensor(atoms.get_masses()), KT, seed=3).numpy())
    return atoms


def ase_npt(kind, atoms, **options):
    """ASE's barostat, with its chain for as many degrees of freedom as there are.

    `MTKNPT` of ASE 3.29 counts 9 components of the cell's momentum, of which 6 are independent since its stress and so
    the momentum are symmetric: then the cell is kept at 1.5 times the temperature. The isotropic one counts 1, with a
    mass of the first thermostat for 9.
    """
    dynamics = kind(atoms, DT, temperature_K=KELVIN, pressure_au=PRESSURE, tdamp=20 * DT, pdamp=50 * DT, **options)
    barostat, degrees = dynamics._barostat, {IsotropicMTKNPT: 1, MTKNPT: 6}.get(kind)
    if degrees is not None:
        barostat._cell_dof = degrees
        barostat._R[0] = degrees * barostat._kT * (50 * DT) ** 2
    return dynamics


CASES = {
    "nve": (nve(DT), lambda atoms: VelocityVerlet(atoms, DT)),
    "nose_hoover": (
        nose_hoover(DT, KT, thermostat_time=20 * DT),
        lambda atoms: NoseHooverChainNVT(atoms, DT, temperature_K=KELVIN, tdamp=20 * DT),
    ),
    "nose_hoover of 1, twice": (
        nose_hoover(DT, KT, thermostat_time=20 * DT, chain_length=1, loops=2),
        lambda atoms: NoseHooverChainNVT(atoms, DT, temperature_K=KELVIN, tdamp=20 * DT, tchain=1, tloop=2),
    ),
    "isotropic": (npt(DT, KT, PRESSURE, **SAME), lambda atoms: ase_npt(IsotropicMTKNPT, atoms)),
    "full": (npt(DT, KT, PRESSURE, cell="full", **SAME), lambda atoms: ase_npt(MTKNPT, atoms)),
    "axes x and z": (
        npt(DT, KT, PRESSURE, cell="axes", mask=(True, False, True), **SAME),
        lambda atoms: ase_npt(MaskedMTKNPT, atoms, mask=[True, False, True]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_50_steps_are_those_of_ase(name):
    integrator, make = CASES[name]
    # ASE's axes are lattice vectors, ours Cartesian: the same for right angles
    atoms = moving_atoms(sheared=not name.startswith("axes"))
    initial = torch.tensor(atoms.positions)
    dynamics, model = make(atoms), argon()
    masses, velocities = (torch.tensor(array) for array in (atoms.get_masses(), atoms.get_velocities()))
    state = integrator.start(System.from_ase(atoms), model, masses=masses, velocities=velocities, removed=0)
    first = integrator.conserved(state)
    for _ in range(50):
        dynamics.run(1)
        state = integrator.step(state, model)
        assert (state.system.positions - torch.tensor(atoms.positions)).abs().max() < 1e-10
        assert (state.velocities - torch.tensor(atoms.get_velocities())).abs().max() < 1e-10
        assert (state.system.cell[0] - torch.tensor(atoms.cell[:])).abs().max() < 1e-10
    assert (state.system.positions - initial).abs().max() > 0.1  # they have moved
    if hasattr(dynamics, "get_conserved_energy"):
        # ASE's has another zero of the chain's energy for "isotropic", and the same changes
        assert abs(integrator.conserved(state).item() - dynamics.get_conserved_energy()) < 1e-10
    assert (integrator.conserved(state) - first).abs() < 2e-4
