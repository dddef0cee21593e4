"""What decides how calls run: which calls are of one kind, whose plans are whose, and what is said about it."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode

from nvalchemiops.torch import plans, record
from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, d3_dispersion
from nvalchemiops.torch.interactions.electrostatics import (
    EwaldSummation,
    coulomb_energy,
    electrostatic_potential,
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.interactions.electrostatics.features import reciprocal_potential
from nvalchemiops.torch.interactions.pair import PairPotential, lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.runtime import calls, tables
from nvalchemiops.torch.runtime import plans as runtime_plans
from nvalchemiops.torch.runtime.engine import run_function
from nvalchemiops.torch.runtime.recorder import Recorder
from tests.support.comparing import close
from tests.support.plans import ordinary, plans_of_calls, way_of
from tests.support.processes import python_says
from tests.support.repeated import CELL, EWALD, F64, NEAR, Q, X, several


def test_numbers_and_tensors_are_told_apart():
    """A parameter as a tensor and another as a number, and the other way round."""
    potential, ones = lennard_jones(3.0), torch.ones(12, dtype=F64)
    for sigma, epsilon in ((1.0, ones), (ones, 1.0), (1.1, ones), (ones, 1.1), (1.0, 1.1), (1.1, 1.0)):

        def call(sigma=sigma, epsilon=epsilon):
            return potential(X, CELL, sigma=sigma, epsilon=epsilon, compute_forces=True, **NEAR)

        close(several(call), ordinary(call), 0.0)
    assert len(plans_of_calls(potential)) == 6


def test_lists_and_matrices_are_told_apart():
    """Both of the shape (2, 2), for two atoms."""
    potential, x = lennard_jones(), X[:2]
    pairs, matrix = torch.tensor([[0, 1], [1, 0]]).int(), torch.tensor([[1, 2], [0, 2]]).int()
    given = {"sigma": 1.0, "epsilon": 1.0}
    expected = several(lambda: potential(x, neighbor_list=pairs, **given))
    found = several(lambda: potential(x, neighbor_matrix=matrix, **given))
    assert torch.equal(found, expected)


def test_precisions_are_told_apart():
    """Also where positions alone have one: there is no cell."""
    potential = lennard_jones(3.0)
    near = dict(zip(("neighbor_list", "neighbor_ptr"), neighbor_list(X, 3.0, return_neighbor_list=True)))
    for x in (X, X.float(), X):

        def call(x=x):
            return potential(x, sigma=1.0, epsilon=1.0, **near)

        close([several(call)], [ordinary(call)], 0.0)


def test_what_changes_in_place_is_noticed():
    """Parameters, cells, numbers and tables, by torch, NumPy and ``.data``."""
    sigma, cell, numbers = torch.ones(12, dtype=F64), CELL.clone(), torch.tensor([6, 8] * 6)
    tables = D3Parameters.load()
    potential = lennard_jones(3.0)

    def call():
        dispersion = d3_dispersion(X, numbers, RationalDamping(0.4, 4.4, 0.8), tables, cell, **NEAR)
        return (*dispersion, *potential(X, cell, sigma=sigma, epsilon=0.3, compute_forces=True, **NEAR))

    changes = [
        lambda: sigma.mul_(1.1),
        lambda: sigma.data.mul_(1.1),
        lambda: cell.numpy().__imul__(1.01),
        lambda: numbers.numpy().__setitem__(slice(0, 3), 8),
        lambda: tables.c6ab.data.mul_(1.1),
        lambda: tables.rcov.numpy().__imul__(1.01),
    ]
    before = several(call)
    for change in changes:
        change()
        found = call()
        assert not all(map(torch.equal, found, before))
        close(found, ordinary(call), 0.0)
        before = several(call)


def test_numbers_belong_to_their_names():
    """In another order, and with a name that is unknown."""
    potential = PairPotential("a*exp(-b*r)", global_parameters=("a", "b"), cutoff=3.0)
    several(lambda: potential(X, CELL, a=1.0, b=2.0, **NEAR))
    expected = ordinary(lambda: potential(X, CELL, a=2.0, b=1.0, **NEAR))
    close([potential(X, CELL, b=1.0, a=2.0, **NEAR)], [expected], 0.0)
    with pytest.raises(TypeError, match="`c` is neither an argument nor a parameter"):
        potential(X, CELL, a=1.0, c=2.0, **NEAR)
    near = PairPotential("near*exp(-r)", global_parameters=("near",), cutoff=3.0)
    assert torch.isfinite(near(X, CELL, near=2.0, **NEAR)).all()


def test_zero_has_a_sign():
    potential = PairPotential("exp(-r)/(a1 + a2)", per_atom=("a",), cutoff=3.0)
    for a in (0.0, -0.0):
        found = several(lambda a=a: potential(X, CELL, a=a, **NEAR))
        close([found.sign()], [ordinary(lambda a=a: potential(X, CELL, a=a, **NEAR)).sign()], 0.0)


def test_sources_are_told_apart():
    """Channels, also where parameters are chosen; and dipoles of channels from quadrupoles."""
    for charges in (Q, Q[:, None], Q):
        found = several(lambda charges=charges: ewald_summation(X, charges, CELL, 0.8, k_cutoff=4.0, cutoff=3.0))
        assert found.shape == charges.shape
    charges, moments = torch.stack([Q] * 3, 1), torch.randn(12, 3, 3, dtype=F64)
    several(lambda: ewald_summation(X, charges, CELL, **EWALD, dipoles=moments))
    with pytest.raises(ValueError, match="quadrupoles"):
        ewald_summation(X, charges, CELL, **EWALD, quadrupoles=moments)


@pytest.mark.parametrize("change", ["data", "numpy"])
def test_a_cell_that_changes_before_the_backward_pass(change):
    """No version tells of it; plans of later calls are right."""
    potential, weights = lennard_jones(3.0), torch.linspace(0.5, 1.5, 12, dtype=F64)

    def slope(cell, changed=False):
        x = X.clone().requires_grad_()
        energies = (potential(x, cell, sigma=1.0, epsilon=0.3, **NEAR), ewald_summation(x, Q, cell, **EWALD))
        if changed and change == "data":
            cell.data.mul_(1.2)
        elif changed:
            cell.numpy().__imul__(1.2)
        return torch.autograd.grad(energies, x, (weights, weights))

    for _ in range(5):
        slope(CELL.clone(), changed=True)
    close(several(lambda: slope(CELL)), ordinary(lambda: slope(CELL)), 1e-11)


def test_arguments_beside_large_cells_have_gradients(monkeypatch):
    """Of thousands of systems the cells are no longer compared by value, but a number among the arguments still is."""
    monkeypatch.setattr(calls, "MOST_OF_SYSTEMS", 8)

    def slope():
        x, alpha = X.clone().requires_grad_(), torch.tensor(0.8, dtype=F64, requires_grad=True)
        energies = ewald_summation(x, Q, CELL, **{**EWALD, "alpha": alpha})
        return torch.autograd.grad(energies.sum(), (x, alpha))

    close(several(slope), ordinary(slope), 1e-11)


def test_a_derivative_that_is_zero_is_differentiated():
    """Plans return zeros where torch returns None, which has derivatives, too."""

    def evaluate(_, positions, factors):
        return ((positions**3).sum(1) * factors,)

    x, factors = X.clone().requires_grad_(), Q.clone().requires_grad_()

    def call():
        (energy,) = run_function("of a test", evaluate, {"positions": x, "factors": factors}, (), {}, ())
        (slope,) = torch.autograd.grad(energy.sum(), factors, create_graph=True)
        mixed, zero = torch.autograd.grad(slope.sum(), (x, factors), create_graph=True, allow_unused=True)
        return torch.autograd.grad(mixed.sum() + (0.0 if zero is None else zero.sum()), x)[0]

    for _ in range(6):
        close(call(), 6.0 * x.detach())
    x = X  # then nothing is left of the second derivative
    for _ in range(4):
        (energy,) = run_function("of a test", evaluate, {"positions": x, "factors": factors}, (), {}, ())
        (slope,) = torch.autograd.grad(energy.sum(), factors, create_graph=True)
        zero = torch.autograd.grad(slope.sum(), factors, allow_unused=True)[0] if slope.requires_grad else None
        assert torch.equal(slope, (x**3).sum(1)) and (zero is None or not zero.any())


def test_results_that_depend_on_nothing_have_no_graph():
    """Coordination numbers, where damping is trained; before and after plans."""
    a1 = torch.tensor(0.4, dtype=F64, requires_grad=True)
    numbers, tables = torch.tensor([6, 8] * 6), D3Parameters.load()
    for _ in range(5):
        given = (X, numbers, RationalDamping(a1, 4.4, 0.8), tables, CELL)
        energies, forces, coordination = d3_dispersion(*given, compute_forces=True, **NEAR)
        assert energies.requires_grad and forces.requires_grad and not coordination.requires_grad
        coordination.numpy()
    assert plans_of_calls()


@pytest.mark.parametrize("name", ["pairs", "sum"])
def test_a_backward_pass_that_others_see(name):
    """Mapped, sparse and dual incoming gradients; in a recording."""
    potential = lennard_jones(3.0)

    def energies(x):
        if name == "sum":
            return ewald_summation(x, Q, CELL, **EWALD)
        return potential(x, CELL, sigma=1.0, epsilon=0.3, **NEAR)

    def jacobian():
        x = X.clone().requires_grad_()
        return torch.autograd.grad(energies(x), x, torch.eye(12, dtype=F64), is_grads_batched=True)

    def slope(weights=Q):
        x = X.clone().requires_grad_()
        return torch.autograd.grad(energies(x), x, weights)

    several(slope)
    close(several(jacobian), ordinary(jacobian), 1e-11)
    tangent = torch.linspace(-1.0, 1.0, 12, dtype=F64)
    with forward_ad.dual_level():
        (found,) = slope(forward_ad.make_dual(torch.ones(12, dtype=F64), tangent))
        close([forward_ad.unpack_dual(found).tangent], slope(tangent), 1e-11)
    x = X.clone().requires_grad_()
    total = energies(x)
    recorded = record(lambda v: torch.autograd.grad(total, x, v, retain_graph=True)[0])
    close([several(lambda: recorded(tangent))], slope(tangent), 1e-11)
    close([several(lambda: recorded(tangent.flip(0)))], slope(tangent.flip(0)), 1e-11)


def test_a_backward_pass_does_not_warn_again():
    x, q, cell = X.float(), Q.float(), CELL.float()
    near = dict(EWALD, accuracy=1e-9)
    for _ in range(5):
        y = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            energies = ewald_summation(y, q, cell, **near)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.autograd.grad(energies, y, torch.linspace(0.5, 1.5, 12))


def test_a_coincidence_does_not_last():
    """A list of as many pairs as a mesh has points; lists in one piece of memory."""
    mesh = {"alpha": 0.8, "mesh_dimensions": (20, 20, 20)}
    pairs = torch.tensor([[0] * 20, [1] * 20], dtype=torch.int32)

    def call(count, of_one=False):
        ptr = torch.tensor([0, *[count] * 12], dtype=torch.int32)
        shifts = torch.arange(3 * count, dtype=torch.int32).reshape(count, 3)
        listed = pairs[:, :1].repeat(1, count)
        if of_one:
            ptr, shifts = torch.cat([ptr, shifts.reshape(-1)]).split([13, 3 * count])
            shifts = shifts.view(-1, 3)
        near = {"neighbor_list": listed, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
        return particle_mesh_ewald(X, Q, CELL, **mesh, **near)

    several(lambda: call(20))
    several(lambda: call(21, of_one=True))
    several(lambda: call(22))
    assert way_of("sum") == "plan (replayed)"


def test_widths_belong_to_a_sum_whose_parameters_are_chosen():
    mu = 0.1 * X.sin()
    for sigma in (0.2, 0.3, 0.2):
        widths = torch.full((12,), sigma, dtype=F64)

        def call(widths=widths):
            return ewald_summation(X, Q, CELL, accuracy=1e-3, dipoles=mu, widths=widths, compute_forces=True)

        close(several(call), ordinary(call), 0.0)


@pytest.mark.parametrize("method", ["ewald", "pme", "k-vectors"])
def test_potentials_at_atoms(method):
    """Other receivers, widths and derivatives are other plans; second derivatives by positions and charges."""

    def potential(x, q, receivers, derivatives):
        if method == "k-vectors":
            options = {"widths": 0.3, "receiver_widths": receivers, "derivatives": derivatives, "k_cutoff": 4.0}
            return reciprocal_potential(x, q, CELL, **options)
        options = {"k_cutoff": 4.0} if method == "ewald" else {"mesh_dimensions": (10, 9, 8)}
        given = {"receiver_widths": receivers, "derivatives": derivatives, "method": method, "alpha": 0.8}
        return electrostatic_potential(x, q, CELL, widths=0.2, **given, **options, **NEAR)

    for receivers in ((0.4, 0.5), [0.5, 0.4]):
        for derivatives in (0, 2):

            def call(x=X, q=Q, receivers=receivers, derivatives=derivatives):
                return [t for t in potential(x, q, receivers, derivatives) if t is not None]

            def gradients(call=call):
                x, q = X.clone().requires_grad_(), Q.clone().requires_grad_()
                first = torch.autograd.grad(call(x, q)[0].sin().sum(), (x, q), create_graph=True)
                return [t.detach() for t in (*first, *torch.autograd.grad(first[0].square().sum(), (x, q)))]

            close(several(call), ordinary(call), 0.0)
            close(several(gradients), ordinary(gradients), 1e-11)
    assert len(plans_of_calls()) >= 3  # credit is for some recordings


@pytest.mark.parametrize("options", [{"accuracy": 1e-3}, {"alpha": 0.8, "k_cutoff": 4.0}], ids=["chosen", "given"])
def test_a_call_keeps_nothing_alive(options):
    """Its description refers to its arguments, and not to itself, or memory would be freed by the collector alone."""
    gc.collect()
    gc.disable()
    try:
        for n in range(4):
            x, cell = X.clone(), (1.0 + 0.001 * n) * CELL
            alive = weakref.ref(x)
            ewald_summation(x, Q, cell, cutoff=3.0, **options, **NEAR)
            del x
            assert alive() is None
    finally:
        gc.enable()


def test_modules_own_their_plans():
    """Many of them do not push each other out; copies begin with none."""
    modules = [EwaldSummation(alpha=0.7 + 0.01 * k, k_cutoff=4.0) for k in range(12)]
    for _ in range(3):
        for module in modules:
            module(X, Q, CELL, **NEAR)
    assert all(len(plans_of_calls(module)) == 1 for module in modules) and not plans_of_calls()
    assert "replayed 1 times" in plans.explain(modules[0])
    for twin in (copy.deepcopy(modules[0]), pickle.loads(pickle.dumps(modules[0]))):
        assert not plans_of_calls(twin)
        close(several(lambda twin=twin: twin(X, Q, CELL, **NEAR)), modules[0](X, Q, CELL, **NEAR), 0.0)
    file = io.BytesIO()
    torch.save(modules[0].state_dict(), file)
    file.seek(0)
    modules[1].load_state_dict(torch.load(file))
    close(modules[1](X, Q, CELL, **NEAR), modules[0](X, Q, CELL, **NEAR), 0.0)


def test_derivatives_of_a_module_have_its_plans():
    module = EwaldSummation(alpha=0.7, k_cutoff=4.0)
    for _ in range(5):
        x, q = X.clone().requires_grad_(), Q.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(x, q, CELL, **NEAR).sum(), x, create_graph=True)
        torch.autograd.grad(slope.square().sum(), q)
    assert len(plans_of_calls(module, of_derivatives=True)) == 2 and not plans_of_calls(of_derivatives=True)


@pytest.mark.parametrize("order", [1, 2])
def test_inputs_that_change_before_the_backward_pass(order):
    """An error of torch, as for its own operations."""
    for _ in range(4):
        x, q = X.clone().requires_grad_(), Q.clone()
        energies = ewald_summation(x, q, CELL, **EWALD)
        if order == 2:
            (energies,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
        q.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            energies.square().sum().backward()


def test_a_graph_that_is_kept_is_differentiated_again():
    for _ in range(4):
        x = X.clone().requires_grad_()
        energy = ewald_summation(x, Q, CELL, **EWALD).sum()
        found = [torch.autograd.grad(energy, x, retain_graph=True)[0] for _ in range(2)]
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        found += [torch.autograd.grad(slope.square().sum(), x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])


def test_which_way_and_why():
    """The reasons that users read."""

    def call(x=X, **options):
        return ewald_summation(x, Q, CELL, **{**EWALD, **options})

    for expected in ("once (calls are recorded", "plan (recorded", "plan (replayed"):
        call()
        assert way_of("sum").startswith(expected)
    with plans.off():
        call()
        assert way_of("sum") == "once (plans are switched off)"
    with torch.device("cpu"):
        call()
        assert way_of("sum").startswith("plan (replayed")
        with BaseTorchFunctionMode():
            call()
            assert "a mode" in way_of("sum")
    torch.func.vmap(call)(X.unsqueeze(0))
    assert way_of("sum").startswith("graph (compilers, transforms")
    call(alpha=torch.tensor([0.8], dtype=F64, requires_grad=True))
    assert "a fixed argument" in way_of("sum")
    potential = PairPotential("exp(-r)", cutoff=3.0)
    for expected in ("once (calls are recorded when they repeat", "plan (recorded)", "plan (replayed)"):
        potential(X, CELL)
        assert way_of("pair potential").startswith(expected)
    one = {"batch_idx": torch.zeros(12, dtype=torch.int32)}
    for changed, part in ((one, "cells or systems of atoms"), ({"compute_forces": True}, "options")):
        potential(X, CELL, **changed)
        assert way_of("pair potential").endswith(f"; the call before had other {part})")
        potential(X, CELL)
    many = torch.zeros(calls.MOST_ATOMS + 1, 3, dtype=F64)
    none = {
        "neighbor_list": torch.zeros(2, 0, dtype=torch.int32),
        "neighbor_shifts": torch.zeros(0, 3, dtype=torch.int32),
    }
    coulomb_energy(many, many[:, 0].contiguous(), CELL, 3.0, **none)
    assert "more than 65536 atoms" in way_of("Coulomb sum")
    plans.clear()
    assert "plans: 0" in plans.explain()


def test_a_recording_ends_where_a_plan_would_take_too_much_memory(monkeypatch):
    """It frees what it has kept at once, and the call goes on."""
    kept = []
    end = Recorder.end
    monkeypatch.setattr(Recorder, "end", lambda self, reason: (end(self, reason), kept.append(len(self.kept)))[0])
    monkeypatch.setattr(runtime_plans, "MOST_BYTES", 2000)

    def call():
        return ewald_summation(X, Q, CELL, **EWALD)

    expected = ordinary(call)
    close(several(call), expected, 0.0)
    assert "its memory is more than 2000 bytes" in way_of("sum")
    assert kept == [0] and not plans_of_calls()


def test_plans_are_limited_and_switched_off(monkeypatch):
    call = {f"{k}": k for k in range(3)}
    for k in call.values():
        several(lambda k=k: ewald_summation(X, Q, CELL, **{**EWALD, "alpha": 0.5 + 0.1 * k}))
    assert len(plans_of_calls()) == 3
    monkeypatch.setattr(tables.everywhere, "most_bytes", tables.MOST_BYTES)
    plans.limit(2**40)  # more than 32 bits
    assert tables.everywhere.most_bytes == 2**40 and len(plans_of_calls()) == 3
    plans.limit(0)
    assert len(plans_of_calls()) == 1
    with pytest.raises(ValueError, match="n_bytes"):
        plans.limit(-1)
    with pytest.raises(ValueError, match="`device`"):
        plans.limit(0, "gpu")
    script = """
        import json
        from nvalchemiops.torch import plans
        from nvalchemiops.torch.interactions.electrostatics import ewald_summation
        from tests.support.repeated import *
        several(lambda: ewald_summation(X, Q, CELL, **EWALD))
        print(json.dumps(plans.explain().splitlines()[0]))
    """
    assert "switched off" in python_says(script, NVALCHEMIOPS_PLANS="0")
