"""Molecular dynamics inside of ``jit``, ``scan`` and ``grad``, by the integrators of `nvalchemiops.torch.dynamics`.

A step is two calls of torch, with the forces between them, which any JAX function computes. With a `TorchModel` it is
one call of torch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from nvalchemiops.jax._jax_internals import vary_alike, vary_like_results
from nvalchemiops.jax.bridge import Bridge, from_torch, types_without_data
from nvalchemiops.jax.neighbors import NeighborListState, neighbor_list
from nvalchemiops.jax.operators import Shape, as_static, from_torch_values, maker, operator, to_torch
from nvalchemiops.jax.systems import Neighbors, System
from nvalchemiops.jax.utils import is_traced
from nvalchemiops.torch import checks, dynamics
from nvalchemiops.torch.batching import told_systems
from nvalchemiops.torch.dynamics import Evaluation
from nvalchemiops.torch.dynamics.model import check_energies
from nvalchemiops.torch.dynamics.state import OF_ATOMS
from nvalchemiops.torch.systems import System as TorchSystem

Model = Callable[[System], Evaluation]
"""A potential energy surface: a JAX function of a `System`."""


def _by_torch(name: str) -> Any:
    """A property of torch's state, for one of arrays."""
    return property(lambda state: _measured(state, name), doc=getattr(dynamics.State, name).__doc__)


_State: Any = dynamics.State  # to a type checker its fields would be tensors


class State(_State):
    """What a step takes and returns: `nvalchemiops.torch.dynamics.State` with arrays, a pytree.

    ``having`` sets parameters, which may be traced, as in ``state.having(temperature=...)``.
    ``kinetic_energies``, ``temperatures``, ``volumes``, ``pressures`` and ``pressure_tensors`` are computed by torch.
    """

    __slots__ = ()

    kinetic_energies = _by_torch("kinetic_energies")
    temperatures = _by_torch("temperatures")
    volumes = _by_torch("volumes")
    pressures = _by_torch("pressures")
    pressure_tensors = _by_torch("pressure_tensors")

    def _column(self, name: str, value: Any, n_systems: int) -> Any:
        found = jnp.asarray(value)
        if found.shape not in ((), (1,), (n_systems,)):
            raise ValueError(
                f"`{name}` must be a number or have shape (n_systems,) = ({n_systems},), got {found.shape}"
            )
        return jnp.broadcast_to(found.reshape(-1, 1), (n_systems, 1))


@from_torch
def _measured(state: State, name: str) -> torch.Tensor:
    found: torch.Tensor = getattr(_of_torch(state), name)
    return found


def _of_torch(state: State) -> dynamics.State:
    """A state of tensors, which has 64 bits where torch has them. Without x64, arrays of JAX have 32."""

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)

    # all but rows of atoms have 64 bits in torch
    extra = {name: value if name in OF_ATOMS else wide(value) for name, value in state.extra.items()}
    return dynamics.State(
        TorchSystem(*state.system), state.velocities, state.masses, state.evaluation, wide(state.step), extra
    )


class _Part:
    """A part of a step: a torch function of a state as a JAX function.

    Torch returns only what the part changes, which is found once by a call without data.
    """

    def __init__(
        self,
        function: Callable[[dynamics.State], dynamics.State],
        name: str,
        for_shapes: Callable[[dynamics.State], dynamics.State] | None = None,
        **options: Any,
    ):
        self._function, self._for_shapes = function, for_shapes or function
        self._bridge = Bridge(self._call, self._types, name=name, **options)
        self._changes: dict[Any, tuple[int, ...]] = {}

    def __call__(self, state: State) -> State:
        leaves, tree = jax.tree.flatten(state)
        types = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        if (tree, types) not in self._changes:
            shapes = jax.tree.unflatten(tree, [Shape(*kind) for kind in types])
            self._changes[tree, types] = tuple(types_without_data(self._changed, [shapes], torch.device("cpu")))
        places = self._changes[tree, types]
        for place, value in zip(places, self._bridge(state, places)):
            leaves[place] = value
        return jax.tree.unflatten(tree, leaves)

    def _changed(self, state: State) -> list[int]:
        """The numbers of the leaves that change."""
        given = _of_torch(state)
        after = self._for_shapes(given)
        before: list[Any] = jax.tree.leaves(given)
        tree: Any = jax.tree.structure(given)
        if jax.tree.structure(after) != tree:
            raise ValueError(f"`{self._bridge.name}`: flows change the fields of the state, which `start` must return")
        return [n for n, (old, new) in enumerate(zip(before, jax.tree.leaves(after))) if new is not old]

    def _call(self, state: State, places: tuple[int, ...]) -> list[torch.Tensor]:
        before, after = jax.tree.leaves(state), jax.tree.leaves(self._function(_of_torch(state)))
        # as given: a state that was made without x64 keeps its dtypes with it
        return [after[place].to(before[place].dtype) for place in places]

    @staticmethod
    def _types(state: State, places: tuple[int, ...]) -> list[Shape]:
        leaves = jax.tree.leaves(state)
        return [leaves[place] for place in places]


