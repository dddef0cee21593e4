"""Cases for several ranks: interactions of their atoms. See `ranks.py`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch.distributed import Domain
from nvalchemiops.torch.interactions.dispersion import d3_dispersion, damping_parameters
from nvalchemiops.torch.interactions.electrostatics import (
    coulomb_energy,
    dsf_coulomb,
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.interactions.pair import PairPotential
from tests.distributed.common import (
    CUTOFF,
    F64,
    PAIRS_OF_CHARGES,
    Atoms,
    assert_equal,
    case,
    compare,
    on_grid,
)
from tests.support.molecules import parameters as d3_parameters

PAIRS = PairPotential(
    "4*((sigma/r)**12 - (sigma/r)**6) + k*q1*q2*c*exp(-r); sigma = (sigma1 + sigma2)/2",
    per_atom=("sigma", "q"),
    global_parameters=("k",),
    per_pair=("c",),
    cutoff=CUTOFF,
    r_switch=3.5,
)


@case(3)
def ranks_without_atoms(group: Any) -> None:
    """Two atoms, with their images, so that one of the ranks has none."""
    atoms = Atoms(n=2)
    atoms.count = 2
    for name in ("positions", "charges", "weights", "vectors", "numbers"):
        setattr(atoms, name, getattr(atoms, name)[:2])

    def energies_of(x, q, cell, alpha, **where):
        numbers = torch.full((len(x),), 6, dtype=torch.int32)
        options: dict[str, Any] = {"cutoff": CUTOFF, **where}
        results = {"atom pairs": PAIRS_OF_CHARGES(x, cell, q=q, **where)}
        results["dsf"], results["atom dsf"] = dsf_coulomb(x, q, CUTOFF, alpha, cell, **where)
        for call, more in (
            (ewald_summation, {"k_cutoff": 4.0}),
            (particle_mesh_ewald, {"mesh_dimensions": (8, 9, 10)}),
        ):
            found = call(x, q, cell, alpha, compute_forces=True, compute_virial=True, **more, **options)
            results |= dict(zip((f"atom {call.__name__}", f"atom {call.__name__} forces", call.__name__), found))
        results["atom d3"] = d3_dispersion(x, numbers, damping_parameters("pbe"), d3_parameters(), cell, **options)[0]
        return results

    compare(group, atoms, energies_of, (torch.tensor(0.7, dtype=F64),))


@case(2)
def weights_that_are_not_finite(group: Any) -> None:
    """Of the energies of one rank, or of all: gradients are not finite, although a maximum over ranks may lose NaN."""
    atoms, size = Atoms(n=3), dist.get_world_size(group)
    domain = Domain(atoms.positions[atoms.mine(group)], atoms.cell, cutoff=3.0, group=group)
    x, q = (domain.distribute(values[atoms.mine(group)]) for values in (atoms.positions, atoms.charges))
    x.requires_grad_()
    for weight, ranks in ((torch.nan, (size - 1,)), (-torch.inf, range(size))):
        energies = particle_mesh_ewald(x, q, atoms.cell, 0.7, mesh_dimensions=(8, 9, 10), cutoff=3.0, domain=domain)
        share = energies.sum() * (weight if domain.rank in ranks else 1.0)
        (gradient,) = torch.autograd.grad(share, x)
        assert not gradient.isfinite().any(), (weight, gradient)


@case(2)
def hybrid_sums(group: Any) -> None:
    """Forces and virials do not depend on positions, cell and alpha, and gradients of energies flow through charges."""

    def energies_of(x, q, cell, alpha, **where):
        given = {"compute_forces": True, "compute_virial": True, "hybrid_forces": True, "cutoff": CUTOFF, **where}
        ewald = ewald_summation(x, q, cell, alpha, k_cutoff=4.0, **given)
        mesh = particle_mesh_ewald(x, q, cell, alpha, mesh_dimensions=(8, 9, 10), **given)
        names = ("atom {} e", "atom {} f", "{} virial")
        return {name.format(k): value for k, sums in enumerate((ewald, mesh)) for name, value in zip(names, sums)}

    for batch in (False, True):
        compare(group, Atoms(batch), energies_of, (torch.tensor(0.7, dtype=F64),))


@case(1, 3)
def pair_potentials(group: Any) -> None:
    table = torch.tensor([[1.0, 0.5, 0.2], [0.5, 2.0, 0.7], [0.2, 0.7, 1.5]], dtype=F64)
    numbers = (torch.tensor(1.5, dtype=F64), torch.tensor(0.7, dtype=F64), table)
    for batch in (False, True):
        atoms = Atoms(batch)
        species = torch.arange(atoms.count) % 3

        def energies_of(x, q, cell, sigma, k, c, domain=None, species=species, **where):
            kinds = species if domain is None else species[domain.global_index]
            given = {"sigma": sigma, "q": q, "k": k, "c": c, "species": kinds, "domain": domain, **where}
            names = ("q", "k", "c", "sigma")
            e, f, by_q, by_k, by_c, by_sigma, virial = PAIRS(
                x, cell, compute_forces=True, compute_gradients=names, compute_virial=True, **given
            )
            total, forces = PAIRS(x, cell, compute_forces=True, energy_reduction="system", **given)
            return {
                "atom e": e, "atom f": f, "atom q": by_q, "k": by_k, "c": by_c, "atom sigma": by_sigma,
                "virial": virial, "total": total, "atom forces": forces,
            }  # fmt: skip

        compare(group, atoms, energies_of, numbers)


@case(2)
def charges_within_a_cutoff(group: Any) -> None:
    for batch in (False, True):

        def energies_of(x, q, cell, alpha, **where):
            energies, forces, virial = dsf_coulomb(x, q, CUTOFF, alpha, cell, compute_virial=True, **where)
            bare = coulomb_energy(x, q, cell, CUTOFF, 0.0, **where)
            return {"e": energies, "atom f": forces, "virial": virial, "atom bare": bare}

        compare(group, Atoms(batch), energies_of, (torch.tensor(0.2, dtype=F64),))


EXCLUDED = torch.stack([torch.arange(0, 200, 7), torch.arange(0, 200, 7) + 2])


def _long_range(group: Any, call: Callable[..., Any], **options: Any) -> None:
    slab = {"slab_correction": True, "pbc": torch.tensor([True, True, False])}
    kinds: list[tuple[bool, dict[str, Any]]] = [(False, {"exclusions": EXCLUDED}), (True, {}), (False, slab)]
    kinds.append((False, {"surface_dielectric": 2.0}))
    size = dist.get_world_size(group)
    grids = ((size, 1), (max(size // 2, 1), min(size, 2)), (1, size), (max(size - 1, 1), 1))
    for (batch, more), grid in zip(kinds, grids, strict=True):
        with on_grid(grid):
            _compare_long_range(group, Atoms(batch), functools.partial(call, cutoff=CUTOFF, **options, **more))


def _compare_long_range(group: Any, atoms: Atoms, call: Callable[..., Any]) -> None:
    def energies_of(x, q, cell, alpha, **where):
        derivatives = ("compute_forces", "compute_charge_gradients", "compute_virial")
        e, f, by_q, virial = call(x, q, cell, alpha, **dict.fromkeys(derivatives, True), **where)
        # energies alone have first derivatives at hand
        total = call(x, q, cell, 0.7, energy_reduction="system", **where)
        channels = call(x, torch.stack([q, q * q], 1), cell, 0.7, **where)
        return {
            "atom e": e, "atom f": f, "atom q": by_q, "virial": virial, "total": total,
            "atom channel": channels[:, 1],
        }  # fmt: skip

    compare(group, atoms, energies_of, (torch.tensor(0.7, dtype=F64),))

    # a plain sum of energies: the backward pass is a product
    def gradients(leaves, domain):
        where = {"domain": domain} if domain is not None else {}
        if domain is None and atoms.batch_idx is not None:
            where["batch_idx"] = atoms.batch_idx
        own = torch.clone if domain is None else domain.distribute
        cell = leaves[2] if atoms.batch_idx is None else torch.stack([leaves[2], leaves[2]])
        energy = call(own(leaves[0]), own(leaves[1]), cell, 0.7, **where).sum()
        return torch.autograd.grad(energy if domain is None else domain.sum(energy), leaves)

    mine, given = atoms.mine(group), (atoms.positions, atoms.charges, atoms.cell)
    expected = gradients([t.clone().requires_grad_() for t in given], None)
    batch_idx = None if atoms.batch_idx is None else atoms.batch_idx[mine]
    domain = Domain(atoms.positions[mine], atoms.cells, batch_idx=batch_idx, cutoff=CUTOFF, group=group)
    held = [t.clone().requires_grad_() for t in (given[0][mine], given[1][mine], given[2])]
    found = gradients(held, domain)
    assert_equal(found[0], expected[0][mine], "plain forces")
    assert_equal(found[1], expected[1][mine], "plain charges")
    assert_equal(found[2], expected[2], "plain cell")
    again = gradients(held, Domain(atoms.positions[mine], atoms.cells, batch_idx=batch_idx, cutoff=CUTOFF, group=group))
    assert all(torch.equal(a, b) for a, b in zip(found, again)), "bits repeat"


@case(1, 4)
def ewald_sums(group: Any) -> None:
    _long_range(group, ewald_summation, k_cutoff=4.0)


@case(1, 4)
def particle_mesh_sums(group: Any) -> None:
    _long_range(group, particle_mesh_ewald, mesh_dimensions=(18, 25, 21), spline_order=6)


@case(2)
def a_mesh_that_is_cut_along_its_second_axis(group: Any) -> None:
    """Atoms are any number of cells away, along each axis another one."""
    atoms = Atoms(n=4)
    cells = torch.randint(-2, 3, (atoms.count, 3), generator=torch.Generator().manual_seed(0)).to(F64)
    x, mine = atoms.positions + cells @ atoms.cell, atoms.mine(group)
    domain = Domain(x[mine], atoms.cell, cutoff=CUTOFF, group=group, grid=(1, dist.get_world_size(group), 1))
    call = functools.partial(particle_mesh_ewald, alpha=0.7, mesh_dimensions=(10, 20, 12), cutoff=CUTOFF)
    own = domain.distribute(x[mine]), domain.distribute(atoms.charges[mine])
    found = call(*own, atoms.cell, domain=domain)
    assert_equal(domain.gather(found), call(x, atoms.charges, atoms.cell)[mine], "energies")


@case(2)
def parameters_that_are_left_open(group: Any) -> None:
    """Chosen for all atoms, not for those of a rank."""
    atoms = Atoms()
    mine = atoms.mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=CUTOFF, group=group)
    for call in (ewald_summation, particle_mesh_ewald):
        expected = call(atoms.positions, atoms.charges, atoms.cell, cutoff=CUTOFF, accuracy=1e-4)
        found = call(
            domain.distribute(atoms.positions[mine]),
            domain.distribute(atoms.charges[mine]),
            atoms.cell,
            accuracy=1e-4,
            domain=domain,
        )
        assert_equal(domain.gather(found), expected[mine], call.__name__)


@case(2)
def dispersion(group: Any) -> None:
    damping, tables = damping_parameters("pbe"), d3_parameters()
    for batch in (False, True):
        atoms = Atoms(batch)

        def energies_of(x, q, cell, numbers=atoms.numbers, **where):
            if "domain" in where:
                numbers = numbers[where["domain"].global_index]
            e, f, counts, virial = d3_dispersion(
                x, numbers, damping, tables, cell, cutoff=CUTOFF, coordination_cutoff=4.0, compute_forces=True,
                compute_virial=True, **where,
            )  # fmt: skip
            return {"atom e": e, "atom f": f, "atom counts": counts, "virial": virial}

        compare(group, atoms, energies_of)


@case(3)
def triples_of_dispersion(group: Any) -> None:
    """The three-body term, with triples of three ranks: first derivatives, explicit and of weighted energies."""
    damping, tables = damping_parameters("pbe"), d3_parameters()
    for batch in (False, True):
        atoms = Atoms(batch, n=4)
        mine, batch_idx = atoms.mine(group), atoms.batch_idx
        options: dict[str, Any] = {"cutoff": 8.0, "coordination_cutoff": 7.0, "smoothing": 2.0}
        options["three_body_cutoff"] = 9.0
        atoms.positions, atoms.cells, atoms.cell = (2.5 * t for t in (atoms.positions, atoms.cells, atoms.cell))

        def results(x, numbers, weights, cell, s9, where, options=options, **flags):
            found = d3_dispersion(x, numbers, damping, tables, cell, s9=s9, **options, **where, **flags)
            return found if flags else (weights * (found[0] + found[1])).sum()

        leaves = [atoms.positions, atoms.cell, torch.tensor(100.0, dtype=F64)]
        several = (lambda cell: cell) if not batch else (lambda cell: torch.stack([cell, cell]))
        flags = {"compute_forces": True, "compute_virial": True}
        told = {} if batch_idx is None else {"batch_idx": batch_idx}
        expected = results(leaves[0], atoms.numbers, None, several(leaves[1]), leaves[2], told, **flags)
        pairs_alone = results(leaves[0], atoms.numbers, None, several(leaves[1]), 0.0, told, **flags)
        assert float((expected[1] - pairs_alone[1]).abs().max()) > 1e-3 * float(expected[1].abs().max())
        first = [t.clone().requires_grad_() for t in leaves]
        loss = results(first[0], atoms.numbers, atoms.weights, several(first[1]), first[2], told)
        slopes = torch.autograd.grad(loss, first)

        held = None if batch_idx is None else batch_idx[mine]
        domain = Domain(atoms.positions[mine], atoms.cells, batch_idx=held, cutoff=9.0, group=group)
        numbers, where = atoms.numbers[domain.global_index], {"domain": domain}
        found = results(
            domain.distribute(leaves[0][mine]), numbers, None, several(leaves[1]), leaves[2], where, **flags
        )
        for k in range(3):
            assert_equal(domain.gather(found[k]), expected[k][mine], ("result", k))
        assert_equal(found[3], expected[3], "virial")
        own = [t.clone().requires_grad_() for t in (leaves[0][mine], *leaves[1:])]
        x = domain.distribute(own[0])
        share = results(x, numbers, atoms.weights[domain.global_index], several(own[1]), own[2], where)
        ours = torch.autograd.grad(domain.sum(share), own, create_graph=True)
        for k, theirs in enumerate(slopes):
            assert_equal(ours[k], theirs if k else theirs[mine], ("derivative", k))
        try:
            torch.autograd.grad(domain.sum(ours[0].square().sum()), own[0])
        except NotDifferentiableError as error:
            assert "three_body" in str(error), error
        else:
            raise AssertionError("second derivatives of triples are an error")
