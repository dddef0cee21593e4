"""What GPU code needs, told without a GPU: it compiles in the variant that is launched, and fits into registers.

More registers than `MOST_REGISTERS` leave fewer than 16 warps for each multiprocessor, which has 65,536 registers on
A100, H100 and B200 alike (CUDA C++ Programming Guide, compute capabilities 8.0, 9.0 and 10.0). An array whose place is
not known to the compiler lies on the stack, in memory. `EXCEPTIONS` names the kernels that need more, and why.
"""

import functools
import re
import types

import pytest
import torch
import warp as wp

from nvalchemiops import cli
from nvalchemiops import launch as core
from nvalchemiops._warp_internals import compiled_folder
from nvalchemiops.interactions.pair.potentials import moment_interaction
from nvalchemiops.launch import lanes_of
from nvalchemiops.layout import layout
from nvalchemiops.loading import compile_for, is_cpu_only
from nvalchemiops.neighbors import nearest
from nvalchemiops.torch.interactions.dispersion import d3_dispersion
from nvalchemiops.torch.interactions.pair.moments import sum_moments
from nvalchemiops.torch.interactions.pair.system import PairSystem
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, rows_of
from nvalchemiops.torch.operators.influence import mesh_influence
from nvalchemiops.torch.operators.sorting import counted_rows
from tests.lanes.fibers import gpu_layout
from tests.static.cubin import Needs, needs
from tests.support import cases

ARCHITECTURE = 90
OTHERS = (80, 100)
"""Compute capabilities, times ten: those of an H100, and of the generations before and after."""

MOST_REGISTERS, NO_STACK = 128, 0

SERIAL = "one thread of a CPU; a GPU never runs it"
OF_SYSTEM = "a thread has a system, so few run, once for a list"
SINE = "sine and cosine of float64, whose branch for huge angles has a table on the stack and is never taken"
BOUNDED = "registers are limited, so that 20 warps run; what is kept in memory instead is read once for a group of rows"
SPREAD = "registers are limited, so that 32 warps run"
EXCEPTIONS = {
    "prepare_search()": (Needs(254, 192), SERIAL),
    "describe_systems()": (Needs(254, 192), OF_SYSTEM),
    "shortest_vectors()": (Needs(72, 144), OF_SYSTEM),
    "search_neighbors()": (Needs(96, 24), BOUNDED),
    "search_nearest()": (Needs(128, 40), "registers are limited, so that 16 warps run: the search and the selection"),
    "normal_numbers()": (Needs(128, 40), SINE),
    "chi_square_numbers()": (Needs(128, 40), SINE),
    "spline_stencils(10, 1, float64)": (
        Needs(168, 0),
        "two weights of ten points along each axis, of 64 bits",
    ),
    "spline_gather(8, 2, float64)": (Needs(164, 0), "three weights of each of eight points, and ten sums, of 64 bits"),
    "spline_gather(10, 2, float64)": (Needs(168, 0), "three weights of each of ten points, and ten sums, of 64 bits"),
    "moment_kernel(erfc(alpha*r)/r of moments 2->3 m float64)": (
        Needs(178, 0),
        "ten moments, and twenty sums, of 64 bits",
    ),
    "three_body(float64)": (
        Needs(184, 0),
        "derivatives by three sides, and eight products, of 64 bits",
    ),
}

OF_OTHERS = {
    80: {
        **{f"spline_spread({order}, 1, float64)": (Needs(64, 16), SPREAD) for order in (4, 5, 8, 10)},
        "spline_gather(5, 2, float64)": (Needs(136, 0), "three weights of each of five points, and ten sums"),
        "spline_gather(8, 1, float64)": (Needs(134, 0), "two weights of each of eight points, and four sums"),
        "spline_gather(10, 1, float64)": (Needs(164, 0), "two weights of each of ten points, and four sums"),
        "search_neighbors()": (Needs(96, 56), BOUNDED),
    },
}
"""Further exceptions of one architecture."""

LEAN = (
    "sum_rows(float64)",
    "spline_stencils(8, 1, float64)",
    "spline_spread(8, 1, float64)",
    "spline_gather(5, 2, float64)",
    "coefficients(1)",
    "three_body(float32)",
    "search_neighbors()",
    "search_nearest()",
    "place_atoms()",
    "find_columns(8)",
    "phase_tables()",
    "fourier_coefficients()",
    "fourier_spread(1)",
    "fourier_gather(2)",
)
"""One of each family, in the everyday suite."""

