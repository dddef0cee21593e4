"""Derivatives of DFT-D3 by positions, cell and damping parameters, whichever way torch asks for them."""

import copy
import functools
import io

import pytest
import torch

from nvalchemiops.torch.interactions import dispersion
from tests.reference import dispersion as slow
from tests.support.comparing import close, compiled, within
from tests.support.molecules import F64, PBE, Atoms, as_list, batch, data, find_pairs, molecule, parameters, solid

CUTOFFS = {"cutoff": 12.0, "coordination_cutoff": 9.0, "smoothing": 3.0}
ZERO_MODIFIED = dispersion.damping_parameters("b3lyp", "zerom")
DAMPINGS = {"rational": PBE, "zero": ZERO_MODIFIED}
BOTH = pytest.mark.parametrize("kind", DAMPINGS)
# Dispersion energies are small: in this unit they are of order one, and so are tolerances.
UNIT = 1e3


class Flat:
    """Energies as a function of one vector: positions, cell and damping parameters.

    So all of them change at once, and mixed derivatives are looked at like any other.
    """

    def __init__(self, atoms, damping, **options):
        self.atoms, self.damping = atoms, damping
        self.options = {"parameters": parameters()} | CUTOFFS | options
        self.pairs = find_pairs(atoms, 13.0)
        self.near = as_list(self.pairs, len(atoms.numbers), atoms.cell is not None)
        parts = [atoms.positions, *([] if atoms.cell is None else [atoms.cell]), torch.tensor(damping, dtype=F64)]
        self.shapes = [part.shape for part in parts]
        self.vector = torch.cat([part.flatten() for part in parts])

    def split(self, vector):
        parts = [v.reshape(shape) for v, shape in zip(vector.split([s.numel() for s in self.shapes]), self.shapes)]
        damping = type(self.damping)(*parts.pop().unbind())
        return parts[0], (parts[1] if len(parts) > 1 else None), damping

    def all_of(self, vector, **options):
        x, cell, damping = self.split(vector)
        given = self.near | self.options | options
        return dispersion.d3_dispersion(x, self.atoms.numbers, damping, cell=cell, **given)

    def energies(self, vector):
        return UNIT * self.all_of(vector)[0]

    def reference(self, vector):
        x, cell, damping = self.split(vector)
        cutoffs = slow.Cutoffs(*(self.options[name] for name in CUTOFFS))
        return UNIT * slow.dispersion(x, cell, self.atoms.numbers, data(), damping, self.pairs, cutoffs).energies


@functools.cache
def ice(kind="rational"):
    """Two water molecules in a small skewed cell."""
    generator = torch.Generator().manual_seed(0)
    molecules = [molecule("H2O").positions, molecule("H2O").positions + torch.tensor([3.1, 3.3, 2.9], dtype=F64)]
    x = torch.cat(molecules)
    x = x + 0.2 * torch.randn(x.shape, generator=generator, dtype=F64)
    cell = torch.tensor([[[7.5, 0.0, 0.0], [1.5, 7.0, 0.0], [-1.0, 1.2, 6.5]]], dtype=F64)
    return Flat(Atoms(x, molecule("H2O").numbers.repeat(2), cell, torch.ones(1, 3, dtype=torch.bool)), DAMPINGS[kind])


@functools.cache
def water(kind="rational"):
    """One molecule, without a cell."""
    x = molecule("H2O").positions * torch.tensor([1.0, 1.05, 0.97], dtype=F64)
    return Flat(Atoms(x, molecule("H2O").numbers), DAMPINGS[kind])


def weights_like(tensor, seed=0):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=tensor.dtype)


# -- against finite differences and the papers ----------------------------------------------------


@BOTH
def test_every_second_derivative_is_that_of_the_papers(kind):
    """Positions, cell and damping: the whole Hessian."""
    flat = ice(kind)

    def hessian(energies):
        return torch.func.jacrev(torch.func.grad(lambda v: energies(v).sum()))(flat.vector)

    found, expected = (
        hessian(flat.energies),
        torch.autograd.functional.hessian(lambda v: flat.reference(v).sum(), flat.vector),
    )
    assert bool((expected.abs().amax(0) > 1e-4).all())
    within([found], [expected], 1e-11)


@pytest.mark.parametrize("kind", ["rational", pytest.param("zero", marks=pytest.mark.slow)])
def test_third_derivatives(kind):
    """By directions, against the papers; of one element, for the expressions are long."""
    x = torch.tensor([[0.0, 0.0, 0.0], [1.4, 0.1, -0.2], [0.5, 1.9, 0.8], [-2.0, -1.0, 1.5]], dtype=F64)
    flat = Flat(Atoms(x, torch.ones(4, dtype=torch.int32)), DAMPINGS[kind], smoothing=None)
    first, second = weights_like(flat.vector, 1), weights_like(flat.vector, 2)

    def twice(energies):
        vector = flat.vector.clone().requires_grad_()
        (slope,) = torch.autograd.grad(energies(vector).sum(), vector, create_graph=True)
        (curvature,) = torch.autograd.grad(slope @ first, vector, create_graph=True)
        return torch.autograd.grad(curvature @ second, vector)

    within(twice(flat.energies), twice(flat.reference), 1e-8)


