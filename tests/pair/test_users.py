"""What users of other libraries met, of results: bits, conventions, and nothing to do."""

import pytest
import torch

from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb
from nvalchemiops.torch.interactions.lj import lj_energy, lj_energy_forces_virial
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import neighbor_list
from tests.comparing import close, derivative_along, random_like, same_bits, weighted
from tests.pair import users
from tests.systems import no_atoms, triclinic

# -- the same bits --------------------------------------------------------------------------------


def all_bits(name, inputs, **given):
    """Results, and first gradients of all inputs."""
    leaves = inputs.leaves()
    results = users.POTENTIALS[name](*leaves, **given)
    return [*(r.detach() for r in results), *leaves.grad(weighted([r.sin() for r in results]))]


def test_gradients_of_tables_do_not_depend_on_threads(threads, always_split, dtype):
    """Nor lose digits: like all sums they are added in float64."""
    n = 40_000
    generator = torch.Generator().manual_seed(1)
    positions = torch.zeros(n, 3, dtype=dtype)
    positions[:, 0] = 10.0 * torch.arange(n) // 20 + (torch.arange(n) % 2) * (1.0 + torch.rand(n, generator=generator))
    i = torch.arange(n, dtype=torch.int32)
    species = torch.randint(0, 3, (n,), generator=generator)
    table = torch.rand(3, 3, generator=generator).to(dtype)
    potential = PairPotential("A/r", per_pair=("A",), cutoff=5.0)

    def slopes(dtype):
        a = table.to(dtype).requires_grad_()
        options = {"neighbor_list": torch.stack([i, i ^ 1]), "species": species}
        energies, slope = potential(positions.to(dtype), A=a, compute_gradients=("A",), **options)
        return slope.detach(), torch.autograd.grad(energies.sum(), a)[0]

    found = []
    for count in (1, 2, 3, 2):
        threads(count)
        found.append(slopes(dtype))
    for other in found[1:]:
        same_bits(other, found[0])
    close([s.double() for s in found[0]], slopes(torch.float64), 1e-6 if dtype == torch.float32 else 0, atol=0)


@users.EACH
@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_system_alone_has_the_bits_of_a_member_of_a_batch(name, member):
    """With its own part of the list, or lists built by the call."""
    mine = users.MIXED.batch_idx == member
    inputs = users.inputs_of(name, users.MIXED)
    alone = users.Inputs(
        inputs.x[mine],
        inputs.cell[member],
        inputs.a[mine],
        inputs.b[mine] if name == "LJ" else inputs.b[member : member + 1],
    )
    number = torch.cumsum(mine, 0).int() - 1
    kept = mine[users.NEAR["neighbor_list"][0].long()]
    given = {
        "neighbor_list": number[users.NEAR["neighbor_list"][:, kept].long()],
        "neighbor_shifts": users.NEAR["neighbor_shifts"][kept],
    }
    together = users.POTENTIALS[name](*inputs, **users.NEAR)
    same_bits(
        users.POTENTIALS[name](*alone, **given), (together[0][mine], together[1][mine], together[2][member][None])
    )
    built = users.POTENTIALS[name](*inputs, batch_idx=users.MIXED.batch_idx)
    close(built, together)
    close(users.POTENTIALS[name](*alone), (built[0][mine], built[1][mine], built[2][member][None]))


def test_systems_of_a_batch_without_cell_do_not_interact():
    """Also where nothing but the list needs to know the systems: energies of atoms, lists built by the call."""
    x = torch.cat([users.ONE.positions, users.ONE.positions + 0.7])
    batch_idx = torch.arange(2, dtype=torch.int32).repeat_interleave(7)
    alone = [lj_energy(part, 1.5, 0.3, users.CUTOFF) for part in x.split(7)]
    for options in ({}, {"num_systems": 2}):
        close([lj_energy(x, 1.5, 0.3, users.CUTOFF, batch_idx=batch_idx, **options)], [torch.cat(alone)])
    mixed = torch.randperm(14, generator=torch.Generator().manual_seed(1))
    close([lj_energy(x[mixed], 1.5, 0.3, users.CUTOFF, batch_idx=batch_idx[mixed])], [torch.cat(alone)[mixed]])
    charges = torch.linspace(-1, 1, 14, dtype=torch.float64)
    energies, _ = dsf_coulomb(x, charges, users.CUTOFF, batch_idx=batch_idx)
    parts = [dsf_coulomb(part, q, users.CUTOFF)[0] for part, q in zip(x.split(7), charges.split(7))]
    close([energies], [torch.cat(parts)])


