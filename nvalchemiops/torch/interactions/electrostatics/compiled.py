"""Ewald sums in compiled graphs on a CPU: one op for a whole sum, which runs it as eager mode does.

Called one by one from a compiled graph, the operators of a sum take longer than the same sum in eager mode, which runs
a plan where it repeats, and keeps what depends on the cell alone. So the graph has one op for the sum of one system of
charges, if parameters and neighbors are given. Where its energies are differentiated by positions or charges, the op
takes first derivatives along, and its backward is a second op, as in
`nvalchemiops.torch.interactions.electrostatics.first_derivatives`. All other derivatives are those of the ordinary sum.

Shapes are checked when the graph is made. Values that do not fit together (`ValuesError`) are NaN in all results, as
elsewhere in compiled graphs.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.layout import layout
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import real_of
from nvalchemiops.torch.interactions.electrostatics import driver
from nvalchemiops.torch.interactions.electrostatics.choice import LongRange
from nvalchemiops.torch.interactions.electrostatics.k_vectors import WaveVectors, check_bounds, per_system
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB
from nvalchemiops.torch.interactions.electrostatics.results import Derivatives, SumRequest, Tensors
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import Influence, MeshSum, Precomputed, PreparedMesh
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.operators.lattice import check_spline_order, mesh_and_order
from nvalchemiops.torch.runtime._torch_internals import PLAIN_TYPES, autograd_inside, is_exporting, only_inlined
from nvalchemiops.torch.runtime.engine import weights_of_systems
from nvalchemiops.torch.systems import System

Optional = torch.Tensor | None

ACCURACY = 1e-6
"""Of sums whose parameters are all given: it does not matter."""


@functools.partial(only_inlined, with_calls=True)
def ewald_sum(
    method: type[KVectorSum] | type[MeshSum],
    given: tuple[Any, ...],
    atoms: System,
    neighbors: GivenNeighbors,
    request: SumRequest,
    options: driver.SumOptions,
) -> Tensors:
    """`driver.ewald_sum` with ``method.given(*given, system)``, in compiled graphs by one op where that is possible."""
    if torch.compiler.is_compiling() and not is_exporting():
        arguments = _arguments(method, given, atoms, neighbors, request, options)
        if arguments is not None:
            energies, *others = whole_sum(*arguments)
            found = [result for result, is_asked in zip(others, request.derivatives) if is_asked]
            return (energies, *found) if found else energies
    return driver.ewald_sum(functools.partial(method.given, *given), atoms, neighbors, request, options)


# -- arguments of the op --------------------------------------------------------------------------

FORCES, CHARGE_GRADIENTS, VIRIAL = 1, 2, 4
"""Bits of the first derivatives that the op computes."""


class _Arguments(NamedTuple):
    """All arguments of the op.

    Attributes
    ----------
    positions, charges, cell : tensors
    alpha : tensor
        Not a number, for each of which the graph would be made anew.
    pairs, pointers, shifts, matrix, matrix_shifts, mask_value, half_list
        As of `GivenNeighbors`.
    k_vectors, k_cutoff, miller, point_begin, point_system, weights
        What says which k-vectors there are: the fields of `WaveVectors` begin with ``miller``, which is otherwise the
        argument ``miller_indices``.
    prepared_cell, influence, derivative : tensor, optional
        Of a prepared mesh.
    sizes : sequence of int
        Of the mesh, or largest Miller indices; empty if they are not given.
    spline_order : int
        0: no mesh.
    energy_reduction : {"atom", "system"}
    computed : int
        First derivatives, by bits.
    """

    positions: torch.Tensor
    charges: torch.Tensor
    cell: torch.Tensor
    alpha: torch.Tensor
    pairs: Optional
    pointers: Optional
    shifts: Optional
    matrix: Optional
    matrix_shifts: Optional
    mask_value: int | None
    half_list: bool
    k_vectors: Optional
    k_cutoff: Optional
    miller: Optional
    point_begin: Optional
    point_system: Optional
    weights: Optional
    prepared_cell: Optional
    influence: Optional
    derivative: Optional
    sizes: Sequence[int]
    spline_order: int
    energy_reduction: str
    computed: int


_NEIGHBORS = slice(_Arguments._fields.index("pairs"), _Arguments._fields.index("k_vectors"))


def _arguments(
    method: Any,
    given: tuple[Any, ...],
    atoms: System,
    neighbors: GivenNeighbors,
    request: SumRequest,
    options: driver.SumOptions,
) -> _Arguments | None:
    """The arguments of the op for a sum, all checked; None if it is to be traced."""
    positions, charges, cell, batch_idx, pbc, _, domain, dipoles, quadrupoles, widths = atoms
    others = (batch_idx, pbc, domain, dipoles, quadrupoles, widths, options.exclusions, options.surface_dielectric)
    if any([value is not None for value in others]) or options.slab_correction is not False or request.hybrid:
        return None
    if options.potential is not COULOMB or options.alpha is None or options.self_interaction is not False:
        return None
    if not isinstance(positions, torch.Tensor) or not isinstance(charges, torch.Tensor):
        return None
    if not isinstance(cell, torch.Tensor) or not layout(positions.device.type).reads:
        return None
    if any([type(t) not in PLAIN_TYPES for t in (positions, charges, cell)]) or charges.ndim != 1:
        return None
    if cell.ndim not in (2, 3) or (cell.ndim == 3 and cell.shape[0] != 1):
        return None
    matrix = neighbors.neighbor_matrix
    if neighbors.neighbor_list is None and matrix is None:
        return None
    alpha = options.alpha
    computed = FORCES * request.derivatives.forces + CHARGE_GRADIENTS * request.derivatives.charge_gradients
    computed += VIRIAL * request.derivatives.virial
    if torch.is_grad_enabled():
        if cell.requires_grad or (isinstance(alpha, torch.Tensor) and alpha.requires_grad):
            return None
        if positions.requires_grad or charges.requires_grad:
            if computed:
                return None
            computed = FORCES * positions.requires_grad + CHARGE_GRADIENTS * charges.requires_grad
    far = _mesh(*given) if method is MeshSum else _vectors(positions.device, *given)
    if far is None:
        return None
    if far[1] is not None:
        given = (None, None, (0, 0, 0), None)  # vectors up to a length are counted by the op alone
    driver.check_sum(functools.partial(method.given, *given), atoms, neighbors, request, options)
    alpha = per_system("alpha", alpha, 1, positions.device)
    pairs, pointers, shifts, _, matrix_shifts, mask_value, half_list, *_ = neighbors
    near = (pairs, pointers, shifts, matrix, matrix_shifts, mask_value, half_list)
    found = (positions, charges, cell, alpha, *near, *far, request.energy_reduction, computed)
    return _Arguments(*found)


def _mesh(
    mesh_dimensions: Any, mesh_spacing: Any, spline_order: Any, precomputed: Precomputed, prepared: PreparedMesh | None
) -> tuple[Any, ...] | None:
    """The arguments of the op that describe a mesh; None if it is not known."""
    if any([value is not None for value in precomputed]) or mesh_spacing is not None:
        return None
    no_vectors = (None,) * 6
    if prepared is not None:
        mesh, order = prepared.mesh_dimensions, prepared.spline_order
        return (*no_vectors, prepared.cell, prepared.influence.value, prepared.influence.derivative, mesh, order)
    if mesh_dimensions is None:
        return None
    mesh, order = mesh_and_order(mesh_dimensions, check_spline_order(spline_order))
    return (*no_vectors, None, None, None, mesh, order)


def _vectors(device: torch.device, k_vectors: Any, k_cutoff: Any, bounds: Any, indices: Any) -> tuple[Any, ...] | None:
    """The arguments of the op that describe k-vectors; None unless they are given in one way."""
    if [k_vectors is None, k_cutoff is None, bounds is None, indices is None].count(False) != 1:
        return None
    if k_cutoff is not None:
        k_cutoff = per_system("k_cutoff", k_cutoff, 1, device).detach()
    if isinstance(bounds, torch.Tensor):
        return None
    sizes = () if bounds is None else check_bounds(bounds)
    miller = tuple(indices)[:4] if isinstance(indices, WaveVectors) else (indices, None, None, None)
    return (k_vectors, k_cutoff, *miller, None, None, None, sizes, 0)


def _sum_of(given: _Arguments) -> tuple[Callable[[ChargedSystem], LongRange], GivenNeighbors, driver.SumOptions]:
    """The long-range part, the neighbors and the options that arguments of the op describe."""
    if given.spline_order:
        prepared: Any = None
        mesh: Any = tuple(given.sizes)
        order = given.spline_order
        if given.influence is not None:
            influence = Influence(given.influence, given.derivative)
            values: tuple[Any, ...] = (given.prepared_cell, given.alpha, mesh, order, COULOMB, influence)
            prepared, mesh = PreparedMesh(*values), None
        far: Any = functools.partial(MeshSum.given, mesh, None, order, Precomputed(), prepared)
    else:
        miller: Any = given.miller
        if given.point_begin is not None:
            of_points: tuple[Any, ...] = (miller, given.point_begin, given.point_system, given.weights)
            miller = WaveVectors(*of_points)
        far = functools.partial(KVectorSum.given, given.k_vectors, given.k_cutoff, tuple(given.sizes) or None, miller)
    near = driver.given_neighbors(*tuple(given)[_NEIGHBORS])
    return far, near, driver.SumOptions(given.alpha, ACCURACY, None, COULOMB, None, None, False)


def _request_of(given: _Arguments) -> SumRequest:
    computed = [bool(given.computed & bit) for bit in (FORCES, CHARGE_GRADIENTS, VIRIAL)]
    return SumRequest(Derivatives(*computed), given.energy_reduction, False, (computed[1], False, False))


def _energies_of(given: _Arguments) -> SumRequest:
    return SumRequest(Derivatives(), given.energy_reduction)


# -- derivatives ----------------------------------------------------------------------------------


def _graph(given: _Arguments, leaves: dict[str, torch.Tensor], request: SumRequest) -> dict[str, torch.Tensor]:
    """Results of the ordinary sum by name, as a graph of ops."""
    far, near, options = _sum_of(given)
    atoms = System(leaves["positions"], leaves["charges"], leaves["cell"])
    found = driver.sum_as_graph(far, atoms, near, request, options)
    names = ["energies", *(name for name, is_asked in zip(Derivatives._fields, request.derivatives) if is_asked)]
    return dict(zip(names, found if isinstance(found, tuple) else (found,)))


def _leaves(given: _Arguments, higher: bool) -> dict[str, torch.Tensor]:
    """Inputs by which the sum is differentiated: views, so that a derivative by one does not go on to another."""
    found = {name: getattr(given, name) for name in ("positions", "charges", "cell")}
    found = {name: t.view_as(t) if higher else t.detach() for name, t in found.items()}
    fixed = () if given.influence is None else ("cell",)  # of a prepared mesh
    return {name: t if t.requires_grad or name in fixed else t.requires_grad_() for name, t in found.items()}


def _slopes(
    outputs: Sequence[torch.Tensor],
    leaves: dict[str, torch.Tensor],
    weights: Sequence[torch.Tensor],
    wanted: frozenset[str],
    higher: bool,
) -> dict[str, torch.Tensor | None]:
    names = [name for name in leaves if name in wanted]
    options: Any = {"create_graph": higher, "allow_unused": True}
    return dict(zip(names, torch.autograd.grad(outputs, [leaves[name] for name in names], weights, **options)))


def _pullback(
    inputs: dict[str, Any],
    gradients: dict[str, torch.Tensor | None],
    wanted: frozenset[str],
    forces: torch.Tensor,
    charge_gradients: torch.Tensor,
) -> dict[str, torch.Tensor | None]:
    """Gradients of the sum: by the second op if the first one has the derivatives, or through the ordinary sum."""
    given = _Arguments(**inputs)
    by = {name: w for name, w in gradients.items() if w is not None}
    of_energies = by.get("energies")
    computed = {"positions": given.computed & FORCES, "charges": given.computed & CHARGE_GRADIENTS, "cell": 0}
    if len(by) == 1 and of_energies is not None and all([computed[name] for name in wanted]):
        both = whole_sum_gradients(of_energies, forces, charge_gradients, *given)
        return {name: g for name, g in zip(("positions", "charges"), both) if name in wanted}
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = _leaves(given, higher)
        results = _graph(given, leaves, _request_of(given))
        both = [(results[name], w) for name, w in by.items() if name in results]
        return _slopes([r for r, _ in both], leaves, [w for _, w in both], wanted, higher)


def _pullback_of_gradients(
    inputs: dict[str, Any], gradients: dict[str, torch.Tensor | None], wanted: frozenset[str]
) -> dict[str, torch.Tensor | None]:
    """Second derivatives, through the ordinary sum."""
    of_energies = inputs["grad_energies"]
    given = _Arguments(*[inputs[name] for name in _Arguments._fields])
    higher = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = _leaves(given, higher)
        weight = of_energies.view_as(of_energies) if higher else of_energies.detach().requires_grad_()
        energies = _graph(given, leaves, _request_of(given)._replace(derivatives=Derivatives()))["energies"]
        slopes = torch.autograd.grad(energies, [leaves["positions"], leaves["charges"]], weight, create_graph=True)
        both = [
            (s, w) for s, w in zip(slopes, (gradients["grad_positions"], gradients["grad_charges"])) if w is not None
        ]
        leaves["grad_energies"] = weight
        return _slopes([s for s, _ in both], leaves, [w for _, w in both], wanted, higher)


# -- the ops --------------------------------------------------------------------------------------


def _n_energies(given: _Arguments) -> Any:
    return given.charges.shape[0] if given.energy_reduction == "atom" else 1


def _shapes(given: _Arguments) -> tuple[tuple[Any, ...], ...]:
    """Of forces, charge gradients and virial; without elements where they are not computed."""
    n_atoms = given.positions.shape[0]
    full = ((n_atoms, 3), (n_atoms,), (1, 3, 3))
    asked = _request_of(given).derivatives
    return tuple([shape if is_asked else (0, *shape[1:]) for shape, is_asked in zip(full, asked)])


def _shape(number: int) -> Callable[..., tuple[Any, ...]]:
    """The shape of an output, that of a first derivative; the arguments of the sum are the last ones of the op."""
    return lambda *inputs: _shapes(_Arguments(*inputs[-len(_Arguments._fields) :]))[number]


def _declared(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of an op, with the arguments of the sum in the place of ``*arguments``."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    types = [(p.name, p.annotation) for p in inspect.signature(body).parameters.values() if p.kind == kind]
    types += _Arguments.__annotations__.items()
    # functions have no declared `__signature__`, but `inspect.signature` reads it
    body.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in types]
    )
    body.__annotations__ = dict(types)
    return body


@warp_custom_op(
    "nvalchemiops::ewald_sum_gradients",
    outputs=[OutputSpec("grad_positions", real_of, _shape(0)), OutputSpec("grad_charges", real_of, _shape(1))],
    grad_arrays=["grad_positions", "grad_charges", "grad_energies", "positions", "charges", "cell"],
    backward=_pullback_of_gradients,
    trusted=True,
)
@_declared
def whole_sum_gradients(
    grad_energies: torch.Tensor, forces: torch.Tensor, charge_gradients: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients by positions and charges, from those by the energies and from the first derivatives of their sum.

    If all weights are the same they are products: values are read. NaN where values do not fit together.
    """
    given = _Arguments(*arguments)
    weights = weights_of_systems(grad_energies, given.energy_reduction == "system", None, 1)
    if weights is not None:
        weight = weights.to(forces.dtype)
        return forces * -weight, charge_gradients * weight
    try:
        with autograd_inside(), torch.enable_grad():
            leaves = _leaves(given, False)
            inputs = [leaves["positions"], leaves["charges"]]
            found = torch.autograd.grad(_graph(given, leaves, _energies_of(given))["energies"], inputs, grad_energies)
    except ValuesError:  # values that do not fit together, as in the sum
        return torch.full_like(forces, torch.nan), torch.full_like(charge_gradients, torch.nan)
    return tuple([g if t.numel() else torch.empty_like(t) for g, t in zip(found, (forces, charge_gradients))])


