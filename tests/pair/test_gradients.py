"""Derivatives of pair potentials: of every order, by everything, whichever way torch asks for them."""

import itertools

import numpy as np
import pytest
import torch
import warp as wp
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemiops.torch import autograd
from nvalchemiops.torch.interactions.pair import lennard_jones
from tests.pair.cases import BY_NAME, CASES, as_list, as_matrix, close, find_pairs, from_pairs, pair_of_systems
from tests.reference import pair as ref
from tests.systems import System, triclinic

CUTOFF = 4.5
# parameters of atoms; those and of the system, with a self energy; tables; those and a switch; the system alone
KINDS = pytest.mark.parametrize(
    "case",
    [BY_NAME[n] for n in ("lj waldman-hagler switched", "damped shifted force", "morse tables", "soft core", "morse")],
    ids=lambda case: case.name,
)

# -- all inputs as one vector ---------------------------------------------------------------------


class Flat:
    """Energies of a case as a function of one vector: positions, cell and all parameters.

    So all of them change at once, and mixed derivatives are looked at like any other.
    """

    def __init__(self, case, system, cutoff, seed=0, **options):
        self.case, self.system, self.cutoff, self.options = case, system, cutoff, options
        self.parameters = case.parameters(system, seed)
        self.parts = {"positions": system.positions, "cell": system.cell, **self.parameters.values}
        self.vector = torch.cat([part.reshape(-1) for part in self.parts.values()])
        # lists are of the unmoved atoms, with room to move
        self.pairs = find_pairs(system, cutoff)
        self.neighbors = from_pairs(self.pairs)

    def split(self, vector):
        parts = vector.split([part.numel() for part in self.parts.values()])
        named = {name: v.reshape(part.shape) for v, (name, part) in zip(parts, self.parts.items())}
        return named.pop("positions"), named.pop("cell"), self.parameters.updated(named)

    def energies(self, vector):
        options = {"batch_idx": self.system.batch_idx, **self.neighbors, **self.options}
        return self.case.evaluate(*self.split(vector), self.cutoff, **options)

    def reference(self, vector):
        return self.case.reference(*self.split(vector), self.pairs, self.cutoff)

    def reference_results(self, vector):
        """Energies, forces, gradients by parameters and virial, with a graph."""
        positions, cell, parameters = self.split(vector)

        def function(positions, cell, values):
            return self.case.reference(positions, cell, parameters.updated(values), self.pairs, self.cutoff)

        batch_idx = self.system.batch_idx
        return ref.everything(function, positions, cell, parameters.values, batch_idx, create_graph=True)


def weights_like(tensor, seed=0):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- finite differences ---------------------------------------------------------------------------

EDGE = st.floats(3.2, 4.5)
SKEW = st.floats(-2.0, 2.0)


@st.composite
def systems(draw):
    """2 to 6 charged atoms, displaced from the sites of a 2x2x2 lattice, in a skewed cell, cells apart.

    Vectors of a lattice are not shorter than the diagonal of its triangular basis, so sites are 1.6 apart or more,
    and atoms 1.2.
    """
    n_atoms = draw(st.integers(2, 6))
    a, b, c = draw(EDGE), draw(EDGE), draw(EDGE)
    cell = np.array([[a, 0.0, 0.0], [draw(SKEW), b, 0.0], [draw(SKEW), draw(SKEW), c]])
    if draw(st.booleans()):
        cell = cell[[1, 0, 2]]
    rng = draw(st.randoms(use_true_random=False))
    sites = rng.sample(list(itertools.product((0.0, 0.5), repeat=3)), n_atoms)
    images = [[rng.randint(-2, 2) for _ in range(3)] for _ in sites]
    moves = [[rng.uniform(-0.11, 0.11) for _ in range(3)] for _ in sites]
    charges = [rng.choice((-1.0, 1.0)) * rng.uniform(0.5, 1.5) for _ in sites]
    return System.of((np.array(sites) + images) @ cell + moves, charges, cell)


