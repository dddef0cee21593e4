"""The ready-made integrators: one function for each way to sample an ensemble."""

from collections.abc import Sequence

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.dynamics.cell_flows import (
    CellChain,
    CellNoise,
    Press,
    StretchedDrift,
    StretchedKick,
    cell_arguments,
)
from nvalchemiops.torch.dynamics.flows import Chain, Drift, Flow, Kick, NoisyDrift, Rescale
from nvalchemiops.torch.dynamics.integrators import FORCES, Integrator, Number


def nve(dt: Number) -> Integrator:
    """Velocity Verlet: constant energy.

    Parameters
    ----------
    dt : float or (n_systems,) tensor, time
        Multiply femtoseconds by `nvalchemiops.constants.FEMTOSECOND`.

    Notes
    -----
    Conserves ``U + K``.
    """
    return Integrator(_verlet(Kick(), Drift()), {"dt": dt})


def langevin(dt: Number, temperature: Number, *, friction: Number | None = None) -> Integrator:
    """Langevin dynamics by the splitting BAOAB: canonical ensemble, all degrees of freedom.

    Parameters
    ----------
    dt : float or (n_systems,) tensor, time
    temperature : float or (n_systems,) tensor, energy
        kT: multiply kelvin by `nvalchemiops.constants.KELVIN`.
    friction : float or (n_systems,) tensor, 1 / time, optional
        Default 1 / (100 dt). With 0 the steps are those of `nve`, bit for bit.

    Notes
    -----
    Conserves ``U + K``, less the heat of the noise. For a harmonic oscillator the distribution of positions is exact
    for any stable dt. The distribution of velocities has an error of second order.
    """
    friction = 0.01 / _positive("dt", dt) if friction is None else friction
    parameters = {"dt": dt, "temperature": temperature, "friction": friction}
    return Integrator(_verlet(Kick(), NoisyDrift()), parameters)


def nose_hoover(
    dt: Number, temperature: Number, *, thermostat_time: Number | None = None, chain_length: int = 3, loops: int = 1
) -> Integrator:
    """Nosé-Hoover chains: canonical ensemble, deterministic and reversible.

    Parameters
    ----------
    dt : float or (n_systems,) tensor, time
    temperature : float or (n_systems,) tensor, energy
        kT, positive.
    thermostat_time : float or (n_systems,) tensor, time, optional
        Default 100 dt.
    chain_length, loops : int, optional
        See `nvalchemiops.torch.dynamics.flows.Chain`. A chain of one is not ergodic for stiff or small systems.

    Notes
    -----
    Conserves ``U + K`` and the energy of the chain.
    """
    chain = Chain(checks.check_count("chain_length", chain_length, 1), checks.check_count("loops", loops, 1))
    parameters = {"dt": dt, "temperature": temperature, "thermostat_time": _time(thermostat_time, 100.0, dt)}
    return Integrator([(chain, 0.5), *_verlet(Kick(), Drift()), (chain, 0.5)], parameters)


def csvr(dt: Number, temperature: Number, *, thermostat_time: Number | None = None) -> Integrator:
    """Stochastic velocity rescaling (Bussi, Donadio and Parrinello): canonical ensemble.

    Parameters
    ----------
    dt : float or (n_systems,) tensor, time
    temperature : float or (n_systems,) tensor, energy
        kT.
    thermostat_time : float or (n_systems,) tensor, time, optional
        Default 100 dt.

    Notes
    -----
    Conserves ``U + K``, less the heat of the thermostat. The total momentum is scaled, so leave it zero.
    """
    parameters = {"dt": dt, "temperature": temperature, "thermostat_time": _time(thermostat_time, 100.0, dt)}
    return Integrator([(Rescale(1), 0.5), *_verlet(Kick(), Drift()), (Rescale(2), 0.5)], parameters)


def nph(
    dt: Number,
    pressure: Number,
    *,
    temperature: Number | None = None,
    barostat_time: Number | None = None,
    cell: str = "isotropic",
    mask: Sequence[bool] = (True, True, True),
) -> Integrator:
    """The barostat of Martyna, Tobias and Klein without a thermostat: constant enthalpy.

    Parameters
    ----------
    dt, pressure, barostat_time, cell, mask
        As for `npt`.
    temperature : float or (n_systems,) tensor, energy, optional
        kT for the mass of the cell and for velocities that are drawn. By default that of the given velocities.

    Notes
    -----
    Conserves ``U + K + P V`` and the kinetic energy of the cell.
    """
    shape = cell_arguments(cell, mask)
    parameters = {"dt": dt, "temperature": temperature, "pressure": pressure}
    return Integrator(_stretched(shape), parameters | {"barostat_time": _time(barostat_time, 1000.0, dt)})


