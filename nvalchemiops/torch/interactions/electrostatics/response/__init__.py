"""Linear response: induced charges and dipoles that minimise a quadratic energy, differentiated implicitly.

E is the energy of interaction of the unknown charges q and dipoles μ, with each other and with everything else. At the
minimum of the total energy, the variables v = (q, y) with ``μ = α y`` make the residual

    ρ(v, θ) = (χ + J q + ∂E/∂q, y - F + ∂E/∂μ)

zero. The sum of the charges of a system is fixed, so the part of ρ for charges is zero up to a constant potential in
each system. The residual depends on tensors θ: positions, cells, permanent sources, polarizabilities, ... Since y is a
field, polarizabilities may be zero. E is quadratic, so ``ρ = K v - f``. Products with K are differences of gradients of
E; K is not built.

* ``K v = f`` is solved by conjugate gradients (`nvalchemiops.torch.interactions.electrostatics.response.solver`).
* In the backward pass a cotangent c of v is first mapped to ``u = K⁻ᵀ c``, the solution of a linear system of the same
  kind. The gradient with respect to θ is then the derivative of ``-u·ρ(v, θ)`` at fixed v and u. The term ``u·∂E`` is
  ``(E(x + u) - E(x - u)) / 2`` at the sources x, so only first derivatives of E are needed.
* The gradient of the minimal energy is the gradient at fixed v, and needs no second solution.

Each of these steps is a function of v, u and θ that is differentiated in the same way. This gives derivatives of all
orders.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd.functorch import is_differentiated
from nvalchemiops.torch.distributed.agreement import of_atoms
from nvalchemiops.torch.interactions.electrostatics.response.solver import (
    Operator,
    Problem,
    Tensors,
    check_dependence,
    check_minimum,
    check_order,
    check_quadratic,
    replace_fields,
    returns_atoms,
    solve,
)
from nvalchemiops.torch.interactions.pair import shares
from nvalchemiops.torch.operators.segments import spread_systems
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime.context import eager, ordinary

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain

OWN = ("hardness", "electronegativity", "total_charge", "polarizabilities", "external_field")
"""Arguments that enter the energies of single atoms, in the order of the tensors of a `Problem`."""


@internals.named_in_files
class InducedMoments(NamedTuple):
    """Sources at the minimum of their energy.

    Attributes
    ----------
    charges : (n_atoms,) tensor or None
    dipoles : (n_atoms, 3) tensor or None
    energies : (n_systems,) tensor
        Total energies at the minimum. Their gradients need no second solution.
    residuals : (n_systems,) tensor
        Gradients of the energy with respect to the sources, relative to the gradients without induced sources.
    iterations : int
        Number of iterations of conjugate gradients.
    """

    charges: torch.Tensor | None
    dipoles: torch.Tensor | None
    energies: torch.Tensor
    residuals: torch.Tensor
    iterations: int


@eager
def induced_moments(
    energy: Callable[..., torch.Tensor],
    parameters: Tensors = (),
    *,
    hardness: torch.Tensor | None = None,
    electronegativity: torch.Tensor | None = None,
    total_charge: float | torch.Tensor = 0.0,
    polarizabilities: torch.Tensor | None = None,
    external_field: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    num_systems: int | None = None,
    initial: InducedMoments | None = None,
    tolerance: float | None = None,
    max_iterations: int = 200,
    domain: "Domain | None" = None,
) -> InducedMoments:
    """Charges and dipoles that minimise the energy, as differentiable functions of its parameters.

    The energy of a system is ``E + Σ_i (χ_i q_i + J_i q_i² / 2 + μ_i·α_i⁻¹ μ_i / 2 - F·μ_i)``, with the interaction E
    of all sources. The unknowns are charges if a hardness J is given, dipoles if a polarizability α is given, or both.

    Parameters
    ----------
    energy : callable
        ``energy(charges, *parameters)``, ``energy(dipoles, *parameters)``, or ``energy(charges, dipoles,
        *parameters)`` returns E, at most quadratic in the unknown sources: for each atom (n_atoms,), for each system
        (n_systems,), or as a scalar for one system. It may use sums of this library or any other differentiable
        function. The callable includes permanent sources itself; for an atom with both kinds it must add the two.
    parameters : sequence of tensors, optional
        Tensors on which E depends and with respect to which results are differentiable: positions, cell, permanent
        sources, ...
    hardness : (n_atoms,) tensor, energy/charge², optional
        J, non-negative. If E includes the self energy of Gaussian charges, this adds to J.
    electronegativity : (n_atoms,) tensor, energy/charge, optional
        χ, zero by default. To apply a field F to the charges of an open system, pass ``χ_i - x_i·F``.
    total_charge : float or (n_systems,) tensor, charge, optional
        Sum of the unknown charges of each system.
    polarizabilities : (n_atoms,) or (n_atoms, 3, 3) tensor, charge² length² / energy, optional
        α, non-negative. Only the symmetric part of a tensor is used. Atoms with zero polarizability have no dipole.
    external_field : (3,), (n_systems, 3) or (n_atoms, 3) tensor, energy / (charge length), optional
        F. It acts on dipoles only; for charges see ``electronegativity``.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    num_systems : int, optional
        Number of systems. By default the largest entry of ``batch_idx`` plus one.
    initial : InducedMoments, optional
        Start of the iteration: the solution of a similar system, as in molecular dynamics. Treated as a constant.
    tolerance : float, optional
        Largest allowed residual of each system, relative to the residual without induced sources. Also applies to the
        solutions in backward passes. 1e-8 by default, in float32 1e-5.
    max_iterations : int, optional
        Largest number of iterations of conjugate gradients.
    domain : Domain, optional
        The system is divided among ranks (`nvalchemiops.torch.distributed`): values per atom are for the atoms that
        this rank owns. ``energy`` must pass the domain to the sums that it calls, and return either energies of the
        owned atoms, or energies of systems that are complete on all ranks.

    Returns
    -------
    InducedMoments

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; or an energy that depends on a tensor with ``requires_grad`` that is not
        among the parameters, so that its gradient would be missing.
    RuntimeError
        The energy has no minimum, because polarizable atoms are too close (the polarization catastrophe; Gaussian
        widths prevent it) or hardnesses are too small; conjugate gradients have not converged; or the energy is not
        quadratic. The error needs sources that are induced: along others, which have another symmetry than all fields,
        the energy may fall without a word. If none are induced at all, a random direction is searched.

    Notes
    -----
    Results are differentiable to any order in all tensors except ``initial``. A backward pass through charges or
    dipoles takes as long as the solution; through ``energies`` alone it takes one evaluation, because the energy is
    stationary. Explicit forces need no backward pass: evaluate the energy with ``compute_forces=True`` at the sources
    found here.

    Each iteration evaluates E and its gradient with respect to the sources, and reads one number on the host. The
    solver does not run inside a compiled graph: `torch.compile` breaks the graph here, or raises an error with
    ``fullgraph=True``. Compile the energy instead. Forward mode and function transforms (`torch.func`) are not
    supported: members of an ensemble, for example, can be copies of the systems in one batch.
    """
    given = dict(zip(OWN, (hardness, electronegativity, total_charge, polarizabilities, external_field)))
    parameters = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
    dual = (is_differentiated(t, False) for t in (*given.values(), *parameters) if isinstance(t, torch.Tensor))
    if (internals.DERIVATIVES_KNOWN and internals.transforms_active()) or any(dual):
        raise NotDifferentiableError(
            "`induced_moments` does not run inside of function transforms (torch.func, vmap) or in forward mode: use "
            "torch.autograd.grad, and make the slices of a vmap the systems of one batch, with `batch_idx`"
        )
    batch = _Batch(ordinary(batch_idx), num_systems)
    differentiable = torch.is_grad_enabled()
    with shares.whole_call(domain), torch.inference_mode(False), torch.set_grad_enabled(differentiable):
        if domain is not None:
            batch = _batch_of_domain(domain, batch, given, parameters)
        with shares.together(domain):
            problem, tensors = _check(energy, parameters, given, batch, tolerance, max_iterations)
        tensors = [ordinary(value) for value in tensors]
        if domain is not None:
            problem = problem._replace(returns_atoms=returns_atoms(problem, tensors))
        start = None if initial is None else problem.deviations(initial[:2], tensors[0])
        v, energies, residuals, iterations = _Minimum.apply(problem, start, *tensors)
        charges, dipoles = problem.sources(problem.polarized(v, tensors), tensors)
        energies = _MinimalEnergy.apply(problem, energies, v, *tensors)
    return InducedMoments(charges, dipoles, energies, residuals, int(iterations))


# -- derivatives -----------------------------------------------------------------------------------


def born_charges(polarization: torch.Tensor, positions: torch.Tensor, *, create_graph: bool = False) -> torch.Tensor:
    """Born effective charges ``Z*[i, a, b] = ∂P_b / ∂x_ia``, by three backward passes.

    Parameters
    ----------
    polarization : (3,) or (n_systems, 3) tensor, charge length
        Dipole of each system, such as ``(charges[:, None] * positions + dipoles).sum(0)``, computed from ``positions``.
        In a periodic cell, charges that depend on the positions make it depend on which image of an atom is taken.
    positions : (n_atoms, 3) tensor, length
        The tensor that requires gradients. Systems of a batch must not depend on atoms of other ones.
    create_graph : bool, optional
        Whether the result is differentiable.

    Returns
    -------
    (n_atoms, 3, 3) tensor, charge
        The sum over the atoms of a neutral system is zero, if a shift of all atoms leaves the energy unchanged.

    Raises
    ------
    ValueError, TypeError
        Bad shapes, or a polarization that does not depend on the positions.
    """
    for name, values in (("polarization", polarization), ("positions", positions)):
        checks.check_tensor(name, values)
        if values.shape[-1:] != (3,) or values.ndim > 2:
            raise ValueError(f"`{name}` must be vectors of three components, got shape {tuple(values.shape)}")
    if not (positions.requires_grad and polarization.requires_grad):
        raise ValueError("`polarization` must be computed from `positions` that require gradients")
    components = polarization.reshape(-1, 3).sum(0)
    found = [
        torch.autograd.grad(one, positions, retain_graph=True, create_graph=create_graph, materialize_grads=True)[0]
        for one in components
    ]
    return torch.stack(found, -1)


def _gradients(wanted: Sequence[bool], tensors: Tensors, value: Callable[[Tensors], torch.Tensor]) -> list[Any]:
    """Gradients of ``value(tensors)`` for the wanted tensors; differentiable if gradients are enabled."""
    as_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # separate nodes of the graph, because one of the tensors may depend on another
        aliases = [
            t.view_as(t) if as_graph and t.requires_grad else t.detach().requires_grad_(by)
            for t, by in zip(tensors, wanted)
        ]
        by = [alias for alias, w in zip(aliases, wanted) if w]
        if not by:
            return [None] * len(tensors)
        found = iter(torch.autograd.grad(value(aliases), by, create_graph=as_graph, allow_unused=True))
    return [next(found) if w else None for w in wanted]


def _constant_unless_graph(*values: torch.Tensor) -> list[torch.Tensor]:
    return list(values) if torch.is_grad_enabled() else [v.detach() for v in values]


def _transposed_solution(operator: Operator, cotangent: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """Compute ``K⁻ᵀ c`` with K⁻¹, as ``c' + D K⁻¹ ((c_q, 0) - T c')``.

    Here ``c' = (0, c_y)``, T are the second derivatives of E, and D has ones for charges, polarizabilities for fields.
    """
    problem = operator.problem
    if not problem.has_dipoles:
        return _Inverse.apply(operator, cotangent, *tensors)
    fields = torch.cat([torch.zeros_like(cotangent[:, :-3]), cotangent[:, -3:]], 1)
    larger, factor = operator.scaled(fields)
    slopes = problem.slopes(larger, tensors)[0]
    if torch.is_grad_enabled():
        slopes = slopes - problem.slopes(torch.zeros_like(larger), tensors)[0]
    else:
        slopes = slopes - operator.slopes_at_zero
    found = _Inverse.apply(operator, cotangent - fields - slopes / factor, *tensors)
    return fields + problem.polarized(found, tensors)


class _Minimum(torch.autograd.Function):
    """Variables at the minimum, with energies, residuals and the number of iterations, which are constants."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, start: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
        operator = Operator(problem, tensors)
        check_dependence(operator)
        check_minimum(operator)
        if start is not None and problem.has_dipoles:
            slopes, _ = problem.slopes(start, operator.tensors)
            start = replace_fields(problem, start, operator.right + operator.slopes_at_zero - slopes)
        if start is not None:  # a residual relative to zero cannot become small
            start = torch.where(operator.at_rest(), 0.0, start)
        found, residuals, count = solve(operator, operator.right, start)
        slopes, energies = problem.slopes(problem.polarized(found, tensors), operator.tensors)
        left = problem.gradient(found, tensors) + slopes
        check_quadratic(operator, left)
        energies = energies.detach() + problem.energies_of_atoms(found, tensors)
        v = replace_fields(problem, found, found - left)
        ctx.operator = operator
        ctx.set_materialize_grads(False)  # otherwise a missing gradient becomes zeros, for which a system is solved
        iterations = torch.tensor(count, device="cpu")
        ctx.save_for_backward(v, *tensors)
        ctx.mark_non_differentiable(energies, residuals, iterations)
        return v, energies, residuals, iterations

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, *_: Any) -> Any:
        operator, problem = ctx.operator, ctx.operator.problem
        v, *tensors = ctx.saved_tensors
        if gradient is None:
            return (None,) * (2 + len(tensors))
        u = _transposed_solution(operator, gradient, tensors)
        v, u = _constant_unless_graph(v, u)
        shift, factor = operator.scaled(u)

        def value(tensors: Tensors) -> torch.Tensor:
            x = problem.polarized(v, tensors)
            slopes = problem.interaction(x + shift, tensors) - problem.interaction(x - shift, tensors)
            return -_per_system(problem, slopes, 2.0 * factor) - (u * problem.gradient(v, tensors)).sum()

        return (None, None, *_gradients(ctx.needs_input_grad[2:], tensors, value))


