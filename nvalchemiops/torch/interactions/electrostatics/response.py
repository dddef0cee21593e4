"""Linear response: induced charges and dipoles that minimise a quadratic energy, differentiated implicitly.

Unknown charges q and dipoles μ have the interaction E with each other and with everything else. At the minimum of the
energy, the variables v = (q, y) with ``μ = α y`` make the residual

    ρ(v, θ) = (χ + J q + ∂E/∂q, y - F + ∂E/∂μ)

zero, but for the same potential at all charges of a system, whose sum is fixed. It depends on tensors θ: positions,
cells, permanent sources, polarizabilities, ... Since y is a field, polarizabilities may be zero. E is quadratic, so
``ρ = K v - f``, where products with K are differences of gradients of E; K is not built.

* ``K v = f`` is solved by conjugate gradients, as K is symmetric in the inner product with α.
* A cotangent c of v becomes ``u = K⁻ᵀ c``, which is again such a solution, and then the derivative of ``-u·ρ(v, θ)``
  by θ at fixed v and u. There ``u·∂E`` is ``(E(x + u) - E(x - u)) / 2`` at the sources x: first derivatives of E.
* The energy at the minimum changes as at fixed v: its gradient needs no second solution.

Each is again a function of v, u and θ that is differentiated in the same way, so every order is right.
Conjugate gradients with a fixed sum: N. I. M. Gould, M. E. Hribar and J. Nocedal, SIAM J. Sci. Comput. 23, 1376 (2001),
doi:10.1137/S1064827598345667, with a diagonal matrix for the preconditioner.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.operators.segments import spread_systems, system_sums
from nvalchemiops.torch.runtime.context import eager

Tensors = Sequence[torch.Tensor]

OWN = ("hardness", "electronegativity", "total_charge", "polarizabilities", "external_field")
"""Arguments that enter the energies of single atoms, in the order in which they are kept."""


class InducedMoments(NamedTuple):
    """Sources at the minimum of their energy.

    Attributes
    ----------
    charges : (n_atoms,) tensor or None
    dipoles : (n_atoms, 3) tensor or None
    energies : (n_systems,) tensor
        At the minimum, everything included. Its gradients take no second solution.
    residuals : (n_systems,) tensor
        Gradients of the energy by the sources, relative to those without induced sources.
    iterations : int
        How many products of the conjugate gradients were needed.
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
    n_systems: int = 1,
    initial: InducedMoments | None = None,
    tolerance: float | None = None,
    max_iterations: int = 200,
) -> InducedMoments:
    """Charges and dipoles at which the energy is lowest, as differentiable functions of all that it depends on.

    The energy of a system is ``E + Σ_i (χ_i q_i + J_i q_i² / 2 + μ_i·α_i⁻¹ μ_i / 2 - F·μ_i)``, with the interaction E
    of all sources. Charges are unknown with a hardness J, dipoles with a polarizability α, or both.

    Parameters
    ----------
    energy : callable
        ``energy(charges, *parameters)``, ``energy(dipoles, *parameters)``, or ``energy(charges, dipoles,
        *parameters)`` gives E, at most quadratic in the unknown sources: for each atom (n_atoms,), for each system
        (n_systems,), or for the only one. Energies from this library, or any other differentiable function. It knows
        the permanent sources, and adds the unknown ones to them where an atom has both.
    parameters : sequence of tensors, optional
        What E depends on and is to be differentiated by: positions, cell, permanent sources, ...
    hardness : (n_atoms,) tensor, energy/charge², optional
        J, not negative. The self energy of a Gaussian charge, if E has it, adds to it.
    electronegativity : (n_atoms,) tensor, energy/charge, optional
        χ, zero by default. In an open system a field F is part of it: ``χ_i - x_i·F``.
    total_charge : float or (n_systems,) tensor, charge, optional
        Sum of the unknown charges of each system.
    polarizabilities : (n_atoms,) or (n_atoms, 3, 3) tensor, charge² length² / energy, optional
        α, not negative; of a tensor the symmetric part counts. Where it is zero there is no dipole.
    external_field : (3,), (n_systems, 3) or (n_atoms, 3) tensor, energy / (charge length), optional
        F, by dipoles alone (see ``electronegativity``).
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    n_systems : int, optional
        How many systems there are.
    initial : InducedMoments, optional
        Where to begin: the solution of a similar system, as in molecular dynamics. It is a constant.
    tolerance : float, optional
        How small the residual of each system must be, relative to that of no induced sources; also for the solutions in
        backward passes. 1e-8 by default, in float32 1e-5.
    max_iterations : int, optional
        How many products with A conjugate gradients may take.

    Returns
    -------
    InducedMoments

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; an energy that depends on a tensor with ``requires_grad`` which is not
        among the parameters, so that its gradient would be missing.
    RuntimeError
        There is no minimum: polarizable atoms are too close (the polarization catastrophe; Gaussian widths prevent it),
        or hardnesses too small. No convergence, with residuals. An energy that is not quadratic.

    Notes
    -----
    Derivatives of any order, by everything but ``initial``. A backward pass through charges or dipoles takes as long as
    the solution; through ``energies`` alone it takes one evaluation, since the energy is stationary. So with explicit
    forces no backward pass is needed: evaluate the energy with ``compute_forces=True`` at the sources found here.

    Each product is one evaluation of E with its gradient by the sources, and ends with one number read on the host.
    It does not run inside of a compiled graph: `torch.compile` breaks the graph here, and with ``fullgraph=True``
    raises an error. Compile the energy instead. Function transforms (`torch.func`) are not supported.
    """
    given = {
        "hardness": hardness,
        "electronegativity": electronegativity,
        "total_charge": total_charge,
        "polarizabilities": polarizabilities,
        "external_field": external_field,
    }
    problem, tensors = _check(energy, parameters, given, batch_idx, n_systems, tolerance, max_iterations)
    start = None if initial is None else problem.deviations(initial, tensors)
    v, energies, residuals, iterations = _Minimum.apply(problem, start, *tensors)
    charges, dipoles = problem.sources(v, tensors)
    energies = _MinimalEnergy.apply(problem, energies, v, *tensors)
    return InducedMoments(charges, dipoles, energies, residuals, int(iterations))


