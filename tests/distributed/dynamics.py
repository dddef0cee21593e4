"""Cases for several ranks: dynamics of systems whose atoms are divided. See `ranks.py`."""

import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ase.build
import ase.io
import pytest
import torch
import torch.distributed as dist

from nvalchemiops.ase import Calculator, FromASE, Pair
from nvalchemiops.constants import FEMTOSECOND, GIGAPASCAL, KELVIN
from nvalchemiops.torch.distributed import Domain, OtherRankError
from nvalchemiops.torch.dynamics import (
    LBFGS,
    CellFilter,
    Constraints,
    ConvergenceWarning,
    Evaluation,
    FromEnergies,
    Integrator,
    Model,
    Simulation,
    State,
    SumOfTerms,
    csvr,
    kinetic_energy,
    langevin,
    maxwell_boltzmann,
    nose_hoover,
    nph,
    npt,
    nve,
    relax,
    remove_rotation,
    simulate,
    stochastic_cell,
    to_ase,
)
from nvalchemiops.torch.dynamics.simulate import Hook
from nvalchemiops.torch.interactions.dispersion import DFTD3
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald
from nvalchemiops.torch.interactions.pair import PairPotential, buckingham
from nvalchemiops.torch.neighbors import VerletList, neighbor_list
from nvalchemiops.torch.operators.segments import system_sums
from nvalchemiops.torch.systems import System
from tests.distributed.common import F64, Atoms, assert_equal, case, chosen, raises, rows_of_owned
from tests.dynamics.systems import SOFT, argon, crystal, joined
from tests.support.molecules import parameters as d3_parameters

DT, KT = 5.0 * FEMTOSECOND, 1500.0 * KELVIN
ALL = ("potential_energy", "kinetic_energy", "temperature", "conserved")


