"""Sums of batches that are called again: choices that are kept, and plans, as `test_repeated_sums` has for one."""

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from nvalchemiops.locks import Kept
from nvalchemiops.torch.interactions.electrostatics import (
    ewald_summation,
    k_vectors,
    particle_mesh_ewald,
    pme_reciprocal_space,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy import choice, sizes
from nvalchemiops.torch.interactions.electrostatics.terms import mesh as meshes
from nvalchemiops.torch.interactions.electrostatics.terms import reciprocal
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.runtime.cache import MOST_ENTRIES
from nvalchemiops.torch.runtime.context import on_host
from tests.lanes.fibers import gpu_layout
from tests.support.comparing import close
from tests.support.plans import forget, ordinary, plan_of, way_of
from tests.support.repeated import F64, NAMES, REQUESTS, assert_as_ordinary, gradients, moved, same_bits


def a_batch(sizes=(8, 12, 5), seed=0):
    """Charged systems of several sizes, whose boxes are long in different directions."""
    generator = torch.Generator().manual_seed(seed)
    cell = torch.diag_embed(torch.tensor([[5.0, 3.0, 4.0], [3.0, 6.0, 4.0], [3.5, 3.0, 9.0]], dtype=F64)[: len(sizes)])
    cell = cell + 0.2 * torch.rand(cell.shape, generator=generator, dtype=F64)
    numbers = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(sizes))
    x = (torch.rand(sum(sizes), 1, 3, generator=generator, dtype=F64) @ cell[numbers]).squeeze(1)
    return x, torch.randn(sum(sizes), generator=generator, dtype=F64), cell, numbers


def test_forces_of_a_batch_that_change_by_a_step(monkeypatch):
    """The parts of other systems are kept, and all calls share a plan; bits do not depend on the calls before."""
    grid = torch.cartesian_prod(*[torch.arange(2, dtype=F64)] * 3) / 2
    cell = torch.diag_embed(torch.tensor([[4.0, 4.0, 4.0], [4.0, 4.2, 4.5], [5.0, 4.0, 4.5]], dtype=F64))
    numbers = torch.arange(3, dtype=torch.int32).repeat_interleave(8)
    x, q = (grid @ cell).reshape(-1, 3), (1.0 - 4.0 * grid.sum(1) % 4.0).repeat(3)
    names = ("neighbor_list", "neighbor_ptr", "neighbor_shifts")
    near = dict(zip(names, neighbor_list(x, 4.0, cell, batch_idx=numbers, return_neighbor_list=True)))
    displaced = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=F64)

    def results(x):
        computed = {"compute_forces": True, "compute_virial": True}
        return ewald_summation(x, q, cell, batch_idx=numbers, accuracy=1e-4, cutoff=4.0, **near, **computed)

    def gradients(x):
        x, h = x.clone().requires_grad_(), cell.clone().requires_grad_()
        energies = ewald_summation(x, q, h, batch_idx=numbers, accuracy=1e-4, cutoff=4.0, **near)
        first = torch.autograd.grad(energies.square().sum(), (x, h), create_graph=True)
        return [t.detach() for t in (*first, *torch.autograd.grad(first[1].square().sum(), (x, h)))]

    def at(step):
        """The atoms of some systems, as the bits of ``step`` say, are farther from their sites."""
        far = torch.tensor([0.2 if step >> bit & 1 else 0.12 for bit in range(3)], dtype=F64)
        return x + far[numbers].unsqueeze(1) * displaced

    monkeypatch.setattr(reciprocal, "_parts", Kept(4))
    for call, tolerance in ((results, 0.0), (gradients, 1e-11)):
        forget()
        ways = []
        for step in (0, 1, 3, 2, 6, 7, 5, 4):
            found = call(at(step))
            ways.append(way_of("sum"))
            with monkeypatch.context() as patch:
                patch.setattr(reciprocal, "_parts", Kept(4))
                patch.setattr("nvalchemiops.torch.runtime.cache._kept", Kept(MOST_ENTRIES))
                close(found, ordinary(functools.partial(call, at(step))), tolerance)
        # a second derivative passes the first ones twice, so the parameters of each call have their own plan
        assert call is gradients or ways.count("plan (replayed, for any parameters)") > 1, ways
    (parts,) = reciprocal._parts.values()
    assert len(parts) > 5, "forces of all systems were to change"