def outputs(flat, vector):
    found = flat.all_of(vector, compute_forces=True, compute_virial=True, num_systems=1)
    return dict(zip(("energies", "forces", "coordination_numbers", "virial"), found))


@pytest.mark.parametrize("periodic", [True, False])
def test_coordination_numbers_can_be_trained_on(periodic, name="coordination_numbers"):
    """The gradient of a loss on it, along a direction, is its finite difference."""
    flat = ice() if periodic else water()
    vector = flat.vector.clone().requires_grad_()
    direction = weights_like(vector)

    def loss(vector):
        return UNIT * (outputs(flat, vector)[name] * weights_like(outputs(flat, flat.vector)[name])).sum()

    (slope,) = torch.autograd.grad(loss(vector), vector)
    step = 1e-5
    expected = (loss(flat.vector + step * direction) - loss(flat.vector - step * direction)) / (2.0 * step)
    assert float(expected.detach().abs()) > 1e-3
    torch.testing.assert_close(slope @ direction, expected.detach(), rtol=1e-7, atol=1e-8)


@BOTH
def test_all_outputs_at_once(kind):
    """Energies, forces, coordination numbers and virial weighted together, against autograd alone."""
    flat = ice(kind)
    vector = flat.vector.clone().requires_grad_()
    found = outputs(flat, vector)
    weights = {name: weights_like(part, n) for n, (name, part) in enumerate(found.items())}
    (slope,) = torch.autograd.grad(sum((found[name] * weights[name]).sum() for name in found), vector)

    strain = torch.zeros(3, 3, dtype=F64, requires_grad=True)
    x, cell, damping = flat.split(vector)
    deform = torch.eye(3, dtype=F64) + strain
    energies, coordination = dispersion.d3_dispersion(
        x @ deform, flat.atoms.numbers, damping, parameters(), cell @ deform, **flat.near, **CUTOFFS
    )
    by = torch.autograd.grad(energies.sum(), (vector, strain), create_graph=True)
    forces = -by[0][: x.numel()].view_as(x)
    composed = {"energies": energies, "forces": forces, "coordination_numbers": coordination, "virial": -by[1][None]}
    (expected,) = torch.autograd.grad(sum((composed[name] * weights[name]).sum() for name in found), vector)
    within([slope], [expected], 1e-12)


# -- training -------------------------------------------------------------------------------------


def test_damping_of_each_system():
    """One value for each system of a batch, with its own gradient."""
    systems = [molecule("H2O"), molecule("CO2"), molecule("CH4")]
    atoms = batch(*systems)
    columns = torch.tensor([[0.4, 0.5, 0.6], [4.4, 4.0, 5.0], [0.8, 1.0, 1.2], [1.0, 0.9, 0.8]], dtype=F64)
    columns.requires_grad_()
    options = {"parameters": parameters(), "cutoff": 30.0, "energy_reduction": "system"}
    energies, _ = dispersion.d3_dispersion(
        *atoms[:2], dispersion.RationalDamping(*columns), batch_idx=atoms.batch_idx, **options
    )
    slope = torch.autograd.grad(energies.sum(), columns)[0]
    for s, system in enumerate(systems):
        own = columns[:, s].detach().clone().requires_grad_()
        alone, _ = dispersion.d3_dispersion(*system[:2], dispersion.RationalDamping(*own), **options)
        within([energies[s : s + 1], slope[:, s]], [alone, torch.autograd.grad(alone.sum(), own)[0]], 1e-15)


def test_the_function_of_clients_is_differentiable():
    """Energy, forces and virial keep their graph."""
    flat = ice()
    vector = flat.vector.clone().requires_grad_()
    x, cell, damping = flat.split(vector)
    near = {"unit_shifts" if name == "neighbor_shifts" else name: value for name, value in flat.near.items()}
    energy, forces, _, virial = dispersion.dftd3(
        x,
        flat.atoms.numbers,
        *damping[:3],
        s6=damping.s6,
        d3_params=parameters(),
        cell=cell,
        compute_virial=True,
        **near,
    )
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    within([forces], [-slope], 1e-15)
    for output in (energy, forces, virial):
        (gradient,) = torch.autograd.grad(output.square().sum(), vector, retain_graph=True)
        assert bool((gradient != 0.0).all()), "a gradient is lost"