@users.EACH
@pytest.mark.parametrize("extra", ["pairs beyond the cutoff", "padding", "padding in between"])
def test_longer_lists_and_padding_change_nothing(name, extra):
    inputs = users.inputs_of(name, users.ONE)
    if extra == "pairs beyond the cutoff":
        system = users.ONE._replace(positions=inputs.x)
        longer, shorter = users.near(system, 1.4 * users.CUTOFF), users.near(system)
        assert longer["neighbor_list"].shape[1] > shorter["neighbor_list"].shape[1]
        # as lists of different reach may have another order
        close(all_bits(name, inputs, **longer), all_bits(name, inputs, **shorter))
        i, j = longer["neighbor_list"].long()
        d = inputs.x[j] - inputs.x[i] + longer["neighbor_shifts"].double() @ inputs.cell[0]
        kept = d.norm(dim=1) < users.CUTOFF
        shorter = {
            "neighbor_list": longer["neighbor_list"][:, kept],
            "neighbor_shifts": longer["neighbor_shifts"][kept],
        }
        same_bits(all_bits(name, inputs, **longer), all_bits(name, inputs, **shorter))
        return
    matrix, _, shifts = neighbor_list(inputs.x, users.CUTOFF, inputs.cell)
    expected = all_bits(name, inputs, neighbor_matrix=matrix, neighbor_matrix_shifts=shifts)
    n, width = matrix.shape
    places = torch.arange(width) * 3 if extra == "padding in between" else torch.arange(width)
    wide = torch.full((n, 3 * width + 5), -7, dtype=torch.int32)
    wide_shifts = torch.full((n, 3 * width + 5, 3), 99, dtype=torch.int32)
    wide[:, places], wide_shifts[:, places] = torch.where(matrix == n, -7, matrix), shifts
    given = {"neighbor_matrix": wide, "neighbor_matrix_shifts": wide_shifts, "fill_value": -7}
    same_bits(all_bits(name, inputs, **given), expected)


# -- nothing to do --------------------------------------------------------------------------------


@users.EACH
@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("n_atoms", [0, 1, 2])
def test_no_pairs(name, n_atoms, matrix):
    """No atoms, one, or two far apart; forces are zero, and everything differentiates, also twice."""
    system = no_atoms() if n_atoms == 0 else users.relaxed(triclinic(n_atoms))
    inputs = users.inputs_of(name, system).leaves()
    if matrix:
        given = {"neighbor_matrix": torch.zeros(n_atoms, 0, dtype=torch.int32)}
        given["neighbor_matrix_shifts"] = torch.zeros(n_atoms, 0, 3, dtype=torch.int32)
    else:
        given = {"neighbor_list": torch.zeros(2, 0, dtype=torch.int32)}
        given["neighbor_shifts"] = torch.zeros(0, 3, dtype=torch.int32)
    energies, forces, virial = users.POTENTIALS[name](*inputs, **given)
    assert energies.shape == (n_atoms,) and forces.shape == (n_atoms, 3) and virial.shape == (1, 3, 3)
    assert not forces.any() and not virial.any()
    assert not energies.any() if name == "LJ" else energies.isfinite().all()
    slopes = inputs.grad(energies.sum() + forces.sum() + virial.sum(), create_graph=True)
    assert all(s.isfinite().all() for s in slopes)
    again = inputs.grad(sum(s.square().sum() for s in slopes), allow_unused=True, materialize_grads=True)
    assert all(s.isfinite().all() for s in again)


@users.EACH
@pytest.mark.parametrize("cell", [True, False])
def test_an_empty_system_in_a_batch(name, cell):
    """Its energy and virial are zero, and the others are as without it."""
    keep = (users.MIXED.batch_idx != 1).nonzero().squeeze(1)
    inputs = users.inputs_of(name, users.MIXED)
    b = inputs.b[keep] if name == "LJ" else inputs.b
    part = users.Inputs(inputs.x[keep], inputs.cell if cell else None, inputs.a[keep], b).leaves()
    options = {"batch_idx": users.MIXED.batch_idx[keep], "num_systems": 3, "energy_reduction": "system"}
    energies, forces, virial = users.POTENTIALS[name](*part, **options)
    assert energies.shape == (3,) and energies[1] == 0 and not virial[1].any()
    slopes = part.grad(energies.sum() + forces.square().sum() + virial.square().sum())
    assert all(s.isfinite().all() for s in slopes)
    for k in (0, 2):
        mine = options["batch_idx"] == k
        b = part.b[mine] if name == "LJ" else part.b[k : k + 1]
        alone = users.POTENTIALS[name](
            part.x[mine], part.cell[k] if cell else None, part.a[mine], b, energy_reduction="system"
        )
        close([t.detach() for t in alone], [t.detach() for t in (energies[k : k + 1], forces[mine], virial[k : k + 1])])


