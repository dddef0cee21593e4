"""Published damping parameters, entry by entry; and reference data, from wherever they come."""

import copy
import functools
import pickle
import re
import sys
import types

import numpy as np
import pytest
import torch
from dftd3 import parameters as published
from torch._subclasses.fake_tensor import FakeTensorMode

from nvalchemiops.interactions.dispersion import damping as module
from nvalchemiops.locks import Kept
from nvalchemiops.torch.interactions import dispersion
from nvalchemiops.torch.interactions.dispersion import reference_data
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.comparing import within
from tests.support.molecules import F64, PBE, PROGRAM, data, molecule, parameters, program
from tests.support.processes import output_of, run_python


@functools.cache
def database():
    """Entries of all functionals, and those among them that are ours; it takes a second to read."""
    found = published.load_data_base(published.get_data_file_name())
    entries = found["parameter"].items()
    return found, [(functional, kind) for functional, entry in entries for kind in entry["d3"] if kind in PROGRAM]


# the program's names of our parameters
NAMES = {"s6": "s6", "s8": "s8", "a1": "a1", "a2": "a2", "rs6": "rs6", "rs8": "rs8", "bet": "beta"}
# the database has s8 = 2.033 here; the program itself, and S. Grimme's before it, have 2.055
MISPRINTED = {("opbe", "zero"): {"s8": 2.055}}

# -- damping --------------------------------------------------------------------------------------


def test_the_table_is_that_of_the_program():
    """All 255 entries, no more and no fewer."""
    table, every = database()
    defaults = table["default"]["parameter"]["d3"]
    for functional, kind in every:
        entry = defaults[kind] | table["parameter"][functional]["d3"][kind]
        entry |= MISPRINTED.get((functional, kind), {})
        found = dispersion.damping_parameters(functional, kind)
        assert isinstance(found, dispersion.ZeroDamping if kind.startswith("zero") else dispersion.RationalDamping)
        expected = {ours: entry.get(theirs, 0.0) for theirs, ours in NAMES.items() if ours in found._fields}
        assert found._asdict() == expected, (functional, kind)
    assert len(every) == len(module._table()) == 255


def test_the_program_itself_has_these_parameters():
    """It has them a second time, compiled; its table of names is a little shorter. One batch of many dampings."""
    atoms = molecule("C2H6")
    _, every = database()
    for kind in PROGRAM:
        found, expected = [], []
        for functional, its_kind in every:
            if its_kind == kind:
                try:
                    expected.append(program(atoms, PROGRAM[kind](method=functional), 30.0, 30.0).energy)
                except RuntimeError as error:
                    assert "No entry" in str(error)
                else:
                    found.append(dispersion.damping_parameters(functional, kind))
        assert len(found) > 0.9 * sum(its_kind == kind for _, its_kind in every)
        columns = [torch.tensor(column, dtype=F64) for column in zip(*found)]
        energies, _ = dispersion.d3_dispersion(
            atoms.positions.repeat(len(found), 1),
            atoms.numbers.repeat(len(found)),
            type(found[0])(*columns),
            parameters(),
            batch_idx=torch.arange(len(found), dtype=torch.int32).repeat_interleave(len(atoms.numbers)),
            cutoff=30.0,
            energy_reduction="system",
        )
        within([energies], [torch.cat(expected)])


# functional: a1, s8, a2 (bohr), s6. S. Grimme, S. Ehrlich and L. Goerigk, J. Comput. Chem. 32, 1456 (2011), table 2
RATIONAL_2011 = {
    "PBE": (0.4289, 0.7875, 4.4407, 1.0),
    "B3LYP": (0.3981, 1.9889, 4.4211, 1.0),
    "BLYP": (0.4298, 2.6996, 4.2359, 1.0),
    "revPBE": (0.5238, 2.3550, 3.5016, 1.0),
    "TPSS": (0.4535, 1.9435, 4.4752, 1.0),
    "B97-D": (0.5545, 2.2609, 3.2297, 1.0),
    "PBE0": (0.4145, 1.2177, 4.8593, 1.0),
    "B2PLYP": (0.3065, 0.9147, 5.0570, 0.64),
}
# functional: rs6, s8, s6. S. Grimme, J. Antony, S. Ehrlich and H. Krieg, J. Chem. Phys. 132, 154104 (2010), table 4
ZERO_2010 = {
    "BLYP": (1.094, 1.682, 1.0),
    "B97-D": (0.892, 0.909, 1.0),
    "revPBE": (0.923, 1.010, 1.0),
    "PBE": (1.217, 0.722, 1.0),
    "TPSS": (1.166, 1.105, 1.0),
    "B3LYP": (1.261, 1.703, 1.0),
    "PBE0": (1.287, 0.928, 1.0),
}


