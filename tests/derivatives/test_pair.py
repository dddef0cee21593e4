"""Derivatives of pair potentials: of every order, by everything, whichever way torch asks for them."""

import pytest
import torch

from nvalchemiops.torch.interactions.pair import PairPotential, lennard_jones
from tests.reference import pair as ref
from tests.support.potentials import BY_NAME, CASES, close, find_pairs, from_pairs, pair_of_systems
from tests.support.systems import triclinic

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


@KINDS
def test_second_derivatives_with_exclusions(case):
    system = triclinic(4, charged=True)
    options = {"exclusions": torch.tensor([[0, 3], [1, 2]]), "exclusion_factors": torch.tensor([0.0, 0.5])}
    flat = Flat(case, system, CUTOFF, **options)
    vector = flat.vector.requires_grad_()
    assert torch.autograd.gradcheck(flat.energies, vector, atol=1e-6, rtol=1e-5, fast_mode=True)
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
def test_gradients_are_linear_in_weights_of_energies(case):
    """To any order: the derivative by weights of what is linear in them does not depend on them any more."""
    flat = Flat(case, triclinic(4, charged=True), CUTOFF)
    direction, vector = directions_for(flat, 1)[0], flat.vector.clone().requires_grad_()
    weights = weights_like(flat.system.charges).requires_grad_()
    slopes = []
    for function in (flat.energies, flat.reference):
        gradient = torch.autograd.grad(function(vector), vector, weights, create_graph=True)[0]
        slopes.append(torch.autograd.grad(gradient @ direction, weights, create_graph=True)[0])
    close(*([slope.detach()] for slope in slopes))
    again = torch.autograd.grad(slopes[0].square().sum(), weights, allow_unused=True)[0]
    assert again is None or not again.any()


def loss_of(outputs):
    """A loss of everything, with random targets and weights, as training on energies, forces and stresses has."""
    return sum((weights_like(t, 2 * k) * (t - weights_like(t, 2 * k + 1)) ** 2).sum() for k, t in enumerate(outputs))


@KINDS
@pytest.mark.parametrize("output", ["forces", "gradients", "virial", "everything"])
def test_every_output_can_be_trained_on(case, output):
    """Each by itself and all at once, with the energies; and twice: the gradient of the loss in a second loss."""
    flat = Flat(case, pair_of_systems(), CUTOFF)
    every = {"forces": True, "gradients": tuple(flat.parameters.values), "virial": True}
    asked = every if output == "everything" else {output: every[output]}

    def found(vector):
        options = {
            "batch_idx": flat.system.batch_idx,
            **flat.neighbors,
            **{f"compute_{k}": v for k, v in asked.items()},
        }
        return case.evaluate(*flat.split(vector), CUTOFF, **options)[output != "everything" :]

    def expected(vector):
        energies, forces, gradients, virial = flat.reference_results(vector)
        results = {"forces": [forces], "gradients": list(gradients.values()), "virial": [virial]}
        return results.get(output, [energies, forces, *gradients.values(), virial])

    slopes = []
    for outputs in (found, expected):
        vector = flat.vector.clone().requires_grad_()
        first = torch.autograd.grad(loss_of(outputs(vector)), vector, create_graph=True)[0]
        second = torch.autograd.grad(first @ directions_for(flat, 1)[0], vector)[0]
        slopes.append([first.detach(), second])
    close(*slopes, tolerance=1e-11)


# -- torch.func -----------------------------------------------------------------------------------

FUNCTIONS = pytest.mark.parametrize("name", ["lj", "damped shifted force", "morse tables"])


@FUNCTIONS
def test_torch_func_jacrev_and_hessian(name):
    flat = Flat(BY_NAME[name], triclinic(3, charged=True), CUTOFF)
    weights = weights_like(flat.system.charges)
    jacobian = torch.autograd.functional.jacobian(flat.reference, flat.vector)
    close([torch.func.jacrev(flat.energies)(flat.vector)], [jacobian])
    expected = torch.autograd.functional.hessian(lambda v: flat.reference(v) @ weights, flat.vector)
    close([torch.func.hessian(lambda v: flat.energies(v) @ weights)(flat.vector)], [expected], tolerance=1e-11)


