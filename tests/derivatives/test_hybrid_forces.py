"""Charges predicted from the geometry, and the chain term counted once.

With ``hybrid_forces=True`` results depend on positions and cell as on constants, so the whole force on charges q(R) is
the explicit one plus that which flows through the charges, with one backward pass through the net alone:

    -dE/dR = F(R, q) - Σ dE/dq dq/dR
"""

import functools
from collections.abc import Callable

import pytest
import torch

from nvalchemiops.torch.interactions import electrostatics
from tests.support.comparing import close, random_like
from tests.support.systems import ALL, System, batch, neighbors_of, triclinic

TWO = batch(triclinic(5), triclinic(4, charged=True, seed=2))
SHUFFLE = torch.randperm(9, generator=torch.Generator().manual_seed(3))
TWO = System(TWO.positions[SHUFFLE], TWO.charges[SHUFFLE], TWO.cell, TWO.batch_idx[SHUFFLE])
X, CELL, BATCH = TWO.positions, TWO.cell, TWO.batch_idx


NEAR = neighbors_of(TWO, 4.0)
SUMS: dict[str, Callable] = {
    "Ewald": functools.partial(
        electrostatics.ewald_summation, alpha=0.8, miller_bounds=(2, 3, 2), batch_idx=BATCH, **NEAR
    ),
    "PME": functools.partial(
        electrostatics.particle_mesh_ewald,
        alpha=0.8,
        mesh_dimensions=(8, 9, 10),
        spline_order=6,
        batch_idx=BATCH,
        **NEAR,
    ),
}
PARTS: dict[str, Callable] = {
    "real space": functools.partial(electrostatics.ewald_real_space, alpha=0.8, batch_idx=BATCH, **NEAR),
    "reciprocal space": functools.partial(
        electrostatics.ewald_reciprocal_space, k_vectors=None, alpha=0.8, miller_bounds=(2, 3, 2), batch_idx=BATCH
    ),
    "mesh": functools.partial(
        electrostatics.pme_reciprocal_space, alpha=0.8, mesh_dimensions=(8, 9, 10), spline_order=6, batch_idx=BATCH
    ),
}
EVERY = SUMS | PARTS
EACH_SUM = pytest.mark.parametrize("name", SUMS)
EACH = pytest.mark.parametrize("name", EVERY)
EITHER_MODE = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


class Net(torch.nn.Module):
    """Charges from the distances to the neighbors, or from positions themselves; dropout makes modes differ."""

    def __init__(self, kind="distances"):
        super().__init__()
        self.kind = kind
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(4, generator=generator, dtype=torch.float64))

    def forward(self, x, cell=CELL):
        if self.kind == "positions":
            return torch.sin(x @ self.weight[:3]) + self.weight[3]
        i, j = NEAR["neighbor_list"].long()
        images = torch.einsum("pa,pab->pb", NEAR["neighbor_shifts"].double(), cell.index_select(0, BATCH[i].long()))
        r2 = (x[j] - x[i] + images).square().sum(1)
        features = torch.exp(-r2[:, None] / torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64))
        q = torch.zeros(len(x), dtype=torch.float64).index_add(0, i, features @ self.weight)
        q = torch.tanh(q)
        return q * 0.5 if self.training else q


NETS = pytest.mark.parametrize("net", ["distances", "positions"])


def full_force(name, net, weights=None, create_graph=False):
    """-dE/dR through the whole graph."""
    x = X.clone().requires_grad_()
    energies = EVERY[name](x, net(x), CELL)
    return -torch.autograd.grad(energies, x, torch.ones_like(energies), create_graph=create_graph)[0]


def hybrid_force(name, net, create_graph=False):
    """The explicit force, plus what flows through the charges; all from one positions tensor."""
    x = X.clone().requires_grad_()
    energies, forces = EVERY[name](x, net(x), CELL, compute_forces=True, hybrid_forces=True)
    return forces - torch.autograd.grad(energies.sum(), x, create_graph=create_graph)[0]


# -- forces ---------------------------------------------------------------------------------------


@EACH
@NETS
@EITHER_MODE
def test_explicit_forces_and_the_gradient_through_charges_are_the_whole_force(name, net, training):
    """To 1e-10, with and without a graph of the gradient; and to finite differences of the composed energy."""
    net = Net(net).train(training)
    found = hybrid_force(name, net, create_graph=training)
    close([found.detach()], [full_force(name, net)], 1e-10)
    (fixed,) = EVERY[name](X, net(X), CELL, compute_forces=True, hybrid_forces=True)[1:]
    assert (found - fixed).abs().max() > 1e-3  # a chain term there is
    direction, h = random_like([X])[0], 1e-4
    at = [EVERY[name](X + k * h * direction, net(X + k * h * direction), CELL).sum() for k in (-2, -1, 1, 2)]
    slope = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * h)
    torch.testing.assert_close(-(found * direction).sum(), slope, rtol=1e-7, atol=1e-8)


