"""Pair potentials for JAX arrays, each from one line of mathematics; see `nvalchemiops.torch.interactions.pair`."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.jax.bridge import ATOMS, SYSTEMS
from nvalchemiops.jax.operators import Shape, maker, number_of_systems, operator, system_energies
from nvalchemiops.jax.primitive import KEPT_REQUESTS
from nvalchemiops.torch.interactions import pair
from nvalchemiops.torch.interactions.pair.driver import names_of
from nvalchemiops.torch.interactions.pair.parameters import check_names
from nvalchemiops.torch.systems import Neighbors, System, long_arguments

_OPTIONS = inspect.signature(pair.PairPotential.__call__).parameters.keys()


class PairPotential:
    """A potential that is a sum over pairs of a function of the distance, for JAX arrays.

    It is made and called like `nvalchemiops.torch.interactions.pair.PairPotential`, with arrays in place of tensors.
    Results are the same, with derivatives of every order. Parameters of the formula may be numbers or arrays.

    Parameters
    ----------
    expression : str
        The energy of a pair as a function of the distance ``r`` and of parameters.
    per_atom, global_parameters, per_pair : sequence of str, optional
        Names of parameters of each atom, of the system, and of each pair of species.
    **options
        ``cutoff``, ``shifted``, ``r_switch``, ``self_energy``.

    Examples
    --------
    >>> spring = PairPotential("k/2*(r - 1)**2", global_parameters=("k",), cutoff=2.0)
    >>> positions = jax.numpy.array([[0.0, 0.0, 0.0], [1.5, 0.0, 0.0]])
    >>> energy = jax.jit(lambda x, k: spring(x, k=k).sum())
    >>> jax.grad(energy, argnums=1)(positions, jax.numpy.float32(3.0))
    Array(0.125, dtype=float32)
    """

    def __init__(
        self,
        expression: str,
        per_atom: Sequence[str] = (),
        global_parameters: Sequence[str] = (),
        per_pair: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self._wrap(pair.PairPotential(expression, per_atom, global_parameters, per_pair, **options))

    @classmethod
    def of(cls, potential: pair.PairPotential) -> "PairPotential":
        """The same potential for JAX arrays."""
        found = cls.__new__(cls)
        found._wrap(potential)
        return found

    def _wrap(self, potential: pair.PairPotential) -> None:
        self.potential = potential
        self._own = None if type(potential) is pair.PairPotential else _operator_of(potential)

    def __call__(
        self, positions: jax.Array | System, cell: jax.Array | Neighbors | None = None, **arguments: Any
    ) -> Any:
        """Energies and, if requested, forces, gradients of parameters and virial. Arguments are as in torch.

        In place of positions and cell it takes a `System`, and `Neighbors`, of arrays. Results are then an array or a
        tuple, too, without names.
        """
        if isinstance(positions, System):
            system, near = positions, (cell, arguments.pop("neighbors", None))
            arguments = long_arguments(
                system,
                near,
                arguments,
                needed=(),
                padding="fill_value",
                reach="neighbor_cutoff",
                cutoff=self.potential.cutoff,
            )
            positions, cell = system.positions, system.cell  # type: ignore[assignment]  # arrays
        # here, since torch searches neighbors before, which has to wait for the values of positions
        check_names(self.potential.formula, [name for name in arguments if name not in _OPTIONS])
        of_torch = self.potential
        call = self._own or _shared(of_torch.formula, of_torch.cutoff, of_torch.r_switch)
        return call(positions, cell, **arguments)

    def __reduce__(self) -> Any:
        return PairPotential.of, (self.potential,)

    def __repr__(self) -> str:
        return repr(self.potential)


def _operator_of(potential: pair.PairPotential) -> Callable[..., Any]:
    formula = potential.formula
    roles = dict.fromkeys(formula.per_atom, ATOMS) | dict.fromkeys(formula.global_parameters, SYSTEMS)
    contract = system_energies({"positions": ATOMS, "cell": SYSTEMS, **roles})
    return operator(potential, functools.partial(_shapes, formula), name=repr(potential), contract=contract)


@functools.lru_cache(maxsize=KEPT_REQUESTS)
def _shared(formula: Formula, cutoff: float | None, r_switch: float | None) -> Callable[..., Any]:
    """One operator for all equal potentials: those that are made in each call are then compiled once."""
    return _operator_of(pair.PairPotential.of(formula, cutoff=cutoff, shifted=formula.shifted, r_switch=r_switch))


def _shapes(
    formula: Formula,
    /,
    positions: Any,
    energy_reduction: str = "atom",
    compute_forces: bool = False,
    compute_gradients: str | Sequence[str] = (),
    compute_virial: bool = False,
    **others: Any,
) -> Any:
    compute_gradients = names_of(compute_gradients)
    by_system = energy_reduction == "system" or compute_virial
    by_system = by_system or any(name in formula.global_parameters for name in compute_gradients)
    n_systems = number_of_systems("PairPotential", **others) if by_system else 0
    rows = positions.shape[:1] if energy_reduction == "atom" else (n_systems,)
    results = [Shape(rows, positions.dtype)] + [Shape(positions.shape, positions.dtype)] * compute_forces
    for name in compute_gradients:
        shape = (n_systems,) if name in formula.global_parameters else positions.shape[:1]
        if name in formula.per_pair:
            tables = [others[other] for other in formula.per_pair if np.ndim(others[other])]
            shape = tables[0].shape if tables else (1, 1)
        results.append(Shape(shape, positions.dtype))
    results += [Shape((n_systems, 3, 3), positions.dtype)] * compute_virial
    return results[0] if len(results) == 1 else tuple(results)


_for_jax = functools.partial(maker, kind=PairPotential, into=PairPotential.of)

born_mayer_huggins = _for_jax(pair.born_mayer_huggins)
buckingham = _for_jax(pair.buckingham)
coulomb = _for_jax(pair.coulomb)
damped_shifted_force = _for_jax(pair.damped_shifted_force)
ewald_real_space = _for_jax(pair.ewald_real_space)
lennard_jones = _for_jax(pair.lennard_jones)
morse = _for_jax(pair.morse)
reaction_field = _for_jax(pair.reaction_field)
soft_core_lennard_jones = _for_jax(pair.soft_core_lennard_jones)
wolf = _for_jax(pair.wolf)
yukawa = _for_jax(pair.yukawa)
ziegler_biersack_littmark = _for_jax(pair.ziegler_biersack_littmark)

__all__ = list(pair.__all__)  # the same names
