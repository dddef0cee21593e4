"""Cases for several ranks: modules, training, single precision, ASE. See `ranks.py`."""

import datetime
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed import Domain, OtherRankError, communication
from nvalchemiops.torch.graph import Graph
from nvalchemiops.torch.interactions.dispersion import DFTD3
from nvalchemiops.torch.interactions.electrostatics import (
    EwaldSummation,
    ParticleMeshEwald,
    dsf_coulomb,
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.systems import System
from tests.distributed.common import CUTOFF, F64, PAIRS_OF_CHARGES, Atoms, assert_equal, case
from tests.support.molecules import parameters as d3_parameters
from tests.support.systems import triclinic


@case(2)
def modules_take_systems_of_a_domain(group: Any) -> None:
    """Configured interactions for a `System` give each rank its part of what they give one process."""
    atoms = Atoms()
    mine = atoms.mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=CUTOFF, group=group)
    whole = System(atoms.positions, atoms.charges, atoms.cell, numbers=atoms.numbers)
    numbers = atoms.numbers[domain.global_index]
    own = System(
        domain.distribute(atoms.positions[mine]),
        domain.distribute(atoms.charges[mine]),
        atoms.cell,
        numbers=numbers,
        domain=domain,
    )
    asked = {"compute_forces": True, "compute_virial": True}
    interactions: list[tuple[Any, dict[str, Any]]] = [
        (EwaldSummation(0.7, cutoff=CUTOFF, k_cutoff=3.0), {}),
        (EwaldSummation(accuracy=1e-4, cutoff=CUTOFF), {}),
        (ParticleMeshEwald(0.7, (18, 20, 24), cutoff=CUTOFF), {}),
        (DFTD3("pbe", [1, 6, 8], d3_parameters(), cutoff=CUTOFF, coordination_cutoff=4.0, smoothing=None), {}),
        (PAIRS_OF_CHARGES, {"q": (atoms.charges, own.charges)}),
    ]
    for interaction, parameters in interactions:
        expected = interaction(whole, **asked, **{name: pair[0] for name, pair in parameters.items()})
        found = interaction(own, **asked, **{name: pair[1] for name, pair in parameters.items()})
        what = type(interaction).__name__
        for field in ("energies", "forces"):
            assert_equal(domain.gather(getattr(found, field)), getattr(expected, field)[mine], (what, field))
        assert_equal(found.virial, expected.virial, (what, "virial"))