@pytest.mark.parametrize("functional", RATIONAL_2011)
def test_rational_damping_as_printed(functional):
    a1, s8, a2, s6 = RATIONAL_2011[functional]
    assert dispersion.damping_parameters(functional) == dispersion.RationalDamping(a1=a1, a2=a2, s8=s8, s6=s6)


@pytest.mark.parametrize("functional", ZERO_2010)
def test_zero_damping_as_printed(functional):
    rs6, s8, s6 = ZERO_2010[functional]
    assert dispersion.damping_parameters(functional, "zero") == dispersion.ZeroDamping(
        rs6=rs6, s8=s8, s6=s6, rs8=1.0, beta=0.0
    )


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        *[(spelling, "camb3lyp") for spelling in ("CAM-B3LYP", "camb3lyp", "Cam_B3LYP", "cam b3lyp")],
        ("r²SCAN", "r2scan"),  # rSCAN, B97M and PBE are other functionals
        ("ωB97M", "wb97m"),
        ("LC-ωPBE", "lcwpbe"),
        ("τ-HCTH", "tauhcth"),
    ],
)
def test_spelling_does_not_matter(spelling, name):
    assert dispersion.damping_parameters(spelling) == dispersion.damping_parameters(name)


@pytest.mark.parametrize(
    ("spelling", "kind"),
    [("BJ", "bj"), ("d3bj", "bj"), ("D3(BJ)", "bj"), ("D3(0)", "zero"), ("D3M(BJ)", "bjm"), ("d3-zerom", "zerom")],
)
def test_spelling_of_damping_does_not_matter(spelling, kind):
    expected = dispersion.damping_parameters("pbe", kind)
    assert dispersion.damping_parameters("pbe", spelling) == expected
    of_both = spelling if spelling.lower().startswith("d3") else f"D3{spelling}"
    assert dispersion.damping_parameters(f"PBE-{of_both}", kind) == expected


@pytest.mark.parametrize(("spelling", "name"), [("BP86-D3BJ", "bp"), ("B97-D3(BJ)", "b97d"), ("r2SCAN-D3", "r2scan")])
def test_functionals_with_the_name_of_their_damping(spelling, name):
    assert dispersion.damping_parameters(spelling) == dispersion.damping_parameters(name)


def test_a_damping_beside_a_functional_with_d3_is_the_one_that_is_meant():
    """But for that which is the default."""
    assert dispersion.damping_parameters("PBE-D3", "zero") == dispersion.damping_parameters("pbe", "zero")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("b3lpy",), ValueError, "`functional`.*did you mean b3lyp"),
        (("xyz",), ValueError, "`functional`.*'xyz'"),
        (("ωPBE",), ValueError, "`functional`.*'ωPBE'"),  # not PBE
        (("m06l",), ValueError, "`damping`.*'m06l'.*'bj'.*'zero'"),
        (("PBE-D3(0)",), ValueError, "`functional`: 'PBE-D3\\(0\\)' is for 'zero', .*is 'bj'; give 'pbe' and.* 'zero'"),
        (("PBE-D3",), ValueError, "`functional`: 'PBE-D3' does not say .* give 'pbe' and.* 'bj' or 'zero' or "),
        (("xyz-D3(BJ)",), ValueError, "`functional`: there are no damping parameters for 'xyz-D3\\(BJ\\)'"),
        (("PBE-D3+",), ValueError, "`functional`: 'PBE-D3\\+' does not say "),
        (("PBE-D3(BJ)-ATM",), ValueError, "`functional`: there are no damping parameters for 'PBE-D3\\(BJ\\)-ATM'"),
        (("pbe", "rational"), ValueError, "`damping` must be one of 'bj', 'zero', 'bjm', 'zerom'"),
        (("pbe", "d3"), ValueError, "`damping` must be one of .* got 'd3'"),
        ((None,), TypeError, "`functional` must be a string"),
    ],
)
def test_what_is_not_known_is_an_error(arguments, error, message):
    with pytest.raises(error, match=message):
        dispersion.damping_parameters(*arguments)


# -- reference data -------------------------------------------------------------------------------