@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_choices_that_are_kept_for_batches_are_those_that_are_made(function, monkeypatch):
    """Cells, and which atoms are in which system, change in the same memory; other atoms, charges and accuracies."""
    x, q, cell, numbers = a_batch()
    changed, places = cell.clone(), numbers.clone()
    near = x.clone()
    near[1] = near[0] + 0.2
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    systems = [(x, q, changed, places, 1e-4), (near, q, changed, places, 1e-4), (x, q, changed, places, 1e-6)]
    systems += [(x[shuffled], q[shuffled], changed, places[shuffled], 1e-4)]
    systems += [(x.float(), q.float(), cell.float(), places, 1e-4), (x, q, cell[[1, 0, 2]], places, 1e-4)]

    def results_of_all():
        inputs = [(x, q, h, idx.clone(), a) for x, q, h, idx, a in systems]
        found = [function(x, q, h, batch_idx=idx, accuracy=a, compute_forces=True) for x, q, h, idx, a in inputs]
        return tuple(t for both in found for t in both)

    for scale, n_moved in ((1.0, 0), (1.2, 0), (1.0, 4), (1.0, 0)):
        changed.copy_(scale * cell)
        places.copy_(numbers)
        places[8 : 8 + n_moved] = 0
        kept = [results_of_all() for _ in range(2)][1]
        with monkeypatch.context() as patch:
            patch.setattr(choice, "key_of_sizes", lambda _: None)
            patch.setattr("nvalchemiops.torch.runtime.cache._kept", Kept(MOST_ENTRIES))
            meshes._meshes.clear()
            same_bits(kept, results_of_all())


@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_kept_long_range_parts_are_those_of_alpha_and_accuracy(function, monkeypatch):
    """That are given, so that no other part of the choice differs. Moments set forces, to which the accuracy refers."""
    x, q, cell, numbers = a_batch()
    few = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=F64)

    def energies(alpha, accuracy, dipoles=None):
        return function(x, q, cell, alpha, batch_idx=numbers, cutoff=5.0, accuracy=accuracy, dipoles=dipoles)

    given = [(0.7, 1e-3), (0.7, 1e-5), (0.9, 1e-3), (torch.tensor([0.7, 0.9, 0.7], dtype=F64), 1e-3)]
    given += [(0.7, 1e-3, few), (0.7, 1e-3, 8.0 * few)]
    kept = [[energies(*each) for each in given] for _ in range(3)][2]
    with monkeypatch.context() as patch:
        patch.setattr(choice, "key_of_sizes", lambda _: None)
        same_bits(tuple(kept), tuple([energies(*each) for each in given]))
    assert len({float(e.sum()) for e in kept}) == len(given)


def test_plans_of_chosen_k_vectors_are_known_by_what_these_follow_from(monkeypatch):
    """Not by tensors, which may have to be made again. A given alpha may change in place."""
    x, q, cell, numbers = a_batch()
    alpha = torch.tensor([0.8, 0.9, 0.7], dtype=F64)
    before = alpha.clone()
    call = functools.partial(ewald_summation, x, q, cell, batch_idx=numbers, accuracy=1e-4, compute_forces=True)
    for options, others in (({}, {}), ({"alpha": alpha}, {"alpha": before})):
        forget()
        for _ in range(5):
            call(**options)
        alpha.add_(0.1)
        monkeypatch.setattr("nvalchemiops.torch.runtime.cache._kept", Kept(MOST_ENTRIES))
        found = call(**others)
        assert way_of("sum") == "plan (replayed)"
        close(found, ordinary(functools.partial(call, **others)), 0.0)
        alpha.copy_(before)


@pytest.mark.parametrize("of_points", [True, False], ids=["charges", "dipoles"])
@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_gradients_by_alpha_beside_long_range_parts_that_are_kept(function, of_points, monkeypatch):
    """Energies and forces depend on a given alpha at fixed k-vectors, or a fixed mesh, in each call alike."""
    x, q, cell, numbers = a_batch()
    sources = {} if of_points else {"dipoles": 0.2 * x.cos()}

    def gradients():
        alpha = torch.full((3,), 0.7, dtype=F64, requires_grad=True)
        energies, forces = function(
            x, q, cell, alpha, batch_idx=numbers, cutoff=4.0, accuracy=1e-3, compute_forces=True, **sources
        )
        return torch.autograd.grad(energies.sum() + (forces * x.sin()).sum(), alpha)

    found = [gradients() for _ in range(3)]
    monkeypatch.setattr(choice, "key_of_sizes", lambda _: None)
    close([g for (g,) in found], [gradients()[0]] * 3, 1e-11)