class _Inverse(torch.autograd.Function):
    """The solution v of ``K v = right``."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, right: torch.Tensor, *tensors: torch.Tensor) -> Any:
        right, problem = right.detach(), operator.problem
        v, *_ = solve(operator, right)
        if problem.has_dipoles:
            v = replace_fields(problem, v, right - operator.coupling(problem.polarized(v, operator.tensors)))
        ctx.operator = operator
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(v, *tensors)
        return v

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        operator, problem = ctx.operator, ctx.operator.problem
        v, *tensors = ctx.saved_tensors
        if gradient is None:
            return (None,) * (2 + len(tensors))
        right = _transposed_solution(operator, gradient, tensors)
        v, u = _constant_unless_graph(v, right)
        shift, factor = operator.scaled(u)
        _, size = operator.scaled(problem.polarized(v, operator.tensors))

        def value(tensors: Tensors) -> torch.Tensor:
            x = size * problem.polarized(v, tensors)
            # second derivatives of E times x and shift: terms of first order cancel
            slopes = problem.interaction(x + shift, tensors) - problem.interaction(x - shift, tensors)
            slopes = slopes - problem.interaction(shift, tensors) + problem.interaction(-shift, tensors)
            found = _per_system(problem, slopes, 2.0 * factor * size)
            if problem.has_charges:
                found = found + (u[:, 0] * problem.own(tensors)["hardness"] * v[:, 0]).sum()
            return -found

        return (None, right, *_gradients(ctx.needs_input_grad[2:], tensors, value))


def _per_system(problem: Problem, energies: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """The sum of the energies of systems, each divided by a number that all atoms (n_atoms, 1) of a system share."""
    counts = problem.counts(divisor)
    inverse = problem.sums(1.0 / divisor[:, 0]) / torch.where(counts > 0.0, counts, 1.0)
    return (energies * inverse).sum()


class _MinimalEnergy(torch.autograd.Function):
    """Energies at the minimum. Their gradient is taken at fixed variables, and itself depends on the variables."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, energies: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.problem = problem
        ctx.save_for_backward(v, *tensors)
        return energies.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        v, *tensors = ctx.saved_tensors
        v, gradient = _constant_unless_graph(v, gradient)
        problem = ctx.problem

        def value(tensors: Tensors) -> torch.Tensor:
            interaction = problem.interaction(problem.polarized(v, tensors), tensors)
            return ((interaction + problem.energies_of_atoms(v, tensors)) * gradient).sum()

        return (None, None, None, *_gradients(ctx.needs_input_grad[3:], tensors, value))