class Integrator:
    """An integrator of `nvalchemiops.torch.dynamics` as functions of JAX arrays.

    Make it once and keep it: JAX compiles the functions of each integrator anew.

    Parameters
    ----------
    integrator : nvalchemiops.torch.dynamics.Integrator

    Examples
    --------
    >>> spring = FromEnergies(lambda system: (system.positions**2).sum())
    >>> integrator = nve(0.01)
    >>> state = integrator.start(System(jnp.ones((2, 3))), spring, masses=jnp.ones(2))
    >>> run = jax.jit(lambda state: jax.lax.fori_loop(0, 10, lambda _, s: integrator.step(s, spring), state))
    >>> int(run(state).step)
    10
    """

    def __init__(self, integrator: dynamics.Integrator):
        self.integrator = integrator
        self._first = _Part(integrator.first_half, "first_half", only_reads=True)
        self._second = _Part(integrator.second_half, "second_half", only_reads=True)
        self._reversed = _Part(integrator.reversed, "reversed", only_reads=True)
        self._conserved = from_torch(lambda state: integrator.conserved(_of_torch(state)))
        self._steps: dict[TorchModel, _Part] = {}

    def __reduce__(self) -> Any:
        return type(self), (self.integrator,)

    def start(self, system: TorchSystem, model: Model, **options: Any) -> State:
        """The state from which steps start; call it outside of ``jit``.

        Parameters
        ----------
        system : System
        model : Model
            Called once, with a system that has a cell for each system.
        **options
            ``masses``, ``velocities``, ``seed``, ``keys``, ``removed``: arrays, as for
            `nvalchemiops.torch.dynamics.Integrator.start`. Without x64 a seed has 32 bits.

        Raises
        ------
        TypeError
            An argument is traced: replace fields of the state inside of ``jit`` instead.
        ValueError
            A bad argument, named in the message.
        """
        if isinstance(options.get("seed"), int | np.integer) and jax.dtypes.canonicalize_dtype("int64") != "int64":
            checks.check_int("seed", options["seed"])  # arrays would have its lower half
        if is_traced((tuple(system), options)):
            raise TypeError("`start` reads values: call it outside of jit, and replace fields of the state inside")

        def in_torch(system: TorchSystem) -> Evaluation:
            found = model(System(*from_torch_values(tuple(system))))
            if is_traced(tuple(found)):
                raise TypeError("`model` is traced: call `start` outside of jit, and `evaluated` inside")
            return Evaluation(*map(to_torch, found))

        given = TorchSystem(*map(to_torch, system))
        state = self.integrator.start(given, in_torch, **{name: to_torch(value) for name, value in options.items()})
        fields = from_torch_values(tuple(state))
        return State(System(*fields[0]), *fields[1:])

    def step(self, state: State, model: Model) -> State:
        """The state after one step. The model is called once."""
        if isinstance(model, TorchModel):
            if model not in self._steps:
                self._steps[model] = self._step_of(model)
            return self._steps[model](state)
        return self.second_half(self.evaluated(self.first_half(state), model))

    def step_with_list(
        self, state: State, model: Callable[[System, Neighbors], Evaluation], near: NeighborListState
    ) -> tuple[State, NeighborListState]:
        """The state after one step with a list of neighbors, which follows the atoms and cells, and the list.

        If neighbors do not fit in the list, ``near.valid`` is False afterwards, and the state is the one before the
        step. It then stays as it is: prepare a list with more room, outside of ``jit``, and go on from there.

        Parameters
        ----------
        state : State
        model : callable
            ``model(system, neighbors)``, such as a `FromEnergies` whose function takes both.
        near : NeighborListState
            From `nvalchemiops.jax.neighbors.prepare_neighbor_list`, best with a skin.
        """
        state, near = vary_alike((state, near))  # the branches of `cond` have equal types inside of shard_map
        half = self.first_half(state)
        _, near = neighbor_list(half.system.positions, cell=half.system.cell, state=near)

        def rest() -> State:
            return self.second_half(self.evaluated(half, lambda system: model(system, Neighbors.from_state(near))))

        return jax.lax.cond(near.valid.all(), rest, lambda: state), near

    def _step_of(self, model: "TorchModel") -> _Part:
        def for_shapes(state: dynamics.State) -> dynamics.State:
            anew = jax.tree.map(torch.empty_like, state.evaluation)
            return self.integrator.step(state, lambda system: anew)

        step = functools.partial(self.integrator.step, model=model.evaluate)
        return _Part(step, "step", for_shapes, with_gradients=model.requires_grad)

    def first_half(self, state: State) -> State:
        """The flows before the forces: positions and cell are those of the end of the step."""
        return self._first(state)

    def evaluated(self, state: State, model: Model) -> State:
        """The state with energies, forces and stress at its positions, with the dtypes that they had before."""
        system: Any = state.system
        values: dict[str, Any] = {}
        found = model(system)
        for name, old in state.evaluation._asdict().items():
            new = getattr(found, name)
            if old is None:
                continue
            if new is None or jnp.shape(new) != jnp.shape(old):
                got = None if new is None else jnp.shape(new)
                raise ValueError(f"`model`: {name} must have shape {jnp.shape(old)}, got {got}")
            values[name] = jnp.asarray(new, jnp.result_type(old))
        return state._replace(evaluation=state.evaluation._replace(**values))

    def second_half(self, state: State) -> State:
        """The flows after the forces, which end the step."""
        return self._second(state)

    def reversed(self, state: State) -> State:
        """The state in which time runs backwards; ValueError if the integrator draws random numbers."""
        return self._reversed(state)

    def conserved(self, state: State) -> jax.Array:
        """The conserved quantity (n_systems,)."""
        found: jax.Array = self._conserved(state)
        return found