LEANEST = ("spline_gather(5, 2, float64)", "three_body(float32)", "search_neighbors()")
"""Those with most registers, which are compiled for other architectures every day."""


@functools.cache
def registered():
    return dict(cli.all_kernels())


@pytest.fixture(scope="module")
def needs_of(tmp_path_factory):
    """What a thread of a kernel needs, compiled for blocks as a launch has them. A module is compiled once."""

    of_modules = {}

    def find(name, architecture=ARCHITECTURE):
        kernel = registered()[name]()
        block = block_of_launch(kernel)
        if (kernel.module, architecture) not in of_modules:
            path = compile_for(kernel, architecture, tmp_path_factory.mktemp("cubin"))
            of_modules[kernel.module, architecture] = needs(path), path.name
        found, file = of_modules[kernel.module, architecture]
        assert file.startswith(variant(kernel, block)), "another variant than the one that is launched"
        (mine,) = (value for symbol, value in found.items() if re.match(rf"{kernel.key}_[0-9a-f]+_cuda_", symbol))
        return mine

    return find


def variant(kernel, block):
    """The name of the compiled module, without leaving its hash, which other tests find under other settings."""
    name = compiled_folder(kernel, block).name
    kernel.module.mark_modified()
    return name


def beyond(name, found, architecture=ARCHITECTURE):
    """A line about a kernel that needs more than it may, or about an exception without need (an H100 tells for all)."""
    own = EXCEPTIONS if architecture == ARCHITECTURE else OF_OTHERS.get(architecture, {})
    most, _ = (EXCEPTIONS | own).get(name, (Needs(MOST_REGISTERS, NO_STACK), ""))
    if found.registers > most.registers or found.stack > most.stack:
        return f"{name} needs {found}, and may have {most}"
    needless = found.registers <= MOST_REGISTERS and found.stack <= NO_STACK
    if name in own and needless:
        return f"{name} needs {found}, and is no exception any more"
    return None


@pytest.mark.parametrize("name", LEAN)
def test_a_kernel_fits_into_registers(name, needs_of):
    assert not beyond(name, needs_of(name))