# -- checks ----------------------------------------------------------------------------------------


class _Batch(NamedTuple):
    """Systems of the atoms, and how ranks share them."""

    batch_idx: Any
    n_systems: Any
    domain: "Domain | None" = None
    has_field_of_systems: bool | None = None  # whether fields are given per system; set where ranks had to agree


def _batch_of_domain(domain: "Domain", batch: _Batch, given: dict[str, Any], parameters: Any) -> _Batch:
    """The systems of a domain. A collective call."""
    field = given["external_field"]
    with shares.together(domain) as agreement:
        for name, value in given.items():
            agreement.same[f"`{name}`"] = of_atoms(value)
        if isinstance(parameters, Sequence):
            agreement.same["`parameters`"] = ", ".join(map(of_atoms, parameters))
        if batch.batch_idx is not None or batch.n_systems not in (None, 1, domain.n_systems):
            raise ValueError("`batch_idx` and `num_systems` belong to the `domain`: leave them out")
    of_systems = None
    if isinstance(field, torch.Tensor) and field.ndim == 2:
        misfits = torch.tensor([field.shape[0] != domain.n_systems], dtype=torch.int32, device=domain.device)
        of_systems = not bool(shares.largest(domain, misfits))
    return _Batch(domain.batch_idx, domain.n_systems, domain, of_systems)