def _number(value: Any) -> Any:
    if is_traced(value):
        raise TypeError("parameters of integrators cannot be traced: set them by `state.having(...)` inside of jit")
    return as_static("parameter", value) if getattr(value, "ndim", 1) == 0 else to_torch(value)


_for_jax = functools.partial(maker, kind=Integrator, into=Integrator, argument=_number)

nve = _for_jax(dynamics.nve)
langevin = _for_jax(dynamics.langevin)
nose_hoover = _for_jax(dynamics.nose_hoover)
csvr = _for_jax(dynamics.csvr)
nph = _for_jax(dynamics.nph)
npt = _for_jax(dynamics.npt)
stochastic_cell = _for_jax(dynamics.stochastic_cell)


# -- models ---------------------------------------------------------------------------------------


class FromEnergies:
    """A model from a JAX function that returns energies: forces and stress are its derivatives, in one call.

    Parameters
    ----------
    function : callable
        ``function(system, ...)`` returns the energies (n_systems,), or of one system (), computed from
        ``system.positions`` and ``system.cell``. Further arguments of a call, such as neighbors or parameters, are
        passed to it.
    stress : bool, optional
        Whether to compute the stress of systems with cells: the derivative by a strain ε of positions and cells,
        ``x' = x + x ε``, divided by the volume. It is zero for systems without a volume.

    Examples
    --------
    >>> springs = FromEnergies(lambda system, k: 0.5 * k * (system.positions**2).sum())
    >>> energies, forces, stress = jax.jit(springs)(System(jnp.ones((1, 3))), 2.0)
    >>> forces
    Array([[-2., -2., -2.]], dtype=float32)
    """

    def __init__(self, function: Callable[..., Any], *, stress: bool = True):
        if not callable(function):
            raise TypeError(f"`function` must be callable, got {type(function).__name__}")
        self.function = function
        self.stress = checks.check_flag("stress", stress)

    def __call__(self, system: System, *args: Any, **kwargs: Any) -> Evaluation:
        """Energies, forces and stress."""
        positions: Any
        cell: Any
        positions, cell, batch_idx = system.positions, system.cell, system.batch_idx
        one_cell, n_systems = cell is not None and cell.ndim == 2, 1
        if strained := self.stress and cell is not None:
            n_systems = told_systems(system) or self._number_of_energies(system, *args, **kwargs)

        def total(positions: Any, strain: Any) -> Any:
            moved = system._replace(positions=positions)
            if strained:
                symmetric = 0.5 * (strain + jnp.swapaxes(strain, 1, 2))
                of_atoms = symmetric[0] if n_systems == 1 else symmetric[batch_idx]
                positions = positions + (positions[:, None] @ of_atoms)[:, 0]
                cells = cell + cell @ symmetric
                moved = system._replace(positions=positions, cell=cells[0] if one_cell and n_systems == 1 else cells)
            energies = jnp.reshape(self.function(moved, *args, **kwargs), (-1,))
            return jnp.sum(energies), energies

        strain = jnp.zeros((n_systems, 3, 3), positions.dtype)
        derivatives = jax.value_and_grad(total, argnums=(0, 1) if strained else (0,), has_aux=True)
        # inside of shard_map: forces and stress of each device's own systems, not summed over devices
        (_, energies), (slope, *by_strain) = derivatives(*vary_like_results(total, (positions, strain)))
        check_energies(energies, told_systems(system))
        if not strained:
            return Evaluation(energies, -slope)
        volumes = jnp.reshape(system.volume, (-1, 1, 1))
        return Evaluation(energies, -slope, by_strain[0] / jnp.where(volumes == 0.0, jnp.inf, volumes))

    def _number_of_energies(self, *args: Any, **kwargs: Any) -> int:
        return math.prod(jax.eval_shape(lambda: self.function(*args, **kwargs)).shape)