@warp_custom_op(
    "nvalchemiops::ewald_sum",
    outputs=[
        OutputSpec("energies", real_of, lambda *inputs: (_n_energies(_Arguments(*inputs)),)),
        *(OutputSpec(name, real_of, _shape(number)) for number, name in enumerate(Derivatives._fields)),
    ],
    grad_arrays=["energies", *Derivatives._fields, "positions", "charges", "cell"],
    backward=_pullback,
    trusted=True,
)
@_declared
def whole_sum(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Energies of an Ewald sum of one system, with first derivatives; see `_Arguments`.

    NaN where values do not fit together.
    """
    given = _Arguments(*arguments)
    request, (far, near, options) = _request_of(given), _sum_of(given)
    positions = given.positions
    try:
        with torch.no_grad():
            found = driver.ewald_sum(far, System(positions, given.charges, given.cell), near, request, options)
    except ValuesError:
        shapes = ((_n_energies(given),), *_shapes(given))
        return tuple([positions.new_full(shape, torch.nan) for shape in shapes])
    energies, *others = found if isinstance(found, tuple) else (found,)
    for number, (is_asked, shape) in enumerate(zip(request.derivatives, _shapes(given))):
        if not is_asked:
            others.insert(number, positions.new_empty(shape))
    return energies, *others
