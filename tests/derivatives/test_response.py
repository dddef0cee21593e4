"""Induced charges and dipoles: against dense matrices, and derivatives of every order through the solution."""

import functools

import pytest
import torch
from torch.autograd import forward_ad

from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch.interactions.electrostatics import (
    Electrostatics,
    InducedMoments,
    born_charges,
    ewald_summation,
    induced_moments,
)
from nvalchemiops.torch.systems import System
from tests.reference.multipoles import energies, open_field, sources
from tests.support.comparing import close, close_to_largest, derivative_along, random_like, weighted
from tests.support.systems import crystal

BATCH = torch.tensor([0, 1, 0, 1, 1, 0, 0], dtype=torch.int32)
TIGHT = {"tolerance": 1e-13}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def atoms():
    """Two molecules, with all that an energy may depend on, by name."""
    n = len(BATCH)
    turns = 0.2 * random(n, 3, 3, seed=4)
    return {
        "positions": 1.6 * torch.arange(n).double().unsqueeze(1) * torch.tensor([0.9, 0.5, 0.3]) + 0.4 * random(n, 3),
        "permanent": random(n, seed=1),
        "hardness": 3.0 + random(n, seed=2) ** 2,
        "electronegativity": random(n, seed=3),
        "total_charge": torch.tensor([0.7, -0.2], dtype=torch.float64),
        "polarizabilities": 0.3 * torch.eye(3) + 0.3 * turns @ turns.mT,
        "external_field": 0.3 * random(2, 3, seed=5),
    }


def gaussians(charges, dipoles, positions, permanent):
    """The interaction of all Gaussians of a molecule, with themselves too: plain torch. Permanent charges are added."""
    found = []
    for system in (0, 1):
        here = BATCH == system
        given = sources(positions[here], (charges + permanent)[here], dipoles[here], widths=0.5)
        found.append(energies(open_field(positions[here], given, own=True), given).sum())
    return torch.stack(found)


def only(kind, unknown, positions, permanent):
    """The same where one kind of source is unknown."""
    zero = torch.zeros(len(positions), 3, dtype=positions.dtype)
    if kind == "charges":
        return gaussians(unknown, zero, positions, permanent)
    return gaussians(0.0 * permanent, unknown, positions, permanent)


OWN = {
    "charges": ("hardness", "electronegativity", "total_charge"),
    "dipoles": ("polarizabilities", "external_field"),
}
OWN["both"] = OWN["charges"] + OWN["dipoles"]
KINDS = pytest.mark.parametrize("kind", OWN)


def names_of(kind):
    return ("positions", "permanent", *OWN[kind])


def solved(kind, values, **options):
    """By the library."""
    given = dict(zip(names_of(kind), values))
    energy = gaussians if kind == "both" else functools.partial(only, kind)
    place = given.pop("positions"), given.pop("permanent")
    options = {**TIGHT, **options}
    found = induced_moments(energy, place, **given, batch_idx=BATCH, num_systems=2, **options)
    return [x for x in found[:3] if x is not None]


def dense(kind, values):
    """By a matrix, with a row and a column for each total charge."""
    given = dict(zip(names_of(kind), values))
    n, eye = len(BATCH), torch.eye(3, dtype=torch.float64)
    with_charges, with_dipoles = kind != "dipoles", kind != "charges"

    def total(x):
        charges, dipoles = x[:n], x[n:].view(n, 3)
        found = gaussians(charges, dipoles, given["positions"], given["permanent"])
        atoms = torch.zeros(n, dtype=torch.float64)
        if with_charges:
            atoms = atoms + given["electronegativity"] * charges + 0.5 * given["hardness"] * charges**2
        if with_dipoles:
            alpha = given["polarizabilities"]
            alpha = alpha[:, None, None] * eye if alpha.ndim == 1 else alpha
            alpha = 0.5 * (alpha + alpha.mT)
            field = given["external_field"][BATCH.long()]
            atoms = atoms + 0.5 * torch.einsum("ia,iab,ib->i", dipoles, torch.linalg.inv(alpha), dipoles)
            atoms = atoms - (dipoles * field).sum(1)
        return found + torch.stack([atoms[BATCH == s].sum() for s in (0, 1)])

    zero = torch.zeros(4 * n, dtype=torch.float64)
    unknown = torch.cat([torch.full((n,), with_charges), torch.full((3 * n,), with_dipoles)]).nonzero().squeeze(1)
    gradient = torch.func.jacrev(lambda x: total(x).sum())
    right = -gradient(zero)[unknown]
    matrix = torch.func.jacfwd(gradient)(zero)[unknown][:, unknown]
    if with_charges:
        border = torch.zeros(len(unknown), 2, dtype=torch.float64)
        border[torch.arange(n), BATCH.long()] = 1.0
        matrix = torch.cat([torch.cat([matrix, border], 1), torch.cat([border.mT, torch.zeros(2, 2)], 1)])
        right = torch.cat([right, given["total_charge"]])
    x = zero.index_put((unknown,), torch.linalg.solve(matrix, right)[: len(unknown)])
    return [*([x[:n]] if with_charges else []), *([x[n:].view(n, 3)] if with_dipoles else []), total(x)]