class TorchModel:
    """A torch model as a model for JAX: `nvalchemiops.torch.dynamics.SumOfTerms`, or any function of tensors.

    Parameters
    ----------
    model : nvalchemiops.torch.dynamics.Model
        A function of a `System` of tensors that returns an `Evaluation`.
    stress : bool, optional
        Whether the model gives the stress of systems with cells. By default its attribute ``stress``, else True.
    requires_grad : bool, optional
        Whether the model calls `torch.autograd.grad` without switching gradients on.
    """

    def __init__(
        self, model: Callable[[TorchSystem], Evaluation], *, stress: bool | None = None, requires_grad: bool = False
    ):
        if not callable(model):
            raise TypeError(f"`model` must be callable, got {type(model).__name__}")
        self.model = model
        self.stress = bool(getattr(model, "stress", True)) if stress is None else checks.check_flag("stress", stress)
        self.requires_grad = checks.check_flag("requires_grad", requires_grad)
        self._function = Bridge(self._of_leaves, self._types, name="TorchModel", with_gradients=requires_grad)

    def __reduce__(self) -> Any:
        return functools.partial(type(self), stress=self.stress, requires_grad=self.requires_grad), (self.model,)

    def __call__(self, system: System) -> Evaluation:
        """Energies, forces and stress, with the dtype of the positions."""
        return Evaluation(*self._function(system))

    def evaluate(self, system: TorchSystem) -> Evaluation:
        """The same for tensors."""
        energies, forces, stress = self.model(system)
        if not self.stress or system.cell is None:
            stress = None
        elif stress is None:
            raise ValueError("`model` gives no stress: TorchModel(model, stress=False)")
        dtype = system.positions.dtype
        return Evaluation(energies.to(dtype), forces.to(dtype), None if stress is None else stress.to(dtype))

    def _of_leaves(self, system: System) -> list[torch.Tensor]:
        return [value for value in self.evaluate(TorchSystem(*system)) if value is not None]

    def _types(self, system: Any) -> list[Shape]:
        n, dtype = told_systems(system), system.positions.dtype
        if n is None and (system.cell is None or system.cell.ndim != 3):
            raise ValueError(
                "TorchModel: shapes must tell how many systems there are: give each of them a cell or `pbc`, and a "
                "single system no `batch_idx`"
            )
        n = 1 if n is None else n  # cells (1, 3, 3)
        types = [Shape((n,), dtype), Shape(system.positions.shape, dtype)]
        return types + [Shape((n, 3, 3), dtype)] * (self.stress and system.cell is not None)


degrees_of_freedom: Any = operator(dynamics.degrees_of_freedom)
kinetic_energy: Any = operator(dynamics.kinetic_energy)
kinetic_tensor: Any = operator(dynamics.kinetic_tensor)
maxwell_boltzmann: Any = operator(dynamics.maxwell_boltzmann)
remove_momentum: Any = operator(dynamics.remove_momentum)
remove_rotation: Any = operator(dynamics.remove_rotation)
temperature: Any = operator(dynamics.temperature)


__all__ = [
    "Evaluation",
    "FromEnergies",
    "Integrator",
    "Model",
    "State",
    "TorchModel",
    "csvr",
    "degrees_of_freedom",
    "kinetic_energy",
    "kinetic_tensor",
    "langevin",
    "maxwell_boltzmann",
    "nose_hoover",
    "nph",
    "npt",
    "nve",
    "remove_momentum",
    "remove_rotation",
    "stochastic_cell",
    "temperature",
]