def clear_of_pairs(system, low=3.6, high=4.4):
    """The cutoff in a range that is farthest from any pair: an energy that jumps has no finite differences."""
    pairs = ref.find_pairs(system.positions, system.cell, system.batch_idx, high)
    r = ref.distances_of(system.positions, system.cell, pairs)
    r = torch.cat([r[r > low], torch.tensor([low, high], dtype=torch.float64)]).sort().values
    widest = r.diff().argmax()
    return 0.5 * float(r[widest] + r[widest + 1])


@CASES
@given(system=systems())
@settings(max_examples=3)
def test_first_derivatives(case, system):
    assert ref.distances_of(system.positions, system.cell, find_pairs(system, 4.0)).min() > 1.2
    flat = Flat(case, system, clear_of_pairs(system))
    # steps of 1e-6 leave 1e-12 third derivatives, and rounding of 1e-16 energies / 1e-6
    assert torch.autograd.gradcheck(flat.energies, flat.vector.requires_grad_(), atol=1e-6, rtol=1e-5)


@CASES
@given(system=systems())
@settings(max_examples=2)
def test_second_derivatives(case, system):
    flat = Flat(case, system, clear_of_pairs(system))
    weights = weights_like(system.charges).requires_grad_()
    # likewise one order up; the weights are differentiated too
    assert torch.autograd.gradgradcheck(
        flat.energies, flat.vector.requires_grad_(), weights, atol=1e-5, rtol=1e-5, fast_mode=True
    )


@KINDS
def test_second_derivatives_entry_by_entry(case):
    """Positions, cell and parameters as inputs of their own; each gradient is differentiated alone."""
    system = triclinic(3, charged=True)
    flat = Flat(case, system, CUTOFF)

    def energies(*parts):
        return flat.energies(torch.cat([part.reshape(-1) for part in parts]))

    parts = [part.clone().requires_grad_() for part in flat.parts.values()]
    assert torch.autograd.gradgradcheck(energies, parts, atol=1e-5, rtol=1e-5)


@KINDS
def test_second_derivatives_with_exclusions(case):
    system = triclinic(4, charged=True)
    options = {"exclusions": torch.tensor([[0, 3], [1, 2]]), "exclusion_factors": torch.tensor([0.0, 0.5])}
    flat = Flat(case, system, CUTOFF, **options)
    vector = flat.vector.requires_grad_()
    assert torch.autograd.gradcheck(flat.energies, vector, atol=1e-6, rtol=1e-5)
    assert torch.autograd.gradgradcheck(flat.energies, vector, atol=1e-5, rtol=1e-5, fast_mode=True)


# -- against the derivatives of the reference -----------------------------------------------------


def derivatives(function, vector, directions, weights):
    """Gradient of the weighted energies, of its product with a direction, of the product of that with the next."""
    vector = vector.detach().clone().requires_grad_()
    found = [torch.autograd.grad(function(vector), vector, weights, create_graph=True)[0]]
    for direction in directions:
        found.append(torch.autograd.grad(found[-1] @ direction, vector, create_graph=True)[0])
    return [t.detach() for t in found]


def directions_for(flat, number):
    return [weights_like(flat.vector, seed) for seed in range(1, number + 1)]


@CASES
def test_three_orders(case):
    """Gradient, Hessian times vector, and the gradient of that times another, by all inputs at once."""
    flat = Flat(case, pair_of_systems(), CUTOFF)
    directions, weights = directions_for(flat, 2), weights_like(flat.system.charges)
    expected = derivatives(flat.reference, flat.vector, directions, weights)
    # orders above zero lose digits: terms of r^-14 and higher, with large factors, cancel
    close(derivatives(flat.energies, flat.vector, directions, weights), expected, tolerance=1e-11)


def test_four_orders():
    flat = Flat(BY_NAME["damped shifted force"], triclinic(4, charged=True), CUTOFF)
    directions, weights = directions_for(flat, 3), weights_like(flat.system.charges)
    expected = derivatives(flat.reference, flat.vector, directions, weights)
    close(derivatives(flat.energies, flat.vector, directions, weights), expected, tolerance=1e-11)