def _check(
    energy: Any, parameters: Any, given: dict[str, Any], batch: _Batch, tolerance: Any, most: Any
) -> tuple[Problem, list[torch.Tensor]]:
    """The problem and its tensors; raise unless the arguments of `induced_moments` fit together."""
    if not callable(energy):
        raise TypeError(f"`energy` must be callable, got {type(energy).__name__}")
    hardness, polarizabilities = given["hardness"], given["polarizabilities"]
    if hardness is None and polarizabilities is None:
        raise ValueError("`hardness` or `polarizabilities` is needed: they say which sources are induced")
    if hardness is None and given["electronegativity"] is not None:
        raise ValueError("`electronegativity` is for charges, which need `hardness`")
    if polarizabilities is None and given["external_field"] is not None:
        raise ValueError("`external_field` is for dipoles, which need `polarizabilities`")
    first = "hardness" if hardness is not None else "polarizabilities"
    like = given[first]
    checks.check_tensor(first, like)
    if like.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"`{first}` must be float32 or float64, got {like.dtype}")
    if not like.ndim:
        raise ValueError(f"`{first}` must have a value for each atom, got shape ()")
    n_atoms = like.shape[0]
    domain = batch.domain
    given_number = None if batch.n_systems is None else checks.check_count("num_systems", batch.n_systems)
    if domain is not None and n_atoms != domain.n_owned:
        raise ValueError(f"`{first}` must be that of the atoms that this rank owns, ({domain.n_owned},), got {n_atoms}")
    waits = given_number is None
    batch_idx, counted = checks.check_batch(batch.batch_idx, like.new_empty(n_atoms, 0), given_number, wait=waits)
    n_systems = max(1, counted or 0) if given_number is None else given_number
    batch = batch._replace(n_systems=n_systems)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "hardness": ((n_atoms,),),
        "electronegativity": ((n_atoms,),),
        "polarizabilities": ((n_atoms,), (n_atoms, 3, 3)),
        "external_field": ((3,), (n_systems, 3), (n_atoms, 3)),
        "total_charge": ((), (n_systems,)),
    }
    found = {}
    for name in OWN:
        value = given[name]
        if value is None or (name == "total_charge" and hardness is None):
            continue
        if name == "total_charge" and not isinstance(value, (torch.Tensor, list, tuple)) and np.size(value) == 1:
            value = like.new_full((), checks.as_float(name, value))
        checks.check_tensor(name, value)
        if checks.is_real(value):
            value = value.to(like.dtype)
        if value.dtype != like.dtype or value.device != like.device:
            raise TypeError(
                f"`{name}` must be {like.dtype} on {like.device}, as `{first}`, got {value.dtype} on {value.device}"
            )
        if tuple(value.shape) not in shapes[name]:
            allowed = " or ".join(str(shape) for shape in shapes[name])
            raise ValueError(f"`{name}` must have shape {allowed}, got {tuple(value.shape)}")
        found[name] = value
    if "total_charge" in found:
        found["total_charge"] = shares.replicated(domain, found["total_charge"])
    if polarizabilities is not None and polarizabilities.ndim == 3:
        found["polarizabilities"] = 0.5 * (found["polarizabilities"] + found["polarizabilities"].mT)
    if polarizabilities is not None:
        _check_not_negative(found["polarizabilities"])
    if "external_field" in found:
        found["external_field"] = _field_of_atoms(found["external_field"], batch, batch_idx, n_atoms)
    if isinstance(parameters, torch.Tensor):
        raise TypeError("`parameters` must be a sequence of tensors, got one tensor")
    for n, value in enumerate(parameters):
        checks.check_tensor(f"parameters[{n}]", value)
    if tolerance is None:
        tolerance = 1e-8 if like.dtype == torch.float64 else 1e-5
    tolerance = checks.check_positive("tolerance", tolerance)
    most = checks.check_count("max_iterations", most)
    problem = Problem(energy, tuple(found), n_atoms, batch_idx, n_systems, tolerance, most, domain)
    return problem, [*found.values(), *parameters]