def leaves_for(kind, scalar=False):
    given = atoms()
    if scalar:
        given["polarizabilities"] = 0.3 + 0.1 * random(len(BATCH), seed=6) ** 2
    return [given[name].requires_grad_() for name in names_of(kind)]


# charges have no polarizability, which may be a scalar or a tensor
@pytest.mark.parametrize(("kind", "scalar"), [(k, s) for k in OWN for s in (False, True) if not (s and k == "charges")])
def test_solution_and_its_derivatives_equal_a_dense_one(kind, scalar):
    """Sources, energies, their first derivatives by all that enters, and second ones with random weights."""
    found = []
    for solve in (solved, dense):
        leaves = leaves_for(kind, scalar)
        results = solve(kind, leaves)
        first = torch.autograd.grad(weighted([r.sin() for r in results]), leaves, create_graph=True)
        second = torch.autograd.grad(weighted([f.sin() for f in first], seed=3), leaves)
        found.append(([r.detach() for r in results], [f.detach() for f in first], second))
    for ours, exact in zip(*found):
        close_to_largest(ours, exact, 1e-9)


def test_energy_needs_no_second_solution_and_its_hessian_is_right():
    """Forces of the minimum are those at fixed sources; second derivatives see the sources move."""
    x, permanent, *own = leaves_for("dipoles")
    given = dict(zip(OWN["dipoles"], (t.detach() for t in own)))
    calls = []

    def energy(dipoles, positions):
        calls.append(len(calls))
        return only("dipoles", dipoles, positions, permanent.detach())

    def minimum(positions):
        return induced_moments(energy, (positions,), **given, batch_idx=BATCH, **TIGHT)  # systems are counted

    found = minimum(x)
    before = len(calls)
    (slope,) = torch.autograd.grad(found.energies.sum(), x)
    assert len(calls) == before + 1
    (explicit,) = torch.autograd.grad(energy(found.dipoles.detach(), x).sum(), x)
    close_to_largest([slope], [explicit], 1e-11)
    direction = random(*x.shape, seed=9)
    (slope,) = torch.autograd.grad(minimum(x).energies.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope, x, direction)
    by_difference = derivative_along(
        lambda y: torch.autograd.grad(minimum(y).energies.sum(), y)[0], x.detach().requires_grad_(), direction, 1e-3
    )
    close_to_largest([second], [by_difference], 1e-8)


def test_derivatives_along_directions_by_two_backward_passes():
    """Those by the weights of the first, which alone are asked for in the second."""
    leaves = leaves_for("both")
    results = solved("both", leaves)
    weights = [torch.ones_like(r).requires_grad_() for r in results]
    directions = random_like(leaves)
    first = torch.autograd.grad(results, leaves, weights, create_graph=True)
    tiny = [1e-10 * w.detach() for w in weights]  # lose no digits
    close_to_largest([1e10 * f for f in torch.autograd.grad(results, leaves, tiny, retain_graph=True)], first, 1e-9)
    along = torch.autograd.grad(first, weights, directions)

    def moved(step):
        return solved("both", [leaf.detach() + step * d for leaf, d in zip(leaves, directions)])

    step = 1e-4
    sides = [moved(k * step) for k in (-2, -1, 1, 2)]
    close_to_largest(along, [(a - 8.0 * b + 8.0 * c - d) / (12.0 * step) for a, b, c, d in zip(*sides)], 1e-9)


