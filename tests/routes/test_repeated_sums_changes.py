"""Sums that are called again after something changed: choices follow it, and no plan has what was before."""

import pytest
import torch

from nvalchemiops.notices import AccuracyWarning
from nvalchemiops.torch.interactions.electrostatics import (
    ewald_real_space,
    ewald_reciprocal_space,
    ewald_summation,
    generate_k_vectors_ewald_summation,
    particle_mesh_ewald,
    prepare_wave_vectors,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy import choice
from nvalchemiops.torch.interactions.electrostatics.terms import mesh as meshes
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.plans import ordinary, plan_of
from tests.support.repeated import F64, NAMES, REQUESTS, SUMS, arguments, moved, same_bits


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald])
def test_plans_where_parameters_and_neighbors_are_chosen(function, request_):
    """One for the forces by which they are chosen, and one for the sum."""
    x, q, cell, _ = arguments()
    for step in range(6):
        y, p, _ = moved(x, q, {}, step)

        def call(y=y, p=p):
            return function(y, p, cell, accuracy=1e-4, **REQUESTS[request_])

        same_bits(call(), ordinary(call))
    plan_of(count=2)
    z = y.clone().requires_grad_()

    def gradient():
        return torch.autograd.grad(function(z, p, cell, accuracy=1e-4).sum(), z)

    for _ in range(4):
        for found, expected in zip(gradient(), ordinary(gradient), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_choice_follows_the_atoms():
    """Forces that are ten times larger allow larger errors; a denser cell and another accuracy change all."""
    x, q, cell, _ = arguments()
    for _ in range(4):
        ewald_summation(x, q, cell, accuracy=1e-4)
    plan_of(count=2)
    near = x.clone()
    near[1] = near[0] + 0.2
    others = [(near, cell, 1e-4), (0.9 * x, 0.9 * cell, 1e-4), (x, cell, 1e-6), (x, cell, 1e-4)]
    for y, h, accuracy in others:

        def call(y=y, h=h, accuracy=accuracy):
            return ewald_summation(y, q, h, accuracy=accuracy, compute_forces=True)

        for _ in range(3):
            same_bits(call(), ordinary(call))


CHOSEN = {
    "nothing given": {},
    "list": {"list": None},
    "list and cutoff": {"list": 3.0},
    "long-range part": {"list": None, "given": True},
    "dipoles": {"dipoles": 0.3},
    "dipoles and widths": {"dipoles": 0.3, "widths": 0.2},
}


def chosen_sum(name, method, x, q, cell, accuracy=1e-4, scale=1.0):
    """Energies and forces with one of the choices `CHOSEN`; ``scale`` multiplies dipoles and widths."""
    options, near = dict(CHOSEN[name]), {}
    function, part = SUMS[method]
    if "list" in options:
        found = neighbor_list(x, 3.0, cell, return_neighbor_list=True)
        near = dict(zip(NAMES[False], found)) | {"cutoff": options["list"]}
    if "dipoles" in options:
        near["dipoles"] = options["dipoles"] * scale * torch.cos(torch.arange(3 * len(x))).reshape(-1, 3).to(x.dtype)
    if "widths" in options:
        near["widths"] = options["widths"] * scale
    part = part if "given" in options else {}
    return function(x, q, cell, accuracy=accuracy, compute_forces=True, **near, **part)


@pytest.mark.filterwarnings("ignore::nvalchemiops.NvalchemiopsWarning")
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("method", SUMS)
def test_choices_that_are_kept_are_those_that_are_made(method, name, monkeypatch):
    """For another cell, in the same memory too, for other atoms, charges, dipoles, widths and accuracies."""
    x, q, cell, _ = arguments()
    changed = cell.clone()
    near = x.clone()
    near[1] = near[0] + 0.2
    systems = [(x, q, changed, 1e-4), (near, q, changed, 1e-4), (x, q * 3.0, changed, 1e-4), (x, q, changed, 1e-6)]
    systems += [(x[:-1], q[:-1], changed, 1e-4), (x.float(), q.float(), cell.float(), 1e-4)]
    systems += [(x, q, changed, 1e-4, 1.5)] if "dipoles" in name else []

    def results_of_all():
        return [t for inputs in systems for t in chosen_sum(name, method, *inputs)]

    for scale in (1.0, 1.2, 1.0):
        changed.copy_(scale * cell)
        kept = [results_of_all() for _ in range(2)][1]
        with monkeypatch.context() as patch:
            patch.setattr(choice, "key_of_sizes", lambda _: None)
            meshes._meshes.clear()
            same_bits(tuple(kept), tuple(results_of_all()))


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("method", SUMS)
def test_choices_are_kept(method, name, monkeypatch):
    """For atoms that move, and dipoles that change, a little."""
    x, q, cell, _ = arguments()
    chosen_sum(name, method, x, q, cell, 1e-2)
    monkeypatch.setattr(choice, "optimal_splitting", None)
    monkeypatch.setattr(choice, "given_alpha", None)
    chosen_sum(name, method, x + 1e-6 * x.sin(), q, cell, 1e-2, 1.0 + 1e-6)


def test_a_warning_of_a_choice_comes_each_time():
    x, q, cell, _ = arguments()
    for _ in range(3):
        with pytest.warns(AccuracyWarning, match="splines of order 4"):
            particle_mesh_ewald(x, q, cell, spline_order=4, accuracy=1e-9)


def test_what_is_fixed_in_a_plan_is_part_of_its_key():
    """Another cell, alpha, cutoff, request, length of the list: each has results of its own."""
    x, q, cell, near = arguments()
    given = {"cell": cell, "alpha": 0.9, "k_cutoff": 6.0, "compute_forces": True}
    for _ in range(4):
        first = ewald_summation(x, q, **given, **near)
    plan_of()
    others = [{"cell": 1.01 * cell}, {"alpha": 0.8}, {"alpha": torch.tensor([0.8], dtype=F64)}, {"k_cutoff": 5.0}]
    for changed in others:

        def call(changed=changed):
            return ewald_summation(x, q, **{**given, **changed}, **near)

        found = call()
        assert not torch.equal(found[0], first[0])
        same_bits(found, ordinary(call))
    same_bits(ewald_summation(x, q, **given, **near), first)
    in_place = cell.clone()
    for scale in (1.0, 1.01):
        in_place.mul_(scale)
        expected = ordinary(lambda: ewald_summation(x, q, **given | {"cell": in_place.clone()}, **near))
        same_bits(ewald_summation(x, q, **given | {"cell": in_place}, **near), expected)


@pytest.mark.parametrize("function", [ewald_summation, ewald_real_space, ewald_reciprocal_space])
def test_requests_and_cutoffs_have_plans_of_their_own(function):
    """Of the same arguments, in turn."""
    x, q, cell, near = arguments()
    given = {} if function is ewald_real_space else {"k_cutoff": 6.0}
    given |= {"k_vectors": None} if function is ewald_reciprocal_space else near
    every = [*REQUESTS.values(), {"cutoff" if near.keys() <= given.keys() else "k_cutoff": 2.5}]
    for asked in every * 4:

        def call(asked=asked):
            return function(x, q, cell, alpha=0.9, **given | asked)

        same_bits(call(), ordinary(call))
    plan_of(count=len(every))


def test_memory_of_the_caller_is_neither_kept_nor_used_later():
    """A cell that was there when the plan was made may have other values when it runs."""
    x, q, cell, near = arguments()
    given = {"alpha": torch.tensor([0.9], dtype=F64), "k_cutoff": 6.0, "compute_forces": True}
    expected = ordinary(lambda: ewald_summation(x, q, cell, **given, **near))
    for _ in range(4):
        mine = cell.clone()
        theirs = {name: t.clone() for name, t in near.items()}
        found = ewald_summation(x, q, mine, **given | {"alpha": given["alpha"].clone()}, **theirs)
        same_bits(found, expected)
        mine.zero_(), [t.zero_() for t in theirs.values()]
        for result in found:
            result.zero_()  # results are the caller's
    plan_of()


def test_a_replay_leaves_earlier_results_alone():
    x, q, cell, near = arguments()
    kept = []
    for step in range(5):
        found = ewald_summation((1.0 + 0.01 * step) * x, q, cell, 0.9, k_cutoff=6.0, compute_forces=True, **near)
        kept.append((found, tuple(t.clone() for t in found)))
    plan_of()
    for found, then in kept:
        same_bits(found, then)


def test_wave_vectors_that_were_changed_are_others():
    x, q, cell, near = arguments()
    vectors = prepare_wave_vectors(cell, 6.0)
    call = {"miller_indices": vectors, **near}
    for _ in range(4):
        ewald_summation(x, q, cell, 0.9, **call)
    plan_of()
    vectors.weights.mul_(2.0)
    same_bits(ewald_summation(x, q, cell, 0.9, **call), ordinary(lambda: ewald_summation(x, q, cell, 0.9, **call)))


@pytest.mark.parametrize("change", ["numpy", "data", "storage"])
@pytest.mark.parametrize("name", ["k_vectors", "miller_indices"])
def test_prepared_data_that_were_changed_without_a_new_version_are_others(name, change):
    x, q, cell, near = arguments()
    given = {"k_vectors": generate_k_vectors_ewald_summation(cell, 6.0).clone()}
    if name == "miller_indices":
        given = {name: prepare_wave_vectors(cell, 6.0)}
    changed = given["k_vectors"] if name == "k_vectors" else given[name].weights

    def call():
        return ewald_summation(x, q, cell, 0.9, **given, **near)

    for _ in range(4):
        before = call()
    plan_of()
    values = torch.zeros_like(changed)
    if change == "numpy":
        changed.numpy()[5:] = 0.0
    elif change == "data":
        changed.data[5:] = 0.0
    else:
        values[:5] = changed[:5]
        changed.data = values
    found = call()
    assert not torch.equal(found, before)
    same_bits(found, ordinary(call))


class Changing:
    """An integer that may change."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_no_plan_for_objects_that_may_change():
    x, q, cell, near = arguments()
    points = Changing(20)

    def call():
        return particle_mesh_ewald(x, q, cell, 0.9, mesh_dimensions=(points, 10, 9), **near)

    for _ in range(4):
        before = call()
    plan_of(count=0)
    points.value = 12
    found = call()
    assert not torch.equal(found, before)
    same_bits(found, ordinary(call))


def test_prepared_data_in_the_memory_of_the_list():
    """Kernels would look for it at the place of the next list."""
    x, q, cell, near = arguments()
    vectors, pairs = prepare_wave_vectors(cell, 6.0), near["neighbor_list"]
    both = torch.cat([pairs.reshape(-1), vectors.point_begin])
    vectors = vectors._replace(point_begin=both[-2:])
    for _ in range(4):
        together = {**near, "neighbor_list": both[:-2].view(2, -1), "miller_indices": vectors}
        expected = ewald_summation(x, q, cell, 0.9, **together)
    plan_of(count=1)  # for any cell, which copies prepared data
    for there in (near, together):
        same_bits(ewald_summation(x, q, cell, 0.9, **{**there, "miller_indices": vectors}), expected)


def test_lists_and_pointers_in_the_same_memory():
    """Kernels would look for the pairs beside the pointers of the next list, where others are."""
    x, q, cell, near = arguments()
    pairs, pointers = near["neighbor_list"], near["neighbor_ptr"]
    both, others = (torch.cat([pairs[0], j, pointers]) for j in (pairs[1], (pairs[0] + 1) % 20))
    together = {**near, "neighbor_list": both[: pairs.numel()].view(2, -1), "neighbor_ptr": both[pairs.numel() :]}
    apart = {**near, "neighbor_ptr": others[pairs.numel() :]}
    expected = ewald_summation(x, q, cell, 0.9, k_cutoff=6.0, **near)
    for there in [together] * 3 + [apart] * 3:
        same_bits(ewald_summation(x, q, cell, 0.9, k_cutoff=6.0, **there), expected)


def test_exclusions_follow_the_atoms():
    """Which image of an excluded atom is the nearest one may be another in the next call."""
    x, q, cell, near = arguments()
    for step in range(5):
        y, p, _ = moved(x + step * cell[0, :1] * torch.tensor([0.0, 0.4], dtype=F64).repeat(10)[:, None], q, near, step)
        here = dict(zip(NAMES[False], neighbor_list(y, 3.0, cell, return_neighbor_list=True)))

        def call(y=y, p=p, here=here):
            return ewald_summation(
                y, p, cell, 0.9, k_cutoff=6.0, exclusions=torch.tensor([[0, 3], [1, 7]]), compute_forces=True, **here
            )

        same_bits(call(), ordinary(call))
    plan_of()


@pytest.mark.filterwarnings("ignore::nvalchemiops.notices.AccuracyWarning")
def test_values_of_atoms_are_read_before_a_plan():
    """Alpha follows the reach of the list and the forces, in each call."""
    x, q, cell, near = arguments()
    for n in range(8):
        moved = x + 0.01 * (n // 4) * torch.sin(3.0 * x)

        def call(moved=moved):
            return ewald_summation(moved, q, cell, k_cutoff=6.0, accuracy=1e-4, **near)

        same_bits(call(), ordinary(call))