def _check_not_negative(polarizabilities: torch.Tensor) -> None:
    """Raise for polarizabilities below zero, along any axis: the energy would have no minimum."""
    values = polarizabilities.detach()
    values = torch.where(values.isfinite(), values, 0.0)
    rounding = 1e3 * torch.finfo(values.dtype).eps * float(values.abs().max()) if values.numel() else 0.0
    along_axes = values if values.ndim == 1 else torch.linalg.eigvalsh(values)
    if bool((along_axes < -rounding).any()):
        raise ValueError("`polarizabilities` must be non-negative, for tensors along every axis")


def _field_of_atoms(field: torch.Tensor, batch: _Batch, batch_idx: Any, n_atoms: int) -> torch.Tensor:
    """The field (n_atoms, 3) at each atom; if ranks share one field, its gradient is complete on each rank."""
    of_systems = batch.has_field_of_systems
    if of_systems is None:
        of_systems = field.shape[0] == batch.n_systems
        if field.ndim == 2 and n_atoms == batch.n_systems:
            check_order(f"`external_field` has {n_atoms} rows", batch_idx, n_atoms)
    if field.ndim == 2 and not of_systems:
        return field
    field = shares.replicated(batch.domain, field)
    return field.expand(n_atoms, 3) if field.ndim == 1 else spread_systems(field, batch_idx, n_atoms)
