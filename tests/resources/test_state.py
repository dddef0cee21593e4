"""What a module carries belongs together: a state dict restores all of it, or loading raises and changes nothing."""

import copy
import io
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nvalchemiops import AccuracyWarning
from nvalchemiops.interactions.dispersion.damping import ZeroDamping
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.dispersion import DFTD3, D3Parameters
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB, power_law
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.molecules import molecule, parameters
from tests.support.systems import triclinic

F64 = torch.float64
X, Q, CELL, _ = triclinic(8)
MOLECULE = molecule("HCl").arguments()


def ewald(alpha=0.6, cutoff=5.0, **options):
    return electrostatics.EwaldSummation(alpha, 8.0 * alpha, cutoff, **options)


def pme(alpha=0.6, cutoff=5.0, mesh=16, order=5, **options):
    return electrostatics.ParticleMeshEwald(alpha, (mesh, mesh, mesh + 2), order, cutoff, **options)


def d3(functional="pbe", elements=(1, 17), data=None, **options):
    return DFTD3(functional, elements, data or parameters(), **{"cutoff": 30.0, "coordination_cutoff": 20.0} | options)


def of(module):
    """What it computes."""
    if isinstance(module, DFTD3):
        return module(**MOLECULE, compute_forces=True)[:2]
    return module(X, Q, CELL, compute_forces=True)


def carried(module):
    values = module._settings().items()
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values}


def same(found, expected):
    for one, other in zip(of(found), of(expected), strict=True):
        assert torch.equal(one, other)


