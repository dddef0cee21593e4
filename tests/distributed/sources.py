"""Dipoles, quadrupoles and Gaussians on several ranks. See `ranks.py`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed import Domain
from nvalchemiops.torch.interactions.electrostatics import (
    ParticleMeshEwald,
    coulomb_energy_forces,
    electrostatic_potential,
    ewald_real_space,
    ewald_reciprocal_space,
    ewald_summation,
    induced_moments,
    particle_mesh_ewald,
    pme_reciprocal_space,
)
from nvalchemiops.torch.systems import System
from tests.distributed.common import CUTOFF, F64, Atoms, assert_equal, case, compare


class Sources:
    """Random dipoles, traceless quadrupoles and widths of atoms."""

    def __init__(self, count: int, n_channels: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(count)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(count, *n_channels, *shape, generator=generator, dtype=F64)

        self.dipoles, second = 0.3 * random(3), 0.3 * random(3, 3)
        second = second + second.mT
        trace = second.diagonal(dim1=-2, dim2=-1).mean(-1)
        self.quadrupoles = second - trace[..., None, None] * torch.eye(3, dtype=F64)
        self.widths = 0.3 + 0.1 * torch.rand(count, generator=generator, dtype=F64)


@case(2)
def sums_of_dipoles_and_gaussians(group: Any) -> None:
    """Energies with derivatives of every kind, and their derivatives."""
    for batch, call, more in (
        (False, ewald_summation, {"k_cutoff": 4.0}),
        (True, particle_mesh_ewald, {"mesh_dimensions": (12, 15, 14), "spline_order": 6}),
    ):
        atoms = Atoms(batch, n=3)
        sources = Sources(atoms.count)

        def energies_of(x, q, cell, dipoles, widths, alpha, call=call, more=more, **where):
            given = {"dipoles": dipoles, "widths": widths, "cutoff": CUTOFF, **more, **where}
            derivatives = ("compute_forces", "compute_charge_gradients", "compute_dipole_gradients")
            e, f, by_q, by_dipoles = call(x, q, cell, alpha, **dict.fromkeys(derivatives, True), **given)
            return {"atom e": e, "atom f": f, "atom q": by_q, "atom dipoles": by_dipoles}

        compare(group, atoms, energies_of, (torch.tensor(0.7, dtype=F64),), (sources.dipoles, sources.widths))


ALL = ("compute_forces", "compute_charge_gradients", "compute_dipole_gradients", "compute_quadrupole_gradients")


def _of_all_kinds(
    group: Any, atoms: Atoms, sources: Sources, call: Callable[..., Any], charges: torch.Tensor, **more: Any
) -> None:
    """First derivatives that a call returns, and those of the energy by autograd, are those of one process."""
    mine = atoms.mine(group)
    batch_idx = None if atoms.batch_idx is None else atoms.batch_idx[mine]
    domain = Domain(atoms.positions[mine], atoms.cells, batch_idx=batch_idx, cutoff=CUTOFF, group=group)
    names = ("dipoles", "quadrupoles", "widths")
    of_atoms = [atoms.positions, charges, *(getattr(sources, name) for name in names)]
    told = {} if atoms.batch_idx is None else {"batch_idx": atoms.batch_idx}

    def results(where: Any, values: Any, cell: torch.Tensor, **flags: Any) -> Any:
        x, q, *others = values
        cell = cell if atoms.batch_idx is None else torch.stack([cell, cell])
        return call(x, q, cell, **dict(zip(names, others)), **more, **where, **flags)

    flags = dict.fromkeys((*ALL, "compute_virial"), True)
    *expected, virial = results(told, of_atoms, atoms.cell, **flags)
    own = [domain.distribute(t[mine]) for t in of_atoms]
    *found, total = results({"domain": domain}, own, atoms.cell, **flags)
    for k, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_equal(domain.gather(ours), theirs[mine], (call, more, k))
    assert_equal(total, virial, (call, more, "virial"))

    def gradients(where: Any, held: list[torch.Tensor], distribute: Callable[..., torch.Tensor]) -> Any:
        leaves = [t.clone().requires_grad_() for t in (*held, atoms.cell)]
        energies = results(where, [distribute(t) for t in leaves[:-1]], leaves[-1])
        return torch.autograd.grad(where.get("domain", _Alone).sum(energies.sum()), leaves)

    expected = gradients(told, of_atoms, torch.clone)
    found = gradients({"domain": domain}, [t[mine] for t in of_atoms], domain.distribute)
    for k, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_equal(ours, theirs[mine] if k < len(of_atoms) else theirs, (call, more, "gradient", k))


class _Alone:
    """What a domain of one process does."""

    @staticmethod
    def sum(shares: torch.Tensor) -> torch.Tensor:
        return shares


@case(3)
def sums_of_all_sources_with_all_terms(group: Any) -> None:
    """Self energies, background, surface, slab and exclusions are counted once; a charged cell."""
    pairs = torch.stack([torch.arange(0, 24, 7), torch.arange(0, 24, 7) + 2])
    open_axis = torch.tensor([True, True, False])
    excluded = {"exclusions": pairs, "exclusion_factors": torch.full((4,), 0.25, dtype=F64)}
    terms: tuple[dict[str, Any], ...] = (
        {"self_interaction": True, **excluded},
        {"slab_correction": True, "pbc": open_axis, **excluded},
        {"surface_dielectric": 2.0},
    )
    for batch, call, more in (
        (True, ewald_summation, {"k_cutoff": 4.0}),
        (False, particle_mesh_ewald, {"mesh_dimensions": (12, 15, 14), "spline_order": 6}),
    ):
        atoms = Atoms(batch, n=3)
        for term in terms:
            if batch and "exclusions" in term:
                term = term | {"exclusions": 2 * (pairs // 2)}
            options = {"alpha": 0.7, "cutoff": CUTOFF, **more, **term}
            _of_all_kinds(group, atoms, Sources(atoms.count), call, atoms.charges, **options)


@case(2)
def few_dipoles_without_alpha(group: Any) -> None:
    """The ranks measure how far they are from each other, and choose the same alpha as one process."""
    atoms = Atoms(n=3)
    mine, charges = atoms.mine(group), torch.zeros_like(atoms.charges)
    dipoles = torch.where((torch.arange(atoms.count) % 17 == 2)[:, None], Sources(atoms.count).dipoles, 0.0)
    options: dict[str, Any] = {"cutoff": CUTOFF, "k_cutoff": 4.0, "accuracy": 1e-2}
    expected = ewald_summation(atoms.positions, charges, atoms.cell, dipoles=dipoles, **options)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=CUTOFF, group=group)
    x, q, own = (domain.distribute(t[mine]) for t in (atoms.positions, charges, dipoles))
    found = ewald_summation(x, q, atoms.cell, dipoles=own, domain=domain, **options)
    assert_equal(domain.gather(found), expected[mine], "energies")


@case(3)
def a_rank_without_sources(group: Any) -> None:
    """Two atoms on three ranks."""
    atoms = Atoms(n=2)
    atoms.count, atoms.positions, atoms.charges = 2, atoms.positions[:2], atoms.charges[:2]
    sources, mine = Sources(2), atoms.mine(group)
    options: dict[str, Any] = {"alpha": 0.7, "cutoff": CUTOFF, "k_cutoff": 4.0}
    _of_all_kinds(group, atoms, sources, ewald_summation, atoms.charges, **options)

    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=CUTOFF, group=group)
    of_atoms = [atoms.positions, atoms.charges, sources.dipoles]
    places: list[tuple[Any, list[torch.Tensor]]] = [({}, of_atoms)]
    places.append(({"domain": domain}, [domain.distribute(t[mine]) for t in of_atoms]))
    results = []
    for where, (x, q, dipoles) in places:

        def energy(unknown, x=x, q=q, where=where):
            return ewald_summation(x, q, atoms.cell, dipoles=unknown, widths=0.5, **options, **where)

        alpha = torch.full_like(q, 0.1)
        first = induced_moments(energy, polarizabilities=alpha, **where)
        again = induced_moments(energy, polarizabilities=alpha, initial=first, **where)
        seen = electrostatic_potential(x, q, atoms.cell, dipoles=dipoles, **options, **where)
        results.append((seen.potential, seen.gradient, again.dipoles))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_equal(domain.gather(ours), theirs[mine], "of atoms", 1e-8)


@case(2)
def parts_of_sums_with_channels(group: Any) -> None:
    """Latent Ewald sums are reciprocal parts with channels."""
    atoms = Atoms(n=3)
    charges, sources = torch.stack([atoms.charges, atoms.charges**2], 1), Sources(atoms.count, (2,))
    for call, more in (
        (ewald_reciprocal_space, {"k_vectors": None, "k_cutoff": 4.0}),
        (pme_reciprocal_space, {"mesh_dimensions": (12, 15, 14), "spline_order": 6, "self_interaction": True}),
        (ewald_real_space, {"cutoff": CUTOFF}),
    ):
        _of_all_kinds(group, atoms, sources, call, charges, alpha=0.7, **more)


@case(2)
def parts_of_sums_of_charges(group: Any) -> None:
    """Both parts of an Ewald sum of point charges, with a loss of forces; alpha is trained."""
    atoms = Atoms(batch=True, n=3)

    def energies_of(x, q, cell, alpha, **where):
        e, f, virial = ewald_real_space(
            x, q, cell, alpha, compute_forces=True, compute_virial=True, cutoff=4.0, **where
        )
        options = {"k_cutoff": 4.0, "compute_forces": True, "compute_virial": True, "energy_reduction": "system"}
        total, forces, strain = ewald_reciprocal_space(x, q, cell, None, alpha, **options, **where)
        return {"atom e": e, "atom f": f, "virial": virial, "total": total, "atom forces": forces, "strain": strain}

    compare(group, atoms, energies_of, (torch.tensor(0.7, dtype=F64),))


@case(2)
def moments_within_a_cutoff(group: Any) -> None:
    """Coulomb energies and forces of moments, bare and damped; one width of all atoms has a complete gradient."""
    atoms = Atoms(n=3)
    sources = Sources(atoms.count)

    def energies_of(x, q, cell, dipoles, alpha, width, **where):
        bare, _ = coulomb_energy_forces(x, q, cell, CUTOFF, dipoles=dipoles, widths=width, **where)
        damped, forces = coulomb_energy_forces(x, q, cell, CUTOFF, alpha, dipoles=dipoles, widths=width, **where)
        return {"atom bare": bare, "atom damped": damped, "atom forces": forces}

    numbers = (torch.tensor(0.5, dtype=F64), torch.tensor(0.4, dtype=F64))
    compare(group, atoms, energies_of, numbers, (sources.dipoles,))


@case(2)
def modules_choose_for_all_sources(group: Any) -> None:
    """Parameters are chosen for the sources of all ranks, of which one has wider Gaussians."""
    atoms = Atoms(n=4)
    sources, mine = Sources(atoms.count), atoms.mine(group)
    sources.widths[:] = torch.where(torch.arange(atoms.count) < 5, 0.8, 0.5)
    longer = torch.stack([atoms.cell, atoms.cell @ torch.diag(torch.tensor([1.0, 1.0, 2.0], dtype=F64))])
    module = ParticleMeshEwald(accuracy=1e-3, cutoff=CUTOFF)
    asked = {"compute_forces": True, "compute_dipole_gradients": True, "compute_virial": True}
    for cell, systems in ((atoms.cell, None), (longer, (torch.arange(atoms.count) % 2).int())):
        values = {"dipoles": sources.dipoles, "widths": sources.widths}
        whole = System(atoms.positions, atoms.charges, cell, systems, **values)
        held = None if systems is None else systems[mine]
        domain = Domain(atoms.positions[mine], cell, batch_idx=held, cutoff=CUTOFF, group=group)
        of_atoms = {name: domain.distribute(getattr(whole, name)[mine]) for name in ("charges", *values)}
        own = System(domain.distribute(whole.positions[mine]), cell=cell, domain=domain, **of_atoms)
        expected, found = module(whole, **asked), module(own, **asked)
        for name in ("energies", "forces", "dipole_gradients"):
            assert_equal(domain.gather(getattr(found, name)), getattr(expected, name)[mine], name)
        assert_equal(found.virial, expected.virial, "virial")


@case(2)
def potentials_at_atoms(group: Any) -> None:
    """Features of two receivers, of which one width is trained, with second derivatives; all terms; open systems."""
    atoms = Atoms(n=3)
    sources = Sources(atoms.count)
    pairs = torch.stack([torch.arange(0, 24, 7), torch.arange(0, 24, 7) + 2])
    slab = {"slab_correction": True, "pbc": torch.tensor([True, True, False])}

    def energies_of(x, q, cell, dipoles, widths, alpha, receivers, **where):
        given = {"dipoles": dipoles, "widths": widths, "receiver_widths": receivers, "cutoff": CUTOFF}
        found = electrostatic_potential(x, q, cell, alpha=alpha, k_cutoff=4.0, exclusions=pairs, **given, **where)
        return {
            f"atom {field} {k}": getattr(found, field)[:, k] for field in ("potential", "gradient") for k in range(2)
        }

    numbers = (torch.tensor(0.7, dtype=F64), torch.tensor([0.3, 0.6], dtype=F64))
    compare(group, atoms, energies_of, numbers, (sources.dipoles, sources.widths))

    batch = Atoms(batch=True, n=3)
    batch_idx, mine = batch.batch_idx, batch.mine(group)
    held = batch_idx[mine]
    domain = Domain(atoms.positions[mine], batch.cells, batch_idx=held, cutoff=CUTOFF, skin=0.3, group=group)
    in_open = Domain(atoms.positions[mine], batch_idx=held, num_systems=2, cutoff=CUTOFF, skin=0.3, group=group)
    names = {"dipoles": sources.dipoles, "quadrupoles": sources.quadrupoles}
    of_mesh = {"method": "pme", "mesh_dimensions": (12, 15, 14), "spline_order": 6, "alpha": 0.7}
    for cell, place, more in (
        (batch.cells, domain, {**of_mesh, **slab, "receiver_widths": [0.4]}),
        (batch.cells, domain, {"accuracy": 1e-4, "widths": 0.4, "self_interaction": True, "surface_dielectric": 2.0}),
        (None, in_open, {"exclusions": 2 * (pairs // 2), "receiver_widths": [0.4, 0.0]}),
    ):
        options = {"cutoff": CUTOFF, "derivatives": 2, **more}
        whole = electrostatic_potential(atoms.positions, atoms.charges, cell, batch_idx, **names, **options)
        x, q, *values = (place.distribute(t[mine]) for t in (atoms.positions, atoms.charges, *names.values()))
        found = electrostatic_potential(x, q, cell, **dict(zip(names, values)), **options, domain=place)
        for k, (ours, theirs) in enumerate(zip(found, whole, strict=True)):
            assert_equal(place.gather(ours), theirs[mine], (more, k))


@case(3)
def a_source_that_one_rank_cannot_take(group: Any) -> None:
    """Values that are wrong on one rank are an error on all."""
    atoms = Atoms(n=3)
    mine, here = atoms.mine(group), dist.get_rank(group) == 0
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=CUTOFF, group=group)
    x, q = domain.distribute(atoms.positions[mine]), domain.distribute(atoms.charges[mine])
    sum_of = functools.partial(ewald_summation, x, q, atoms.cell, 0.7, k_cutoff=2.0, domain=domain)
    potential_of = functools.partial(electrostatic_potential, x, q, atoms.cell, alpha=0.7, k_cutoff=2.0, domain=domain)
    trained = torch.tensor(0.5, dtype=F64, requires_grad=True)
    dipoles, widths = torch.zeros(len(q), 3, dtype=F64), torch.ones(len(q), dtype=F64)
    for call, options, text in (
        (sum_of, {"dipoles": dipoles[:, :2] if here else dipoles}, "`dipoles`"),
        (sum_of, {"widths": -widths if here else widths}, "`widths`"),
        (sum_of, {"widths": 0.0 * widths if here else widths, "self_interaction": True}, "`self_interaction`"),
        (potential_of, {"receiver_widths": [trained, torch.ones(2) if here else 0.4]}, "`receiver_widths`"),
    ):
        try:
            call(**options)
        except (ValueError, TypeError, RuntimeError) as error:
            assert text in str(error), error
            assert here or "rank 0" in str(error), error
        else:
            raise AssertionError(text)
