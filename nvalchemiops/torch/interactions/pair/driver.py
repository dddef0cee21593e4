"""The driver of all sums over pairs: it checks the request, prepares the arguments of the op and orders its results."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.pair.exclusions import ExclusionRows
from nvalchemiops.torch.interactions.pair.op import NO_DIRECTIONS, pair_sum
from nvalchemiops.torch.interactions.pair.parameters import Parameters, parameter_arrays
from nvalchemiops.torch.interactions.pair.shares import beside_ghosts, ghosts_of, whole_call
from nvalchemiops.torch.interactions.pair.system import NO_CUTOFF, PairSystem, cells_fit_any_list
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, Rows, is_listed
from nvalchemiops.torch.operators.segments import system_sums
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime.context import is_eager
from nvalchemiops.torch.systems import System


@engine.immutable
class PairRequest(NamedTuple):
    """Which results are requested in addition to the energies, and whether energies are per atom or per system.

    Energies have ``energy_dtype``, or by default the dtype of the positions, as other results.
    """

    forces: bool = False
    gradients: tuple[str | tuple[str, ...], ...] = ()
    virial: bool = False
    energy_reduction: str = "atom"
    energy_dtype: torch.dtype | None = None

    @property
    def by_system(self) -> bool:
        """Whether any result is per system."""
        return self.virial or self.energy_reduction != "atom"


def names_of(given: Any) -> Any:
    """Names of parameters, also from a single one."""
    return (given,) if isinstance(given, str) else given


def check_pair_request(
    compute_forces: Any, compute_virial: Any, energy_reduction: Any = "atom", compute_gradients: Any = ()
) -> PairRequest:
    """Check the arguments of a call that select results, and return them as a `PairRequest`."""
    # a sequence rather than a set, because gradients are returned in this order
    given = names_of(compute_gradients)
    names = tuple(given) if isinstance(given, Sequence) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"`compute_gradients` must be a sequence of names, got {compute_gradients!r}")
    checks.check_choice("energy_reduction", energy_reduction, ("atom", "system"))
    forces = checks.check_flag("compute_forces", compute_forces)
    return PairRequest(forces, names, checks.check_flag("compute_virial", compute_virial), energy_reduction)


def run(
    name: str,
    evaluate: Callable[..., tuple[torch.Tensor, ...]],
    atoms: System,
    given: GivenNeighbors,
    system_of: Callable[[System, GivenNeighbors], PairSystem],
    moving: dict[str, Any],
    fixed: dict[str, Any],
    options: tuple[Any, ...],
    *,
    check: Any = False,
) -> tuple[torch.Tensor, ...]:
    """Call ``evaluate(neighbors, positions, cell, batch_idx, pbc, **moving, **fixed)``, replaying a plan if one exists.

    If no neighbors are given, those of ``system_of(atoms, given)`` are found first, so that one plan serves any number
    of neighbors.
    """
    near: GivenNeighbors | Rows = given
    ways: tuple[Any, ...] | str = options
    cell, pbc = atoms.cell, atoms.pbc
    if atoms.domain is not None:
        ways = "ranks share it"
    elif check is not False:
        ways = "`check` is for debugging"
    elif is_eager(atoms.positions):
        fits = given.fits_cell or cells_fit_any_list(cell, pbc)
        listed = given._replace(fits_cell=True) if fits else given
        near = listed if is_listed(given) else system_of(atoms, listed).rows
    fixed = {"batch_idx": atoms.batch_idx, "pbc": pbc, **fixed}
    if near is given:
        fixed["cell"] = cell
    else:  # no value of the cell will be read: one plan serves all cells
        moving = {**moving, "cell": cell}
    with whole_call(atoms.domain):
        return engine.run_function(name, evaluate, {"positions": atoms.positions, **moving}, near, fixed, ways)


def sum_pairs(
    formula: Formula,
    system: PairSystem,
    parameters: Parameters,
    request: PairRequest,
    *,
    cutoff: float | None,
    r_switch: float | None = None,
    species: torch.Tensor | None = None,
    exclusions: ExclusionRows | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Sum ``formula`` over the pairs of a system; other arguments and results are as for `PairPotential.__call__`.

    With a domain, results per system and gradients of global parameters are only this rank's share. ``weights``
    (n_atoms,) are those of the energies in the sum whose derivatives are the other results; one by default.
    """
    positions, cell, batch_idx, n_systems, rows, domain = system
    cell = None if rows.shifts is None else cell  # nothing depends on it
    of_atoms, of_systems, species, n_species = parameter_arrays(formula, parameters, positions, species, n_systems)
    excluded = (None, None, None) if exclusions is None else exclusions[:3]

    outputs = "w" + "r" * bool(request.forces)
    for name in request.gradients:
        if name not in parameters:
            raise ValueError(f"`compute_gradients` names '{name}', which is not a parameter of this potential")
        letter = "g" if name in formula.global_parameters else "p"
        outputs += letter * (letter not in outputs)
    outputs += "v" * bool(request.virial)
    inputs = (positions, cell, of_atoms, of_systems, weights, *NO_DIRECTIONS, batch_idx, n_systems, *rows)
    distances = (NO_CUTOFF if cutoff is None else cutoff, 0.0 if r_switch is None else r_switch)
    there, ghosts = None if species is None else beside_ghosts(domain, species), ghosts_of(domain, batch_idx)
    found = pair_sum(formula.text, outputs, "", *inputs, there, n_species, *excluded, *distances, *ghosts)
    energies, position_gradients, _, parameter_gradients, global_gradients, virial = found
    if request.energy_dtype is not None:
        energies = energies.to(request.energy_dtype)
    if request.energy_reduction == "system":
        energies = system_sums(energies, batch_idx, n_systems)
    results = [energies]
    if request.forces:
        results.append(-position_gradients)
    for name in request.gradients:
        if isinstance(name, tuple):
            at = formula.per_atom.index(name[0])
            results.append(parameter_gradients[:, at : at + len(name)])
        elif name in formula.per_atom:
            results.append(parameter_gradients[:, formula.per_atom.index(name)])
        elif name in formula.global_parameters:
            results.append(global_gradients[:, formula.global_parameters.index(name)])
        else:
            at = len(formula.per_atom) + n_species * formula.per_pair.index(name)
            assert species is not None
            results.append(system_sums(parameter_gradients[:, at : at + n_species], species, n_species))
    if request.virial:
        results.append(virial)
    return tuple(results)