def tables(n=95, mesh=5):
    """The four tables as clients hold them, without elements beyond plutonium; and radii of pairs."""
    p = parameters()
    cn_ref = data().coordination[:n, None, :mesh, None].expand(n, n, mesh, mesh)
    return {
        "rcov": p.rcov[:n],
        "r4r2": p.r4r2[:n],
        "c6ab": p.c6ab[:n, :n, :mesh, :mesh],
        "cn_ref": torch.where(p.c6ab[:n, :n, :mesh, :mesh] > 0.0, cn_ref, 0.0),
        "r0ab": p.r0ab[:n, :n],
    }


def energies(given, kind="bj"):
    atoms = molecule("CH3CH2OH")
    return dispersion.d3_dispersion(*atoms[:2], dispersion.damping_parameters("pbe", kind), given, cutoff=30.0)[0]


@pytest.mark.parametrize("form", ["four dimensions", "two dimensions", "float32"])
def test_from_tensors(form):
    """Elements up to plutonium need five reference molecules."""
    given = tables()
    if form == "two dimensions":
        given["cn_ref"] = data().coordination[:95, :5]
    if form == "float32":
        given = {name: table.float() for name, table in given.items()}
    found = dispersion.D3Parameters(**given)
    assert found.elements == tuple(range(1, 95))
    for kind in ("bj", "zero"):
        within([energies(found, kind)], [energies(parameters(), kind)], 1e-8 if form == "float32" else 1e-15)


FILES = ["three columns.npz", "as here.npz", "three columns.pt", "as here.pt"]


@pytest.mark.parametrize("name", FILES)
def test_from_a_file(tmp_path, name):
    """``c6ab`` with C6 and both coordination numbers in the last dimension is how most programs keep it."""
    given, path = tables(), tmp_path / name
    if name.startswith("three"):
        own, other = given.pop("cn_ref"), None
        other = own.permute(1, 0, 3, 2)
        given["c6ab"] = torch.stack([given["c6ab"], own, other], -1)
        given["r2r4"] = given.pop("r4r2")
    if path.suffix == ".npz":
        np.savez(path, **{key: table.numpy() for key, table in given.items()})
    else:
        torch.save({key: table.clone() for key, table in given.items()}, path)
    for where in (path, str(path)):
        found = dispersion.D3Parameters.load(where)
        for kind in ("bj", "zero"):
            within([energies(found, kind)], [energies(parameters(), kind)], 1e-15)


def test_files_that_lack_something(tmp_path):
    given = tables()
    np.savez(tmp_path / "less.npz", rcov=given["rcov"], c6ab=given["c6ab"])
    with pytest.raises(ValueError, match=r"`path`.*less\.npz.*lacks r4r2, cn_ref.*holds rcov, c6ab"):
        dispersion.D3Parameters.load(tmp_path / "less.npz")
    with pytest.raises(ValueError, match=r"`path`.*\.npz or \.pt"):
        dispersion.D3Parameters.load(tmp_path / "parameters.toml")
    with pytest.raises(FileNotFoundError):
        dispersion.D3Parameters.load(tmp_path / "nothing.npz")


@pytest.mark.parametrize("name", ["rcov", "r4r2", "c6ab", "cn_ref", "r0ab"])
def test_tables_of_wrong_kind_or_shape(name):
    given = tables()
    for value in (given[name].tolist(), given[name].int(), given[name].numpy()):
        with pytest.raises(TypeError, match=f"`{name}`"):
            dispersion.D3Parameters(**(given | {name: value}))
    shaped = "r4r2|c6ab|cn_ref|r0ab" if name == "rcov" else name  # the others are compared with it
    for value in (given[name][:-1], given[name][None], given[name].sum()):
        with pytest.raises(ValueError, match=f"`({shaped}|{name})`"):
            dispersion.D3Parameters(**(given | {name: value}))


def test_a_wrong_number_of_references():
    with pytest.raises(ValueError, match=r"`c6ab`.*`interp_mesh` = 7"):
        dispersion.D3Parameters(**tables(), interp_mesh=7)


