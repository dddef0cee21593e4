"""The long-range part of an Ewald sum on a mesh: particle-mesh Ewald.

Charges are spread to a mesh by B-splines. The potential on the mesh follows from a product in Fourier space, and is
gathered at the atoms by the same splines. Both steps replace the exponential ``exp(i k.r)`` by splines that agree with
it at mesh points, due to a factor ``1 / b`` for each axis: ``b(m) = Σ_j M_p(j) cos(2π m j / n)``, with the spline
centred on zero. Forces are derivatives of the computed energy.

Sources: T. Darden, D. York and L. Pedersen, J. Chem. Phys. 98, 10089 (1993), doi:10.1063/1.464397; U. Essmann et al.,
J. Chem. Phys. 103, 8577 (1995), doi:10.1063/1.470117. A spline of odd order has no zero of b when it is centred.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nvalchemiops import notices
from nvalchemiops.arguments import ValuesError
from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.layout import layout
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd.functorch import is_differentiated
from nvalchemiops.torch.distributed.mesh import MeshDivision
from nvalchemiops.torch.interactions.electrostatics.accuracy.choice import EwaldSplitting, mesh_for
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import Sizes, sizes_of_system
from nvalchemiops.torch.interactions.electrostatics.accuracy.strengths import Strengths
from nvalchemiops.torch.interactions.electrostatics.k_vectors import ELSEWHERE
from nvalchemiops.torch.interactions.electrostatics.parameters import mesh_spacing_to_dimensions
from nvalchemiops.torch.interactions.electrostatics.potentials import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.results import Contribution, Derivatives
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.interactions.electrostatics.terms.moments import HIGHEST, frames_of
from nvalchemiops.torch.interactions.pair.shares import must_be_near
from nvalchemiops.torch.operators.influence import PowerLaw, mesh_influence, multiply_by_influence
from nvalchemiops.torch.operators.lattice import (
    Lattice,
    check_spline_order,
    lattice_of,
    mesh_and_order,
    mesh_frequencies,
)
from nvalchemiops.torch.operators.mesh import AtomsOnMesh, mesh_columns, mesh_gather, mesh_spread, spline_transform
from nvalchemiops.torch.operators.mesh_transform import mesh_spectrum, mesh_values
from nvalchemiops.torch.operators.segments import totals
from nvalchemiops.torch.runtime.cache import KeptTensors, cached_by_value, cached_on_device
from nvalchemiops.torch.runtime.context import ValuesNeededError, is_eager, may_read, on_host
from nvalchemiops.torch.runtime.graphs import place_of
from nvalchemiops.torch.runtime.recorder import read_number

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain

# -- which mesh -----------------------------------------------------------------------------------


class Influence(NamedTuple):
    """Factors of the charge density in Fourier space."""

    # (n_systems, 1, n_x, n_y, n_z // 2 + 1, 2 or 1), ``g(k²) / V`` with deconvolution, in float64 or in the dtype of
    # the mesh; on a CPU twice, for real and imaginary parts
    value: torch.Tensor
    # likewise for g', in float64, times the multiplicity of each plane in a sum over the whole mesh
    derivative: torch.Tensor | None


class PreparedMesh(NamedTuple):
    """Input of a mesh sum that depends on the cells alone, prepared for fixed cells by `prepare_mesh`.

    Attributes
    ----------
    cell : (n_systems, 3, 3) tensor
    alpha : (n_systems,) tensor
    mesh_dimensions : (int, int, int)
    spline_order : int
    potential : LongRangePotential
    influence : Influence
        Factors in Fourier space, float64, for each point of half the mesh; as of `Influence`.
    """

    cell: torch.Tensor
    alpha: torch.Tensor
    mesh_dimensions: tuple[int, int, int]
    spline_order: int
    potential: LongRangePotential
    influence: Influence

    def alpha_for(self, alpha: Any, mesh_dimensions: Any, mesh_spacing: Any, potential: Any) -> torch.Tensor:
        """Alpha; raise if the arguments of a call contradict the prepared data."""
        if any(value is not None for value in (alpha, mesh_dimensions, mesh_spacing)):
            raise ValueError("`prepared` has its own alpha and mesh: leave `alpha` and `mesh_...` out")
        # by value, too: transforms of torch.func pass copies of tuples to functions
        if potential is not self.potential and potential != self.potential:
            raise ValueError("`prepared` is for another `potential`")
        return self.alpha

    def check_cell(self, cell: torch.Tensor) -> torch.Tensor | None:
        """Raise if the mesh was prepared for other cells. If values cannot be read, return whether each cell agrees."""
        if is_differentiated(cell):
            raise ValueError("`cell` requires a gradient, but `prepared` data do not depend on it")
        if cell.shape != self.cell.shape or cell.device != self.cell.device:
            raise ValueError(
                f"`prepared` is for a cell {tuple(self.cell.shape)} on {self.cell.device}, but this one is "
                f"{tuple(cell.shape)} on {cell.device}. {ELSEWHERE}"
            )
        agrees = (cell.detach().to(torch.float64) == self.cell).flatten(1).all(1)
        if not may_read(cell):
            return agrees
        if not read_number(agrees.all()):
            raise ValuesError(f"`prepared` is for another `cell`: prepare it again for this cell. {ELSEWHERE}")
        return None

    def check_number(self, n_systems: int) -> None:
        """Raise unless these are the data of as many systems."""
        if self.cell.shape[0] != n_systems:
            raise ValueError(f"`prepared` is for {self.cell.shape[0]} cells, but the batch has {n_systems} systems")

    def of_systems(self, systems: torch.Tensor, n_systems: int) -> "PreparedMesh":
        """The data of some systems of a batch."""
        cell, alpha, value = (t.index_select(0, systems) for t in (self.cell, self.alpha, self.influence.value))
        slope = self.influence.derivative
        slope = None if slope is None else slope.index_select(0, systems)
        return self._replace(cell=cell, alpha=alpha, influence=Influence(value, slope))


class Precomputed(NamedTuple):
    """Arguments of `particle_mesh_ewald` that it recomputes: only their shapes are checked."""

    k_vectors: Any = None
    k_squared: Any = None
    cell_inv_t: Any = None
    volume: Any = None
    moduli_x: Any = None
    moduli_y: Any = None
    moduli_z: Any = None

    @property
    def are_none(self) -> bool:
        """Whether none is given."""
        return all(value is None for value in self)

    def of_systems(self, systems: torch.Tensor, n_systems: int) -> "Precomputed":
        """The values of some systems of a batch."""
        found = {}
        for name, n_axes in {"k_vectors": 5, "k_squared": 4, "cell_inv_t": 3, "volume": 1}.items():
            if (value := getattr(self, name)) is not None:
                checks.check_tensor(name, value)
                if value.ndim != n_axes or value.shape[0] != n_systems:
                    shape = tuple(value.shape)
                    raise ValueError(f"`{name}` must have {n_axes} axes, the first of length {n_systems}, got {shape}")
                found[name] = value.index_select(0, systems)
        return self._replace(**found)

    def check(self, n_systems: int, mesh: tuple[int, int, int]) -> None:
        """Raise unless the shapes fit."""
        half = (mesh[0], mesh[1], mesh[2] // 2 + 1)
        of_systems = {"k_vectors": (*half, 3), "k_squared": half, "cell_inv_t": (3, 3), "volume": ()}
        allowed: dict[str, list[tuple[Any, ...]]] = {name: [(n_systems, *shape)] for name, shape in of_systems.items()}
        if n_systems == 1:
            allowed = {name: [*shapes, of_systems[name]] for name, shapes in allowed.items()}
        allowed |= {"moduli_x": [(mesh[0],)], "moduli_y": [(mesh[1],)], "moduli_z": [(half[2],), (mesh[2],)]}
        for name, value in zip(self._fields, self):
            if value is None:
                continue
            checks.check_tensor(name, value)
            if tuple(value.shape) not in allowed[name]:
                shapes = " or ".join(map(str, allowed[name]))
                raise ValueError(f"`{name}` must have shape {shapes}, got {tuple(value.shape)}")


MOST_MESHES = 64
"""Number of chosen meshes that are kept, with their `MeshSum.basis`."""

Planes = tuple[tuple[int, int], tuple[int, int]]
"""First and end of the planes of the half mesh along its second and its third axis."""

_meshes: KeptTensors[tuple[tuple[int, int, int], torch.Tensor | None]] = KeptTensors(MOST_MESHES)


NOT_CHOSEN = 0
"""In place of an order that is still to be chosen."""


class MeshSum(NamedTuple):
    """The long-range part on a mesh, given or still to be chosen; see `KVectorSum`."""

    spline_order: int  # `NOT_CHOSEN` until `suited`, if neither it nor a mesh is given
    mesh: tuple[int, int, int] | None
    argument: str = "`mesh_dimensions` or `mesh_spacing`"
    precomputed: Precomputed = Precomputed()
    influence: Influence | None = None  # the influence function, if it is prepared
    # (n_systems,), if values could not be read: False for cells that differ from the prepared ones
    valid: torch.Tensor | None = None
    # (n_systems, 3, 3) whole numbers in float64: the axes of the mesh are the vectors `basis @ cell`; None if they are
    # those of the cell
    basis: torch.Tensor | None = None

    @classmethod
    def given(
        cls,
        mesh_dimensions: Any,
        mesh_spacing: Any,
        spline_order: Any,
        precomputed: Precomputed,
        prepared: PreparedMesh | None,
        system: ChargedSystem,
    ) -> "MeshSum":
        """The long-range part that these arguments of `particle_mesh_ewald` describe."""
        # each rank has only a window of the mesh around its brick
        must_be_near(system.domain, system.positions, system.cell)
        if prepared is not None:
            valid = prepared.check_cell(system.cell)
            mesh, order = prepared.mesh_dimensions, prepared.spline_order
            # on a mesh of few points an order is the largest one that fits, also for `prepare_mesh`
            if spline_order is not None and min(check_spline_order(spline_order), *mesh) != order:
                raise ValueError(f"`spline_order` = {spline_order}, but `prepared` is for splines of order {order}")
            return cls(order, mesh, "`prepared`", precomputed, prepared.influence, valid)
        order = core.DEFAULT_ORDER if spline_order is None else check_spline_order(spline_order)
        if mesh_dimensions is not None:
            if mesh_spacing is not None:
                raise ValueError("`mesh_dimensions` and `mesh_spacing` are both given; give one of them")
            mesh, order = mesh_and_order(mesh_dimensions, order)
            return cls(order, mesh, "`mesh_dimensions`", precomputed)
        if not may_read():
            raise ValuesNeededError(
                "`mesh_dimensions` is needed where the size of the cell cannot be read, as inside torch.compile"
            )
        if mesh_spacing is None:
            return cls(NOT_CHOSEN if spline_order is None else order, None, precomputed=precomputed)
        cell, basis = system.cell.detach(), None
        if precomputed.are_none and system.domain is None:  # prepared data have a mesh along the vectors of the cell
            ones = np.ones(system.n_systems)
            sizes, found = Sizes(on_host(cell).astype(np.float64), ones, ones).along_spacing(mesh_spacing)
            if found is not None:
                cell, basis = torch.as_tensor(sizes.cell, device="cpu"), _basis_on(cell.device, found)
        mesh = mesh_spacing_to_dimensions(cell, mesh_spacing, spline_order=order)
        return cls(order, mesh, "`mesh_spacing`", precomputed, basis=basis)

    @staticmethod
    def for_all_cells(cell: torch.Tensor, mesh_dimensions: Any, *given: Any) -> tuple[()] | None:
        """As for `KVectorSum`."""
        return None if mesh_dimensions is None else ()

    @property
    def is_given(self) -> bool:
        """As for `KVectorSum`."""
        return self.mesh is not None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """As for `KVectorSum`. Each ``basis`` has its own plan: it seldom changes."""
        return ()

    @property
    def choice(self) -> None:
        """As for `KVectorSum`."""

    def suited(self, accuracy: float, costs: core.Costs, strengths: Strengths | None) -> "MeshSum":
        """As for `KVectorSum`. Forces between few moments may need a mesh for which the highest order takes least."""
        if self.spline_order != NOT_CHOSEN:
            return self
        if strengths is not None and strengths.are_few:
            return self._replace(spline_order=max(core.MESH_ERROR))
        return self._replace(spline_order=core.order_of_least_cost(accuracy, costs))

    def error_model(self, system: ChargedSystem) -> core.Reciprocal:
        """As for `KVectorSum`."""
        assert self.mesh is not None
        cell = system.along(self.basis).cell.detach().to(torch.float64)
        return core.mesh_model(cell, lattice_of(cell, None, 0).inverse, self.mesh, self.spline_order, torch)

    def optimal_alpha(
        self, n_atoms: Any, volume: Any, target: core.Target, costs: core.Costs, xp: Any, lengths: Any = None
    ) -> Any:
        """As for `KVectorSum`."""
        if lengths is not None:
            along = -np.sort(-lengths, axis=1)  # in the order of the mesh; see `chosen`
            cutoff = core.batch_mesh_cutoff(n_atoms, volume, along, target, self.spline_order, costs)
            return core.alpha_for_cutoff(cutoff, core.average_distance(n_atoms, volume), target)
        return core.mesh_alpha(n_atoms, volume, target, self.spline_order, costs, xp)

    def chosen(self, system: ChargedSystem, found: EwaldSplitting) -> "MeshSum":
        """As for `KVectorSum`. Reads values on the host."""
        values, target, strengths = found.values, found.target, found.strengths
        if values is None:
            values = on_host(found.alpha.detach())  # which says what cannot be read
        key: Any = None
        if found.sizes_known is not None:
            force, squares = np.asarray(target.force), None if strengths is None else strengths.squares.tobytes()
            options = self.spline_order, self.precomputed.are_none, squares
            # the basis is a tensor, which on another stream may not be there yet
            others = target.accuracy, force.tobytes(), options, place_of(found.alpha.device)
            key = (found.sizes_known, values.tobytes(), *others)
            if (kept := _meshes.find(key)) is not None:
                return self._replace(mesh=kept[0], basis=kept[1])
        sizes, basis, notes = sizes_of_system(system, found.sizes_known), None, notices.count()
        if system.domain is None and self.precomputed.are_none:  # a domain is divided along the vectors of its cell
            sizes, matrices = sizes.for_mesh()
            basis = _basis_on(found.alpha.device, matrices)
        mesh = mesh_for(sizes, values, target, self.spline_order, strengths=strengths)
        if key is not None and notices.count() == notes:  # choices with warnings must warn in each call
            _meshes.keep(key, (mesh, basis))
        return self._replace(mesh=mesh, basis=basis)

    def term(self, system: ChargedSystem, potential: LongRangePotential, alpha: torch.Tensor) -> "MeshTerm":
        """As for `KVectorSum`."""
        assert self.mesh is not None
        self.precomputed.check(system.n_systems, self.mesh)
        lowest = HIGHEST[int(system.moments.shape[-1])] + 3  # for continuous forces
        if self.spline_order < lowest and lowest > 3:
            name = "dipoles" if lowest == 4 else "quadrupoles"
            raise ValueError(f"`spline_order` must be at least {lowest} with `{name}`, got {self.spline_order}")
        if system.domain is not None:
            division_of(system.domain, self.mesh, self.spline_order)  # made here, on the stream of the caller
        return MeshTerm(potential, alpha, self.mesh, self.spline_order, self.influence, self.basis)


# -- the sum --------------------------------------------------------------------------------------


class MeshTerm(NamedTuple):
    """The long-range part with alpha (n_systems,), on a mesh of the dtype of the charges."""

    potential: LongRangePotential
    alpha: torch.Tensor
    mesh: tuple[int, int, int]
    spline_order: int
    prepared: Influence | None = None
    basis: torch.Tensor | None = None

    def evaluate(self, system: ChargedSystem, derivatives: Derivatives) -> Contribution:
        """As for `Term`."""
        potential, alpha, mesh, spline_order, prepared, basis = self
        system = system.along(basis)
        dtype, batch_idx, n_systems = system.moments.dtype, system.batch_idx, system.n_systems
        with_virial = derivatives.virial
        division = None if system.domain is None else division_of(system.domain, mesh, spline_order)
        planes = _all_planes(mesh) if division is None else division.planes
        *_, powers_of_z, dyads, n, identity = _axes_of(mesh, planes, spline_order, alpha.device)
        lattice = system.lattice()
        in_spacings = lattice._replace(frame=lattice.frame * n)
        coordinates = in_spacings.fractional(system.positions)
        window = mesh if division is None else division.window
        coordinates = coordinates if division is None else division.in_window(coordinates)
        order, column_begin = mesh_columns(coordinates, batch_idx, n_systems, window, spline_order)
        atoms = AtomsOnMesh(coordinates, batch_idx, n_systems, order, column_begin, window, spline_order)
        frames = frames_of(system, in_spacings, dtype, n)
        spread = mesh_spread(frames.moments.to(dtype), *atoms, frames.highest)
        density = mesh_spectrum(spread) if division is None else division.spectrum(spread)
        of_rows: torch.Tensor | None = None
        law = self._power_law(lattice, planes) if prepared is None else None
        if law is not None and not density.requires_grad:
            powers = multiply_by_influence(density, *law, with_virial)
            product, of_rows = density, powers if with_virial else None
        else:
            if prepared is None or division is not None:
                value, derivative = cached_by_value(
                    "influence",
                    (system.cell, alpha),
                    (potential, mesh, planes, spline_order, with_virial) if potential.is_constant else None,
                    lambda: self.influence(lattice, with_virial, planes, dtype),
                )
            else:
                value, derivative = prepared.value, prepared.derivative if with_virial else None
            if derivative is not None:
                power = density.to(torch.float64).square() * derivative
                of_rows = (power.flatten(4) @ powers_of_z).sum(1)
            factor = value.to(dtype)
            # in place if no graph is recorded: fresh memory costs more than the product
            recorded = density.requires_grad or factor.requires_grad or not is_eager()
            product = density * factor if recorded else density.mul_(factor)
        field = mesh_values(product, mesh[2]) if division is None else division.values(product)
        gathered = mesh_gather(field, *atoms, frames.highest + int(derivatives.forces))
        contribution = frames.contribution(gathered, system, derivatives)
        if of_rows is None:
            return contribution
        sums = of_rows.flatten(1) @ dyads
        energy = totals(contribution.energies.to(torch.float64).sum(1), batch_idx, n_systems)
        virial = lattice.dyadic(sums.unflatten(-1, (3, 3))) + energy[:, None, None] * identity
        of_frames = contribution.virial  # not None for a system with moments
        return contribution._replace(virial=virial if of_frames is None else virial + of_frames)

    def influence(
        self, lattice: Lattice, with_derivative: bool, planes: Planes | None = None, dtype: torch.dtype = torch.float64
    ) -> Influence:
        """The influence function of the half mesh, or of some of its planes.

        On a GPU a kernel tabulates that of a power law if no derivative is asked for, with values in ``dtype``: for
        torch's operations these are some thirty passes over arrays of float64. On a CPU values are kept from call to
        call.
        """
        potential, alpha = self.potential, self.alpha
        planes = _all_planes(self.mesh) if planes is None else planes
        if (law := self._power_law(lattice, planes)) is not None:
            value, derivative = mesh_influence(*law, with_derivative, dtype == torch.float32)
            return Influence(value, derivative if with_derivative else None)
        xx, xy, yy, yz, zz, zx, b_xy, b_z, doubled, *_ = _axes_of(self.mesh, planes, self.spline_order, alpha.device)
        m = lattice.metric.flatten(1)[..., None, None, None].unbind(1)
        # k² as a sum of functions of two indices
        k2 = torch.addcmul(m[0] * xx, m[1], xy)
        k2 = k2 + torch.addcmul(m[4] * yy, m[5], yz) + torch.addcmul(m[8] * zz, m[2], zx)
        origin = k2 == 0.0
        of_system = torch.stack([alpha, potential.at_zero(alpha), lattice.volume], 0)[..., None, None, None]
        k2 = torch.where(origin, 1.0, k2)
        b_xy = b_xy / of_system[2]
        derivative = None
        if with_derivative:
            value, derivative = potential.reciprocal_and_derivative(k2, of_system[0])
        else:
            value = potential.reciprocal(k2, of_system[0])
        value = _for_both_parts(torch.where(origin, of_system[1] / of_system[2], value * b_xy * b_z))
        if derivative is None:
            return Influence(value, None)
        return Influence(value, _for_both_parts(torch.where(origin, 0.0, derivative * b_xy * (b_z * doubled))))

    def _power_law(self, lattice: Lattice, planes: Planes) -> PowerLaw | None:
        """What the `influence` function depends on, where a kernel computes it."""
        of_cells, exponent = (lattice.metric, lattice.volume, self.alpha), self.potential.exponent
        if exponent is None or layout(self.alpha.device.type).reads or not is_eager(*of_cells):
            return None
        if any(map(is_differentiated, of_cells)):
            return None
        b_xy, b_z = _axes_of(self.mesh, planes, self.spline_order, self.alpha.device)[6:8]
        return PowerLaw(*of_cells, b_xy, b_z, self.mesh, (planes[0][0], planes[1][0]), exponent)


def _for_both_parts(values: torch.Tensor) -> torch.Tensor:
    """Values (n_systems, n_x, n_y, n_z) as factors of real and imaginary parts, in the shape (n_systems, 1, ..., 2).

    Each is stored twice: a product in which the last axis is broadcast takes four times as long on a CPU.
    """
    return torch.stack([values, values], -1).unsqueeze(1)


def _basis_on(device: torch.device, basis: np.ndarray | None) -> torch.Tensor | None:
    """The matrices of `MeshSum.basis`; equal ones are one tensor, by which plans on a GPU recognize them."""
    if basis is None:
        return None
    key = basis.shape, basis.tobytes()
    with torch.inference_mode(False):
        (found,) = cached_on_device("basis", device, key, lambda: (torch.as_tensor(basis, device=device),))
    return found


def division_of(domain: "Domain", mesh: tuple[int, int, int], spline_order: int) -> MeshDivision:
    """How the mesh is divided among the ranks of a domain, kept with it."""
    key = (mesh, spline_order)
    if key not in domain.kept:
        domain.kept[key] = MeshDivision(domain, mesh, spline_order)
    return domain.kept[key]


def _all_planes(mesh: tuple[int, int, int]) -> Planes:
    return (0, mesh[1]), (0, mesh[2] // 2 + 1)


def _axes_of(mesh: tuple[int, int, int], planes: Planes, order: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tensors that depend on the mesh alone, kept from call to call; see `_axes`."""
    others = (mesh, planes, order)
    return cached_on_device("mesh axes", device, others, lambda: _axes(mesh, planes, order, device))