@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_invalid_systems_are_nan_in_each_call(function):
    """Where values are not read, although what was chosen for their cells is kept."""
    x, q, cell, numbers = a_batch()
    pbc = torch.ones(3, 3, dtype=torch.bool)
    pbc[1, 2] = False
    for given in ({}, {"alpha": 1.2, "cutoff": 1.0}):  # the last leaves atoms without neighbors
        options = {"batch_idx": numbers, "accuracy": 1e-3, "compute_forces": True, "compute_virial": True, **given}
        with gpu_layout():
            for _ in range(3):
                energies, forces, virial = function(x, q, cell, pbc=pbc, **options)
                for of_system in (energies.isnan(), forces.isnan().all(1), forces.isnan().any(1)):
                    assert torch.equal(of_system, numbers == 1)
                assert torch.equal(virial.isnan().flatten(1).all(1), torch.tensor([False, True, False]))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_graphs_choose_k_vectors():
    """For the cells and alphas with which they are called, or they raise for another number of k-vectors."""
    x, q, cell, numbers = a_batch()
    near = dict(zip(NAMES[False], neighbor_list(x, 3.0, cell, None, numbers, return_neighbor_list=True)))

    def energy(x, cell, alpha):
        return ewald_summation(x, q, cell, alpha, batch_idx=numbers, accuracy=1e-3, **near).sum()

    alpha = torch.full((3,), 0.7, dtype=F64)
    energy(x, cell, alpha)
    for traced in (make_fx(energy)(x, cell, alpha), torch.jit.trace(energy, (x, cell, alpha), check_trace=False)):
        close([traced(x, cell, alpha)], [energy(x, cell, alpha)], 1e-12)
        try:
            found = traced(x, cell, 1.5 * alpha)
        except RuntimeError:
            continue
        close([found], [energy(x, cell, 1.5 * alpha)], 1e-12)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_sums_over_a_mesh_of_charges_and_dipoles():
    """By torch.jit.trace, for other positions and cells than those of the trace."""
    x, q, cell, numbers = a_batch()
    for dipoles in (None, 0.1 * x.cos()):

        def forces(x, cell, dipoles=dipoles):
            mesh = {"mesh_dimensions": (16, 16, 16), "spline_order": 6, "alpha": 0.7, "cutoff": 3.0}
            return particle_mesh_ewald(x, q, cell, batch_idx=numbers, dipoles=dipoles, compute_forces=True, **mesh)

        traced = torch.jit.trace(forces, (x, cell), check_trace=False)
        close(traced(x.sin(), 1.1 * cell), forces(x.sin(), 1.1 * cell), 1e-12)


def test_exported_sums_over_a_mesh_of_any_number_of_channels():
    x, q, cell, numbers = a_batch()

    class Forces(torch.nn.Module):
        def forward(self, charges, dipoles):
            mesh = {"mesh_dimensions": (8, 8, 8), "alpha": 0.7, "cutoff": 3.0, "compute_forces": True}
            return particle_mesh_ewald(x, charges, cell, batch_idx=numbers, dipoles=dipoles, **mesh)

    def sources(n):
        charges = q[:, None] * torch.arange(1.0, n + 1)
        return charges, charges[:, :, None] * x.cos()[:, None]

    shapes = [{1: torch.export.Dim("channels", min=2)}] * 2
    program = torch.export.export(Forces(), sources(2), dynamic_shapes=tuple(shapes), strict=False).module()
    close(program(*sources(3)), Forces()(*sources(3)), 1e-12)