def test_blocks_are_as_large_as_it_takes_to_fill_a_multiprocessor(needs_of):
    """Smaller ones would leave places free that registers allow; larger ones would not."""
    block = layout("cuda").block
    assert [Needs(32, 0).warps_at_once(n) for n in (block // 2, block, 2 * block)] == [32, 64, 64]
    assert [Needs(n, 0).warps_at_once(block) for n in (40, 41, 64, 65, 128, 129)] == [48, 40, 32, 28, 16, 12]
    assert needs_of("search_nearest()").warps_at_once(block) == nearest.WARPS


@pytest.mark.parametrize(("name", "warps"), [("tabulate_influence(float32)", 28), ("spline_gather(5, 1, float32)", 32)])
def test_kernels_of_meshes_have_warps_that_hide_latency(name, warps, needs_of):
    """As docs/performance.md counts them; a value more that is kept in a loop may cost some."""
    assert needs_of(name).warps_at_once(layout("cuda").block) == warps


@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize(
    "name", [name if name in LEANEST else pytest.param(name, marks=pytest.mark.later) for name in LEAN]
)
def test_a_kernel_fits_into_registers_of_others(name, architecture, needs_of):
    assert not beyond(name, needs_of(name, architecture), architecture)


@pytest.mark.slow  # a third of a second for each kernel
@pytest.mark.parametrize("architecture", [ARCHITECTURE, *OTHERS])
def test_every_kernel_fits_into_registers(architecture, needs_of):
    assert not {*EXCEPTIONS, *OF_OTHERS.get(architecture, ())} - set(registered())
    assert not [line for name in registered() if (line := beyond(name, needs_of(name, architecture), architecture))]


@pytest.mark.parametrize(
    ("type_", "threshold"), [(wp.float64, Needs(40, 8 * 600)), (wp.float32, Needs(40, 4 * 600))], ids=["64", "32"]
)
def test_the_stack_of_a_kernel_is_found(type_, threshold, tmp_path):
    """An array of known size on the stack, and its use by a number that is not."""

    @wp.func_native("""
        decltype(value + value) kept[600];
        for (int k = 0; k < 600; ++k) kept[k] = value * (k ^ place);
        out.data[0] = kept[place] + kept[2 * place];
    """)
    def on_stack(value: type_, place: wp.int32, out: wp.array(dtype=type_)): ...

    module = wp.get_module(f"test_stack_{type_.__name__}")

    @wp.kernel(module=module, enable_backward=False)
    def kernel(value: type_, place: wp.int32, out: wp.array(dtype=type_)):
        on_stack(value, place, out)

    (path,) = wp.compile_aot_module(module, arch=ARCHITECTURE, module_dir=tmp_path)
    (found,) = needs(path).values()
    assert found.stack == threshold.stack and 8 <= found.registers <= threshold.registers


def test_what_is_no_cubin_is_refused(tmp_path):
    (tmp_path / "none.cubin").write_bytes(b"\x7fELF\x01 and more")
    with pytest.raises(ValueError, match="ELF"):
        needs(tmp_path / "none.cubin")


# -- which variant --------------------------------------------------------------------------------


class Card:
    """As much of a GPU as it takes to be asked for a launch."""

    is_cpu, alias, context = False, "cuda:0", None
    stream = types.SimpleNamespace(is_capturing=False)

    def __str__(self):
        return self.alias


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr(wp, "get_cuda_devices", lambda: [card])
    monkeypatch.setattr(wp, "get_device", lambda name=None: card)
    yield card
    for build in registered().values():
        build().module.mark_modified()  # as in `variant`


def block_of_launch(kernel):
    return layout("cuda").block


def test_warmup_builds_what_is_launched_on_a_gpu(card, monkeypatch, capsys):
    """For every kernel the block, which with the kernel makes the module; the names of modules for some."""
    warmed, launched = {}, {}
    monkeypatch.setattr(
        "nvalchemiops.loading.find_kernel", lambda k, device, block: warmed.update({k: (device, block)})
    )
    assert cli.main(["warmup", "--device", "cuda"]) == 0
    kernels = {name: kernel for name, build in registered().items() if not is_cpu_only(kernel := build())}

    def recorded(kernel, device, stream, block, grid, arguments):
        launched[kernel] = device, block
        assert grid == ((3, 32) if lanes_of(kernel) else (3,))

    monkeypatch.setattr(core, "_launch_recorded", recorded)
    for kernel in kernels.values():
        core.launch(kernel, 3, [], device="cuda", lanes=lanes_of(kernel), record_tape=False)
    assert warmed == launched and set(warmed) == set(kernels.values())
    for name in LEAN:
        (_, block), kernel = launched[kernels[name]], kernels[name]
        assert variant(kernel, block) != variant(kernel, 256)


def test_kernels_are_launched_with_the_lanes_that_they_declare(monkeypatch):
    """Otherwise `warmup` would build another variant. Every registered kernel with lanes is launched here."""
    seen = {}
    launch = core.launch

    def watched(kernel, *arguments, lanes=0, **options):
        seen.setdefault(kernel, set()).add(lanes)
        launch(kernel, *arguments, lanes=lanes, **options)

    monkeypatch.setattr(core, "launch", watched)
    system = cases.MIXED
    for case in (*cases.SUMS, *cases.PAIRS, cases.D3):
        inputs = case.inputs(system).leaves()
        energies = case.results(*inputs, case.near(system))[0]
        inputs.grad(energies.sum())
    cell = system.cell[:1]
    x = system.positions[:5]
    neighbor_list(x, 4.0, cell, nearest=2, return_neighbor_list=True)
    near = cases.D3.near(cases.ONE)
    damping = cases.RationalDamping(0.4, 4.0, 0.8)
    d3_dispersion(cases.ONE.positions, near.pop("numbers"), damping, cases.STATES, cases.ONE.cell, **near, s9=1.0)
    pairs, ptr, shifts = neighbor_list(x, 4.0, cell, return_neighbor_list=True)
    rows = rows_of(GivenNeighbors(pairs, ptr, shifts), x, periodic=True)
    sum_moments(moment_interaction(False), PairSystem(x, cell, None, 1, rows), x.unsqueeze(1)[..., :1])
    one = torch.ones(1, dtype=torch.float64)
    factors = (torch.ones(4, 4, 1, dtype=torch.float64), torch.ones(1, 1, 3, dtype=torch.float64))
    mesh_influence(cell, one, one, *factors, (4, 4, 4), (0, 0), 1, False, False)
    with gpu_layout():
        counted_rows(ptr[1:] - ptr[:-1], torch.zeros(1, dtype=torch.int32))
    assert {kernel.key: lanes for kernel, lanes in seen.items() if lanes != {lanes_of(kernel)}} == {}
    families = {family(kernel) for build in registered().values() if lanes_of(kernel := build())}
    assert families <= {family(kernel) for kernel in seen}


def family(kernel):
    return re.sub(r"(_\d+|_float\d\d|_[0-9a-f]{20})+$", "", kernel.key)