def _axes(mesh: Sequence[int], planes: Planes, order: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Functions of one or two frequencies of the half mesh, or of some of its planes, in float64.

    A mesh of an even number n of points does not tell the frequencies n / 2 and -n / 2 apart: k² is its mean over both
    signs, so that products of this frequency with that of another axis are zero. With one of the signs, sums would
    depend on the order and the sense of the lattice vectors.

    Returned in this order: the products x x, 2 x y, y y, 2 y z, z z, 2 z x, of which k² is a sum with the metric as
    weights; ``1 / b²`` for x and y, and for z, both in shapes that broadcast to the half mesh; the multiplicity of each
    plane in a sum over the whole mesh; two matrices for sums of values on the mesh times ``n n^T``, where n are the
    three frequencies; the numbers of points; and an identity matrix. The first of the two matrices multiplies by powers
    of z, equally for real and imaginary parts. The second one combines them with x and y to the nine products.
    """
    axes, signed, deconvolution = [], [], []
    for axis, n in enumerate(mesh):
        shape = [-1 if a == axis else 1 for a in range(3)]
        m = mesh_frequencies(n, axis == 2, device)
        axes.append(m.reshape(shape))
        signed.append(torch.where(2.0 * m.abs() == n, 0.0, m).reshape(shape))
        deconvolution.append(spline_transform(n, order, axis == 2, device).pow(-2).reshape(shape))
    for t in (axes, signed, deconvolution):
        t[1], t[2] = t[1][:, slice(*planes[0])], t[2][..., slice(*planes[1])]
    x, y, z = axes
    s_x, s_y, s_z = signed
    products = (x * x, 2.0 * s_x * s_y, y * y, 2.0 * s_y * s_z, z * z, 2.0 * s_z * s_x)
    # planes that are their own mirror images
    doubled = torch.where((z == 0) | (2 * z == mesh[2]), 1.0, 2.0).to(torch.float64)
    powers_of_z = torch.stack([torch.ones_like(z), s_z, z * z], -1).reshape(-1, 3).repeat_interleave(2, 0)
    x, y, s_x, s_y = (t[..., 0] for t in (x, y, s_x, s_y))
    entries = {(0, 0, 0): x * x, (0, 0, 1): s_x * s_y, (0, 1, 1): y * y, (1, 0, 2): s_x, (1, 1, 2): s_y}
    entries[2, 2, 2] = torch.ones_like(x)  # a constant from the host would have to be copied by a graph
    none = torch.zeros_like(x * y)
    # stacked, not written into zeros: `torch.func.linearize` loses what is written into a constant (torch 2.13)
    dyads = torch.stack(
        [
            entries.get((power, min(a, b), max(a, b)), none).expand_as(none)
            for power, a, b in itertools.product(range(3), repeat=3)
        ],
        -1,
    )
    deconvolved = (deconvolution[0] * deconvolution[1], deconvolution[2])
    sizes = torch.cat([torch.full((1,), float(n), dtype=torch.float64, device=device) for n in mesh])
    identity = torch.eye(3, dtype=torch.float64, device=device)
    return (*products, *deconvolved, doubled, powers_of_z, dyads.reshape(-1, 9), sizes, identity)