@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_repeated_choices_wait_for_cells_alone(function, monkeypatch):
    """On a GPU: of what was chosen before nothing is read again, and neither k-vectors nor a mesh are found again."""
    x, q, cell, numbers = a_batch()

    def forces():
        return function(x, q, cell, batch_idx=numbers, accuracy=1e-4, compute_forces=True)[1]

    expected, read = forces(), []
    with gpu_layout():
        found = [forces() for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(sizes, "on_host", lambda t: read.append(t) or on_host(t))
            for module in (choice, meshes, reciprocal, k_vectors):
                patch.setattr(module, "on_host", None)
            for name in ("points_on_host", "_joined_parts"):
                patch.setattr(reciprocal, name, None)
            patch.setattr(meshes, "mesh_for", None)
            found.append(forces())
        numbers[:6] = 2
        of_other_sizes = forces()
    close([*found, of_other_sizes], [*[expected] * 4, forces()], 1e-12)
    assert [t.shape for t in read if t.shape != (len(cell),)] == [cell.shape]  # the others are on the host


OF_BATCHES = {
    "given": (ewald_summation, {"alpha": 0.9, "k_cutoff": 6.0}),
    "given mesh": (particle_mesh_ewald, {"alpha": 0.9, "mesh_dimensions": (12, 10, 9)}),
    "chosen": (ewald_summation, {"accuracy": 1e-4}),
    "chosen mesh": (particle_mesh_ewald, {"accuracy": 2e-5}),  # no list is as long as another axis
}


def sum_of_batch(name, x, q, cell, numbers, **asked):
    """One of `OF_BATCHES`, with a list if parameters are given."""
    function, options = OF_BATCHES[name]
    near = {}
    if "alpha" in options:
        found = neighbor_list(x.detach(), 3.0, cell, None, numbers, return_neighbor_list=True)
        near = dict(zip(NAMES[False], found))
    return function(x, q, cell, batch_idx=numbers, **near, **options, **asked)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", OF_BATCHES)
def test_batches_have_plans(name, dtype):
    """The same bits as without, where values and memory of all arguments but those of cells and systems differ."""
    x, q, cell, numbers = a_batch()
    x, q, cell = x.to(dtype), q.to(dtype), cell.to(dtype)
    for step in range(5):
        y, p, _ = moved(x, q, {}, step)
        for request in ("all", "of systems"):

            def call(y=y, p=p, request=request):
                return sum_of_batch(name, y, p, cell.clone(), numbers.clone(), **REQUESTS[request])

            same_bits(call(), ordinary(call))
    plan_of(count=2 if "given" in name else 3)


def test_hybrid_forces_of_a_large_batch_have_a_plan():
    """Its alpha is too long to be compared by value: plans recognize the tensor, which is not detached anew."""
    x, q, cells, _ = a_batch((257,))
    cell, numbers = cells[:1].expand(257, 3, 3).contiguous(), torch.arange(257, dtype=torch.int32)
    near = dict(zip(NAMES[False], neighbor_list(x, 3.0, cell, None, numbers, return_neighbor_list=True)))
    alpha = torch.full((257,), 0.9, dtype=F64)
    for step in range(3):
        y, p, _ = moved(x, q, {}, step)
        given = {"k_cutoff": 3.0, "batch_idx": numbers, **near, "compute_forces": True, "hybrid_forces": True}
        ewald_summation(y, p, cell, alpha, **given)
    assert way_of("sum") == "plan (replayed)"


@pytest.mark.parametrize("name", OF_BATCHES)
def test_gradients_of_batches(name):
    """First and second order, by positions and charges; weights of systems and of atoms."""
    x, q, cell, numbers = a_batch()

    def energies(x, q):
        return sum_of_batch(name, x, q, cell, numbers)

    of_systems, of_atoms = torch.tensor([1.0, 0.5, 2.0], dtype=F64)[numbers], torch.linspace(0.5, 1.5, 25, dtype=F64)
    for step in range(4):
        y, p, _ = moved(x, q, {}, step)
        for weights, order in ((of_systems, 1), (of_atoms, 1), (of_systems, 2)):
            assert_as_ordinary(gradients, energies, (y, p), weights, order)
    plan_of(count=1 if "given" in name else 2)


@pytest.mark.parametrize("name", [*OF_BATCHES, "long range"])
def test_batches_of_another_composition_or_other_cells(name):
    """In the memory of the first ones, or not; atoms in any order, where a list is searched for."""
    x, q, cell, numbers = a_batch()
    here, places = cell.clone(), numbers.clone()

    def call():
        if name == "long range":
            return pme_reciprocal_space(x, q, here, 0.9, (12, 10, 9), batch_idx=places, compute_forces=True)
        return sum_of_batch(name, x, q, here, places, compute_forces=True)

    for _ in range(4):
        first = call()
    compositions = [numbers.clone() for _ in range(2)]
    compositions[0][8:12] = 0
    if "given" not in name:
        compositions.append(numbers[torch.randperm(25, generator=torch.Generator().manual_seed(2))])
    for composition in (*compositions, numbers):
        for scale in (1.0, 1.1, 1.0):
            here.copy_(scale * cell)
            places.copy_(composition)
            found = call()
            same_bits(found, ordinary(call))
            if scale == 1.1 or not torch.equal(composition, numbers):
                assert not torch.equal(found[0], first[0])
    places = numbers.long()
    same_bits(call(), first)
    here.zero_(), places.zero_()  # nothing of them is kept
    here, places = cell.clone(), numbers.clone()
    same_bits(call(), first)


def test_batches_with_faults():
    """What is no number stays in its system; errors are those of the ordinary way, and plans work on after them."""
    x, q, cell, numbers = a_batch((8, 12, 0))
    for _ in range(4):
        expected = sum_of_batch("given", x, q, cell, numbers, energy_reduction="system")
    plan_of()
    nothing = x.clone()
    nothing[3] = torch.nan
    near = dict(zip(NAMES[False], neighbor_list(x, 3.0, cell, None, numbers, return_neighbor_list=True)))
    options = {"alpha": 0.9, "k_cutoff": 6.0, "energy_reduction": "system", **near}
    energies = ewald_summation(nothing, q, cell, batch_idx=numbers, **options)
    assert energies.isnan().tolist() == [True, False, False] and torch.equal(energies[1:], expected[1:])
    with pytest.raises(ValueError, match="batch_idx"):
        ewald_summation(x, q, cell, batch_idx=numbers + 2, **options)
    with pytest.raises(ValueError, match="neighbor_list"):
        wrong = {**options, "neighbor_list": near["neighbor_list"].flip(1)}
        ewald_summation(x, q, cell, batch_idx=numbers, **wrong)
    same_bits(sum_of_batch("given", x, q, cell, numbers, energy_reduction="system"), expected)
    plan_of()