# -- units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [1e2, 0.1, 1e-8])
def test_three_orders_in_float32_in_any_unit_of_length(unit):
    """In pm, nm and, as long as the results are numbers, in cm: no power of a length alone may leave the range."""
    potential = lennard_jones(30.0 * unit)
    distances = (0.03, 0.9, 1.5, 2.0, 5.0) if unit > 1e-3 else (0.9, 1.5, 2.0, 5.0)
    for distance in distances:
        orders = []
        for dtype in (torch.float32, torch.float64):
            x = torch.tensor([[0.0, 0.0, 0.0], [3.4 * distance * unit, 0.0, 0.0]]).to(dtype).requires_grad_()
            sigma = torch.tensor(3.4 * unit).to(dtype)
            energies = potential(x, neighbor_list=torch.tensor([[0, 1], [1, 0]]), sigma=sigma.item(), epsilon=0.01)
            values = [energies.sum()]
            for _ in range(3 if unit > 1e-3 else 1):
                values.append(torch.autograd.grad(values[-1], x, create_graph=True)[0][0, 0])
            orders.append(torch.stack(values).detach().double())
        # attraction and repulsion cancel by a digit or two
        torch.testing.assert_close(orders[0], orders[1], rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("expression", "r", "parameters", "expected"),
    [("a/r^4", 1e-10, {"a": 2e-38}, 200.0), ("a^3*b/r", 1.0, {"a": 1e13, "b": 1e-30}, 1e9)],
)
def test_energies_in_float32_have_factors_beyond_its_range(expression, r, parameters, expected):
    potential = PairPotential(expression, cutoff=2.0 * r, global_parameters=tuple(parameters))
    x = torch.tensor([[0.0, 0.0, 0.0], [r, 0.0, 0.0]])
    energy = potential(x, neighbor_list=torch.tensor([[0, 1], [1, 0]]), **parameters).sum()
    assert abs(energy / expected - 1.0) < 1e-5


def test_virials_of_atoms_are_halves_of_those_of_their_pairs():
    """As derivatives of the energies of a batch by one strain, in forward mode; with the energy r^-6 / 6."""
    system = pair_of_systems()
    pairs, potential = find_pairs(system, CUTOFF), PairPotential("1/(6*r^6)", cutoff=CUTOFF)
    x, cell = system.positions, system.cell

    def energies(strain):
        deform = torch.eye(3, dtype=x.dtype) + strain
        return potential(x @ deform, cell @ deform, batch_idx=system.batch_idx, **from_pairs(pairs))

    virials = -torch.func.jacfwd(energies)(torch.zeros(3, 3, dtype=x.dtype))
    d = x[pairs.j] - x[pairs.i] + (pairs.shift.unsqueeze(1) @ cell[pairs.system[pairs.i]]).squeeze(1)
    r = d.norm(dim=1)
    of_pairs = torch.where(r < CUTOFF, r.pow(-8), 0.0)[:, None, None] * d.unsqueeze(-1) * d.unsqueeze(-2)
    expected = torch.zeros_like(virials).index_add(0, pairs.i, 0.5 * of_pairs)
    torch.testing.assert_close(virials, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("mixing", ["lorentz-berthelot", "geometric"])
def test_derivatives_by_sigma_where_epsilon_is_zero(mixing):
    """As for hydrogen: the square root of epsilon has no slope there, which does not matter for a constant."""
    positions = torch.tensor([[0.0, 0.0, 0.0], [1.1, 0.0, 0.0], [0.0, 1.3, 0.2]], dtype=torch.float64)
    sigma = torch.tensor([1.0, 0.9, 0.8], dtype=torch.float64)
    epsilon = torch.tensor([0.0, 0.5, 0.3], dtype=torch.float64)
    i, j = torch.tensor([[0, 0, 1], [1, 2, 2]])

    def reference(x, sigma):
        mixed = (sigma[i] + sigma[j]) / 2 if mixing == "lorentz-berthelot" else (sigma[i] * sigma[j]).sqrt()
        ratio = (mixed / (x[i] - x[j]).norm(dim=1)) ** 6
        return (4.0 * (epsilon[i] * epsilon[j]).sqrt() * ratio * (ratio - 1.0)).sum()

    def derivatives(energy):
        found = torch.autograd.functional.hessian(energy, (positions, sigma), create_graph=True)
        return [block for row in found for block in row]

    potential = lennard_jones(mixing=mixing)
    found = derivatives(lambda x, sigma: potential(x, sigma=sigma, epsilon=epsilon).sum())
    torch.testing.assert_close(found, derivatives(reference), rtol=1e-10, atol=1e-10)