def npt(
    dt: Number,
    temperature: Number,
    pressure: Number,
    *,
    thermostat_time: Number | None = None,
    barostat_time: Number | None = None,
    cell: str = "isotropic",
    mask: Sequence[bool] = (True, True, True),
    chain_length: int = 3,
    cell_chain_length: int = 3,
    loops: int = 1,
) -> Integrator:
    """Martyna, Tobias and Klein: isothermal-isobaric ensemble, deterministic and reversible.

    Parameters
    ----------
    dt : float or (n_systems,) tensor, time
    temperature : float or (n_systems,) tensor, energy
        kT, positive.
    pressure : float or (n_systems,) tensor, energy / volume
        Multiply gigapascals by `nvalchemiops.constants.GIGAPASCAL`.
    thermostat_time, barostat_time : float or (n_systems,) tensor, time, optional
        Default 100 dt and 1000 dt.
    cell : {"isotropic", "axes", "full"}, optional
        All axes change by the same factor; each Cartesian axis by its own; or all lengths and angles.
    mask : (bool, bool, bool), optional
        Which Cartesian axes may change: ``(True, True, False)`` for a slab that is normal to z, whose area changes.
        Axes along which a system is not periodic must stay.
    chain_length, cell_chain_length, loops : int, optional
        Lengths of the chains of the atoms and of the cell; repetitions of both.

    Notes
    -----
    Conserves ``U + K + P V``, the kinetic energy of the cell, and the energies of both chains. Volumes are distributed
    as ``V^n exp(-P V / kT)`` times the configuration integral at fixed fractional coordinates, for n mobile atoms, or
    n - 1 if the centre of mass is at rest.

    In mode "full" the strain rate is symmetric, so the cell does not rotate, and has six degrees of freedom.
    """
    shape = cell_arguments(cell, mask)
    loops = checks.check_count("loops", loops, 1)
    chain = Chain(checks.check_count("chain_length", chain_length, 1), loops)
    cell_chain = CellChain(checks.check_count("cell_chain_length", cell_chain_length, 1), loops, Press(*shape))
    before: list[tuple[Flow, float] | None] = [(cell_chain, 0.5), (chain, 0.5)]
    parameters = {"dt": dt, "temperature": temperature, "pressure": pressure}
    parameters |= {"thermostat_time": _time(thermostat_time, 100.0, dt)}
    parameters |= {"barostat_time": _time(barostat_time, 1000.0, dt)}
    return Integrator([*before, *_stretched(shape), *before[::-1]], parameters)


def stochastic_cell(
    dt: Number,
    temperature: Number,
    pressure: Number,
    compressibility: Number,
    *,
    thermostat_time: Number | None = None,
    barostat_time: Number | None = None,
    mask: Sequence[bool] = (True, True, True),
) -> Integrator:
    """Stochastic cell rescaling (Bernetti and Bussi) with `csvr`: isothermal-isobaric ensemble, isotropic strains.

    Parameters
    ----------
    dt, temperature, pressure, thermostat_time, barostat_time, mask
        As for `npt`; the temperature may be zero.
    compressibility : float or (n_systems,) tensor, volume / energy
        An estimate, which only scales the barostat's time: ``0.46 / GIGAPASCAL`` for water.

    Notes
    -----
    Volumes relax without oscillations. Conserves ``U + K + P V``, less the energy of thermostat and barostat.
    """
    _, axes = cell_arguments("isotropic", mask)
    drift: list[tuple[Flow, float] | None] = [(Drift(), 0.5), (CellNoise("isotropic", axes), 1.0), (Drift(), 0.5)]
    flows = [(Rescale(1), 0.5), (Kick(), 0.5), *drift, FORCES, (Kick(), 0.5), (Rescale(2), 0.5)]
    parameters = {"dt": dt, "temperature": temperature, "pressure": pressure, "compressibility": compressibility}
    parameters |= {"thermostat_time": _time(thermostat_time, 100.0, dt)}
    return Integrator(flows, parameters | {"barostat_time": _time(barostat_time, 1000.0, dt)})


def _verlet(kick: Flow, drift: Flow) -> list[tuple[Flow, float] | None]:
    return [(kick, 0.5), (drift, 1.0), FORCES, (kick, 0.5)]


def _stretched(shape: tuple[str, tuple[bool, bool, bool]]) -> list[tuple[Flow, float] | None]:
    press = Press(*shape)
    return [(press, 0.5), *_verlet(StretchedKick(*shape), StretchedDrift(*shape)), (press, 0.5)]


# -- arguments ------------------------------------------------------------------------------------


def _positive(name: str, value: Number) -> Number:
    return value if isinstance(value, torch.Tensor) else checks.check_positive(name, value)


def _time(value: Number | None, steps: float, dt: Number) -> Number:
    return steps * _positive("dt", dt) if value is None else value