@KINDS
@pytest.mark.parametrize("reduction", ["atom", "system"])
def test_weighted_energies(case, reduction):
    """A random weight for each atom, or for each system, given as gradient of the outputs."""
    flat = Flat(case, pair_of_systems(), CUTOFF, energy_reduction=reduction)
    of_atoms = reduction == "atom"
    weights = weights_like(flat.system.charges if of_atoms else torch.zeros(2))
    spread = weights if of_atoms else weights[flat.system.batch_idx.long()]
    directions = directions_for(flat, 1)
    expected = derivatives(flat.reference, flat.vector, directions, spread)
    close(derivatives(flat.energies, flat.vector, directions, weights), expected, tolerance=1e-11)


@KINDS
def test_weights_are_differentiated(case):
    """The gradient is linear in the weights: its derivative by them is a Jacobian times a vector."""
    flat = Flat(case, pair_of_systems(), CUTOFF)
    direction, found = directions_for(flat, 1)[0], []
    for function in (flat.energies, flat.reference):
        vector = flat.vector.clone().requires_grad_()
        weights = weights_like(flat.system.charges).requires_grad_()
        slope = torch.autograd.grad(function(vector), vector, weights, create_graph=True)[0]
        by_weights = torch.autograd.grad(slope @ direction, weights, create_graph=True)[0]
        mixed = torch.autograd.grad(by_weights.square().sum(), (vector, weights), allow_unused=True)
        found.append([by_weights.detach(), mixed[0]])
        # linear: nothing left by the weights
        assert mixed[1] is None or not mixed[1].any()
    close(*found, tolerance=1e-11)


def loss_of(outputs):
    """A loss of everything, with random targets and weights, as training on energies, forces and stresses has."""
    return sum((weights_like(t, 2 * k) * (t - weights_like(t, 2 * k + 1)) ** 2).sum() for k, t in enumerate(outputs))


@KINDS
def test_every_output_can_be_trained_on(case):
    """Energies, forces, gradients by parameters and virial of one call, in a loss; gradient by all inputs."""
    flat = Flat(case, pair_of_systems(), CUTOFF)
    names = tuple(flat.parameters.values)

    def found(vector):
        positions, cell, parameters = flat.split(vector)
        options = {"compute_forces": True, "compute_gradients": names, "compute_virial": True}
        return case.evaluate(positions, cell, parameters, CUTOFF, flat.system.batch_idx, **flat.neighbors, **options)

    def expected(vector):
        energies, forces, gradients, virial = flat.reference_results(vector)
        return energies, forces, *gradients.values(), virial

    slopes = []
    for outputs in (found, expected):
        vector = flat.vector.clone().requires_grad_()
        slopes.append(torch.autograd.grad(loss_of(outputs(vector)), vector, create_graph=True)[0].detach())
    close(slopes[:1], slopes[1:], tolerance=1e-11)


@KINDS
@pytest.mark.parametrize("output", ["forces", "gradients", "virial"])
def test_one_output_can_be_trained_on(case, output):
    """Each by itself, and twice: the gradient of the loss in a second loss."""
    flat = Flat(case, pair_of_systems(), CUTOFF)
    names = tuple(flat.parameters.values)
    asked = {"forces": True, "gradients": names, "virial": True}[output]

    def found(vector):
        options = {"batch_idx": flat.system.batch_idx, **flat.neighbors, f"compute_{output}": asked}
        return case.evaluate(*flat.split(vector), CUTOFF, **options)[1:]

    def expected(vector):
        _, forces, gradients, virial = flat.reference_results(vector)
        return {"forces": [forces], "gradients": list(gradients.values()), "virial": [virial]}[output]

    slopes = []
    for outputs in (found, expected):
        vector = flat.vector.clone().requires_grad_()
        first = torch.autograd.grad(loss_of(outputs(vector)), vector, create_graph=True)[0]
        second = torch.autograd.grad(first @ directions_for(flat, 1)[0], vector)[0]
        slopes.append([first.detach(), second])
    close(*slopes, tolerance=1e-11)


# -- graphs ---------------------------------------------------------------------------------------


def test_retained_graphs():
    """A second backward pass through one graph adds the same again, and other weights give other gradients."""
    flat = Flat(BY_NAME["wolf"], pair_of_systems(), CUTOFF)
    vector = flat.vector.clone().requires_grad_()
    energies = flat.energies(vector)
    energies.sum().backward(retain_graph=True)
    once = vector.grad.clone()
    energies.sum().backward(retain_graph=True)
    assert torch.equal(vector.grad, 2.0 * once)
    rows = [torch.autograd.grad(energies, vector, w, retain_graph=True)[0] for w in torch.eye(10).double()]
    close([torch.stack(rows).sum(0)], [once])
    expected = torch.autograd.functional.jacobian(flat.reference, flat.vector)
    close([torch.stack(rows)], [expected])