# -- the energy ------------------------------------------------------------------------------------


class _Problem(NamedTuple):
    """What stays the same while tensors vary.

    Variables v (n_atoms, 1, 3 or 4) are charges, fields, or both, and so are sources. Charges of both are deviations
    from the mean charge of the system: they add up to zero.
    """

    energy: Callable[..., torch.Tensor]
    names: tuple[str, ...]  # of the first tensors; the others are parameters of the energy
    n_atoms: int
    batch_idx: torch.Tensor | None
    n_systems: int
    tolerance: float
    max_iterations: int

    @property
    def has_charges(self) -> bool:
        return "hardness" in self.names

    @property
    def has_dipoles(self) -> bool:
        return "polarizabilities" in self.names

    def own(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Tensors of single atoms by name."""
        return dict(zip(self.names, tensors))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return system_sums(values, self.batch_idx, self.n_systems)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        return spread_systems(values, self.batch_idx, self.n_atoms)

    def mean_charges(self, tensors: Tensors) -> torch.Tensor:
        """The share (n_atoms,) of each atom in the total charge."""
        total = self.own(tensors)["total_charge"]
        return self.spread(total / self.sums(torch.ones(self.n_atoms, dtype=total.dtype, device=total.device)))

    def split(self, columns: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The parts (n_atoms,) of charges and (n_atoms, 3) of dipoles or fields."""
        return columns[:, 0] if self.has_charges else None, columns[:, -3:] if self.has_dipoles else None

    def polarized(self, v: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """Variables with dipoles in the place of fields."""
        if not self.has_dipoles:
            return v
        return torch.cat([v[:, :-3], _times(self.own(tensors)["polarizabilities"], v[:, -3:])], 1)

    def sources(self, v: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Charges and dipoles."""
        charges, dipoles = self.split(self.polarized(v, tensors))
        return None if charges is None else charges + self.mean_charges(tensors), dipoles

    def deviations(self, initial: InducedMoments, tensors: Tensors) -> torch.Tensor:
        """These sources as columns."""
        columns = []
        for name, found, unknown in zip(("charges", "dipoles"), initial[:2], (self.has_charges, self.has_dipoles)):
            if not unknown:
                continue
            if found is None or found.shape[0] != self.n_atoms:
                raise ValueError(f"`initial` must have {name} of {self.n_atoms} atoms")
            found = found.detach()
            if name == "charges":
                found = found - self.spread(self.sums(found) / self.sums(torch.ones_like(found)))
            columns.append(found.reshape(self.n_atoms, -1))
        return torch.cat(columns, 1)

    def interaction(self, deviations: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """E of each system."""
        charges, dipoles = self.split(deviations)
        unknown = [] if charges is None else [charges + self.mean_charges(tensors)]
        found = self.energy(*unknown, *([] if dipoles is None else [dipoles]), *tensors[len(self.names) :])
        checks.check_tensor("energy(...)", found)
        if tuple(found.shape) == (self.n_atoms,):
            return self.sums(found)
        if tuple(found.shape) == (self.n_systems,) or (found.ndim == 0 and self.n_systems == 1):
            return found.reshape(self.n_systems)
        raise ValueError(
            f"`energy` must return a tensor of shape ({self.n_atoms},), for each atom, or ({self.n_systems},), for "
            f"each system, got {tuple(found.shape)}"
        )

    def slopes(self, deviations: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """∂E by charges and dipoles, with a graph where gradients are enabled; and E of each system."""
        as_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            alias = deviations.view_as(deviations) if as_graph else deviations.detach()
            alias = alias if alias.requires_grad else alias.requires_grad_()
            energies = self.interaction(alias, tensors if as_graph else [t.detach() for t in tensors])
            # there may be no interaction at all
            value = energies.sum() + 0.0 * alias.sum()
            return torch.autograd.grad(value, alias, create_graph=as_graph)[0], energies

    def gradient(self, v: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """ρ without the derivatives of E, as a column for each variable."""
        own, columns = self.own(tensors), []
        charges, fields = self.split(v)
        if charges is not None:
            found = own["hardness"] * (charges + self.mean_charges(tensors))
            found = found + own["electronegativity"] if "electronegativity" in own else found
            columns.append(found.unsqueeze(1))
        if fields is not None:
            columns.append(fields - own["external_field"] if "external_field" in own else fields)
        return torch.cat(columns, 1)

    def energies(self, v: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """The energies of systems at these variables."""
        return self.interaction(self.polarized(v, tensors), tensors) + self.energies_of_atoms(v, tensors)

    def energies_of_atoms(self, v: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """The same without E."""
        own, parts = self.own(tensors), []
        charges, dipoles = self.sources(v, tensors)
        if charges is not None:
            parts.append(0.5 * own["hardness"] * charges**2)
            if "electronegativity" in own:
                parts.append(own["electronegativity"] * charges)
        if dipoles is not None:
            field = 0.5 * v[:, -3:]
            field = field - own["external_field"] if "external_field" in own else field
            parts.append((dipoles * field).sum(1))
        return self.sums(torch.stack(parts).sum(0))


def _times(polarizabilities: torch.Tensor, field: torch.Tensor) -> torch.Tensor:
    if polarizabilities.ndim == 1:
        return polarizabilities.unsqueeze(1) * field
    return (polarizabilities @ field.unsqueeze(-1)).squeeze(-1)


# -- the solver ------------------------------------------------------------------------------------


class _Solution(NamedTuple):
    v: torch.Tensor  # (n_atoms, n_columns)
    residuals: torch.Tensor  # (n_systems,), relative
    iterations: int


class _Operator:
    """K, its inner product, and the preconditioner, at tensors that stay."""

    def __init__(self, problem: _Problem, tensors: Tensors) -> None:
        self.problem = problem
        self.tensors = [t.detach() for t in tensors]
        own = problem.own(self.tensors)
        like = self.tensors[0]
        zero = like.new_zeros(problem.n_atoms, problem.has_charges + 3 * problem.has_dipoles)
        if problem.has_charges:
            # between that of each atom and the mean: the energy may have self energies, which add to hardnesses
            hardness = own["hardness"].clamp(min=0.0)
            mean = problem.spread(problem.sums(hardness) / problem.sums(torch.ones_like(hardness)))
            stiffness = 0.5 * (hardness + mean)
            self.hardness = own["hardness"]
            self.softness = 1.0 / torch.where(stiffness > 0.0, stiffness, 1.0)
            self.softness_of_system = problem.sums(self.softness)
        with torch.no_grad():
            self.slopes_at_zero, energies = problem.slopes(zero, self.tensors)
            self.energies_at_zero = energies.detach().to(torch.float64).abs()
            self.right = -problem.gradient(zero, self.tensors) - self.slopes_at_zero
            residual, z = self.preconditioned(self.right)
            self.scale = self.inner(residual, z).clamp(min=0.0).sqrt()
            # of sources: those that would be induced without an interaction, or whose energies compare with the given
            # ones, where symmetry leaves only rounding errors of fields
            first = self.norm(problem.polarized(z, self.tensors))
            self.length = torch.maximum(first, (self.energies_at_zero * self._compliance(like)).sqrt())

    def _compliance(self, like: torch.Tensor) -> torch.Tensor:
        """Square of sources for an energy: averages (n_systems,) of softness and polarizability."""
        problem, parts = self.problem, []
        if problem.has_charges:
            parts.append(self.softness)
        if problem.has_dipoles:
            alpha = problem.own(self.tensors)["polarizabilities"]
            parts.append(alpha if alpha.ndim == 1 else alpha.diagonal(dim1=1, dim2=2).mean(1))
        counts = problem.sums(torch.ones(problem.n_atoms, dtype=torch.float64, device=like.device)).clamp(min=1.0)
        return problem.sums(torch.stack(parts).sum(0).to(torch.float64)).clamp(min=0.0) / counts

    def norm(self, columns: torch.Tensor) -> torch.Tensor:
        """The length (n_systems,) of all numbers of a system, not zero."""
        found = self.problem.sums((columns.to(torch.float64) ** 2).sum(1)).sqrt()
        return torch.where(found > 0.0, found, 1.0)

    def inner(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Inner products (n_systems,) in float64, of fields with polarizabilities."""
        return self.problem.sums((a.to(torch.float64) * self.problem.polarized(b, self.tensors)).sum(1))

    def scaled(self, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """These sources as large as physical ones in each system, and the factors (n_atoms, 1).

        Interactions of sources are differences of energies: small or large sources would leave few digits.
        """
        factor = self.problem.spread((self.length / self.norm(sources.detach())).to(sources.dtype)).unsqueeze(1)
        return sources * factor, factor

    def coupling(self, sources: torch.Tensor) -> torch.Tensor:
        """Second derivatives of E times these sources."""
        larger, factor = self.scaled(sources)
        return (self.problem.slopes(larger, self.tensors)[0] - self.slopes_at_zero) / factor

    def product(self, v: torch.Tensor) -> torch.Tensor:
        """``K v``."""
        found = self.coupling(self.problem.polarized(v, self.tensors))
        if not self.problem.has_charges:
            return v + found
        return found + torch.cat([(self.hardness * v[:, 0]).unsqueeze(1), v[:, 1:]], 1)

    def preconditioned(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual without a mean potential, and variables that it would give without an interaction.

        The mean potential does no work, but its rounding errors do: they are larger than the rest, at the end.
        """
        if not self.problem.has_charges:
            return residual, residual
        potential = self.problem.sums(self.softness * residual[:, 0]) / self.softness_of_system
        charges = residual[:, 0] - self.problem.spread(potential)
        left = torch.cat([charges.unsqueeze(1), residual[:, 1:]], 1)
        return left, torch.cat([(self.softness * charges).unsqueeze(1), residual[:, 1:]], 1)


def _solve(operator: _Operator, right: torch.Tensor, start: torch.Tensor | None = None) -> _Solution:
    """Solve ``K v = right`` by preconditioned conjugate gradients, all systems at once.

    Fields where there is no polarizability are not found: `_with_fields` adds them.
    """
    problem = operator.problem
    residual, z = operator.preconditioned(right)
    square = operator.inner(residual, z)
    first = square.clamp(min=0.0)
    v = torch.zeros_like(right)
    if start is not None:
        v = start
        residual, z = operator.preconditioned(right - operator.product(v))
        square = operator.inner(residual, z)
    limit = first * problem.tolerance**2
    p, iterations = z, 0
    while True:
        active = square > limit  # not if it is NaN
        if not bool(active.any()):
            break
        if iterations == problem.max_iterations:
            raise _no_convergence(problem, (square / first).sqrt(), iterations)
        along = operator.product(p)
        curvature = operator.inner(p, along)
        iterations += 1
        if bool((active & (curvature <= 0.0)).any()):
            raise _no_minimum(active & (curvature <= 0.0))
        step = problem.spread(torch.where(active, square / curvature, 0.0).to(v.dtype)).unsqueeze(1)
        v = v + step * p
        residual, z = operator.preconditioned(residual - step * along)
        before, square = square, operator.inner(residual, z)
        factor = torch.where(active, square / before, 0.0)
        p = z + problem.spread(factor.to(v.dtype)).unsqueeze(1) * p
    residuals = torch.where(first > 0.0, (square.clamp(min=0.0) / first).sqrt(), 0.0 * square)
    # what is not a number anywhere in a system is so everywhere
    v = v + problem.spread(torch.where(square == square, 0.0, torch.nan).to(v.dtype)).unsqueeze(1)
    return _Solution(v, residuals, iterations)


def _with_fields(problem: _Problem, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """``v`` with the fields that these slopes are."""
    return torch.cat([v[:, :-3], slopes[:, -3:]], 1) if problem.has_dipoles else v


def _listed(values: torch.Tensor) -> str:
    some = ", ".join(f"{value:.1e}" for value in values[:8].tolist())
    return some + (", ..." if len(values) > 8 else "")


def _no_convergence(problem: _Problem, residuals: torch.Tensor, iterations: int) -> RuntimeError:
    worse = torch.nonzero(residuals > problem.tolerance).squeeze(1)
    return RuntimeError(
        f"induced moments have not converged after {iterations} iterations (`max_iterations`): systems "
        f"{worse[:8].tolist()} have relative residuals {_listed(residuals[worse])}, above the tolerance "
        f"{problem.tolerance:.1e}"
    )


def _no_minimum(where: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"the energy of systems {torch.nonzero(where).squeeze(1)[:8].tolist()} has no minimum: it falls without end "
        "along some induced sources. Atoms are too close for their polarizabilities, or hardnesses too small; Gaussian "
        "widths damp the interaction of close atoms"
    )


# -- derivatives -----------------------------------------------------------------------------------


def _gradients(wanted: Sequence[bool], tensors: Tensors, value: Callable[[Tensors], torch.Tensor]) -> list[Any]:
    """Gradients of ``value(tensors)`` by those that are wanted; differentiable where a graph is asked for."""
    as_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # other nodes of the graph than the tensors themselves, of which one may depend on another
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


def _transposed_solution(operator: _Operator, cotangent: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """``K⁻ᵀ c``, by K⁻¹: it is ``c' + D K⁻¹ ((c_q, 0) - T c')``.

    Here ``c' = (0, c_y)``, T are the second derivatives of E, and D has ones for charges, and polarizabilities.
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
    def forward(ctx: Any, problem: _Problem, start: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
        operator = _Operator(problem, tensors)
        _check_dependence(operator)
        if start is not None and problem.has_dipoles:
            slopes, _ = problem.slopes(start, operator.tensors)
            start = _with_fields(problem, start, operator.right + operator.slopes_at_zero - slopes)
        found = _solve(operator, operator.right, start)
        slopes, energies = problem.slopes(problem.polarized(found.v, tensors), operator.tensors)
        left = problem.gradient(found.v, tensors) + slopes
        _check_quadratic(operator, left)
        energies = energies.detach() + problem.energies_of_atoms(found.v, tensors)
        v = _with_fields(problem, found.v, found.v - left)
        ctx.operator = operator
        ctx.set_materialize_grads(False)  # zeros would be solved for
        iterations = torch.tensor(found.iterations)
        ctx.save_for_backward(v, *tensors)
        ctx.mark_non_differentiable(energies, found.residuals, iterations)
        return v, energies, found.residuals, iterations

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
    def forward(ctx: Any, operator: _Operator, right: torch.Tensor, *tensors: torch.Tensor) -> Any:
        right, problem = right.detach(), operator.problem
        v = _solve(operator, right).v
        if problem.has_dipoles:
            v = _with_fields(problem, v, right - operator.coupling(problem.polarized(v, operator.tensors)))
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
            # the product of both with the second derivatives: what is of first order cancels
            slopes = problem.interaction(x + shift, tensors) - problem.interaction(x - shift, tensors)
            slopes = slopes - problem.interaction(shift, tensors) + problem.interaction(-shift, tensors)
            found = _per_system(problem, slopes, 2.0 * factor * size)
            if problem.has_charges:
                found = found + (u[:, 0] * problem.own(tensors)["hardness"] * v[:, 0]).sum()
            return -found

        return (None, right, *_gradients(ctx.needs_input_grad[2:], tensors, value))


def _per_system(problem: _Problem, energies: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """The sum of energies of systems, divided by numbers (n_atoms, 1) that are the same in a system."""
    counts = problem.sums(torch.ones_like(divisor[:, 0]))
    inverse = problem.sums(1.0 / divisor[:, 0]) / torch.where(counts > 0.0, counts, 1.0)
    return (energies * inverse).sum()


class _MinimalEnergy(torch.autograd.Function):
    """Energies at the minimum: their gradient is that at fixed variables, in which variables depend on everything."""

    @staticmethod
    def forward(ctx: Any, problem: _Problem, energies: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.problem = problem
        ctx.save_for_backward(v, *tensors)
        return energies.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        v, *tensors = ctx.saved_tensors
        v, gradient = _constant_unless_graph(v, gradient)

        def value(tensors: Tensors) -> torch.Tensor:
            return (ctx.problem.energies(v, tensors) * gradient).sum()

        return (None, None, None, *_gradients(ctx.needs_input_grad[3:], tensors, value))


# -- checks ----------------------------------------------------------------------------------------


def _check(
    energy: Any, parameters: Any, given: dict[str, Any], batch_idx: Any, n_systems: Any, tolerance: Any, most: Any
) -> tuple[_Problem, list[torch.Tensor]]:
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
    n_atoms = like.shape[0] if like.ndim else 0
    n_systems = checks.check_count("n_systems", n_systems)
    batch_idx, _ = checks.check_batch(batch_idx, like.new_empty(n_atoms, 0), n_systems)
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
        if name == "total_charge" and not isinstance(value, torch.Tensor):
            value = torch.full((n_systems,), checks.as_float(name, value), dtype=like.dtype, device=like.device)
        checks.check_tensor(name, value)
        if value.dtype != like.dtype or value.device != like.device:
            raise TypeError(
                f"`{name}` must be {like.dtype} on {like.device}, as `{first}`, got {value.dtype} on {value.device}"
            )
        if tuple(value.shape) not in shapes[name]:
            allowed = " or ".join(str(shape) for shape in shapes[name])
            raise ValueError(f"`{name}` must have shape {allowed}, got {tuple(value.shape)}")
        found[name] = value
    if "total_charge" in found:
        found["total_charge"] = found["total_charge"].expand(n_systems)
    if polarizabilities is not None and polarizabilities.ndim == 3:
        found["polarizabilities"] = 0.5 * (polarizabilities + polarizabilities.mT)
    if "external_field" in found:
        found["external_field"] = _field_of_atoms(found["external_field"], batch_idx, n_systems, n_atoms)
    if isinstance(parameters, torch.Tensor):
        raise TypeError("`parameters` must be a sequence of tensors, got one tensor")
    parameters = list(parameters)
    for n, value in enumerate(parameters):
        checks.check_tensor(f"parameters[{n}]", value)
    if tolerance is None:
        tolerance = 1e-8 if like.dtype == torch.float64 else 1e-5
    tolerance = checks.check_positive("tolerance", tolerance)
    most = checks.check_count("max_iterations", most)
    problem = _Problem(energy, tuple(found), n_atoms, batch_idx, n_systems, tolerance, most)
    return problem, [*found.values(), *parameters]


def _field_of_atoms(field: torch.Tensor, batch_idx: Any, n_systems: int, n_atoms: int) -> torch.Tensor:
    if field.ndim == 1:
        return field.expand(n_atoms, 3)
    return spread_systems(field, batch_idx, n_atoms) if field.shape[0] == n_systems else field


def _check_dependence(operator: _Operator) -> None:
    """Raise if the energy has gradients by tensors that are not among the parameters."""
    with torch.enable_grad():
        found = operator.problem.interaction(torch.zeros_like(operator.right), operator.tensors)
    if found.requires_grad:
        raise ValueError(
            "`energy` depends on a tensor that requires a gradient and is not among `parameters`: give it as a "
            "parameter, or detach it"
        )


def _check_quadratic(operator: _Operator, residual: torch.Tensor) -> None:
    """Raise if the residual at the solution is not zero: the energy is not quadratic."""
    left = operator.inner(*operator.preconditioned(residual)).clamp(min=0.0).sqrt()
    tolerance, scale = operator.problem.tolerance, operator.scale
    rounding = 1e4 * torch.finfo(residual.dtype).eps * (scale + operator.energies_at_zero.sqrt())
    if bool((left > 30.0 * tolerance * scale + rounding).any()):
        left = left / torch.where(scale > 0.0, scale, 1.0)
        raise RuntimeError(
            f"`energy` is not quadratic in the induced sources, or its gradient is not exact: where conjugate "
            f"gradients have converged, {left[~left.isnan()].max().item():.1e} of the gradient is left (tolerance "
            f"{tolerance:.1e})"
        )