@users.EACH
@pytest.mark.parametrize("where", ["origin", "on an atom"])
def test_padding_atoms(name, where):
    """Atoms without neighbors after the real ones: the same bits, and no gradient, at distance zero as well."""
    inputs, n = users.inputs_of(name, users.ONE), 7
    matrix, _, shifts = neighbor_list(inputs.x, users.CUTOFF, inputs.cell)
    place = torch.zeros(3, 3, dtype=torch.float64) if where == "origin" else inputs.x[:1].expand(3, 3)
    fill = torch.zeros(3, dtype=torch.float64)
    more = users.Inputs(
        torch.cat([inputs.x, place]),
        inputs.cell,
        torch.cat([inputs.a, fill]),
        torch.cat([inputs.b, fill]) if name == "LJ" else inputs.b,
    )
    given = {
        "neighbor_matrix": torch.cat([matrix, torch.full((3, matrix.shape[1]), n, dtype=torch.int32)]),
        "neighbor_matrix_shifts": torch.cat([shifts, torch.zeros(3, *shifts.shape[1:], dtype=torch.int32)]),
        "fill_value": n,
    }
    results = []
    for values, options in ((inputs, {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}), (more, given)):
        leaves = values.leaves()
        energies, forces, virial = users.POTENTIALS[name](*leaves, **options)
        loss = energies[:n].sum() + forces[:n].square().sum() + virial.square().sum()
        results.append(([energies, forces, virial], leaves.grad(loss)))
    (plain, plain_slopes), (padded, slopes) = results
    same_bits([padded[0][:n], padded[1][:n], padded[2]], plain)
    assert not padded[0][n:].any() and not padded[1][n:].any()
    per_atom = [True, False, True, name == "LJ"]
    same_bits([s[:n] if cut else s for s, cut in zip(slopes, per_atom)], plain_slopes)
    assert not any(s[n:].any() for s, cut in zip(slopes, per_atom) if cut)


# -- conventions ----------------------------------------------------------------------------------


@users.EACH
def test_signs_of_forces_and_virial(name):
    """W = -dE/dstrain and F = -dE/dR by finite differences, in a cell without symmetry."""
    inputs = users.inputs_of(name, users.MIXED)
    _, forces, virial = users.POTENTIALS[name](*inputs, **users.NEAR)
    strain, move = random_like([virial, forces])

    def deformed(x, s):
        h = torch.eye(3, dtype=torch.float64) + s * strain
        positions = torch.einsum("ia,iab->ib", x, h[users.MIXED.batch_idx.long()])
        return users.POTENTIALS[name](positions, inputs.cell @ h, inputs.a, inputs.b, **users.NEAR)[0].sum()

    found = -derivative_along(
        lambda s: deformed(inputs.x, s), torch.tensor(0.0), torch.tensor(1.0, dtype=torch.float64)
    )
    torch.testing.assert_close(found, (virial * strain).sum(), rtol=1e-6, atol=1e-8)
    found = -derivative_along(lambda x: deformed(x, 0.0), inputs.x, move)
    torch.testing.assert_close(found, (forces * move).sum(), rtol=1e-6, atol=1e-8)


def test_a_compressed_crystal_pushes_outwards():
    """Stress = -W/V, so the pressure tr(W)/(3 V) is positive if squeezed, negative if stretched."""
    pressure = {}
    for length in (1.3, 1.7):
        cell = length * torch.eye(3, dtype=torch.float64)
        virial = lj_energy_forces_virial(torch.zeros(1, 3, dtype=torch.float64), 1.3, 1.0, 2.6, cell)[2]
        pressure[length] = virial.diagonal(dim1=1, dim2=2).sum().item() / (3.0 * length**3)
    assert pressure[1.3] > 0.1
    assert pressure[1.7] < -0.1