def from_file(module, weights_only=True):
    """The state dict after a way through a file."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


TWO = {
    "ewald": (lambda: ewald(0.7, 4.0), ewald),
    "ewald, prepared": (lambda: ewald(0.7, 4.0).prepare(CELL), ewald),
    "ewald, prepared for another cell": (lambda: ewald(0.7, 4.0), lambda: ewald().prepare(1.2 * CELL)),
    "ewald of float32": (lambda: ewald(0.7, 4.0).prepare(CELL.float().double()), lambda: ewald().prepare(CELL.float())),
    "pme": (lambda: pme(0.7, 4.0, 20, 6), pme),
    "pme, prepared": (lambda: pme(0.7, 4.0, 20, 6).prepare(CELL), pme),
    "pme, prepared for another cell": (lambda: pme(0.7, 4.0, 20, 6), lambda: pme().prepare(1.2 * CELL)),
    "pme without a cutoff": (lambda: pme(0.7, None), pme),
    "other power": (
        lambda: pme(0.7, 4.0, 20, potential=power_law(6)).prepare(CELL),
        lambda: pme(potential=power_law(6)),
    ),
    "d3": (d3, lambda: d3("b3lyp", cutoff=20.0, smoothing=None, s9=1.0)),
    "d3, trained": (lambda: d3(trainable=True), lambda: d3("b3lyp", s9=1.0)),
    "d3, to be trained": (lambda: d3(s9=1.0), lambda: d3("b3lyp", trainable=True)),
    "zero damping": (lambda: d3(ZeroDamping(1.2, 0.8)), lambda: d3(ZeroDamping(1.0, 0.7), cutoff=25.0)),
}
PAIRS = pytest.mark.parametrize(("saved", "other"), TWO.values(), ids=TWO)


@PAIRS
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_restores_the_module(saved, other, strict):
    saved, loaded = saved(), other()
    keys = loaded.load_state_dict(from_file(saved), strict=strict)
    assert not keys.missing_keys and not keys.unexpected_keys
    same(loaded, saved)
    assert carried(loaded) == carried(saved)
    if not isinstance(saved, DFTD3):
        assert (loaded.prepared_cell is None) == (saved.prepared_cell is None)


@PAIRS
def test_inside_of_a_model(saved, other):
    """Beside layers, and under the names that DDP and torch.compile give."""
    model, loaded = (torch.nn.ModuleDict({"net": torch.nn.Linear(1, 1), "sum": m()}) for m in (saved, other))
    wrapped = torch.nn.ModuleDict({"module": loaded})
    wrapped.load_state_dict({f"module.{name}": value for name, value in from_file(model).items()})
    same(loaded["sum"], model["sum"])
    assert torch.equal(loaded["net"].weight, model["net"].weight)


@PAIRS
def test_a_state_dict_is_a_copy_of_tensors(saved, other):
    """Formats for tensors can keep it, and what writes to its entries does not change a part of the module."""
    module, expected = saved(), saved()
    for name, value in module.state_dict().items():
        assert isinstance(value, torch.Tensor)
        if name not in dict(module.named_parameters()):
            value.zero_()
    same(module, expected)
    assert not list(module.buffers())


@PAIRS
@pytest.mark.parametrize("convert", ["double", "float", "half", "to"])
def test_conversions(saved, other, convert):
    module = saved()
    if list(module.parameters()):  # these are like those of a network
        return
    module = getattr(module, convert)(*[torch.bfloat16] * (convert == "to"))
    same(module, saved())
    loaded = other()
    loaded.load_state_dict(from_file(module))
    same(loaded, saved())


def prepared_in_single():
    return pme(0.61, 4.0).prepare(CELL.float())


def test_a_sum_prepared_in_single_precision_comes_back():
    """Its alpha is rounded, as that of calls."""
    saved, loaded = prepared_in_single(), pme()
    loaded.load_state_dict(from_file(saved))
    for one, other in zip(*(m(X.float(), Q.float(), CELL.float(), compute_forces=True) for m in (saved, loaded))):
        assert torch.equal(one, other)


def trained(module, alpha):
    module.alpha = torch.nn.Parameter(alpha)
    return module


# -- what cannot be restored ------------------------------------------------------------------------


def old(module, *names):
    """As versions wrote it that had buffers."""
    return {name: getattr(module, name).detach().clone() for name in names}


def truncated(module):
    return {name: value[:-256] for name, value in module.state_dict().items()}


def altered_table():
    data = parameters()
    table = data.c6ab.clone()
    table[1, 17], table[17, 1] = 1.001 * table[1, 17], 1.001 * table[17, 1]
    return D3Parameters(data.rcov, data.r4r2, table, data.cn_ref, data.cn_ref.shape[1])


REFUSED = {
    "old, ewald": (lambda: old(ewald(0.7), "alpha", "k_cutoff"), ewald, "`alpha`, `k_cutoff`.*cutoff"),
    "old, pme": (lambda: old(pme(0.7), "alpha"), pme, "`alpha`.*mesh_dimensions"),
    "old, d3": (lambda: old(d3("b3lyp"), "a1", "a2", "s8", "s6"), d3, "`a1`.*cutoff"),
    "old, d3, trained": (lambda: old(d3("b3lyp"), "a1", "a2", "s8", "s6"), lambda: d3(trainable=True), "`a1`.*cutoff"),
    "part of it": (lambda: pme().state_dict() | old(pme(0.7), "alpha"), pme, "`alpha`.*mesh_dimensions"),
    "damaged": (lambda: truncated(pme().prepare(CELL)), pme, "damaged"),
    "no bytes": (lambda: {"_extra_state": torch.zeros(3)}, pme, "_extra_state.*float32"),
    "no tensor": (lambda: {"_extra_state": {"alpha": 0.6}}, pme, "_extra_state.*dict"),
    "another kind of module": (lambda: ewald().state_dict(), pme, "EwaldSummation"),
    "another power": (lambda: ewald().state_dict(), lambda: ewald(potential=power_law(6)), "`potential` is 1/r.6"),
    "another potential": (
        lambda: ewald(potential=COULOMB._replace(at_zero=lambda alpha: 0.0 * alpha)).state_dict(),
        ewald,
        "`potential` is 1/r.1, but user-defined",
    ),
    "other damping": (lambda: d3(ZeroDamping(1.2, 0.8)).state_dict(), d3, "`a1`, `a2` not in .*, but `rs6`, `rs8`"),
    "other damping, trained": (
        lambda: d3(ZeroDamping(1.2, 0.8), trainable=True).state_dict(),
        lambda: d3(trainable=True),
        "`a1`, `a2` not in the state dict",
    ),
    "other elements": (lambda: d3(elements=[1, 8, 17]).state_dict(), d3, r"`elements` are \(1, 17\), but \(1, 8, 17\)"),
    "no values": (lambda: {"alpha": torch.empty(1, device="meta")}, pme, "`alpha` must be a tensor with values"),
    "another shape": (
        lambda: pme(0.7).state_dict(),
        lambda: trained(pme(), torch.tensor([0.6, 0.6], dtype=F64)),
        r"`alpha` has shape \(2,\), but \(1,\)",
    ),
    "another table": (lambda: d3(data=altered_table()).state_dict(), d3, "`parameters` have other values"),
}


@pytest.mark.parametrize(("state", "make", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("strict", [True, False])
def test_what_differs_is_named(state, make, message, strict):
    module, untouched = make(), make()
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state(), strict=strict)
    assert carried(module) == carried(untouched)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (ewald, ["alpha", "k_cutoff"]),
        (pme, ["alpha"]),
        (d3, ["a1", "a2", "s8", "s6"]),
        (lambda: d3(trainable=True), ["a1", "a2", "s8", "s6"]),
    ],
)
def test_old_state_dicts_of_the_same_module_load(make, names, strict):
    module = make()
    module.load_state_dict(old(make(), *names), strict=strict)
    same(module, make())


@pytest.mark.parametrize("make", [ewald, pme, d3])
def test_a_state_dict_without_the_module(make):
    """Of a model before the sum was added: torch says that it is missing, or leaves all of it."""
    module = make()
    with pytest.raises(RuntimeError, match=r"Missing key.*\s.*_extra_state"):
        module.load_state_dict({})
    assert module.load_state_dict({}, strict=False).missing_keys == ["_extra_state"]
    same(module, make())


# -- trained parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ewald, pme])
def test_alpha_may_be_trained(make):
    """Then it is a parameter like others; the rest comes with it."""
    saved = make(0.7, 4.0)
    saved.alpha = torch.nn.Parameter(saved.alpha)
    (slope,) = torch.autograd.grad(saved(X, Q, CELL)[0], saved.alpha)
    assert slope != 0 and list(saved.state_dict()) == ["alpha", "_extra_state"]
    loaded, direct = (trained(make(), torch.tensor([0.6], dtype=F64)) for _ in range(2))
    direct.set_extra_state(saved.get_extra_state())
    assert direct.alpha == 0.6, "it is no part of the entry"
    direct.alpha.data.fill_(0.7)
    same(direct, saved)
    for module in (loaded, make()):
        module.load_state_dict(from_file(saved))
        same(module, saved)
        assert module.cutoff == 4.0
    loaded.load_state_dict(from_file(make(0.65, 4.5)))
    same(loaded, make(0.65, 4.5))
    assert isinstance(loaded.alpha, torch.nn.Parameter)


def test_what_is_prepared_does_not_outlive_its_parameters():
    """Changed in place or set, by the caller or by `torch.func.functional_call`."""
    for change in (lambda m: m.alpha.mul_(1.1), lambda m: setattr(m, "alpha", 1.1 * m.alpha)):
        module = pme().prepare(CELL)
        change(module)
        with pytest.raises(ValueError, match="`alpha` has changed since `prepare`"):
            of(module)
        same(module.prepare(CELL), pme(1.1 * 0.6))
    module = ewald().prepare(CELL)
    module.k_cutoff = 2.0 * module.k_cutoff
    with pytest.raises(ValueError, match="`k_cutoff` has changed since `prepare`"):
        of(module)
    module = pme().prepare(CELL)
    for name, value in (("spline_order", 6), ("mesh_dimensions", (20, 20, 20)), ("potential", power_law(6))):
        changed = copy.deepcopy(module)
        setattr(changed, name, value)
        with pytest.raises(ValueError, match="changed since `prepare`"):
            of(changed)
    compiled = torch.compile(lambda m, x: torch.func.functional_call(m, {"alpha": 1.1 * m.alpha}, (x, Q, CELL)))
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match="`alpha` has changed"):
        compiled(module, X)
    trained = pme()
    trained.alpha = torch.nn.Parameter(trained.alpha)
    with pytest.raises(ValueError, match="`alpha` is trained"):
        trained.prepare(CELL)


# -- made elsewhere --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ewald, pme])
def test_modules_without_memory(make):
    """Made on the meta device: parameters come with a state dict, and until then nothing is plausible."""
    with torch.device("meta"):
        empty = make()
    assert "alpha=?" in repr(empty)
    with pytest.raises(RuntimeError, match="`alpha`, but not the matching"):
        empty.load_state_dict(old(make(), "alpha"))
    same_kind = copy.deepcopy(empty).to_empty(device="cpu")
    with pytest.raises(ValueError, match="must be positive and finite"):
        of(same_kind)
    for module in (empty, same_kind):
        module.load_state_dict(from_file(make(0.7).prepare(CELL)), assign=True)
        same(module, make(0.7))


def test_tables_of_d3_without_memory_make_nan_until_a_state_is_loaded():
    with torch.device("meta"):
        empty = d3()
    same_kind = copy.deepcopy(empty).to_empty(device="cpu")
    assert of(same_kind)[0].isnan().all()
    for module in (empty, same_kind):
        module.load_state_dict(from_file(d3()), assign=True)
        same(module, d3())


@pytest.mark.parametrize("make", [ewald, lambda: pme().prepare(CELL), d3, lambda: d3(trainable=True)])
def test_modules_that_lost_their_memory(make):
    """As the one that ``functional_call`` gives the weights of an ensemble: only these are lost."""
    module, base = make(), make().to("meta")
    trained = dict(module.named_parameters())
    arguments = MOLECULE if isinstance(base, DFTD3) else dict(zip(("positions", "charges", "cell"), (X, Q, CELL)))
    found = torch.func.functional_call(base, trained, kwargs=arguments | {"compute_forces": True})
    for one, other in zip(found, of(module)):
        assert torch.equal(one, other)
    if not trained:
        same(base.to_empty(device="cpu"), module)


@pytest.mark.parametrize("make", [ewald, lambda: pme().prepare(CELL), d3])
def test_a_call_without_memory_leaves_the_module_as_it_was(make):
    """It is an error, since kernels have nothing to read."""
    module = make()
    with pytest.raises(ValueError, match="is on meta"):
        if isinstance(module, DFTD3):
            module(**{name: value.to("meta") for name, value in MOLECULE.items()})
        else:
            module(X.to("meta"), Q.to("meta"), CELL.to("meta"))
    same(module, make())


def test_modules_share_memory():
    module = torch.nn.Sequential(ewald().prepare(CELL), pme().prepare(CELL), d3())
    module.share_memory()
    assert all(m.alpha.is_shared() for m in module[:2]) and module[2].a1.is_shared()
    assert module[0]._prepared.points.is_shared() and module[2].states.radii.is_shared()


@pytest.mark.parametrize("make", [ewald, pme])
@pytest.mark.filterwarnings("error", "default:Guards may run slower:RuntimeWarning")  # torch's, of Python 3.13.0
def test_in_compiled_graphs_and_exported_programs(make):
    """One graph for all positions; what is prepared is an input of it, and does not outlive its parameters there."""
    model = torch.nn.Sequential(make().prepare(CELL))
    matrix, _, shifts = neighbor_list(X, 5.5, CELL)
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}

    class Total(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model[0](x, Q, CELL, **near).sum()

    total, counter = Total(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(total, fullgraph=True, backend=counter)
    for step in range(3):
        x = X + 0.01 * step
        torch.testing.assert_close(compiled(x), total(x), rtol=1e-12, atol=0.0)
    assert counter.frame_count == 1
    program = torch.export.export(total, (X,)).module()
    torch.testing.assert_close(program(x), total(x), rtol=1e-12, atol=0.0)
    if make is pme:
        model[0].alpha = 1.1 * model[0].alpha
        assert compiled(x).isnan() and counter.frame_count == 1


# -- another cell ----------------------------------------------------------------------------------


def stretched(factor):
    return CELL * torch.tensor([1.0, factor, 1.0], dtype=F64)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.08, 1.12, 2.0])
def test_wave_vectors_that_do_not_reach_far_enough_are_noticed(factor):
    """In a cell that is longer by a tenth in any direction; a rotation is none."""
    waves = electrostatics.prepare_wave_vectors(CELL, 4.8)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(0)))[0]
    for cell in (stretched(factor), stretched(factor) @ rotation):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            electrostatics.ewald_summation(X, Q, cell, 0.6, miller_indices=waves, cutoff=5.0)
        assert [warning.category for warning in said] == [AccuracyWarning] * (factor > 1.1)


def test_how_far_they_reach_is_right():
    """The message says up to which length all wave vectors are there; beyond it there is one that is not."""
    waves, cell = electrostatics.prepare_wave_vectors(CELL, 4.8), stretched(1.5)
    with pytest.warns(AccuracyWarning, match=r"DistributedDataParallel.*state dict") as said:
        found = electrostatics.ewald_reciprocal_space(X, Q, cell, None, 0.6, miller_indices=waves)
    reach = float(str(said[0].message).split("complete up to ")[1].split()[0])
    assert 4.8 / 1.5 - 0.001 < reach < 4.8
    complete = electrostatics.ewald_reciprocal_space(X, Q, cell, None, 0.6, k_cutoff=20.0)
    within = electrostatics.ewald_reciprocal_space(X, Q, cell, None, 0.6, k_cutoff=reach)
    assert 0 < (found - complete).abs().sum() < (within - complete).abs().sum()


def test_the_number_of_systems_is_that_of_the_preparation():
    waves = electrostatics.prepare_wave_vectors(CELL, 4.8)
    with pytest.raises(ValueError, match=r"prepared for 1 systems, but there are 2.*DistributedDataParallel"):
        electrostatics.ewald_summation(
            X, Q, CELL.repeat(2, 1, 1), 0.6, miller_indices=waves, cutoff=5.0, batch_idx=torch.arange(8).int() // 4
        )


@pytest.mark.parametrize("number", [0.45, 0.5])
def test_a_number_may_be_set(number):
    """As long as nothing was prepared with another one."""
    x = torch.tensor([[0.0, 0.0, 0.0], [2.0, 1.0, 0.5]], dtype=torch.float64)
    q, cell = torch.tensor([1.0, -1.0], dtype=torch.float64), 6.0 * torch.eye(3, dtype=torch.float64)
    module = electrostatics.ParticleMeshEwald(0.5, (12, 12, 12), 5, 5.0).prepare(cell)
    expected = module(x, q, cell)
    module.alpha = number
    if number == 0.5:
        assert torch.equal(module(x, q, cell), expected)
    else:
        with pytest.raises(ValueError, match="`alpha` has changed"):
            module(x, q, cell)