@pytest.mark.later
def test_third_derivatives_against_differences():
    """Implicit differentiation of the implicit second derivative."""
    leaves = leaves_for("both")
    x, others = leaves[0], [t.detach() for t in leaves[1:]]

    def second(x):
        charges, dipoles, _ = solved("both", [x, *others])
        (first,) = torch.autograd.grad(weighted([charges, dipoles]), x, create_graph=True)
        return torch.autograd.grad(weighted([first], 5), x, create_graph=True)[0]

    (third,) = torch.autograd.grad(weighted([second(x)], 7), x)
    direction = random(*x.shape, seed=9)
    by_difference = derivative_along(lambda y: weighted([second(y)], 7).detach(), x, direction, 1e-3)
    close([(third * direction).sum()], [by_difference], 1e-7)


def test_gradcheck():
    x, permanent, *own = leaves_for("charges")
    own = [t.detach() for t in own]

    def charges(x, permanent):
        return solved("charges", [x, permanent, *own])[0]

    torch.autograd.gradcheck(charges, (x, permanent), fast_mode=True)
    torch.autograd.gradgradcheck(charges, (x, permanent), fast_mode=True)


def test_atoms_without_polarizability():
    """Zero is allowed, as a number and along axes, and has the gradient of the limit."""
    for scalar in (True, False):
        given = atoms()
        alpha = given["polarizabilities"]
        alpha = alpha.diagonal(dim1=1, dim2=2).mean(1) if scalar else alpha.clone()
        if scalar:
            alpha[2] = 0.0
        else:
            alpha[2] = torch.diag(torch.tensor([0.4, 0.0, 0.0], dtype=torch.float64))
        values = [given["positions"], given["permanent"], alpha.requires_grad_(), given["external_field"]]
        dipoles, _ = solved("dipoles", values)
        assert dipoles[2, 1:].abs().max() == 0.0

        def loss(alpha, values=values):
            dipoles, minimum = solved("dipoles", [*values[:2], alpha, values[3]])
            return weighted([dipoles, minimum])

        (slope,) = torch.autograd.grad(loss(alpha), alpha)
        direction = random(*alpha.shape, seed=1)
        direction = direction if scalar else direction @ direction.mT
        # from one side: polarizabilities must not be negative
        step = 1e-3
        at = [loss(alpha.detach() + k * step * direction.abs()).item() for k in range(5)] if scalar else None
        if scalar:
            forward = (-25 * at[0] + 48 * at[1] - 36 * at[2] + 16 * at[3] - 3 * at[4]) / (12 * step)
            assert abs((slope * direction.abs()).sum().item() / forward - 1.0) < 1e-8
        else:
            near = (alpha.detach() + 1e-9 * torch.eye(3)).requires_grad_()
            (there,) = torch.autograd.grad(loss(near), near)
            close_to_largest([slope], [there], 1e-7)


CELL = torch.tensor([[8.0, 0.0, 0.0], [1.0, 7.5, 0.0], [-0.6, 0.9, 8.4]], dtype=torch.float64)


def test_charges_in_a_crystal():
    """By `ewald_summation`: equal chemical potentials, the total charge, and gradients by positions and cell."""
    x = CELL.mean(0) * torch.arange(6).double().unsqueeze(1) / 6 + 0.5 * random(6, 3)
    hardness, chi = 4.0 + random(6) ** 2, random(6, seed=1)

    def energy(charges, positions, cell):
        return ewald_summation(positions, charges, cell, alpha=0.5, cutoff=9.0, k_cutoff=6.0, energy_reduction="system")

    def charges(positions, cell):
        options = {"hardness": hardness, "electronegativity": chi, "total_charge": 0.5, **TIGHT}
        return induced_moments(energy, (positions, cell), **options)

    leaves = [x.requires_grad_(), CELL.clone().requires_grad_()]
    found = charges(*leaves)
    assert found.residuals.max() < 1e-13 and 3 < found.iterations < 20
    close([found.charges.sum()], [torch.tensor(0.5, dtype=torch.float64)])
    q = found.charges.detach().requires_grad_()
    (potential,) = torch.autograd.grad(energy(q, x, CELL).sum(), q)
    levels = potential + hardness * q + chi
    close_to_largest([levels], [levels.mean().expand(6)], 1e-11)
    slopes = torch.autograd.grad(weighted([found.charges]), leaves)
    for place, slope in enumerate(slopes):
        direction = random(*leaves[place].shape, seed=2)

        def moved(value, place=place):
            there = [leaf.detach() for leaf in leaves]
            there[place] = value
            return weighted([charges(*there).charges])

        by_difference = derivative_along(moved, leaves[place].detach(), direction, 1e-3)
        close([(slope * direction).sum()], [by_difference], 1e-8)