class Held:
    """A system, the part of its atoms that this rank holds, and the division."""

    def __init__(self, group: Any, whole: System, *, cutoff: float, skin: float = 0.5) -> None:
        size, rank, n = dist.get_world_size(group), dist.get_rank(group), len(whole.positions)
        edges = [n * r * (r + 1) // (size * (size + 1)) for r in range(size + 1)]
        self.whole, self.mine = whole, slice(edges[rank], edges[rank + 1])
        per_atom = {"positions", "charges", "numbers", "batch_idx"}
        held = {
            name: value[self.mine] for name, value in whole._asdict().items() if name in per_atom and value is not None
        }
        self.system = whole._replace(**held)
        x, cell, pbc, batch_idx = (self.system._asdict()[name] for name in ("positions", "cell", "pbc", "batch_idx"))
        self.domain = Domain(x, cell, pbc, batch_idx, cutoff=cutoff, skin=skin, group=group)
        self.own = self.domain.distribute(self.system)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Values of all atoms, for those that this rank owns."""
        return self.domain.distribute(values[self.mine])

    def run(
        self,
        model: Model,
        integrator: Integrator,
        steps: int = 30,
        record: Sequence[str] = ALL,
        hooks: Sequence[Hook] = (),
        **options: Any,
    ) -> tuple[Simulation, list[Domain]]:
        """A run on ranks, which must be that of one process, and its domains."""
        per_atom = {name: options.pop(name) for name in ("masses", "velocities") if name in options}
        given = {"record": record, **options}
        expected = simulate(self.whole, model, integrator, steps, hooks=hooks, **per_atom, **given)
        domains = [self.domain]

        def note(state: Any) -> None:
            if state.system.domain is not domains[-1]:
                domains.append(state.system.domain)

        own = {name: self.of(value) for name, value in per_atom.items()}
        found = simulate(self.own, model, integrator, steps, hooks=[note, *hooks], **own, **given)
        state, domain = found.state, found.state.system.domain
        held, there = domain.gather(state.system), expected.state
        assert held.domain is None
        for name in ("positions", "charges", "numbers", "batch_idx"):
            value, theirs = getattr(held, name), getattr(there.system, name)
            if theirs is not None:
                assert_equal(value.to(F64), theirs[self.mine].to(F64), name)
        assert_equal(domain.gather(state.velocities), there.velocities[self.mine], "velocities")
        assert_equal(domain.gather(1.0 / state.masses), 1.0 / there.masses[self.mine], "masses")
        assert_equal(domain.gather(state.evaluation.forces), there.evaluation.forces[self.mine], "forces", 1e-9)
        assert_equal(held.cell, there.system.cell, "cell")
        for name, values in found.records.items():
            assert_equal(values, expected.records[name], name, 1e-9)
            assert domain._is_same(values), name
        for name in integrator.parameters:
            assert_equal(state.extra[name], there.extra[name], name)
        return found, domains


def number_of_moves(domains: Sequence[Domain]) -> int:
    """How many atoms have changed from one rank to another."""
    first, last = (set(domain.global_index.tolist()) for domain in (domains[0], domains[-1]))
    return int(domains[0].sum(torch.tensor(len(last - first))))


@case(2, 3)
def trajectories_are_those_of_one_process(group: Any) -> None:
    """Of all flows, with atoms that change their owners, and cells that change while domains last."""
    held = Held(group, System.from_ase(crystal()), cutoff=5.5)
    velocities = 0.05 * torch.randn(held.whole.positions.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    strained = (*ALL, "volume", "pressure")
    fast = {"barostat_time": 50.0 * DT, "thermostat_time": 20.0 * DT}
    more: tuple[tuple[Integrator, dict[str, Any]], ...] = ()
    if chosen["which"] != "few":  # most of their flows are in the others, too
        more = (
            (nose_hoover(DT, KT, thermostat_time=20.0 * DT), {"seed": 3}),
            (csvr(DT, KT, thermostat_time=20.0 * DT), {"seed": 3}),
            (nph(DT, 0.1 * GIGAPASCAL, cell="axes", barostat_time=50.0 * DT), {"velocities": velocities}),
        )
    moves = 0
    for integrator, options in (
        (nve(DT), {"velocities": velocities}),
        (langevin(DT, KT), {"seed": 3}),
        *more,
        (npt(DT, KT, 0.1 * GIGAPASCAL, cell="full", **fast), {"record": strained}),
        (stochastic_cell(DT, KT, 0.1 * GIGAPASCAL, compressibility=1.0 / GIGAPASCAL, **fast), {"record": strained}),
    ):
        found, domains = held.run(argon(), integrator, **options)
        assert 1 < len(domains) < 16, len(domains)  # steps without a division, also where the cell changes
        moves += number_of_moves(domains)
        change = found.records["conserved"] - found.records["conserved"][0]
        assert float(change.abs().max()) < 0.02 * float(found.records["kinetic_energy"].mean())
    assert moves > 0
    cluster = held.whole._replace(pbc=torch.tensor([False, False, False]))  # at rest: it does not rotate
    Held(group, cluster, cutoff=5.5).run(argon(), nve(DT), 2)


@case(2, 3)
def batches_of_divided_systems(group: Any) -> None:
    """Different sizes, cells, parameters and keys of systems; frozen atoms, and parameters of all atoms in a model."""
    both = joined([System.from_ase(crystal()), System.from_ase(crystal((2, 2, 3), a=5.3, seed=2))])
    order = torch.randperm(len(both.positions), generator=torch.Generator().manual_seed(2))
    both = both._replace(positions=both.positions[order], batch_idx=both.batch_idx[order])
    held = Held(group, both, cutoff=5.5, skin=0.5)
    masses = torch.where(torch.arange(len(order)) % 9 == 0, torch.inf, 39.9).to(F64)
    sizes = 3.4 + 0.1 * torch.rand(len(order), generator=torch.Generator().manual_seed(3), dtype=F64)
    potential = PairPotential(
        "0.04*(((sigma1+sigma2)/2/r)^12 - ((sigma1+sigma2)/2/r)^6)", per_atom=("sigma",), cutoff=5.5, r_switch=4.5
    )
    model = SumOfTerms(partial(potential, sigma=sizes))
    pressures = torch.tensor([0.0, 0.5], dtype=F64) * GIGAPASCAL
    options: Any = {"masses": masses, "seed": 5, "keys": torch.tensor([7, 4])}
    kt = torch.tensor([1.0, 2.0], dtype=F64) * 0.4 * KT
    for integrator in (langevin(DT, kt), npt(DT, kt, pressures, cell="axes", barostat_time=100.0 * DT)):
        _, domains = held.run(model, integrator, 20, **options)
        assert len(domains) > 1


@case(2, 3)
def charges_move_with_their_atoms(group: Any) -> None:
    """A mesh in a cell that changes; then dispersion, which has its own units."""
    salt = ase.build.bulk("NaCl", "rocksalt", a=5.6, cubic=True) * 2
    salt.rattle(0.1, seed=1)
    charges = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0).to(F64)
    whole = System.from_ase(salt, charges)
    repulsion = partial(buckingham(5.5, r_switch=4.5), A=1500.0, rho=0.32, C=0.0)
    # so short-ranged that it makes no difference that one process sums pairs of its list beyond the cutoff, too
    electrostatics = ParticleMeshEwald(1.0, mesh_dimensions=(12, 14, 16), spline_order=5, cutoff=5.5)
    held = Held(group, whole, cutoff=5.5, skin=0.3)
    barostat = npt(3.0 * FEMTOSECOND, 1200.0 * KELVIN, 0.0, cell="full", barostat_time=200.0 * FEMTOSECOND)
    bound = partial(electrostatics, charges=torch.linspace(-0.1, 0.1, 64, dtype=F64))
    _, domains = held.run(SumOfTerms(repulsion, electrostatics, bound), barostat, 20, seed=1)
    assert 1 < len(domains) < 12, len(domains)
    # a slab in a vacuum that is narrower than the cutoff: only the mesh sum has pairs across it
    vacuum, axes = torch.diag(torch.tensor([0.0, 0.0, 3.0], dtype=F64)), torch.tensor([True, True, False])
    slab = Held(group, whole._replace(cell=whole.cell + vacuum, pbc=axes), cutoff=5.5, skin=0.2)
    flat = {"cell": "axes", "mask": (True, True, False), "barostat_time": 200.0 * FEMTOSECOND}
    barostat = npt(3.0 * FEMTOSECOND, 1200.0 * KELVIN, 0.0, **flat)
    _, domains = slab.run(SumOfTerms(repulsion, electrostatics), barostat, 12, seed=1)
    assert len(domains) > 1
    wide, own = slab.whole._replace(cell=slab.whole.cell + 0.3 * vacuum), slab.own
    assert electrostatics(own).energies.shape == own.charges.shape
    assert own.domain.displacement(own.positions, wide.cell) > 0.1
    domain, x, q = own.domain.follow(own.positions, own.charges, cell=wide.cell)
    found = electrostatics(System(x, q, wide.cell, domain=domain), compute_forces=True)
    assert_equal(
        domain.gather(found.forces), electrostatics(wide, compute_forces=True).forces[slab.mine], "more vacuum"
    )

    model = SumOfTerms(DFTD3("pbe", [11, 17], d3_parameters(), cutoff=10.0, coordination_cutoff=9.0, smoothing=None))
    strained = [s._replace(cell=1.005 * s.cell, positions=1.005 * s.positions) for s in (whole, held.own)]
    expected, found = map(model, strained)
    assert_equal(found.energies, expected.energies, "energy")
    assert_equal(found.stress, expected.stress, "stress")
    assert_equal(held.domain.gather(found.forces), expected.forces[held.mine], "forces")


@case(2, 3)
def molecules_that_borders_cut_stay_rigid(group: Any) -> None:
    """Clusters of two sizes, with atoms on several ranks and in other images; frozen atoms; cells that change."""
    generator = torch.Generator().manual_seed(5)
    places = 3.4 * torch.cartesian_prod(*(torch.arange(3.0, dtype=F64),) * 3)
    shape = torch.tensor([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]], dtype=F64)
    turns = torch.linalg.qr(torch.randn(27, 3, 3, generator=generator, dtype=F64))[0]
    atoms = (places[:, None] + shape @ turns).reshape(-1, 3)
    shuffled = torch.randperm(81, generator=generator)
    number = torch.argsort(shuffled)  # of each atom after shuffling
    triples = number[torch.arange(81).reshape(27, 3)]
    pairs = torch.cat([triples[:, [0, 1]], triples[:, [0, 2]], triples[:20, [1, 2]]])
    cell = 10.2 * torch.eye(3, dtype=F64) + 0.3 * torch.randn(3, 3, generator=generator, dtype=F64)
    images = torch.randint(-1, 2, (81, 3), generator=generator).to(F64)
    x = atoms[shuffled] + images @ cell
    masses = torch.tensor([16.0, 1.0, 1.0], dtype=F64).repeat(27)[shuffled]
    masses[number[5]] = torch.inf
    # between oxygen atoms alone
    charges = torch.where(masses.isinf(), 0.0, (masses > 10.0).to(F64))
    potential = PairPotential("0.02*q1*q2*((2.9/r)^12 - (2.9/r)^6)", per_atom=("q",), cutoff=5.0, r_switch=4.0)
    dt, kt = 2.0 * FEMTOSECOND, 400.0 * KELVIN
    one = System(x, cell=cell)
    turned = one._replace(
        positions=x.flip(0) @ torch.eye(3, dtype=F64).flip(0), cell=cell @ torch.eye(3, dtype=F64).flip(0)
    )
    pairs_of_both = torch.cat([pairs, 161 - pairs])

    def push(state: State) -> State | None:
        """On the rank that owns the first atom alone."""
        domain, v = state.system.domain, state.velocities
        owned = (torch.arange(len(v)) if domain is None else domain.global_index).unsqueeze(1)
        return state._replace(velocities=torch.where(owned == 0, 1.1 * v, v)) if (owned == 0).any() else None

    for integrator, lengths, whole in (
        (nve(dt), None, one),
        (langevin(dt, kt), 0.9, one),
        (npt(dt, kt, 0.0, cell="full", barostat_time=50.0 * dt), None, joined([one, turned])),
        (stochastic_cell(dt, kt, 0.0, compressibility=1.0 / GIGAPASCAL, barostat_time=50.0 * dt), None, one),
    ):
        is_batch = whole is not one
        held = Held(group, whole, cutoff=5.0)
        of_atoms = [torch.cat([values, values.flip(0)]) if is_batch else values for values in (charges, masses)]
        start = 0.02 * torch.randn(whole.positions.shape, generator=generator, dtype=F64)
        options: Any = {"masses": of_atoms[1], "seed": 1, "record": ALL if lengths else (*ALL, "pressure")}
        options |= {} if lengths else {"velocities": start}
        which = pairs[:54] if lengths else pairs_of_both if is_batch else pairs
        options["hooks"] = [lambda _: None] * (dist.get_rank(group) == 0) if lengths else [push]
        constrained = integrator.constrained(Constraints(which, lengths))
        found, domains = held.run(SumOfTerms(partial(potential, q=of_atoms[0])), constrained, 15, **options)
        assert len(domains) > 1
        everywhere = domains[-1].collect(found.state.system.positions)
        if dist.get_rank(group) == 0 and lengths:
            bonds = everywhere[which[:, 0]] - everywhere[which[:, 1]]
            assert_equal(bonds.norm(dim=1), torch.full((54,), lengths, dtype=F64), "lengths", 1e-9)


@case(2, 3)
def domains_last_as_long_as_verlet_lists(group: Any) -> None:
    """For strains and displacements of several sizes; while they last, lists have all pairs and meshes are right."""
    atoms, cutoff, skin = Atoms(n=4), 3.0, 0.4
    mine, rank = atoms.mine(group), dist.get_rank(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=cutoff, skin=skin, group=group)
    charges = domain.distribute(atoms.charges[mine])
    verlet = VerletList(cutoff, skin)
    verlet(atoms.positions, atoms.cell)
    kept = []
    sheared, compressed = atoms.dyad / atoms.dyad.abs().sum(), -skin / (cutoff + skin) * torch.eye(3, dtype=F64)
    for scale in (0.0, 0.02, 0.05, 0.1, 0.2, 0.9, 1.4):
        for turn in (0.0, 0.5, 1.5):
            strain = scale * (compressed if scale > 0.5 else sheared)
            cell = atoms.cell + atoms.cell @ strain
            shift = torch.zeros_like(atoms.positions)
            shift[5] = turn * (0.5 * skin - 0.1 * min(scale, 0.5)) * atoms.vectors[5] / atoms.vectors[5].norm()
            x = atoms.positions + atoms.positions @ strain + shift
            verlet.reset()
            verlet(atoms.positions, atoms.cell)
            verlet(x, cell)
            own = x[domain.global_index]
            lasts = domain.follow(own, cell=cell)[0] is domain
            assert lasts == (not bool(verlet.rebuilt.any())), (scale, turn)
            displacement = domain.displacement(own, cell)
            assert lasts == (2.0 * displacement <= skin)
            assert 0.5 * domain._in_units(0.5).displacement(2.0 * own, 2.0 * cell) == displacement
            kept.append(lasts)
            if not lasts:
                with pytest.raises(ValueError, match="have moved by"):
                    domain.neighbors(own, cutoff, cell)
                continue
            pairs, _, shifts = neighbor_list(x, cutoff, cell, return_neighbor_list=True)
            expected = {row for row in map(tuple, torch.cat([pairs.T, shifts], 1).tolist())}
            with mock.patch.object(domain, "neighbors", partial(domain.neighbors, cell=cell)):
                found = set(rows_of_owned(domain, own, cutoff))
            held = set(domain.global_index.tolist())
            assert {row for row in expected if row[0] in held} <= found, rank
            energy = ParticleMeshEwald(0.7, mesh_dimensions=(16, 16, 16), cutoff=cutoff)
            results = [energy(System(x, atoms.charges, cell), compute_forces=True)]
            results.append(energy(System(own, charges, cell, domain=domain), compute_forces=True))
            assert_equal(results[1].forces, results[0].forces[domain.global_index], (scale, turn))
    assert 4 < sum(kept) < 14, kept
    new, own = domain.follow(own, cell=cell)
    assert torch.equal(new.cell[0], cell) and new is not domain
    assert_equal(own, x[new.global_index], "positions")


@case(2)
def runs_go_on_and_are_written(group: Any) -> None:
    """From a state, by another integrator, into one file; functions of velocities; and gradients through steps."""
    held = Held(group, System.from_ase(crystal()), cutoff=5.5, skin=0.4)
    rank = dist.get_rank(group)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole.traj")
        first = simulate(held.whole, argon(), langevin(DT, KT), 10, seed=2)
        last = simulate(first.state, argon(), npt(DT, KT, 0.0), 10, every=5, trajectory=whole)
        part = simulate(held.own, argon(), langevin(DT, KT), 10, seed=2)
        path = Path(folder, "parts.traj")
        found = simulate(part.state, argon(), npt(DT, KT, 0.0), 10, every=5, trajectory=path)
        assert_equal(found.records["conserved"], last.records["conserved"], "conserved", 1e-9)
        assert path.exists() == (rank == 0)
        if rank == 0:
            for ours, theirs in zip(ase.io.read(path, ":"), ase.io.read(whole, ":"), strict=True):
                assert abs(ours.positions - theirs.positions).max() < 1e-9
                assert abs(ours.get_momenta() - theirs.get_momenta()).max() < 1e-9
                assert abs(ours.get_forces() - theirs.get_forces()).max() < 1e-9
                assert abs(ours.cell.array - theirs.cell.array).max() < 1e-9

    state, theirs = found.state, last.state
    domain = state.system.domain
    kinetic = kinetic_energy(state.velocities, state.masses, domain=domain)
    assert_equal(kinetic, theirs.kinetic_energies, "kinetic energy")
    masses = state.masses if rank else -state.masses
    raises(lambda: maxwell_boltzmann(masses, KT, domain=domain), "`masses` must be positive")
    still = remove_rotation(state.velocities, state.system.positions, state.masses, domain=domain)
    expected = remove_rotation(theirs.velocities, theirs.system.positions, theirs.masses)
    assert_equal(domain.gather(still), expected[held.mine], "without rotation")

    def energies(system: System) -> torch.Tensor:
        return SOFT(system, sigma=3.4, epsilon=0.0104, energy_reduction="system").energies

    def slopes(system: System, velocities: torch.Tensor, total: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        kt = torch.tensor(KT, dtype=F64, requires_grad=True)
        velocities = velocities.clone().requires_grad_()
        barostat = npt(DT, kt, 0.0, barostat_time=20.0 * DT)
        run = simulate(system, FromEnergies(energies), barostat, 12, velocities=velocities, **options)
        assert system.domain is None or run.state.system.domain is not system.domain
        loss = total(run.state.system) + run.records["conserved"][-1].sum()
        return torch.autograd.grad(loss, (velocities, kt))

    velocities = 0.05 * torch.randn(held.whole.positions.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    expected = slopes(held.whole, velocities, lambda system: system.positions.square().sum())
    for options in ({}, {"checkpoint_every": 5}):
        found = slopes(held.own, held.of(velocities), lambda s: s.domain.sum(s.positions.square().sum()), **options)
        assert_equal(held.domain.gather(found[0]), expected[0][held.mine], "by velocities", 1e-9)
        assert_equal(found[1], expected[1], "by the temperature", 1e-9)


@case(2, 3)
def minima_are_those_of_one_process(group: Any) -> None:
    """With cells, fixed atoms, and batches: the steps of all optimizers, of which atoms take their part along."""
    ones = [System.from_ase(crystal(rattle=0.3)), System.from_ase(crystal((2, 2, 3), a=5.3, rattle=0.4, seed=2))]
    both = joined(ones)
    both = both._replace(numbers=torch.full((len(both.positions),), 18, dtype=torch.int32))
    fixed = torch.arange(len(both.positions)) % 7 == 0
    moves = 0
    for optimizer, cell in (
        ("fire", CellFilter(hydrostatic_strain=True, scalar_pressure=0.002)),
        ("fire2", False),
        (LBFGS(maxstep=0.5), True),
    ):
        options: Any = {"fmax": 3e-3, "cell": cell, "max_steps": 40}
        held = Held(group, both, cutoff=5.5, skin=0.3)
        domains = [held.domain]

        def note(progress: Any, domains: list[Domain] = domains) -> None:
            if progress.system.domain is not domains[-1]:
                domains.append(progress.system.domain)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            expected = relax(both, argon(), optimizer, fixed=fixed, **options)
            found = relax(held.own, argon(), optimizer, fixed=held.of(fixed), hooks=[note], **options)
        domain = found.system.domain
        assert domain is domains[-1] and len(domains) > 1
        moves += number_of_moves(domains)
        assert found.steps.tolist() == expected.steps.tolist() and int(found.steps.min()) > 5
        assert found.converged.tolist() == expected.converged.tolist()
        assert_equal(domain.gather(found.system.positions), expected.system.positions[held.mine], optimizer, 1e-8)
        assert_equal(found.system.cell, expected.system.cell, optimizer, 1e-8)
        assert_equal(found.evaluation.energies, expected.evaluation.energies, optimizer)
        largest = expected.evaluation.forces.abs().max()
        forces = domain.gather(found.evaluation.forces) - expected.evaluation.forces[held.mine]
        assert not len(forces) or float(forces.abs().max() / largest) < 1e-6
        assert domain._is_same(found.system.cell)
        for atoms, of_one in zip(to_ase(found), to_ase(expected), strict=True):  # those of the first rank
            assert len(atoms) == (len(of_one) if dist.get_rank(group) == 0 else 0)
            assert not len(atoms) or abs(atoms.get_forces() - of_one.get_forces()).max() < 1e-6 * float(largest)
    assert moves > 0


@case(2)
def what_ranks_cannot_do_is_named(group: Any) -> None:
    held = Held(group, System.from_ase(crystal()), cutoff=5.5)
    own, rank = held.own, dist.get_rank(group)
    of_rank = 1.0 + 0.1 * rank

    def forgetful(system: System) -> Evaluation:
        energies = (system.positions**2).sum(1, keepdim=True)
        return Evaluation(system_sums(energies, None, 1).squeeze(1), -2.0 * system.positions)

    lennard_jones = Pair("lennard_jones", cutoff=5.5, sigma=3.4, epsilon=0.0104)
    per_atom = PairPotential("sigma1*sigma2/r", per_atom=("sigma",), cutoff=5.5)
    far, beyond = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 32]])
    here = torch.ones(own.domain.n_owned, dtype=F64)
    with_cells = own._replace(cell=of_rank * own.cell)
    for call, words in (
        (lambda: simulate(own, argon(), nve(DT).constrained(Constraints(far, 0.1)), 1), "lengths of atoms .0, 1, 2."),
        (lambda: simulate(own, argon(), nve(DT).constrained(Constraints(beyond)), 1), "name atom 32 of 32"),
        (lambda: simulate(own, forgetful, nve(DT), 1), "`model`: energies differ between ranks"),
        (lambda: simulate(own, FromASE(Calculator(lennard_jones)), nve(DT), 1), "`domain`: a calculator"),
        (lambda: simulate(own, SumOfTerms(partial(per_atom, sigma=here)), nve(DT), 1), "`sigma` of a term must have"),
        (lambda: simulate(own, argon(), nve(of_rank * DT), 1), "`dt` must be the same on all ranks"),
        (lambda: simulate(own, argon(), nve(DT), 2 + rank), "`steps` must be the same on all ranks"),
        (lambda: simulate(own, argon(), nve(DT), 1, seed=rank), "`seed` must be the same on all ranks"),
        (lambda: argon()(with_cells), "`cell` must be the same on all ranks"),
        (lambda: own.domain.follow(own.positions, cell=with_cells.cell), "`cell` must be the same on all ranks"),
        (lambda: own.domain.distribute(held.system._replace(pbc=torch.tensor([True, True, False]))), "`pbc`"),
        (lambda: kinetic_energy(own.positions, here, here.int(), domain=own.domain), "belong to the `domain`"),
        (lambda: relax(own, forgetful), "`model`: energies differ between ranks"),
        (lambda: relax(own, argon(), fmax=0.1 * of_rank), "`fmax` must be the same on all ranks"),
    ):
        with pytest.raises((ValueError, TypeError, OtherRankError), match=words):
            call()
    with pytest.raises(ValueError if rank == 0 else OtherRankError, match="`velocities` must have shape"):
        simulate(own, argon(), nve(DT), 1, velocities=own.positions[: len(here) - (rank == 0)])
    held.run(argon(), nve(DT), 2, velocities=0.0 * held.whole.positions)
