"""Induced charges and dipoles on several ranks. See `ranks.py`."""

from typing import Any

import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed import Domain, OtherRankError
from nvalchemiops.torch.interactions.electrostatics import ewald_summation, induced_moments
from tests.distributed.common import CUTOFF, F64, Atoms, assert_equal, case, compare


@case(3)
def induced_charges_and_dipoles(group: Any) -> None:
    """Moments and energies at the minimum, with two derivatives by all that they depend on."""
    for batch, reduction in ((False, "atom"), (True, "system")):
        atoms = Atoms(batch, n=3)
        split = {"alpha": 0.7, "k_cutoff": 4.0, "cutoff": CUTOFF, "widths": 0.5, "energy_reduction": reduction}

        def energies_of(x, q, cell, hardness, polarizabilities, total, field, split=split, **where):
            def energy(charges, dipoles, x, q, cell):
                return ewald_summation(x, charges + q, cell, dipoles=dipoles, **split, **where)

            told = {} if "domain" not in where else {"domain": where["domain"]}
            if "batch_idx" in where:
                told = {"batch_idx": where["batch_idx"], "num_systems": 2}
            found = induced_moments(
                energy, (x, q, cell), hardness=hardness, polarizabilities=polarizabilities, electronegativity=0.3 * q,
                total_charge=total, external_field=field, tolerance=1e-13, **told,
            )  # fmt: skip
            return {"atom charges": found.charges, "atom dipoles": found.dipoles, "energies": found.energies}

        hardness = 3.0 + 0.5 * atoms.weights**2
        polarizabilities = 0.1 + 0.02 * atoms.charges**2
        total = torch.tensor([0.7, -0.2] if batch else [0.7], dtype=F64)
        field = 0.1 * atoms.dyad[:2] if batch else 0.1 * atoms.dyad[0]
        compare(group, atoms, energies_of, (total, field), (hardness, polarizabilities))


@case(3)
def one_atom_on_each_rank_has_an_energy_of_its_own(group: Any) -> None:
    """As many atoms as systems: energies of atoms, zero without dipoles, are not taken for those of systems."""
    count = dist.get_world_size(group)
    x = torch.tensor([[8.0 * i + 4.0, 4.0 + 0.1 * i, 4.0] for i in range(count)], dtype=F64)
    cell, field = torch.diag(torch.tensor([8.0 * count, 8.0, 8.0], dtype=F64)), torch.tensor([0.1, 0.2, 0.0], dtype=F64)
    mine = slice(dist.get_rank(group), dist.get_rank(group) + 1)
    domain = Domain(x[mine], cell, cutoff=6.0, grid=(count, 1, 1), group=group)

    def solved(x: torch.Tensor, **told: Any) -> Any:
        def energy(dipoles: torch.Tensor) -> torch.Tensor:
            options = {"alpha": 0.6, "k_cutoff": 4.0, "cutoff": 6.0, "widths": 0.5, **told}
            return ewald_summation(x, torch.zeros_like(x[:, 0]), cell, dipoles=dipoles, **options)

        polarizabilities = torch.full_like(x[:, 0], 0.8)
        return induced_moments(energy, polarizabilities=polarizabilities, external_field=field, tolerance=1e-13, **told)

    whole, found = solved(x), solved(domain.distribute(x[mine]), domain=domain)
    assert domain.n_owned == 1
    assert_equal(domain.gather(found.dipoles), whole.dipoles[mine], "dipoles", 1e-10)
    assert_equal(found.energies, whole.energies, "energies", 1e-10)


@case(3)
def ranks_find_the_minimum_together(group: Any) -> None:
    """Two molecules, one with few atoms: a start, the same number of steps on all ranks, fields of atoms; errors."""
    atoms = Atoms(n=3)
    mine, here = atoms.mine(group), dist.get_rank(group) == 0
    batch_idx = (torch.arange(atoms.count) >= 25).int()
    place = {"num_systems": 2, "cutoff": CUTOFF, "group": group}
    domain = Domain(atoms.positions[mine], atoms.cells.expand(2, 3, 3), batch_idx=batch_idx[mine], **place)
    cells, polarizabilities = atoms.cell.expand(2, 3, 3).clone(), 0.1 + 0.02 * atoms.charges**2
    options: dict[str, Any] = {"alpha": 0.7, "k_cutoff": 4.0, "cutoff": CUTOFF, "widths": 0.5}
    x, q, alpha, field = (
        domain.distribute(t[mine]) for t in (atoms.positions, atoms.charges, polarizabilities, atoms.vectors)
    )

    def solved(x, q, alpha, field, domain=None, reduction="system", **more):
        told = {"batch_idx": batch_idx} if domain is None else {"domain": domain}

        def energy(dipoles):
            return ewald_summation(x, q, cells, dipoles=dipoles, energy_reduction=reduction, **options, **told)

        told_systems = told if domain is not None else {**told, "num_systems": 2}
        return induced_moments(energy, polarizabilities=alpha, external_field=field, **told_systems, **more)

    whole = solved(atoms.positions, atoms.charges, polarizabilities, atoms.vectors)
    found = solved(x, q, alpha, field, domain)
    assert found.iterations == whole.iterations
    for reduction in ("atom", "system"):
        again = solved(x, q, alpha, field, domain, reduction, initial=found)
        assert again.iterations == 0
        assert_equal(domain.gather(again.dipoles), whole.dipoles[mine], reduction, 1e-7)
    by_ranks: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(by_ranks, found.iterations, group=group)
    assert len(set(by_ranks)) == 1

    def raises(call: Any, kind: Any, text: str) -> None:
        try:
            call()
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)

    raises(lambda: solved(x, q, 100.0 * alpha, field, domain, max_iterations=40), RuntimeError, "induced")
    raises(lambda: solved(x, 0.0 * q, 100.0 * alpha, 0.0 * field, domain), RuntimeError, "has no minimum")
    kind, shorter = (ValueError if here else OtherRankError), slice(1 if here else 0, None)
    raises(lambda: solved(x, q, alpha[shorter], field, domain), kind, "`polarizabilities`")
    share = dist.get_rank(group) + torch.zeros(2, dtype=F64)
    raises(
        lambda: induced_moments(lambda d: share + d.sum(), polarizabilities=alpha, domain=domain),
        ValueError,
        "complete",
    )