def test_dipoles_that_are_zero_by_symmetry():
    """In a perfect crystal fields are rounding errors, which must not become sources too small to be summed."""
    x, q, cell, _ = crystal("zincblende", 5.4)
    for origin in (0.0, 0.37):

        def energy(dipoles, origin=origin):
            given = {"alpha": 0.6, "cutoff": 8.0, "k_cutoff": 5.0, "dipoles": dipoles}
            return ewald_summation(x + origin, q, cell, **given, energy_reduction="system")

        found = induced_moments(energy, polarizabilities=torch.full_like(q, 2.0))
        assert found.dipoles.abs().max() < 1e-12 and found.iterations < 5


def test_born_charges():
    """Of two molecules with induced dipoles, beside differences; charges that do not respond are their own."""
    start, *others = (atoms()[name] for name in names_of("dipoles"))
    permanent = others[0]

    def polarization(x, of_systems=True):
        found = permanent[:, None] * x + solved("dipoles", [x, *others])[0]
        return torch.zeros(2, 3, dtype=x.dtype).index_add(0, BATCH.long(), found) if of_systems else found.sum(0)

    x, direction, weights = start.clone().requires_grad_(), random(*start.shape, seed=6), random(2, 3, seed=7)
    born = born_charges(polarization(x), x, create_graph=True)
    by_difference = derivative_along(lambda x: (weights * polarization(x)).sum(), start, direction, 1e-3)
    close([torch.einsum("ia,iab,ib->", direction, born, weights[BATCH.long()])], [by_difference], 1e-8)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(weighted([born]), x))
    close([born_charges(polarization(x, of_systems=False), x)], [born])
    close([born_charges((permanent[:, None] * x).sum(0), x)], [permanent[:, None, None] * torch.eye(3).double()])
    with pytest.raises(ValueError, match="`polarization` must be computed from `positions`"):
        born_charges(polarization(start), start)
    with pytest.raises(ValueError, match="`polarization` must be vectors"):
        born_charges(polarization(x).sum(), x)


def test_a_good_beginning_saves_iterations():
    leaves = [leaf.detach() for leaf in leaves_for("both")]
    given = dict(zip(names_of("both"), leaves))
    place = given.pop("positions"), given.pop("permanent")
    options = {**given, "batch_idx": BATCH, "num_systems": 2}
    first = induced_moments(gaussians, place, **options)
    again = induced_moments(gaussians, (place[0] + 1e-4, place[1]), **options, initial=first)
    assert again.iterations < 0.5 * first.iterations
    close_to_largest(again[:3], induced_moments(gaussians, (place[0] + 1e-4, place[1]), **options)[:3], 1e-7)


def test_systems_of_a_batch_are_alone():
    """Each has the solution that it has alone, also beside one that is not a number, whatever that is in it."""
    values, here = [leaf.detach() for leaf in leaves_for("both")], BATCH == 0
    *sources, minimum = solved("both", values)
    for place in map(names_of("both").index, ("permanent", "total_charge", "polarizabilities")):
        wrong = values[place].clone()
        wrong[1] = torch.nan  # of the second atom or system; the atom is in the second system
        *found, energies = solved("both", [*values[:place], wrong, *values[place + 1 :]])
        close([*(f[here] for f in found), energies[0]], [*(s[here] for s in sources), minimum[0]], 1e-11)
        assert all(f[~here].isnan().all() for f in found) and energies[1].isnan()


INTEGERS = torch.tensor([1, -1])