class FitOfForces(torch.nn.Module):
    """A loss of forces, with charges that a layer makes of what it knows of the atoms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1, dtype=F64)

    def forward(self, x: torch.Tensor, known: torch.Tensor, cell: torch.Tensor, **where: Any) -> torch.Tensor:
        domain = where.get("domain")
        weight, bias = self.layer.weight, self.layer.bias
        if domain is not None:
            weight, bias = domain.replicated(weight), domain.replicated(bias)
        q = torch.nn.functional.linear(known, weight, bias).squeeze(1)
        options: dict[str, Any] = {"cutoff": CUTOFF, "k_cutoff": 3.0, "compute_forces": True, **where}
        forces = ewald_summation(x, q, cell, 0.7, **options)[1]
        loss = forces.square().sum() + (forces * known).sum()
        return loss if domain is None else domain.sum(loss)


@case(2, 4)
def training_by_whole_systems_or_by_one_that_is_divided(group: Any) -> None:
    """Gradients of a batch by DistributedDataParallel, each rank with whole systems, and of one divided system."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(1)
    systems = [(x, torch.randn(len(x), 3, dtype=F64), cell) for x, _, cell, _ in map(triclinic, range(6, 6 + size))]
    counts = torch.tensor([len(x) for x, _, _ in systems])
    batch_idx = torch.arange(size).repeat_interleave(counts).int()
    x, known, cells = torch.cat([s[0] for s in systems]), torch.cat([s[1] for s in systems]), [s[2] for s in systems]
    one = FitOfForces()
    expected = torch.autograd.grad(one(x, known, torch.cat(cells), batch_idx=batch_idx), list(one.parameters()))

    parallel = torch.nn.parallel.DistributedDataParallel(FitOfForces(), process_group=group)
    mine, own, cell = systems[rank]
    (size * parallel(mine, own, cell)).backward()  # DDP takes the mean over ranks
    for found, gradient in zip(parallel.module.parameters(), expected):
        assert_equal(found.grad, gradient, "data parallel")

    held = slice(len(x) * rank // size, len(x) * (rank + 1) // size)
    domain = Domain(x[held], torch.cat(cells), batch_idx=batch_idx[held], cutoff=CUTOFF, group=group)
    divided = FitOfForces()
    loss = divided(domain.distribute(x[held]), domain.distribute(known[held]), torch.cat(cells), domain=domain)
    for found, gradient in zip(torch.autograd.grad(loss, list(divided.parameters())), expected):
        assert_equal(found, gradient, "divided")


@case(2)
def single_precision(group: Any) -> None:
    """Positions in float32: the same pairs as on one process, and results but for the order of sums in float32."""
    atoms = Atoms(dtype=torch.float32)
    mine = atoms.mine(group)
    x, q, cell = atoms.positions, atoms.charges.float(), atoms.cell
    domain = Domain(x[mine], cell, cutoff=CUTOFF, group=group)
    own, charges = domain.distribute(x[mine]), domain.distribute(q[mine])
    for call, more in (
        (dsf_coulomb, {"cutoff": CUTOFF, "alpha": 0.2}),
        (ewald_summation, {"alpha": 0.7, "cutoff": CUTOFF, "k_cutoff": 4.0, "compute_forces": True}),
        (
            particle_mesh_ewald,
            {"alpha": 0.7, "cutoff": CUTOFF, "mesh_dimensions": (18, 20, 24), "compute_forces": True},
        ),
    ):
        more["cutoff"] = CUTOFF
        expected = call(x, q, cell=cell, **more)[1]
        found = call(own, charges, cell=cell, domain=domain, **more)[1]
        assert found.dtype is torch.float32
        assert_equal(domain.gather(found), expected[mine], call.__name__, 3e-6)


@case(2)
def a_calculator_on_ranks(group: Any) -> None:
    """Rank 0 has the atoms and runs ASE; results are those of the calculator of one process."""
    import ase.build
    import numpy as np
    from ase import units
    from ase.md import VelocityVerlet

    from nvalchemiops.ase import Calculator, Dispersion, Electrostatics, Pair, on_ranks

    repulsion = {"A": {"Mg-O": 1280.0, "*": 0.0}, "rho": 0.3, "C": {"O-O": 25.0, "*": 0.0}}
    crystal = ase.build.bulk("MgO", "rocksalt", a=4.3, cubic=True).repeat(2)
    crystal.rattle(0.1, seed=1)
    crystal.numbers[:5] = 10  # of elements that one rank does not have
    charges = np.where(crystal.numbers == 12, 2.0, np.where(crystal.numbers == 8, -2.0, 0.5))
    crystal.set_initial_charges(charges)

    along = {"Mg": [0.1, 0.0, 0.2], "*": [0.0, -0.3, 0.1]}

    def of(atoms):
        names = ("energy", "energies", "forces", "stress", "charges", "dipole")
        found = {name: np.asarray(atoms.calc.get_property(name, atoms)) for name in names}
        if "dipoles" in repr(atoms.calc.terms):
            found["torques"] = atoms.calc.get_torques(atoms)
        return found

    for terms in (
        (Pair("buckingham", cutoff=4.0, **repulsion), Electrostatics("pme", accuracy=1e-4)),
        (
            Electrostatics("ewald", charges, accuracy=1e-4),
            Dispersion("pbe", cutoff=4.2, coordination_cutoff=4.0, smoothing=None, parameters=d3_parameters()),
        ),
        (Electrostatics("dsf", {"Mg": 2.0, "O": -2.0, "Ne": 0.5}, cutoff=4.2, alpha=0.2),),
        (Electrostatics("ewald", charges, dipoles=along, widths={"Mg": 0.3, "*": 0.2}, accuracy=1e-4),),
    ):

        def main(calculator, terms=terms):
            atoms, alone = crystal.copy(), crystal.copy()
            atoms.calc, alone.calc = calculator, Calculator(*terms)
            VelocityVerlet(atoms, 1.0 * units.fs).run(3)
            alone.positions[:] = atoms.positions

            def compare_all(what):
                expected = of(alone)
                for name, value in of(atoms).items():
                    error = np.abs(value - expected[name]).max() / np.abs(expected[name]).max()
                    assert error < 1e-9, (what, name, error)

            compare_all("after dynamics")
            for changed in (atoms, alone):
                changed.positions[7, 0] += 3.0
            compare_all("an atom far away")
            before = atoms.positions.copy()
            atoms.positions[0, 0] = np.nan
            try:
                atoms.get_forces()
            except ValueError as error:
                assert "NaN" in str(error), error
            else:
                raise AssertionError("NaN")
            atoms.positions[:] = before
            for changed in (atoms, alone):
                changed.set_cell(1.02 * changed.cell.array, scale_atoms=True)
                changed.numbers[[0, 6]] = 8, 10
            compare_all("another cell and other elements")
            if "dsf" in repr(terms):
                for changed in (atoms, alone):
                    changed.pbc = False
                assert abs(atoms.get_potential_energy() / alone.get_potential_energy() - 1.0) < 1e-12, "open"
                np.testing.assert_allclose(atoms.get_forces(), alone.get_forces(), rtol=0, atol=1e-10)
            return atoms.calc.searches

        made = on_ranks(main, *terms, group=group)
        assert (made is None) == (dist.get_rank(group) > 0)
        assert made is None or made in (2, 3, 4, 5), made

    # what rank 0 raises ends the others
    def fails(_):
        raise KeyError("mine")

    try:
        on_ranks(fails, *terms, group=group)
    except KeyError:
        assert dist.get_rank(group) == 0
    except OtherRankError as error:
        assert dist.get_rank(group) > 0 and "rank 0 failed: KeyError: 'mine'" in str(error), error
    else:
        raise AssertionError("an error on all ranks")


@case(2, 3)
def transforms_of_functions(group: Any) -> None:
    """torch.func with a domain: gradients, and derivatives along a direction of the atoms of all ranks; no vmap.

    One of three ranks has no atoms, so none of the directions that it would map over.
    """
    atoms, mine = Atoms(n=3), Atoms(n=3).mine(group)
    methods: tuple[tuple[Any, dict[str, Any]], ...] = (
        (ewald_summation, {"k_cutoff": 2.0, "cutoff": 3.0}),
        (particle_mesh_ewald, {"mesh_dimensions": (8, 9, 10), "cutoff": 3.0}),
    )
    for method, options in methods:
        # nothing is kept of a call before
        domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, group=group)
        q = domain.distribute(atoms.charges[mine])

        def whole(x: torch.Tensor, method: Any = method, options: Any = options) -> torch.Tensor:
            return method(x, atoms.charges, atoms.cell, 0.7, **options).sum()

        def share(
            x: torch.Tensor, domain: Domain = domain, q: torch.Tensor = q, method: Any = method, options: Any = options
        ) -> torch.Tensor:
            energies = method(domain.distribute(x), q, atoms.cell, 0.7, domain=domain, **options)
            return domain.sum(energies.sum())

        x, everywhere, along = atoms.positions[mine], atoms.positions, atoms.vectors
        assert_equal(torch.func.grad(share)(x), torch.func.grad(whole)(everywhere)[mine], "gradient")
        found = torch.func.jvp(torch.func.grad(share), (x,), (along[mine],))
        expected = torch.func.jvp(torch.func.grad(whole), (everywhere,), (along,))
        for ours, theirs in zip(found, expected):
            assert_equal(ours, theirs[mine], "Hessian times a vector")
        own = domain.distribute(x)

        def of_own(
            own: torch.Tensor,
            cell: torch.Tensor = atoms.cell,
            domain: Domain = domain,
            q: torch.Tensor = q,
            method: Any = method,
            options: Any = options,
        ) -> torch.Tensor:
            return method(own, q, cell, 0.7, domain=domain, **options)

        for transform, function, at in (
            (torch.func.hessian, share, x),
            (torch.func.jacfwd, share, x),
            (torch.func.vmap, share, torch.stack([x, x])),
            (torch.func.vmap, of_own, torch.stack([own, own])),
            (torch.func.vmap, functools.partial(of_own, own), torch.stack([atoms.cell, atoms.cell])),
        ):
            with pytest.raises(NotImplementedError, match="cannot map over a call with a `domain`"):
                transform(function)(at)
        assert_equal(share(x), whole(everywhere), "and then normal work")


@case(2)
def compiled_functions_break_at_calls_with_a_domain(group: Any) -> None:
    """Edges, and a sum over pairs with its gradients, are those of calls that are not compiled."""
    atoms = Atoms(n=3)
    mine = atoms.mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=CUTOFF, group=group)
    x, q = domain.distribute(atoms.positions[mine]).requires_grad_(), domain.distribute(atoms.charges[mine])

    def energy(x: torch.Tensor) -> torch.Tensor:
        lengths = Graph(System(x, cell=atoms.cell, domain=domain), CUTOFF).distances
        return domain.sum(PAIRS_OF_CHARGES(x, atoms.cell, q=q, domain=domain).sum() + lengths.square().sum())

    with mock.patch.object(communication, "LOOK", datetime.timedelta(milliseconds=1)):  # a rank that compiles is late
        totals = [energy(x), torch.compile(energy, backend="eager")(x)]
    expected, found = ([total, *torch.autograd.grad(total, x)] for total in totals)
    for k in range(2):
        assert_equal(found[k], expected[k], k)