@users.EACH
@pytest.mark.parametrize("matrix", [False, True])
def test_half_lists_give_the_same(name, matrix):
    """Energies, forces, virial and gradients. (That a contradiction is found: test_bad_input.py.)"""
    inputs = users.inputs_of(name, users.ONE)
    expected = all_bits(name, inputs, **users.near(users.ONE))
    options = {"half_fill": True, "return_neighbor_list": not matrix}
    found = neighbor_list(inputs.x, users.CUTOFF, inputs.cell, **options)
    half = (
        {"neighbor_matrix": found[0], "neighbor_matrix_shifts": found[2]}
        if matrix
        else {"neighbor_list": found[0], "neighbor_ptr": found[1], "neighbor_shifts": found[2]}
    )
    close(all_bits(name, inputs, **half, half_list=True), expected)
    close(all_bits(name, inputs, **half, half_list=True, check=True), expected)


EXCLUDED = torch.tensor([[0, 1, 6], [3, 2, 4]])
FACTORS = torch.tensor([0.0, 0.5, 0.0, 1.0], dtype=torch.float64)


@users.EACH
def test_exclusions_do_not_depend_on_the_image_that_is_stored(name):
    """A partner moved by a lattice vector, with the list of the moved atoms."""
    inputs = users.inputs_of(name, users.ONE)
    options = {"exclusions": EXCLUDED, "exclusion_factors": FACTORS[:3]}
    expected = users.POTENTIALS[name](*inputs, **users.near(users.ONE), **options)
    without = users.POTENTIALS[name](*inputs, **users.near(users.ONE))
    assert (expected[0] - without[0]).abs().max() > 1e-4
    for seed in range(3):
        jumps = torch.randint(-2, 3, (7, 3), generator=torch.Generator().manual_seed(seed)).double()
        moved = users.ONE._replace(positions=users.ONE.positions + jumps @ users.ONE.cell[0])
        for given in (users.near(moved), {}):
            found = users.POTENTIALS[name](moved.positions, *inputs[1:], **given, **options)
            close(found, expected, 1e-10)


def test_factors_scale_energies_and_forces_alike():
    """As for 1-4 pairs."""
    x = torch.tensor([[0.0, 0, 0], [1.0, 0.5, 0]], dtype=torch.float64)
    options = {"neighbor_list": torch.tensor([[0, 1], [1, 0]]), "compute_forces": True, "q": 1.0}
    potential = PairPotential("q1*q2/r", ("q",))
    pair = torch.tensor([[0], [1]])
    full, half = (potential(x, **options, exclusions=pair, exclusion_factors=FACTORS[k : k + 1]) for k in (3, 1))
    close(full, potential(x, **options))
    close(half, [0.5 * r for r in full])


@users.EACH
def test_exclusions_take_away_the_nearest_pairs(name):
    """The result is the full energy less that of the excluded pairs; forces by finite differences."""
    inputs = users.inputs_of(name, users.ONE)
    options = {"exclusions": EXCLUDED, "exclusion_factors": FACTORS[:3]}
    energies, forces, _ = users.POTENTIALS[name](*inputs, **users.near(users.ONE), **options)
    full = users.POTENTIALS[name](*inputs, **users.near(users.ONE))[0]
    images = torch.cartesian_prod(*(torch.arange(-2, 3),) * 3).double() @ inputs.cell[0]
    less = 0.0
    for (i, j), factor in zip(EXCLUDED.T.tolist(), FACTORS.tolist()):
        d = inputs.x[j] - inputs.x[i] + images
        d = d[d.norm(dim=1).argmin()]
        pair = torch.stack([torch.zeros(3, dtype=torch.float64), d])
        ab = inputs.a[[i, j]], inputs.b[[i, j]] if name == "LJ" else inputs.b
        both = {"neighbor_list": torch.tensor([[0, 1], [1, 0]])}
        alone = {"neighbor_list": torch.zeros(2, 0, dtype=torch.int64)}
        energy_of_pair = [users.POTENTIALS[name](pair, None, *ab, **g)[0].sum() for g in (both, alone)]
        less = less + (1.0 - factor) * (energy_of_pair[0] - energy_of_pair[1])
    torch.testing.assert_close(energies.sum(), full.sum() - less, rtol=1e-11, atol=1e-11)
    move = random_like([forces])[0]
    slope = derivative_along(
        lambda x: users.POTENTIALS[name](x, *inputs[1:], **users.near(users.ONE), **options)[0].sum(), inputs.x, move
    )
    torch.testing.assert_close(-slope, (forces * move).sum(), rtol=1e-6, atol=1e-8)