def test_single_precision():
    single = [leaf.detach().float() for leaf in leaves_for("both")]
    double = [leaf.detach() for leaf in leaves_for("both")]

    def found(values, **options):
        given = dict(zip(names_of("both"), values))
        place = given.pop("positions"), given.pop("permanent")

        def energy(charges, dipoles, positions, permanent):
            return gaussians(*(t.double() for t in (charges, dipoles, positions, permanent))).to(charges.dtype)

        return induced_moments(energy, place, **given, batch_idx=BATCH, num_systems=2, **options)

    rough, exact = found(single), found(double)
    for results in (rough, found(single, initial=exact)):
        assert all(r.dtype == torch.float32 for r in results[:3])
        close_to_largest([r.double() for r in results[:3]], exact[:3], 2e-5)
    assert found(single, tolerance=1e-5).iterations == rough.iterations < found(single, tolerance=1e-8).iterations
    assert all(map(torch.equal, found([*single[:-1], double[-1]])[:3], rough[:3]))  # a field in another dtype
    place = names_of("both").index("total_charge")
    of_integers, of_floats = (found([*single[:place], t, *single[place + 1 :]]) for t in (INTEGERS, INTEGERS.float()))
    assert all(map(torch.equal, of_integers[:3], of_floats[:3]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, found(single)[:3], rough[:3]))


def test_in_inference_mode():
    expected = solved("both", leaves_for("both"))
    with torch.inference_mode():
        found = solved("both", [leaf.clone() for leaf in leaves_for("both")])
    assert all(map(torch.equal, found[:3], expected[:3])) and not any(t.requires_grad for t in found[:3])


# -- what must not be answered ---------------------------------------------------------------------


def pair_of_dipoles(dipoles, distance):
    """Two points on a line."""
    return torch.stack([-2.0 * dipoles[0, 0] * dipoles[1, 0] / distance**3]).sum()


def test_polarization_catastrophe():
    """Two points closer than (4 α²)^(1/6) have no minimum (Applequist)."""
    alpha = torch.ones(2, dtype=torch.float64)
    field = {"polarizabilities": alpha, "external_field": torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)}
    limit = 4.0 ** (1 / 6)
    found = induced_moments(pair_of_dipoles, (torch.tensor(1.05 * limit).double(),), **field)
    close([found.dipoles[:, 0]], [1.0 / (1.0 - 2.0 / (1.05 * limit) ** 3 + torch.zeros(2).double())], 1e-6)
    with pytest.raises(RuntimeError, match=r"systems \[0\] has no minimum"):
        induced_moments(pair_of_dipoles, (torch.tensor(0.95 * limit).double(),), **field)


def test_polarization_catastrophe_without_a_field():
    """Zero dipoles are stationary then, but no minimum if points are too close; nor are zero charges."""

    def energy(dipoles, distances):
        return -2.0 * dipoles[:2, 0] * dipoles[2:, 0] / distances**3

    alpha, systems = torch.ones(4, dtype=torch.float64), torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    options = {"polarizabilities": alpha, "batch_idx": systems, "num_systems": 2}
    limit, along_x = 4.0 ** (1 / 6), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    far, close_by = (limit * torch.tensor(r, dtype=torch.float64) for r in ([1.3, 1.05], [1.3, 0.95]))
    for field in ({}, {"external_field": torch.stack([along_x, 0.0 * along_x])}):
        found = induced_moments(energy, (far,), **options, **field)
        assert not found.dipoles[1::2].any() and found.residuals[1] == 0.0
        with pytest.raises(RuntimeError, match=r"systems \[1\] has no minimum"):
            induced_moments(energy, (close_by,), **options, **field)
    # flat: zero charges are a minimum, if not the only one
    for flat in (lambda q: 0.0 * q, lambda q: 0.5 * q.sum().square()):
        for hardness in ([0.0, 0.0], [0.0, 1.0, 0.0]):
            assert not induced_moments(flat, hardness=torch.tensor(hardness, dtype=torch.float64)).charges.any()
    # what was induced before does not stay
    before = induced_moments(energy, (far,), **options, external_field=along_x)
    assert not induced_moments(energy, (far,), **options, initial=before).dipoles.any()

    def attraction(charges):
        return 1.2 * charges[0] * charges[1]

    for hardness, is_stable in ((1.3, True), (1.1, False)):
        given = {"hardness": hardness * torch.ones(2, dtype=torch.float64)}
        if is_stable:
            assert not induced_moments(attraction, **given).charges.any()
        else:
            with pytest.raises(RuntimeError, match=r"systems \[0\] has no minimum"):
                induced_moments(attraction, **given)