@EACH
def test_the_gradient_by_charges_may_be_used_instead_of_the_energy(name):
    """The same chain term from the explicit charge gradients, without a backward pass through the sum."""
    net, x = Net(), X.clone().requires_grad_()
    q = net(x)
    results = EVERY[name](x, q, CELL, compute_forces=True, compute_charge_gradients=True, hybrid_forces=True)
    energies, forces, slopes = results
    through = [torch.autograd.grad(q, x, slopes, retain_graph=True)[0], torch.autograd.grad(energies.sum(), x)[0]]
    close(through[:1], through[1:], 1e-10)
    close([(forces - through[0]).detach()], [full_force(name, net)], 1e-10)


@EACH
def test_values_are_those_without_hybrid_forces(name):
    q = Net()(X).detach()
    close(EVERY[name](X, q, CELL, hybrid_forces=True, **ALL), EVERY[name](X, q, CELL, **ALL), 0)


@EACH_SUM
def test_the_function_transforms_take_the_same_path(name):
    """`torch.func.grad` of the energy with frozen geometry, by positions that only the charges see."""
    net = Net()

    def energy(x):
        return SUMS[name](x, net(x), CELL, hybrid_forces=True).sum()

    def force(x):
        return SUMS[name](x, net(x), CELL, compute_forces=True, hybrid_forces=True)[1]

    def whole(x):
        return SUMS[name](x, net(x), CELL).sum()

    close([force(X) - torch.func.grad(energy)(X)], [-torch.func.grad(whole)(X)], 1e-10)
    values, pull = torch.func.vjp(lambda x: SUMS[name](x, net(x), CELL, hybrid_forces=True), X)
    close([pull(torch.ones_like(values))[0]], [torch.func.grad(energy)(X)], 1e-10)


@EACH_SUM
@EITHER_MODE
def test_the_graph_may_be_used_twice(name, training):
    """Forces, and then the loss of a training step, from one graph."""
    net, x = Net(), X.clone().requires_grad_()
    energies, forces = SUMS[name](x, net(x), CELL, compute_forces=True, hybrid_forces=True)
    options = {"create_graph": training, "retain_graph": True}
    first = torch.autograd.grad(energies.sum(), x, **options)[0]
    second = torch.autograd.grad(energies.sum(), x, **options)[0]
    assert torch.equal(first, second)
    close([(forces - first).detach()], [full_force(name, net)], 1e-10)
    # and the gradient by parameters of the net, through the energy
    (found,) = torch.autograd.grad(energies.sum(), net.weight)
    plain = torch.autograd.grad(SUMS[name](X, net(X), CELL).sum(), net.weight)
    close([found], plain, 1e-10)


@EACH_SUM
@pytest.mark.parametrize("reduction", ["atom", "system"])
def test_weights_of_energies_reach_the_chain_term(name, reduction):
    """Gradients through the charges of a weighted sum of energies, as those at frozen geometry."""
    net, x = Net(), X.clone().requires_grad_()
    energies = SUMS[name](x, net(x), CELL, hybrid_forces=True, energy_reduction=reduction)
    weights = random_like([energies])[0]
    (found,) = torch.autograd.grad(energies, x, weights)
    fixed = SUMS[name](X, net(x), CELL, energy_reduction=reduction)
    close([found], torch.autograd.grad(fixed, x, weights), 1e-10)
    singles = []
    for energy in SUMS[name](x, net(x), CELL, hybrid_forces=True, energy_reduction=reduction):
        singles.append(torch.autograd.grad(energy, x, retain_graph=True)[0])
    close([found], [sum(w * s for w, s in zip(weights, singles))], 1e-10)


# -- virial ---------------------------------------------------------------------------------------


@EACH
@EITHER_MODE
def test_explicit_virial_and_the_gradient_through_charges_are_the_whole_virial(name, training):
    """The charges feel the strain too."""
    net = Net().train(training)
    strain = torch.zeros(2, 3, 3, dtype=torch.float64, requires_grad=True)
    deform = torch.eye(3, dtype=torch.float64) + strain
    x, cell = torch.einsum("ia,iab->ib", X, deform[BATCH.long()]), CELL @ deform
    q = net(x, cell)
    energies, virial = EVERY[name](x, q, cell, compute_virial=True, hybrid_forces=True)
    (through,) = torch.autograd.grad(energies.sum(), strain, retain_graph=True, create_graph=training)
    assert through.abs().max() > 1e-3
    (whole,) = torch.autograd.grad(EVERY[name](x, q, cell).sum(), strain)
    close([(virial - through).detach()], [-whole], 1e-10)


# -- who is in the graph --------------------------------------------------------------------------


@EACH
def test_the_graph_reaches_the_geometry_only_through_charges(name):
    x, q, cell = (t.clone().requires_grad_() for t in (X, TWO.charges, CELL))
    results = EVERY[name](x, q, cell, hybrid_forces=True, **ALL)
    for result in results:
        assert result.requires_grad
        by_x, by_q, by_cell = torch.autograd.grad(
            (result * random_like([result])[0]).sum(), (x, q, cell), allow_unused=True, retain_graph=True
        )
        assert by_x is None and by_cell is None and by_q.any()
    assert not any(r.requires_grad for r in EVERY[name](x, q.detach(), cell, hybrid_forces=True, **ALL))


