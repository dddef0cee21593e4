"""The energy of induced charges and dipoles, and conjugate gradients for its minimum (`induced_moments`).

The gradient of the energy with respect to the variables v is ``ρ = K v - f``; its formula is in
`nvalchemiops.torch.interactions.electrostatics.response`. Products with K are differences of gradients of the
interaction E, and K is not built. It is symmetric in the inner product with polarizabilities.

Conjugate gradients with a fixed sum: N. I. M. Gould, M. E. Hribar and J. Nocedal, SIAM J. Sci. Comput. 23, 1376 (2001),
doi:10.1137/S1064827598345667, with a diagonal matrix for the preconditioner.

**Several ranks.** Inner products, counts and norms are sums over the atoms of all ranks. They are equal on
all ranks, so that all ranks take the same steps and stop together. Each rank holds the variables and tensors of its own
atoms. Energies of systems are replicated (`Domain.sum`): the loss is computed from them once, not summed over
ranks, and gradients with respect to the variables are complete.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.pair import shares
from nvalchemiops.torch.operators.segments import spread_systems, system_sums

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain

Tensors = Sequence[torch.Tensor]

# -- the energy ------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """The parts of a problem that stay fixed while tensors vary.

    Variables v (n_atoms, 1, 3 or 4) are charges, fields, or both; sources are charges, dipoles, or both. In variables
    and sources, charges are deviations from the mean charge of the system, and add up to zero.
    """

    energy: Callable[..., torch.Tensor]
    names: tuple[str, ...]  # of the first tensors; the others are parameters of the energy
    n_atoms: int
    batch_idx: torch.Tensor | None
    n_systems: int
    tolerance: float
    max_iterations: int
    domain: "Domain | None" = None
    returns_atoms: bool | None = None  # whether E is given per atom; set where ranks had to agree

    @property
    def has_charges(self) -> bool:
        """Whether charges are unknown."""
        return "hardness" in self.names

    @property
    def has_dipoles(self) -> bool:
        """Whether dipoles are unknown."""
        return "polarizabilities" in self.names

    def own(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors that enter the energies of single atoms, by name."""
        return dict(zip(self.names, tensors))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums (n_systems, ...) of constants over the atoms of each system."""
        found = system_sums(values, self.batch_idx, self.n_systems)
        return shares.summed_for_shares(self.domain, found)

    def results(self, values: torch.Tensor) -> torch.Tensor:
        """Sums (n_systems,) of energies over the atoms of each system; replicated on several ranks."""
        found = system_sums(values, self.batch_idx, self.n_systems)
        return shares.summed(self.domain, found)

    def counts(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers of atoms (n_systems,), in the dtype of ``like``."""
        if self.domain is not None:
            return self.domain.atoms_in_systems.to(like.dtype)
        return self.sums(torch.ones(self.n_atoms, dtype=like.dtype, device=like.device))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values of systems for each of their atoms."""
        return spread_systems(values, self.batch_idx, self.n_atoms)

    def mean_charges(self, tensors: Tensors) -> torch.Tensor:
        """The share (n_atoms,) of each atom in the total charge."""
        total = self.own(tensors)["total_charge"]
        # a division by zero for a system without atoms would make gradients NaN
        return self.spread(total / self.counts(total).clamp(min=1.0))

    def split(self, columns: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The parts (n_atoms,) of charges and (n_atoms, 3) of dipoles or fields."""
        return columns[:, 0] if self.has_charges else None, columns[:, -3:] if self.has_dipoles else None

    def polarized(self, v: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """The variables, with fields replaced by dipoles."""
        if not self.has_dipoles:
            return v
        alpha, fields = self.own(tensors)["polarizabilities"], v[:, -3:]
        # no product of matrices, which autocast would round
        dipoles = alpha.unsqueeze(1) * fields if alpha.ndim == 1 else (alpha * fields.unsqueeze(1)).sum(-1)
        return torch.cat([v[:, :-3], dipoles], 1)

    def sources(self, deviations: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Charges and dipoles."""
        charges, dipoles = self.split(deviations)
        return None if charges is None else charges + self.mean_charges(tensors), dipoles

    def deviations(self, initial: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
        """These charges and dipoles as columns, in the dtype of ``like``."""
        columns = []
        with shares.together(self.domain):
            for name, found, unknown in zip(("charges", "dipoles"), initial, (self.has_charges, self.has_dipoles)):
                if not unknown:
                    continue
                if found is None or found.shape[0] != self.n_atoms:
                    raise ValueError(f"`initial` must have {name} of {self.n_atoms} atoms")
                found = found.detach().to(like)
                columns.append(found.unsqueeze(1) if name == "charges" else found)
        if self.has_charges:
            charges = columns[0][:, 0]
            columns[0] = (charges - self.spread(self.sums(charges) / self.counts(charges))).unsqueeze(1)
        return torch.cat(columns, 1)

    def interaction(self, deviations: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """E of each system."""
        found = self.returned(deviations, tensors)
        checks.check_tensor("energy(...)", found)
        of_atoms, of_systems = self.fits(found)
        if of_atoms and of_systems and self.returns_atoms is None:
            self.check_order()
        if of_atoms and self.returns_atoms is not False:
            return self.results(found)
        if of_systems:
            return found.reshape(self.n_systems)
        raise self.wrong_shape(found)

    def fits(self, found: torch.Tensor) -> tuple[bool, bool]:
        """Whether the energies have the shape of energies per atom, and whether they have the shape per system."""
        of_systems = tuple(found.shape) == (self.n_systems,) or (found.ndim == 0 and self.n_systems == 1)
        return tuple(found.shape) == (self.n_atoms,), of_systems

    def check_order(self) -> None:
        """Raise if there are as many systems as atoms, and energies per atom and per system differ in order."""
        check_order(f"`energy` returns {self.n_atoms} numbers", self.batch_idx, self.n_atoms)

    def wrong_shape(self, found: torch.Tensor) -> ValueError:
        """The error about energies of neither shape."""
        return ValueError(
            f"`energy` must return a tensor of shape ({self.n_atoms},), for each atom, or ({self.n_systems},), for "
            f"each system, got {tuple(found.shape)}"
        )

    def returned(self, deviations: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """The energies that the callable returns."""
        unknown = [values for values in self.sources(deviations, tensors) if values is not None]
        parameters = tensors[len(self.names) :]
        try:
            return self.energy(*unknown, *parameters)
        except TypeError as error:
            dtypes = {t.dtype for t in parameters if t.is_floating_point()} - {deviations.dtype}
            if dtypes:
                given = "hardness" if "hardness" in self.names else "polarizabilities"
                error.add_note(f"The sources that `energy` is given have the dtype of `{given}`, {deviations.dtype}.")
            raise

    def slopes(self, deviations: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """∂E/∂q and ∂E/∂μ as columns, with a graph if gradients are enabled; and E of each system."""
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

    def energies_of_atoms(self, v: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        """The energies of systems at these variables, without the interaction E."""
        own, parts = self.own(tensors), []
        charges, dipoles = self.sources(self.polarized(v, tensors), tensors)
        if charges is not None:
            parts.append(0.5 * own["hardness"] * charges**2)
            if "electronegativity" in own:
                parts.append(own["electronegativity"] * charges)
        if dipoles is not None:
            field = 0.5 * v[:, -3:]
            field = field - own["external_field"] if "external_field" in own else field
            parts.append((dipoles * field).sum(1))
        return self.results(torch.stack(parts).sum(0))


# -- the solver ------------------------------------------------------------------------------------


class Operator:
    """K, its inner product, and the preconditioner, at fixed tensors."""

    def __init__(self, problem: Problem, tensors: Tensors) -> None:
        self.problem = problem
        self.tensors = [t.detach() for t in tensors]
        own = problem.own(self.tensors)
        like = self.tensors[0]
        zero = like.new_zeros(problem.n_atoms, problem.has_charges + 3 * problem.has_dipoles)
        if problem.has_charges:
            # average of each hardness and the mean: the energy may have self energies, which add to hardnesses
            hardness = own["hardness"].clamp(min=0.0)
            mean = problem.spread(problem.sums(hardness) / problem.counts(hardness))
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
            # magnitude of sources that are induced without an interaction; or, if by symmetry fields are rounding
            # errors, of sources whose energies are comparable to the energies without induced sources
            first = self.norm(problem.polarized(z, self.tensors))
            # mean square of sources per unit of energy: averages (n_systems,) of softness and polarizability
            parts = [self.softness] if problem.has_charges else []
            if problem.has_dipoles:
                alpha = own["polarizabilities"]
                parts.append(alpha if alpha.ndim == 1 else alpha.diagonal(dim1=1, dim2=2).mean(1))
            counts = problem.counts(like.to(torch.float64)).clamp(min=1.0)
            compliance = problem.sums(torch.stack(parts).sum(0).to(torch.float64)).clamp(min=0.0) / counts
            self.length = torch.maximum(first, (self.energies_at_zero * compliance).sqrt())

    def norm(self, columns: torch.Tensor) -> torch.Tensor:
        """The Euclidean norm (n_systems,) of all numbers of a system, never zero."""
        found = self.problem.sums((columns.to(torch.float64) ** 2).sum(1)).sqrt()
        return torch.where(found > 0.0, found, 1.0)

    def inner(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Inner products (n_systems,) in float64, of fields with polarizabilities."""
        return self.problem.sums((a.to(torch.float64) * self.problem.polarized(b, self.tensors)).sum(1))

    def at_rest(self) -> torch.Tensor:
        """Whether nothing induces sources in the system of each atom, as a column (n_atoms, 1)."""
        return self.problem.spread(self.scale == 0.0).unsqueeze(1)

    def scaled(self, sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """These sources scaled to a physical magnitude in each system, and the factors (n_atoms, 1).

        Interactions of sources are differences of energies: much smaller or larger sources would lose digits.
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
        """The residual without its mean potential, and the variables that follow from it without an interaction.

        The mean potential does no work, but near convergence its rounding errors exceed the rest of the residual.
        """
        if not self.problem.has_charges:
            return residual, residual
        potential = self.problem.sums(self.softness * residual[:, 0]) / self.softness_of_system
        charges = residual[:, 0] - self.problem.spread(potential)
        left = torch.cat([charges.unsqueeze(1), residual[:, 1:]], 1)
        return left, torch.cat([(self.softness * charges).unsqueeze(1), residual[:, 1:]], 1)


class NotConvergedError(RuntimeError):
    """Conjugate gradients have reached the largest number of iterations."""


FLAT = 1e-12
"""Cosine between a direction and its image below which an energy is taken for flat along the direction."""


def solve(
    operator: Operator, right: torch.Tensor, start: torch.Tensor | None = None, may_be_flat: bool = False
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Solve ``K v = right`` by preconditioned conjugate gradients, all systems at once.

    With ``may_be_flat`` systems along whose sources the energy neither rises nor falls are left unsolved; otherwise
    that is an error as for an energy that falls.

    Returns v (n_atoms, n_columns), relative residuals (n_systems,) and the number of iterations.

    Fields at atoms without polarizability are not solved for: `replace_fields` adds them.
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
            residuals = (square / first).sqrt()
            worse = torch.nonzero(residuals > problem.tolerance).squeeze(1)
            some = ", ".join(f"{value:.1e}" for value in residuals[worse[:8]].tolist())
            raise NotConvergedError(
                f"induced moments have not converged after {iterations} iterations (`max_iterations`): systems "
                f"{worse[:8].tolist()} have relative residuals {some}{', ...' * (len(worse) > 8)}, above the tolerance "
                f"{problem.tolerance:.1e}"
            )
        along = operator.product(p)
        curvature = operator.inner(p, along)
        iterations += 1
        if may_be_flat:
            size = (operator.inner(p, p).abs() * operator.inner(along, along).abs()).sqrt()
            is_flat = curvature.abs() <= FLAT * size
            active, square = active & ~is_flat, torch.where(is_flat, 0.0, square)
        falls = active & (curvature <= 0.0)
        if bool(falls.any()):
            raise RuntimeError(
                f"the energy of systems {torch.nonzero(falls).squeeze(1)[:8].tolist()} has no minimum: it falls "
                "without end along some induced sources. Atoms are too close for their polarizabilities, or hardnesses "
                "too small; Gaussian widths damp the interaction of close atoms"
            )
        step = problem.spread(torch.where(active, square / curvature, 0.0).to(v.dtype)).unsqueeze(1)
        v = v + step * p
        residual, z = operator.preconditioned(residual - step * along)
        before, square = square, operator.inner(residual, z)
        factor = torch.where(active, square / before, 0.0)
        p = z + problem.spread(factor.to(v.dtype)).unsqueeze(1) * p
    residuals = torch.where(first > 0.0, (square.clamp(min=0.0) / first).sqrt(), 0.0 * square)
    # a NaN in one atom of a system makes all results of the system NaN
    v = v + problem.spread(torch.where(square == square, 0.0, torch.nan).to(v.dtype)).unsqueeze(1)
    return v, residuals, iterations


def replace_fields(problem: Problem, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """``v`` with its fields replaced by these slopes."""
    return torch.cat([v[:, :-3], slopes[:, -3:]], 1) if problem.has_dipoles else v


# -- checks ----------------------------------------------------------------------------------------


def check_order(what: str, batch_idx: torch.Tensor | None, n: int) -> None:
    """Raise if values of as many atoms as systems (n,) would differ in order, since they could belong to either."""
    if batch_idx is not None and not bool((batch_idx == torch.arange(n, device=batch_idx.device)).all()):
        raise ValueError(
            f"{what}, which may belong to the {n} atoms or to the {n} systems: number the systems so that `batch_idx` "
            "is 0, 1, 2, ... if each has one atom; otherwise add an empty system at the end (`n_systems` + 1)"
        )


def check_dependence(operator: Operator) -> None:
    """Raise if the energy has gradients with respect to tensors that are not among the parameters."""
    with torch.enable_grad():
        found = operator.problem.interaction(torch.zeros_like(operator.right), operator.tensors)
    if found.requires_grad:
        raise ValueError(
            "`energy` depends on a tensor that requires a gradient and is not among `parameters`: give it as a "
            "parameter, or detach it"
        )


def returns_atoms(problem: Problem, tensors: Tensors) -> bool:
    """Whether the callable returns energies per atom, not per system; equal on all ranks. A collective call."""
    domain = problem.domain
    assert domain is not None
    with torch.no_grad():
        zero = tensors[0].new_zeros(problem.n_atoms, problem.has_charges + 3 * problem.has_dipoles)
        found = problem.returned(zero, [t.detach() for t in tensors])
    with shares.together(domain):
        checks.check_tensor("energy(...)", found)
        fits = problem.fits(found)
        if not any(fits):
            raise problem.wrong_shape(found)
    not_atoms, not_systems = shares.largest(
        domain, torch.tensor(fits, device=domain.device).logical_not().int()
    ).tolist()
    if not_atoms and not_systems:
        raise ValueError("`energy` returns energies of atoms on some ranks, and of systems on others")
    if not_systems:
        return True
    if not not_atoms:
        if domain.n_ranks == 1:
            problem.check_order()
        # each rank has as many atoms as systems: if the sources differ between ranks, only energies per atom differ
        numbers = _random_numbers(zero.shape, domain)
        with torch.no_grad():
            found = problem.returned(numbers.to(zero), [t.detach() for t in tensors])
    # energies per system are equal on all ranks
    values = found.detach().reshape(problem.n_systems).to(torch.float64)
    ends = shares.largest(domain, torch.stack([values, -values]))
    differ = bool((ends.sum(0) > 1e-9 * ends.abs().amax(0)).any())
    if differ and not_atoms:
        raise ValueError(
            "`energy` returns energies of systems that are not the same on all ranks: with a `domain` they must be "
            'complete, as by `energy_reduction="system"` or `domain.sum`'
        )
    return differ


def check_minimum(operator: Operator) -> None:
    """Raise if sources are zero in a system where nothing induces any, but its energy falls along others.

    Conjugate gradients take no step there, so they get random fields and electronegativities to start from.
    """
    problem = operator.problem
    if not bool((operator.scale == 0.0).any()):
        return
    numbers = _random_numbers(operator.right.shape, problem.domain).to(operator.right)
    with contextlib.suppress(NotConvergedError):
        solve(operator, torch.where(operator.at_rest(), numbers, 0.0), may_be_flat=True)


def _random_numbers(shape: Sequence[int], domain: "Domain | None") -> torch.Tensor:
    """Normal numbers in float64, on the CPU. Ranks whose atoms have the same surroundings have other numbers."""
    generator = torch.Generator("cpu").manual_seed(0 if domain is None else domain.rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def check_quadratic(operator: Operator, residual: torch.Tensor) -> None:
    """Raise if the residual at the solution is not zero: the energy is not quadratic."""
    left = operator.inner(*operator.preconditioned(residual)).clamp(min=0.0).sqrt()
    tolerance, scale = operator.problem.tolerance, operator.scale
    rounding = 1e4 * torch.finfo(residual.dtype).eps * (scale + operator.energies_at_zero.sqrt())
    if bool((left > 30.0 * tolerance * scale + rounding).any()):
        left = left / torch.where(scale > 0.0, scale, 1.0)
        raise RuntimeError(
            f"`energy` is not quadratic in the induced sources, or its gradient is not exact: where conjugate "
            f"gradients have converged, {left[~left.isnan()].max().item():.1e} of the gradient is left (tolerance "
            f"{tolerance:.1e}). Sums without given parameters choose them for the sources of each call: fix them, by "
            "`alpha` and the rest or a module from `estimate`"
        )