@pytest.mark.parametrize("name", ["positions", "cell", "q", "alpha"])
def test_only_what_is_asked_for(name):
    """One input with a gradient gives what it gives among all."""
    case, system = BY_NAME["wolf"], pair_of_systems()
    flat = Flat(case, system, CUTOFF)
    parts = {key: part.clone() for key, part in flat.parts.items()}
    parts[name].requires_grad_()

    def run(function):
        energies = function(torch.cat([part.reshape(-1) for part in parts.values()]))
        first = torch.autograd.grad((energies * weights_like(energies)).sum(), parts[name], create_graph=True)[0]
        return [first.detach(), torch.autograd.grad(first.square().sum(), parts[name])[0]]

    close(run(flat.energies), run(flat.reference), tolerance=1e-11)


@pytest.mark.parametrize("form", ["list", "half", "matrix", "built"])
def test_derivatives_do_not_depend_on_the_form_of_neighbors(form):
    case, system = BY_NAME["damped shifted force"], triclinic(5, charged=True)
    flat = Flat(case, system, CUTOFF)
    directions, weights = directions_for(flat, 1), weights_like(system.charges)
    expected = derivatives(flat.energies, flat.vector, directions, weights)
    flat.neighbors = {
        "list": lambda: as_list(system, CUTOFF),
        "half": lambda: as_list(system, CUTOFF, half=True),
        "matrix": lambda: as_matrix(system, CUTOFF, max_neighbors=70),
        "built": dict,
    }[form]()
    close(derivatives(flat.energies, flat.vector, directions, weights), expected)


# -- torch.func -----------------------------------------------------------------------------------

FUNCTIONS = pytest.mark.parametrize("name", ["lj", "damped shifted force", "morse tables"])


@FUNCTIONS
def test_torch_func_grad_vjp_and_jvp(name):
    flat = Flat(BY_NAME[name], pair_of_systems(), CUTOFF)
    weights, direction = weights_like(flat.system.charges), directions_for(flat, 1)[0]
    jacobian = torch.autograd.functional.jacobian(flat.reference, flat.vector)
    expected = flat.reference(flat.vector)

    close([torch.func.grad(lambda v: flat.energies(v) @ weights)(flat.vector)], [weights @ jacobian])
    value, pull = torch.func.vjp(flat.energies, flat.vector)
    close([value, pull(weights)[0]], [expected, weights @ jacobian])
    close(torch.func.jvp(flat.energies, (flat.vector,), (direction,)), [expected, jacobian @ direction])


@FUNCTIONS
def test_torch_func_jacrev_and_hessian(name):
    flat = Flat(BY_NAME[name], triclinic(3, charged=True), CUTOFF)
    weights = weights_like(flat.system.charges)
    jacobian = torch.autograd.functional.jacobian(flat.reference, flat.vector)
    close([torch.func.jacrev(flat.energies)(flat.vector)], [jacobian])
    expected = torch.autograd.functional.hessian(lambda v: flat.reference(v) @ weights, flat.vector)
    close([torch.func.hessian(lambda v: flat.energies(v) @ weights)(flat.vector)], [expected], tolerance=1e-11)


@FUNCTIONS
def test_torch_func_vmap(name):
    """Over geometries and parameters at once, of energies and of gradients."""
    flat = Flat(BY_NAME[name], pair_of_systems(), CUTOFF)
    several = flat.vector + 1e-3 * weights_like(torch.zeros(3, len(flat.vector)))
    found, expected = [], []
    for results, function in ((found, flat.energies), (expected, flat.reference)):
        results.append(torch.func.vmap(function)(several))
        results.append(torch.func.vmap(torch.func.grad(lambda v: function(v).sum()))(several))  # noqa: B023 (called at once)
    one_by_one = torch.stack([flat.reference(v) for v in several])
    close([expected[0]], [one_by_one])
    close(found, expected)