def test_no_convergence_says_so():
    values = [leaf.detach() for leaf in leaves_for("both")]
    with pytest.raises(RuntimeError, match=r"not converged after 3 iterations .*relative residuals"):
        solved("both", values, max_iterations=3)


def test_energy_that_is_not_quadratic():
    alpha = torch.ones(2, dtype=torch.float64)
    field = {"polarizabilities": alpha, "external_field": torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)}
    with pytest.raises(RuntimeError, match=r"not quadratic.*for the sources of each call: fix them"):
        induced_moments(lambda dipoles: 0.1 * (dipoles**4).sum(), **field)


def test_forgotten_parameter():
    distance = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    alpha = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="not among `parameters`"):
        induced_moments(lambda dipoles: pair_of_dipoles(dipoles, distance), polarizabilities=alpha)


BAD = {
    "neither": ({"polarizabilities": None}, ValueError, "`hardness` or `polarizabilities`"),
    "chi alone": ({"electronegativity": torch.ones(3)}, ValueError, "`electronegativity` is for charges"),
    "field alone": (
        {"polarizabilities": None, "hardness": torch.ones(3), "external_field": torch.ones(3)},
        ValueError,
        "`external_field` is for dipoles",
    ),
    "half precision": ({"polarizabilities": torch.ones(3).half()}, TypeError, "`polarizabilities` must be float32"),
    "another beginning": ({"initial": InducedMoments(None, torch.ones(2, 3), *[None] * 3)}, ValueError, "`initial`"),
    "no dipoles to begin with": ({"initial": InducedMoments(torch.ones(3), *[None] * 4)}, ValueError, "`initial`"),
    "field shape": ({"external_field": torch.ones(5)}, ValueError, r"`external_field` must have shape \(3,\)"),
    "dtype": ({"external_field": torch.ones(3).bool()}, TypeError, "`external_field` must be torch.float32"),
    "polarizability shape": ({"polarizabilities": torch.ones(3, 3)}, ValueError, "`polarizabilities` must have shape"),
    "negative": ({"polarizabilities": torch.tensor([1.0, -0.1, 1.0])}, ValueError, "must be non-negative"),
    "negative along an axis": (
        {"polarizabilities": torch.diag(torch.tensor([1.0, 1.0, -0.1])).expand(3, 3, 3)},
        ValueError,
        "must be non-negative",
    ),
    "one hardness": (
        {"hardness": torch.tensor(1.0), "batch_idx": torch.zeros(3, dtype=torch.int32)},
        ValueError,
        "`hardness` must have a value for each atom",
    ),
    "list of charges": (
        {"hardness": torch.ones(3), "total_charge": [1.0]},
        TypeError,
        r"`total_charge` must be a torch.Tensor, got list: use torch.as_tensor",
    ),
    "batch": ({"num_systems": 2}, ValueError, "`batch_idx`"),
    "parameters": ({"parameters": torch.ones(3)}, TypeError, "`parameters` must be a sequence"),
    "energy": ({"energy": 3.0}, TypeError, "`energy` must be callable"),
    "result": ({"energy": lambda dipoles: dipoles}, ValueError, "`energy` must return a tensor of shape"),
    "tolerance": ({"tolerance": -1.0}, ValueError, "`tolerance`"),
    "iterations": ({"max_iterations": 1.5}, TypeError, "`max_iterations`"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    changed, error, message = BAD[name]
    arguments = {"energy": lambda dipoles: 0.0 * dipoles.sum(), "polarizabilities": torch.ones(3), **changed}
    with pytest.raises(error, match=message):
        induced_moments(**arguments)


@pytest.mark.parametrize("numbers", [(1, 0, 2), (0, 2, 2)])
def test_energies_of_as_many_systems_as_atoms(numbers):
    """Which of the two they are is not guessed; with one more system, without atoms, their shape says it."""
    batch_idx, field, alpha = torch.tensor(numbers, dtype=torch.int32), random(3), torch.ones(3).double()
    strength = torch.tensor([1.5, 2.0, 2.5, 0.0], dtype=torch.float64)

    def solve(of, n_systems, batch_idx=batch_idx):
        def energy(dipoles):
            found = 0.5 * strength[batch_idx.long()] * dipoles.square().sum(1)
            return found if of == "atoms" else found.new_zeros(n_systems).index_add(0, batch_idx.long(), found)

        options = {"polarizabilities": alpha, "external_field": field, "batch_idx": batch_idx}
        return induced_moments(energy, **options, num_systems=n_systems)

    expected = field / (1.0 + strength[batch_idx.long()]).unsqueeze(1)
    for of in ("atoms", "systems"):
        with pytest.raises(ValueError, match="`energy` returns 3 numbers"):
            solve(of, 3)
        close([solve(of, 4).dipoles], [expected])
        close([solve(of, 3, torch.arange(3, dtype=torch.int32)).dipoles], [field / (1.0 + strength[:3]).unsqueeze(1)])


def test_fields_of_as_many_systems_as_atoms():
    """Which of the two they belong to is not guessed either."""
    field, alpha = random(2, 3), torch.tensor([1.0, 2.0], dtype=torch.float64)

    def solve(numbers, n_systems):
        batch_idx = torch.tensor(numbers, dtype=torch.int32)
        options = {"polarizabilities": alpha, "external_field": field, "batch_idx": batch_idx}
        return induced_moments(lambda dipoles: 0.0 * dipoles.sum(1), **options, num_systems=n_systems).dipoles

    for numbers in ((1, 0), (1, 1)):
        with pytest.raises(ValueError, match="`external_field` has 2 rows"):
            solve(numbers, 2)
        close([solve(numbers, 3)], [alpha.unsqueeze(1) * field])
    close([solve((0, 1), 2)], [alpha.unsqueeze(1) * field])


def test_gradients_beside_a_system_without_atoms():
    """It has no charge, whatever its total is."""
    hardness, total = torch.tensor([1.0, 3.0, 3.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    for given in (total, total[0]):
        given = given.clone().requires_grad_()
        options = {"hardness": hardness, "total_charge": given, "batch_idx": torch.zeros(3, dtype=torch.int32)}
        found = induced_moments(lambda charges: 0.0 * charges, **options, num_systems=2)
        close([found.charges], [torch.tensor([0.6, 0.2, 0.2], dtype=torch.float64)])
        (slope,) = torch.autograd.grad(found.charges[0] + found.energies.sum(), given)
        close([slope.reshape(-1)], [torch.tensor([1.2, 0.0], dtype=torch.float64)[: slope.numel()]])


def test_compiled_code_leaves_the_graph():
    values = [leaf.detach() for leaf in leaves_for("charges")]

    def called(values):
        values = [2.0 * values[0], *values[1:]]
        return solved("charges", values)[0].sin()

    close([torch.compile(called, backend="eager")(values)], [called(values)])
    with pytest.raises(Exception, match="disable"):
        torch.compile(lambda values: called(values), backend="eager", fullgraph=True)(values)


def test_transforms_are_refused_by_name():
    """Torch's own error asks users to change a class of this library."""
    values = [leaf.detach() for leaf in leaves_for("charges")]
    for asked in (torch.func.grad, torch.vmap):
        with pytest.raises(NotDifferentiableError, match=r"does not run inside of function transforms .*one batch"):
            asked(lambda x: solved("charges", [x, *values[1:]])[0].sum())(values[0])
    with forward_ad.dual_level():
        for moving in range(len(values)):
            dual = [forward_ad.make_dual(v, v) if n == moving else v for n, v in enumerate(values)]
            with pytest.raises(NotDifferentiableError, match="in forward mode: use "):
                solved("charges", dual)


def test_sources_of_another_precision_than_positions_are_explained():
    """The error of a sum names dipoles, which its caller has not made."""
    charges, alpha = torch.ones(2, dtype=torch.float64), torch.ones(2)

    def energy(dipoles, positions):
        return Electrostatics()(System(positions, charges, dipoles=dipoles)).energies

    with pytest.raises(TypeError, match="`dipoles` has dtype") as raised:
        induced_moments(energy, [torch.eye(3, dtype=torch.float64)[:2]], polarizabilities=alpha)
    assert raised.value.__notes__ == [
        "The sources that `energy` is given have the dtype of `polarizabilities`, torch.float32."
    ]