@pytest.mark.parametrize("name", ["c6ab", "cn_ref"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tables_that_are_no_numbers(name, value):
    given = tables()
    given[name] = given[name].clone()
    given[name][6, 8, 1, 0] = value
    with pytest.raises(ValueError, match=f"`{name}` has entries that are NaN or infinite"):
        energies(dispersion.D3Parameters(**given))
    dispersion.D3Parameters(**given).states([1, 6])


def test_zero_damping_needs_radii_of_pairs():
    given = tables()
    del given["r0ab"]
    with pytest.raises(ValueError, match="`r0ab`"):
        energies(dispersion.D3Parameters(**given), "zero")
    within([energies(dispersion.D3Parameters(**given))], [energies(parameters())], 1e-15)


MISSING = """
    import sys

    sys.modules["{package}"] = None
    from nvalchemiops.torch.interactions.dispersion import D3Parameters, damping_parameters

    damping_parameters("pbe")
    try:
        D3Parameters.load()
    except ImportError as error:
        print(error)
"""


@pytest.mark.later_cases("tad_mctc")
@pytest.mark.parametrize("package", ["tad_dftd3", "tad_mctc"])
def test_without_the_package_with_the_data(package):
    """It is optional: everything can be imported, and the error says what to install and what to do else."""
    said = output_of(run_python(MISSING.format(package=package)))
    assert re.search(r"tad-dftd3.*pip install 'nvalchemiops\[dispersion\]'.*'\.\[dispersion\]'.*file", said)


@pytest.mark.parametrize("package", ["tad_dftd3", "tad_mctc.data.radii"])
def test_a_package_with_another_layout_is_not_said_to_be_missing(package, monkeypatch):
    """Without a module, or without the functions in it."""
    monkeypatch.delitem(sys.modules, "tad_dftd3.reference", raising=False)  # which another test may have imported
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    with pytest.raises(ImportError, match=r"tad-dftd3, of which another release.*(tad_dftd3.reference|VDW_PAIRWISE)"):
        dispersion.D3Parameters.load()


def test_published_data_do_not_import_their_package(monkeypatch):
    """It imports the compiler of torch, which takes longer than the first sum."""
    monkeypatch.delitem(sys.modules, "tad_dftd3", raising=False)
    dispersion.D3Parameters.load()
    assert "tad_dftd3" not in sys.modules


IN_THREADS = """
from nvalchemiops.torch.interactions import dispersion
from tests.support.processes import in_threads

print(len(in_threads(lambda _: dispersion.D3Parameters.load(), range(6))))
"""


@pytest.mark.later
def test_threads_read_published_data_at_once():
    """A package whose modules import each other cannot be entered by several of them at once."""
    assert output_of(run_python(IN_THREADS)).split()[-1] == "6"


# -- prepared states ------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [(1,), (6, 8, 1), (26, 79, 11, 17), range(1, 95)])
def test_factors_of_c6_are_exact(elements):
    """C6(a, b) = sum of v_aq v_bq with its signs, to rounding, for all reference molecules."""
    p, states = parameters(), parameters().states(elements)
    assert isinstance(states, dispersion.ReferenceStates) and states.elements == tuple(sorted(elements))
    rows = states.row_of_number[list(states.elements)]
    signs = torch.ones(states.vectors.shape[1], dtype=F64)
    signs[states.n_positive :] = -1.0
    vectors = states.vectors[states.places[rows]]
    found = torch.einsum("iaq,jbq,q->ijab", vectors, vectors, signs)
    numbers = torch.tensor(states.elements)
    expected = p.c6ab[numbers][:, numbers, : found.shape[2], : found.shape[2]]
    # relative to the geometric mean of the coefficients of equal pairs
    own = torch.einsum("iiaa->ia", expected).sqrt()
    scale = torch.einsum("ia,jb->ijab", own, own)
    assert float(((found - expected).abs() / scale).nan_to_num().max()) < 1e-13
    # nothing is left out that is not zero
    assert not p.c6ab[numbers][:, numbers, found.shape[2] :].any()


def test_states_are_prepared_once(monkeypatch):
    """For the same values, whichever tables have them; each caller has a copy, which may be changed."""
    made, factors = [], reference_data._factors
    monkeypatch.setattr(reference_data, "_prepared", Kept(reference_data.MOST_STATES))
    monkeypatch.setattr(reference_data, "_factors", lambda *given: made.append(given) or factors(*given))
    p = parameters()
    first = p.states([8, 1, 1])
    first.radii.mul_(2.0)
    for states in (p.states((1, 8)), dispersion.D3Parameters.load().states(torch.tensor([1, 8]))):
        assert torch.equal(2.0 * states.radii[:2], first.radii[:2])
    assert len(made) == 1


def test_more_elements_than_needed_change_nothing():
    atoms = molecule("CH3CH2OH")
    found = [
        dispersion.d3_dispersion(*atoms[:2], PBE, given, cutoff=30.0, compute_forces=True)
        for given in (parameters(), parameters().states([1, 6, 8]), parameters().states([1, 6, 7, 8, 79]))
    ]
    within(found[1], found[0], 0.0)
    within(found[2], found[0], 1e-15)


def test_elements_that_are_not_there():
    p = parameters()
    assert p.elements == tuple(range(1, 104))
    for elements in ([1, 104], [0], [-1], [200]):
        with pytest.raises(ValueError, match=rf"no D3 parameters for the elements \[{elements[-1]}\]"):
            p.states(elements)
    with pytest.raises(ValueError, match="`elements` is empty"):
        p.states([])


def test_another_device():
    states = parameters().states([1, 8], "meta")
    assert {part.device.type for part in states if isinstance(part, torch.Tensor)} == {"meta"}
    assert states.elements == (1, 8)


def test_another_dtype():
    p = parameters()
    for narrow in (p.to(torch.float32), p.to("cpu", torch.float32), p.to(dtype=torch.float32)):
        assert torch.equal(narrow.c6ab, p.c6ab.float()) and narrow.cn_ref.dtype == torch.float32


def test_tables_are_copied():
    given = {name: table.clone() for name, table in tables().items()}
    atoms = molecule("H2O")
    given["c6ab"].requires_grad_()
    p = dispersion.D3Parameters(**given)
    assert not p.c6ab.requires_grad
    given["c6ab"].data.mul_(2.0)
    expected = dispersion.d3_dispersion(*atoms[:2], PBE, dispersion.D3Parameters(**tables()), cutoff=30.0)[0]
    within(dispersion.d3_dispersion(*atoms[:2], PBE, p, cutoff=30.0)[0], expected, 0.0)


@pytest.mark.parametrize("form", ["list", "matrix", "none"])
def test_padding_is_nobodys_neighbor(form):
    """Whatever a list says: number 0 is no atom."""
    x, z, *_ = molecule("CH3CH2OH")
    expected = dispersion.d3_dispersion(x, z, PBE, parameters(), cutoff=20.0, compute_forces=True)
    x, z = torch.cat([x[:4], x[:1] + 0.3, x[4:]]), torch.cat([z[:4], 0 * z[:1], z[4:]])
    near = {}
    if form == "list":
        pairs, ptr = neighbor_list(x, 20.0, return_neighbor_list=True)
        near = {"neighbor_list": pairs, "neighbor_ptr": ptr}
    if form == "matrix":
        near = {"neighbor_matrix": neighbor_list(x, 20.0)[0]}
    found = dispersion.d3_dispersion(x, z, PBE, parameters(), cutoff=20.0, compute_forces=True, **near)
    compiled = torch.compile(dispersion.d3_dispersion, backend="eager")
    states = parameters().states([1, 6, 8])
    others = compiled(x, z, PBE, states, cutoff=20.0, compute_forces=True, **near) if near else found
    real = z != 0
    for a, b, c in zip(found, expected, others):
        within(a[real], b, 1e-15)
        within(c[real], b, 1e-15)
    assert not found[0][~real].any() and not found[1][~real].any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("changed_first", [True, False])
def test_a_changed_copy_is_another_one(copied, changed_first):
    """What is kept of the elements of one must not serve the other."""
    positions = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 5.0], [0.0, 4.0, 0.0]], dtype=torch.float64)
    numbers, damping = torch.tensor([6, 8, 6]), dispersion.damping_parameters("pbe")
    original = dispersion.D3Parameters.load()

    def energy(parameters):
        return dispersion.d3_dispersion(positions, numbers, damping, parameters, cutoff=40.0)[0].sum().item()

    before = energy(original)
    changed = copied(original)
    assert energy(changed) == before
    changed = copied(original)
    changed.r4r2[6] *= 1.5
    order = (changed, original) if changed_first else (original, changed)
    found = {id(parameters): energy(parameters) for parameters in order}
    assert found[id(original)] == before
    assert abs(found[id(changed)] / before - 1.0) > 0.1


AT_EXIT = """
import atexit

from nvalchemiops.torch.interactions import dispersion

atexit.register(lambda: print(dispersion.D3Parameters.load().rcov[0].item()))
"""


def test_published_data_are_read_while_an_interpreter_ends_and_in_fake_mode():
    """Where no thread can be started, and where tensors of another thread are refused."""
    assert output_of(run_python(AT_EXIT)).split()[-1] == "0.0"
    with FakeTensorMode():
        assert dispersion.D3Parameters.load().rcov.shape == dispersion.D3Parameters.load().r4r2.shape