@EACH_SUM
def test_alpha_is_a_constant_too(name):
    alpha = torch.tensor([0.7, 0.8], dtype=torch.float64, requires_grad=True)
    fixed = SUMS[name](X, TWO.charges, CELL, alpha=alpha, hybrid_forces=True, **ALL)
    assert not any(r.requires_grad for r in fixed)
    assert all(r.requires_grad for r in SUMS[name](X, TWO.charges, CELL, alpha=alpha, **ALL))


def test_a_prepared_mesh_takes_a_cell_that_is_frozen():
    prepared = electrostatics.prepare_mesh(CELL, 0.8, (8, 9, 10), 6)
    given = {"batch_idx": BATCH, "prepared": prepared, "cutoff": 4.0, "compute_forces": True}
    found = electrostatics.particle_mesh_ewald(
        X, TWO.charges, CELL.clone().requires_grad_(), hybrid_forces=True, **given
    )
    close(found, electrostatics.particle_mesh_ewald(X, TWO.charges, CELL, **given))


@EACH_SUM
def test_corrections_are_frozen_as_well(name):
    """Slabs and excluded pairs."""
    options = {
        "pbc": torch.tensor([[True, True, False], [True, True, True]]),
        "slab_correction": True,
        "exclusions": torch.stack([torch.where(BATCH == k)[0][:2] for k in range(2)], 1),
    }
    net, x = Net(), X.clone().requires_grad_()
    energies, forces = SUMS[name](x, net(x), CELL, compute_forces=True, hybrid_forces=True, **options)
    through = torch.autograd.grad(energies.sum(), x)[0]
    whole = torch.autograd.grad(SUMS[name](x, net(x), CELL, **options).sum(), x)[0]
    close([(forces - through).detach()], [-whole], 1e-10)
    # the slab correction by itself has no such flag: detach positions there
    slab = electrostatics.compute_slab_correction(X, net(x), CELL, options["pbc"], BATCH, compute_forces=True)
    bent = electrostatics.compute_slab_correction(x, net(x), CELL, options["pbc"], BATCH)
    chain = slab[1] - torch.autograd.grad(slab[0].sum(), x)[0]
    close([chain.detach()], [-torch.autograd.grad(bent.sum(), x)[0]], 1e-10)


# -- training -------------------------------------------------------------------------------------


def loss_gradient(force, net):
    return torch.autograd.grad((force - 0.3 * random_like([X], 5)[0]).square().sum(), net.weight)[0]


@EACH
def test_force_matching_on_the_whole_force(name):
    """The loss on forces plus chain term trains like that on the full path, and like finite differences.

    The explicit force is frozen in positions, which is right: parameters reach it through the charges alone. So is the
    chain term: by charges it has the second derivatives, by parameters those of the net.
    """
    net = Net().train()
    found = loss_gradient(hybrid_force(name, net, create_graph=True), net)
    expected = loss_gradient(full_force(name, net, create_graph=True), net)
    close([found], [expected], 1e-10)
    direction, h = random_like([net.weight])[0], 1e-4
    losses = []
    with torch.no_grad():
        start = net.weight.clone()
    for k in (-2, -1, 1, 2):
        with torch.no_grad():
            net.weight.copy_(start + k * h * direction)
        losses.append((hybrid_force(name, net) - 0.3 * random_like([X], 5)[0]).square().sum().item())
    slope = (losses[0] - 8 * losses[1] + 8 * losses[2] - losses[3]) / (12 * h)
    assert (found @ direction).item() == pytest.approx(slope, rel=1e-7)


@EACH_SUM
def test_channels(name):
    """Charges (n_atoms, 2) of two nets."""
    nets, x = (Net(), Net("positions")), X.clone().requires_grad_()
    q = torch.stack([net(x) for net in nets], 1)
    energies, forces = SUMS[name](x, q, CELL, compute_forces=True, hybrid_forces=True)
    found = forces - torch.autograd.grad(energies.sum(), x)[0]
    close([found.detach()], [sum(full_force(name, net) for net in nets)], 1e-10)


@EACH_SUM
def test_charges_that_require_no_positions_gradient_in_inference(name):
    """Molecular dynamics: no_grad for the sum, forces all the same."""
    net = Net().eval()
    with torch.no_grad():
        energies, forces, _, virial = SUMS[name](X, net(X), CELL, hybrid_forces=True, **ALL)
    assert not energies.requires_grad
    # another set of results is another kernel, with other roundings
    close((energies, forces), [t.detach() for t in SUMS[name](X, net(X), CELL, compute_forces=True)], 0, atol=1e-14)
    with torch.inference_mode():
        again = SUMS[name](X, net(X), CELL, hybrid_forces=True, **ALL)
    close((again[0], again[1], again[3]), (energies, forces, virial), 0)
