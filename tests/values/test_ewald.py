"""The Ewald sum: right energies, and every derivative of them."""

import numpy as np
import pytest
import torch

from nvalchemiops.torch.interactions.electrostatics import EwaldParameters, estimate_ewald_parameters, ewald_summation
from nvalchemiops.torch.neighbors import neighbor_list
from tests.reference.ewald import everything
from tests.support.comparing import close
from tests.support.systems import ALL, SYSTEMS, System, batch, crystal, csr, triclinic

WITH_ATOMS = [name for name in SYSTEMS if name != "no atoms"]


def summed(system, **options):
    return ewald_summation(system.positions, system.charges, system.cell, batch_idx=system.batch_idx, **options)


def matrix(system, cutoff, **options):
    found, _, shifts = neighbor_list(
        system.positions.detach(), cutoff, system.cell.detach(), batch_idx=system.batch_idx, **options
    )
    return {"neighbor_matrix": found, "neighbor_matrix_shifts": shifts, "mask_value": options.get("fill_value")}


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_ATOMS)
def test_everything_equals_the_slow_reference(name, device):
    system = SYSTEMS[name]()
    alpha, cutoff, k_cutoff = 0.7, 6.0, 6.0
    moved = system.to(device)
    found = [t.cpu() for t in summed(moved, alpha=alpha, k_cutoff=k_cutoff, **csr(moved, cutoff), **ALL)]
    energies, forces, slopes, virial = everything(
        system.positions, system.charges, system.cell[0], alpha, cutoff, k_cutoff
    )
    close(found, (energies.detach(), forces, slopes, virial[None]), 1e-10)


def test_a_lone_ion_in_its_background():
    """Wigner lattice, simple cubic: E = -1.418648739749 q² / L."""
    system = System.of([[0.1, 0.2, 0.3]], [2.0], np.eye(3) * 3.0)
    energy = summed(system, accuracy=1e-13).item()
    assert energy == pytest.approx(-1.4186487397403098 * 4.0 / 3.0, abs=1e-9)


# -- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["triclinic", "charged", "cesiumchloride"])
def test_gradients_of_every_output_equal_the_slow_reference(name, device):
    """Second derivatives of the energy, with random weights for each output and atom."""
    system = SYSTEMS[name]()
    alpha, cutoff, k_cutoff = 0.7, 5.0, 5.0
    inputs = [t.requires_grad_() for t in system[:3]]
    moved = system.to(device)
    found = summed(moved, alpha=alpha, k_cutoff=k_cutoff, **csr(moved, cutoff), **ALL)
    expected = everything(*inputs[:2], inputs[2][0], alpha, cutoff, k_cutoff, create_graph=True)
    generator = torch.Generator().manual_seed(0)
    for ours, theirs in zip(found, expected, strict=True):
        weight = torch.randn(theirs.shape, generator=generator, dtype=torch.float64)
        ours = torch.autograd.grad((weight * ours.cpu()).sum(), inputs, retain_graph=True)
        theirs = torch.autograd.grad((weight * theirs).sum(), inputs, retain_graph=True)
        close(ours, theirs, 1e-9, atol=1e-10)


# -- accuracy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accuracy", [1e-4, 1e-6, 1e-9])
@pytest.mark.parametrize("cutoff", [None, 5.0, 9.5])
def test_measured_force_error_meets_the_accuracy(accuracy, cutoff):
    # forces of the order of those in a liquid, to which errors are relative
    system = crystal("rocksalt", 5.64, 3, 0.3)
    exact = summed(system, accuracy=1e-13, compute_forces=True)
    options = {"accuracy": accuracy, "compute_forces": True}
    cutoff = cutoff or float(estimate_ewald_parameters(system.positions, system.cell, accuracy=accuracy)[1])
    # the reach is not said here: the sum has to find out that the list is short
    for neighbors in (csr(system, cutoff), {"cutoff": cutoff}):
        energies, forces = summed(system, **options, **neighbors)
        error = (forces - exact[1]).norm() / exact[1].norm()
        # with a list that is longer than needed, missing wave vectors are the only error
        assert accuracy / (3.0 if cutoff < 9.0 else 6.0) < error < 3.0 * accuracy
        assert abs(energies.sum() / exact[0].sum() - 1.0) < accuracy


def test_estimate_is_for_each_system():
    systems = [SYSTEMS["rocksalt"](), SYSTEMS["triclinic"](), SYSTEMS["one atom"]()]
    together = batch(*systems)
    found = estimate_ewald_parameters(together.positions, together.cell, together.batch_idx, accuracy=1e-5)
    assert isinstance(found, EwaldParameters)
    for n, system in enumerate(systems):
        alone = estimate_ewald_parameters(system.positions, system.cell[0], accuracy=1e-5)
        close([t[n : n + 1] for t in found], alone, 1e-10)
    finer = estimate_ewald_parameters(together.positions, together.cell, together.batch_idx, accuracy=1e-8)
    assert (finer.real_space_cutoff > found.real_space_cutoff).all()
    assert (finer.reciprocal_space_cutoff > found.reciprocal_space_cutoff).all()


# -- bad input ------------------------------------------------------------------------------------

SYSTEM = triclinic(4)
X, Q, CELL = SYSTEM[:3]
NEAR = csr(SYSTEM, 3.0)
MATRIX = matrix(SYSTEM, 3.0)
TWO = {"cell": CELL.expand(2, 3, 3), "batch_idx": torch.tensor([0, 1, 0, 1])}


@pytest.mark.parametrize(
    ("error", "argument", "options"),
    [
        (ValueError, "positions", {"positions": X / 0.0}),
        (ValueError, "charges", {"charges": Q[:, None][:, :0]}),
        (ValueError, "k_cutoff", {"k_cutoff": -1.0}),
        (ValueError, "alpha", {"alpha": 1e4}),
        (ValueError, r"batch_idx.*one system.*\(n_systems, 3, 3\)", {"batch_idx": torch.tensor([0, 1, 0, 1])}),
        (ValueError, "k_vectors", {"k_vectors": X}),
        (TypeError, "k_vectors", {"k_vectors": [[1.0, 0.0, 0.0]]}),
        (ValueError, "k_vectors", {"k_vectors": X, "miller_bounds": (1, 1, 1)}),
        (TypeError, "miller_indices", {"miller_indices": X}),
        (ValueError, "miller_bounds", {"miller_bounds": (1, 1)}),
        (TypeError, "miller_bounds", {"miller_bounds": (1.5, 1, 1)}),
    ],
)
def test_bad_input_that_only_this_sum_has_is_named(error, argument, options):
    with pytest.raises(error, match=argument):
        ewald_summation(**{"positions": X, "charges": Q, "cell": CELL, **options})