# -- compiled -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("periodic", [True, False])
def test_compiled_equals_eager(kind, periodic):
    """All outputs, and the gradient of a loss on all of them: second derivatives of the energy."""
    flat = ice(kind) if periodic else water(kind)
    states = parameters().states([1, 8])

    def loss(vector):
        found = flat.all_of(vector, parameters=states, compute_forces=True, compute_virial=True)
        return sum((UNIT * part).square().sum() for part in found[:2]) + found[3].square().sum() + found[2].sum()

    results = []
    for function in (loss, compiled(loss)):
        vector = flat.vector.clone().requires_grad_()
        value = function(vector)
        results.append((value.detach(), *torch.autograd.grad(value, vector)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-13)


def test_a_compiled_force_loss_trains_the_module():
    """The module has its states prepared, so that it compiles as it is."""
    flat = water()
    target = 1e-3 * weights_like(flat.atoms.positions)
    gradients = []
    for wrap in (lambda f: f, compiled):
        model = dispersion.DFTD3("pbe", [1, 8], parameters(), trainable=True)

        def loss(x, model=model):
            _, forces, _ = model(x, flat.atoms.numbers, compute_forces=True, **flat.near)
            return UNIT**2 * (forces - target).square().mean()

        wrap(loss)(flat.atoms.positions).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert len(gradients[0]) == 4 and all(float(g.abs()) > 1e-6 for g in gradients[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=0.0)


def test_what_cannot_be_read_inside_a_graph_is_asked_for():
    """Unprepared parameters in a graph and under vmap are an error that says what to do."""
    flat, unprepared = water(), parameters()

    def energies(x, numbers):
        return dispersion.d3_dispersion(x, numbers, PBE, unprepared, **flat.near)[0]

    with pytest.raises(Exception, match=r"D3Parameters\.states"):
        compiled(energies)(flat.atoms.positions, flat.atoms.numbers)
    with pytest.raises(ValueError, match=r"D3Parameters\.states"):
        torch.func.vmap(energies, in_dims=(None, 0))(flat.atoms.positions, flat.atoms.numbers[None])


# -- the module -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", ["pbe", PBE, ZERO_MODIFIED], ids=["name", "rational", "zero"])
def test_the_module_is_the_function(damping):
    atoms = solid("dry ice")
    model = dispersion.DFTD3(damping, [8, 6], parameters(), **CUTOFFS)
    given = dispersion.damping_parameters(damping) if isinstance(damping, str) else damping
    options = {"compute_forces": True, "compute_virial": True, "energy_reduction": "system"}
    expected = dispersion.d3_dispersion(*atoms[:2], given, parameters(), atoms.cell, **CUTOFFS, **options)
    within(model(*atoms[:3], **options), expected, 1e-16)
    assert not list(model.parameters())


def test_the_module_is_kept_and_comes_back():
    trained = dispersion.DFTD3("pbe", [1, 8], parameters(), trainable=True)
    assert {name for name, _ in trained.named_parameters()} == set(dispersion.RationalDamping._fields)
    with torch.no_grad():
        trained.a1 += 0.1
    memory = io.BytesIO()
    torch.save(trained.state_dict(), memory)
    memory.seek(0)
    # tables come with the library
    assert set(torch.load(memory, weights_only=True)) == {"a1", "a2", "s8", "s6", "_extra_state"}
    memory.seek(0)
    for trainable in (True, False):
        other = dispersion.DFTD3("b3lyp", [1, 8], parameters(), trainable=trainable)
        memory.seek(0)
        other.load_state_dict(torch.load(memory, weights_only=True))
        atoms = molecule("H2O")
        within(other(*atoms[:2]), trained(*atoms[:2]), 0.0)
    within(copy.deepcopy(trained)(*atoms[:2]), trained(*atoms[:2]), 0.0)


def test_double_positions_and_a_single_module():
    """What is computed has the precision of the positions."""
    atoms = molecule("H2O")
    energies, _ = dispersion.DFTD3("pbe", [1, 8], parameters(), trainable=True).float()(*atoms[:2])
    assert energies.dtype is F64


def test_zero_damping_can_be_trained_too():
    model = dispersion.DFTD3(dispersion.ZeroDamping(1.2, 0.8), [1, 8], parameters(), trainable=True)
    model(*molecule("H2O")[:2])[0].sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad != 0.0} == set(dispersion.ZeroDamping._fields)


def test_states_that_are_made_inside_a_transform_serve_later_calls():
    known = parameters()
    fresh = dispersion.D3Parameters(known.rcov, known.r4r2, known.c6ab, known.cn_ref, known.interp_mesh)
    flat = Flat(molecule("H2O"), PBE, parameters=fresh)

    def energy(vector):
        return flat.all_of(vector)[0].sum()

    nested = torch.func.jacrev(torch.func.grad(energy))(flat.vector)
    close(nested, torch.func.hessian(energy)(flat.vector), 1e-9)
    close(torch.func.grad(energy)(flat.vector), torch.autograd.functional.jacobian(energy, flat.vector))