def test_torch_func_of_forces():
    """Force constants as the Jacobian of forces, with neighbors that are built inside."""
    system, case = triclinic(4, charged=True), BY_NAME["wolf"]
    parameters, pairs = case.parameters(system), find_pairs(system, CUTOFF)

    def forces(positions):
        return case.evaluate(positions, system.cell, parameters, CUTOFF, compute_forces=True)[1]

    def energy(positions):
        return case.reference(positions, system.cell, parameters, pairs, CUTOFF).sum()

    expected = torch.autograd.functional.hessian(energy, system.positions)
    close([-torch.func.jacrev(forces)(system.positions)], [expected], tolerance=1e-11)


# -- the yardstick: a tape op ---------------------------------------------------------------------

real = wp.float64


@wp.kernel
def tape_lennard_jones_kernel(
    positions: wp.array(dtype=wp.vec3d),
    cell: wp.array(dtype=wp.mat33d),
    sigma: wp.array(dtype=real),
    epsilon: wp.array(dtype=real),
    neighbors: wp.array2d(dtype=wp.int32),
    shifts: wp.array2d(dtype=wp.vec3i),
    cutoff: real,
    energies: wp.array(dtype=real),
):
    i = wp.tid()
    total = real(0.0)
    for slot in range(neighbors.shape[1]):
        j = neighbors[i, slot]
        if j < positions.shape[0]:
            image = shifts[i, slot]
            shift = wp.vec3d(real(image[0]), real(image[1]), real(image[2]))
            r = wp.length(positions[j] - positions[i] + wp.transpose(cell[0]) * shift)
            if r < cutoff:
                x = real(0.5) * (sigma[i] + sigma[j]) / r
                x6 = x * x * x * x * x * x
                total += real(2.0) * wp.sqrt(epsilon[i] * epsilon[j]) * (x6 * x6 - x6)
    energies[i] = total


@autograd.warp_custom_op(
    "tests::tape_lennard_jones",
    outputs=[autograd.OutputSpec("energies", wp.float64, lambda positions, *_: (positions.shape[0],))],
)
def tape_lennard_jones(
    positions: torch.Tensor,
    cell: torch.Tensor,
    sigma: torch.Tensor,
    epsilon: torch.Tensor,
    neighbors: torch.Tensor,
    shifts: torch.Tensor,
    cutoff: float,
) -> torch.Tensor:
    energies = torch.empty_like(sigma)
    track = autograd.needs_grad(positions, cell, sigma, epsilon)
    arrays = {
        "positions": autograd.warp_from_torch(positions, wp.vec3d),
        "cell": autograd.warp_from_torch(cell, wp.mat33d),
        "sigma": autograd.warp_from_torch(sigma, wp.float64),
        "epsilon": autograd.warp_from_torch(epsilon, wp.float64),
    }
    rows = [autograd.warp_from_torch(neighbors, wp.int32), autograd.warp_from_torch(shifts, wp.vec3i)]
    written = autograd.warp_from_torch(energies, wp.float64, requires_grad=track)
    with autograd.WarpAutogradContextManager(track) as tape:
        wp.launch(
            tape_lennard_jones_kernel,
            positions.shape[0],
            [*arrays.values(), *rows, cutoff],
            [written],
            device=written.device,
        )
    if track:
        autograd.attach_for_backward(energies, tape, **arrays, energies=written)
    return energies


def test_a_tape_of_one_kernel_agrees():
    """Warp's own adjoint of the loop as anyone would write it."""
    system = triclinic(6)
    parameters = BY_NAME["lj"].parameters(system).values
    rows = as_matrix(system, CUTOFF, max_neighbors=80)
    inputs = [t.clone().requires_grad_() for t in (system.positions, system.cell, *parameters.values())]
    weights = weights_like(system.charges)

    taped = tape_lennard_jones(*inputs, rows["neighbor_matrix"], rows["neighbor_matrix_shifts"], CUTOFF)
    expected = [taped.detach(), *torch.autograd.grad(taped, inputs, weights)]
    ours = lennard_jones(CUTOFF)(inputs[0], inputs[1], sigma=inputs[2], epsilon=inputs[3], **rows)
    close([ours.detach(), *torch.autograd.grad(ours, inputs, weights)], expected)
