"""The package as a thing to install and import: what it loads, what it needs, what it leaves alone."""

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nvalchemiops
from tests.support.processes import output_of, python_says, run_interpreter, run_script, said_by_mypy

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nvalchemiops"

TOP_LEVEL = {
    "pyproject.toml",
    "nvalchemiops",
    "tests",
    "benchmarks",
    "docs",
    "README.md",
    "examples",
    "Makefile",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "constraints.txt",
    ".ci",
}
DOT_FILES = {".gitignore", ".gitattributes", ".editorconfig", ".github"}


# -- metadata -------------------------------------------------------------------------------------


def test_version_is_written_in_one_place():
    assert nvalchemiops.__version__ == "1.0.0.dev0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]
    holders = [p for p in PACKAGE.rglob("*.py") if nvalchemiops.__version__ in p.read_text()]
    assert holders == [PACKAGE / "__init__.py"]


def test_every_dependency_is_pinned_by_the_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "constraints.txt").read_text().lower().splitlines()
    lines = [line for line in text if not line.startswith("#")]
    pinned = {line.split("==")[0].replace("_", "-") for line in lines}
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.match(r"[A-Za-z0-9_-]+", entry)[0].lower() for group in wanted for entry in group}
    assert names <= pinned
    assert "torch==2.13.0" in lines
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "no suffix, address or path"


def test_top_level_holds_what_is_agreed_and_nothing_else():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    present = {line.split("/")[0] for line in listing.stdout.splitlines() if (ROOT / line).exists()}
    assert present - DOT_FILES == TOP_LEVEL


def test_interpreters_that_do_not_run_are_left_out_of_the_matrix(tmp_path):
    """As those of pyenv for versions that are not chosen."""
    shim = tmp_path / "python3.0"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    command = ["make", "-s", "test-matrix", f"MATRIX={shim}:2.11.0 python3.nowhere:2.11.0"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0 and finished.stdout.count("left out, there is no") == 2, finished.stderr


@pytest.mark.parametrize("patch", sorted(ROOT.glob("benchmarks/gpu_variants/*.patch")), ids=lambda patch: patch.stem)
def test_kernels_to_be_timed_on_a_gpu_are_variants_of_the_present_ones(patch):
    """Renew or delete a patch whose kernel has changed."""
    subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, check=True)


def nodes(path: Path, word: str) -> Iterator[ast.AST]:
    """The nodes of a file in which the word occurs; others need not be parsed."""
    text = path.read_text()
    return ast.walk(ast.parse(text)) if word in text else iter(())


def test_no_postponed_annotations_where_kernels_are_built():
    # Warp reads annotations as objects; as strings, a type that only an annotation names is lost
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path, "__future__"):
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                offenders.append(str(path.relative_to(ROOT)))
    assert not offenders


def test_every_launch_goes_through_the_helper():
    """One place decides about threads, lanes and tapes; user code in docstrings and docs may launch as it likes."""
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        if path in (PACKAGE / "launch.py", PACKAGE / "_warp_internals.py"):
            continue
        for node in nodes(path, ".launch"):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("wp.launch", "wp.launch_tiled", "warp.launch", "warp.launch_tiled"):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not offenders


def test_operators_ask_for_the_layout_not_for_the_device():
    """What a GPU is prepared for is chosen by `nvalchemiops.layout`, which tests replace (`tests/lanes`)."""
    threads_of_transforms = PACKAGE / "torch" / "operators" / "mesh_transform.py"
    waits_to_measure = PACKAGE / "torch" / "interactions" / "electrostatics" / "accuracy" / "tuning.py"
    rooms = [PACKAGE / "torch" / name for name in ("operators", "neighbors", "interactions")]
    offenders = []
    for path in (
        path for room in rooms for path in room.rglob("*.py") if path not in (threads_of_transforms, waits_to_measure)
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            compared = isinstance(node, ast.Compare) and re.search(r"device\.type\b(?!\))", ast.unparse(node))
            if compared or (isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_cpu")):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not offenders


WARP_INTERNALS = {
    *("_src", "adj", "module_exec", "hooks", "get_kernel_hooks", "get_module_identifier", "failed_builds"),
    *("fwd_args", "params_addr", "set_param_at_index", "set_param_at_index_from_ctype", "set_dim"),
    *("record_launch", "record_func", "record_scope_begin", "record_scope_end"),
    *("__ctype__", "_wp_scalar_type_", "_shape_", "instance_type"),
}
"""Names that Warp does not promise to keep; and what a kernel has beside its key."""


def test_private_parts_of_warp_are_named_in_one_file():
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "_warp_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            attribute = node.attr if isinstance(node, ast.Attribute) else None
            named = attribute or (node.value if isinstance(node, ast.Constant) else None)
            imported = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("warp._")
            of_kernel = attribute in ("module", "options", "func", "overloads") and re.fullmatch(
                r"(\w*_)?kernel\.\w+", ast.unparse(node)
            )
            if imported or of_kernel or (isinstance(named, str) and named in WARP_INTERNALS):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not offenders


def test_layers_below_torch_do_not_import_it():
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "cli.py" or any(path.is_relative_to(PACKAGE / name) for name in ("torch", "ase", "jax")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(re.match(r"(nvalchemiops\.)?(torch|jax)(\.|$)", name) for name in names):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not offenders


PRIVATE_OF_TENSORS = {n for n in dir(torch.Tensor) if re.match(r"_[a-z]", n)}
"""Methods and properties of tensors that torch does not document."""


def private_names_of_torch(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and name of what a file imports or takes from torch's modules, or asks of tensors, by a private name."""
    modules, found = {"torch"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    modules.add(alias.asname or "torch")
                    found += [(node.lineno, alias.name)] * ("._" in alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                modules.add(alias.asname or alias.name)
                found += [(node.lineno, alias.name)] * ("._" in f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            chain = ast.unparse(node)
            if chain.partition(".")[0] in modules or node.attr in PRIVATE_OF_TENSORS:
                found.append((node.lineno, chain))
    return found


def test_private_names_of_torch_are_in_one_file():
    """It has a way without each: any other file would fail to import, or in a call, with another release of torch."""
    offenders = []
    for path in (*(PACKAGE / "torch").rglob("*.py"), *(PACKAGE / "jax").rglob("*.py")):
        if path != PACKAGE / "torch" / "runtime" / "_torch_internals.py":
            names = private_names_of_torch(ast.parse(path.read_text()))
            offenders += [f"{path.relative_to(ROOT)}:{line} {name}" for line, name in names]
    assert not offenders
    probe = "import torch.x as t\nfrom torch import _C\nt.a._b\n_C.c._d\nvalue._version\nself._own\nitem._make()"
    assert [name for _, name in private_names_of_torch(ast.parse(probe))] == [
        "_C",
        "t.a._b",
        "_C.c._d",
        "value._version",
    ]


SUMS = "torch/interactions/electrostatics"
HOPS = {
    "ewald_summation": [
        f"{SUMS}/ewald.py",
        f"{SUMS}/terms/reciprocal.py",
        "torch/operators/fourier.py",
        "kernels/fourier/spread.py",
    ],
    "its sum over pairs": [
        f"{SUMS}/ewald.py",
        f"{SUMS}/driver.py",
        f"{SUMS}/terms/pairs.py",
        "torch/interactions/pair/driver.py",
    ],
    "particle_mesh_ewald": [
        f"{SUMS}/pme.py",
        f"{SUMS}/terms/mesh.py",
        "torch/operators/mesh.py",
        "kernels/mesh/spread.py",
    ],
    "d3_dispersion": [
        "torch/interactions/dispersion/d3.py",
        "torch/interactions/dispersion/driver.py",
        "interactions/dispersion/formulas.py",
    ],
    "its coefficients": [
        "torch/interactions/dispersion/driver.py",
        "torch/interactions/dispersion/coefficients.py",
        "interactions/dispersion/coefficients.py",
    ],
    "neighbor_list": [
        "torch/neighbors/lists.py",
        "torch/neighbors/driver.py",
        "torch/neighbors/search.py",
        "neighbors/search.py",
    ],
    "PairPotential": [
        "torch/interactions/pair/potential.py",
        "torch/interactions/pair/driver.py",
        "torch/interactions/pair/op.py",
        "interactions/pair/sum.py",
    ],
}
"""The ways from calls to formulas and kernels that docs/architecture.md shows."""


@pytest.mark.parametrize("call", HOPS)
def test_formulas_and_kernels_are_three_imports_away(call):
    table = (ROOT / "docs" / "architecture.md").read_text()
    for here, there in zip(HOPS[call], HOPS[call][1:]):
        *package, name = there.removesuffix(".py").split("/")
        imported = set()
        for node in ast.walk(ast.parse((PACKAGE / here).read_text())):
            if isinstance(node, ast.ImportFrom):
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        assert ".".join(["nvalchemiops", *package, name]) in imported, f"{here} does not import {there}"
        assert f"{name}.py" in table


TYPED = """
import jax.numpy as jnp
import numpy as np
import torch
import warp as wp

from nvalchemiops import jax
from nvalchemiops.jax.neighbors import neighbor_list as jax_neighbor_list, prepare_neighbor_list
from nvalchemiops.torch import System
from nvalchemiops.torch.interactions.electrostatics import EwaldSummation, ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.kernel import differentiable_kernel
from nvalchemiops.torch.neighbors import VerletList, neighbor_list

def slabs(x: torch.Tensor, q: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    neighbor_list(x, 3.0, h, [[True, True, False], [True] * 3])
    VerletList(3.0, 0.5)(x, h, (1, 1, 0))
    EwaldSummation()(System(x, q, h, pbc=(True, True, False)), compute_forces=True)
    energies, forces = particle_mesh_ewald(x, q, h, pbc=np.array([True, True, False]), compute_forces=True)
    return ewald_summation(x, q, h, pbc=False).sum() + forces.square().sum()

def in_jax(x: jnp.ndarray, h: jnp.ndarray) -> jnp.ndarray:
    system = jax.System(x, cell=h, pbc=(True, True, False))
    prepare_neighbor_list(system.positions, 3.0, system.cell, False)
    return jax_neighbor_list(x, 3.0, h, (True, True, False))[0]

def op_of(kernel: wp.Kernel) -> None:
    differentiable_kernel(kernel).op([])

neighbor_list(torch.rand(2, 3), 3.0, pbc="xy")
"""


@pytest.mark.later
def test_calls_of_users_pass_a_type_checker(tmp_path):
    pytest.importorskip("mypy", reason="no mypy")
    pytest.importorskip("jax")
    (said,) = said_by_mypy(tmp_path / "typed.py", TYPED)  # the last call is wrong
    assert 'Argument "pbc" to "neighbor_list" has incompatible type "str"' in said


# -- import ---------------------------------------------------------------------------------------


def test_import_loads_neither_torch_nor_warp():
    loaded = python_says(
        "import nvalchemiops, nvalchemiops.constants, nvalchemiops.cli, sys, json\n"
        "print(json.dumps([m for m in ('torch', 'warp', 'numpy', 'sympy') if m in sys.modules]))",
        fresh=True,
    )
    assert loaded == []


def test_subpackages_load_on_first_use():
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        _ = nvalchemiops.no_such_thing
    ours = "nvalchemiops.constants.COULOMB_HARTREE_BOHR, nvalchemiops.torch.interactions.electrostatics.__name__"
    said = python_says(f"import nvalchemiops, json\nprint(json.dumps([{ours}]))")
    assert said == [1.0, "nvalchemiops.torch.interactions.electrostatics"]


@pytest.mark.parametrize("package", ["", ".interactions", ".torch", ".torch.interactions", ".jax", ".jax.interactions"])
def test_documented_modules_load_on_first_use(package):
    if "jax" in package:
        pytest.importorskip("jax")
    package = importlib.import_module(f"nvalchemiops{package}")
    below = re.findall(rf":: {package.__name__}\.(\w+)", (ROOT / "docs" / "api.md").read_text())
    of_clients = ["dynamics", "segment_ops"] if package is nvalchemiops else []
    assert below
    for name in {*below, *of_clients} - {"operators", "runtime"}:  # which explain how it works
        assert package.__getattr__(name).__name__ == f"{package.__name__}.{name}"


def test_importing_everything_warns_of_nothing_compiles_nothing_and_leaves_warp_settings_alone(tmp_path):
    before, after = python_says(
        """
        import json, warnings
        import torch, warp as wp  # their own warnings are theirs
        warnings.simplefilter("error")
        def settings():
            return {k: repr(v) for k, v in vars(wp.config).items() if not k.startswith("__")}
        before = settings()
        import nvalchemiops
        from nvalchemiops.cli import import_all
        for module in import_all(nvalchemiops):
            pass
        print(json.dumps([before, settings()]))
        """,
        WARP_CACHE_PATH=str(tmp_path),
    )
    # Warp itself fills in the resolved cache folder when it starts
    before.pop("kernel_cache_dir"), after.pop("kernel_cache_dir")
    assert after == before
    assert not list(tmp_path.rglob("wp_*"))


@pytest.mark.later
def test_a_kernel_is_compiled_alone_and_once(tmp_path):
    """Using op B never recompiles op A, whatever was defined in between."""
    before, after = python_says(
        """
        import json, os
        from pathlib import Path
        import torch
        from nvalchemiops.torch.interactions.electrostatics import ewald_summation
        from nvalchemiops.torch.neighbors import neighbor_list

        def compiled():
            folders = [f for f in Path(os.environ["WARP_CACHE_PATH"]).glob("*/wp_nvalchemiops*") if f.is_dir()]
            return {folder.name: max(f.stat().st_mtime_ns for f in folder.iterdir()) for folder in folders}

        x, cell = torch.rand(4, 3, dtype=torch.float64), 4.0 * torch.eye(3, dtype=torch.float64)
        neighbor_list(x, 2.0, cell)
        first = compiled()
        ewald_summation(x, torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64), cell)
        neighbor_list(x, 3.0, cell)
        print(json.dumps([first, compiled()]))
        """,
        WARP_CACHE_PATH=str(tmp_path),
    )
    assert len(before) == 3 and len(after) > len(before)  # bins, search, compaction
    assert {name: after[name] for name in before} == before
    release = "".join(c if c.isalnum() else "_" for c in nvalchemiops.__version__)
    assert all(release in name for name in after), "the folder of each kernel carries the release"


@pytest.mark.everyday_cases("absent0")
@pytest.mark.parametrize("absent", [["torch"], ["jax"], ["ase"], ["torch", "jax", "ase"]])
def test_everything_else_imports_without_optional_packages(absent):
    modules = python_says(
        f"""
        import json, sys
        sys.modules.update(dict.fromkeys({absent!r}))
        import nvalchemiops
        from nvalchemiops.cli import import_all
        print(json.dumps([m.__name__ for m in import_all(nvalchemiops)]))
        """,
        fresh=True,
    )
    assert {"nvalchemiops.constants", "nvalchemiops.launch", "nvalchemiops.types"} <= set(modules)
    if "torch" not in absent:
        assert "nvalchemiops.torch.autograd" in modules
    else:
        assert {"nvalchemiops.neighbors", "nvalchemiops.interactions.electrostatics"} <= set(modules)
        assert not [m for m in modules if m.startswith("nvalchemiops.torch")]


# -- wheel and sdist ------------------------------------------------------------------------------


@pytest.mark.later
def test_wheel_and_sdist_build_and_the_wheel_works_elsewhere(tmp_path):
    dist, site = tmp_path / "dist", tmp_path / "site"
    quietly = {"check": True, "capture_output": True, "text": True}
    # the wheel is built from the sdist, so this also shows that the sdist is complete
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "-o", dist, ROOT], **quietly)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"nvalchemiops-{nvalchemiops.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"nvalchemiops", info}
    assert {"nvalchemiops/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    sources = {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*.py")}
    assert sources <= set(names)

    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "LICENSE", "tests/conftest.py", "Makefile", "constraints.txt"} <= inside
    assert not [name for name in inside if name.startswith((".venv", ".gpu", "docs/_build")) or "__pycache__" in name]

    install = ["install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", site, wheel]
    subprocess.run([sys.executable, "-m", "pip", *install], **quietly)
    path, version, constant = python_says(
        "import json, nvalchemiops, nvalchemiops.torch\n"
        "from nvalchemiops.constants import COULOMB_EV_ANGSTROM as k\n"
        "print(json.dumps([nvalchemiops.__file__, nvalchemiops.__version__, k]))",
        fresh=True,
        cwd=tmp_path,
        PYTHONPATH=str(site),
    )
    assert Path(path).is_relative_to(site)
    assert version == nvalchemiops.__version__
    assert constant == pytest.approx(14.39964547, abs=1e-8)

    # the documented examples, against the wheel and outside of the checkout
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text("\n".join(["import nvalchemiops", *blocks, "print(nvalchemiops.__file__)"]))
    said = output_of(run_interpreter(script, cwd=tmp_path, PYTHONPATH=site))
    assert Path(said.splitlines()[-1]).is_relative_to(site)


# -- Warp's start and its kernel cache ------------------------------------------------------------

KERNEL = """
import json, sys, warnings
import warp as wp
from nvalchemiops._warp import ensure_warp

@wp.kernel
def double(x: wp.array(dtype=wp.float64)):
    i = wp.tid()
    x[i] = wp.float64(2.0) * x[i]

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ensure_warp()
    ensure_warp()
x = wp.array([1.0, 2.0, 3.0], dtype=wp.float64, device="cpu")
if "launch" in sys.argv:
    wp.launch(double, 3, inputs=[x], device="cpu")
print(json.dumps([x.numpy().tolist(), wp.config.kernel_cache_dir, [str(w.message) for w in caught]]))
"""


@pytest.fixture
def kernel_script(tmp_path) -> Path:
    path = tmp_path / "kernel_script.py"  # Warp reads the source of kernels, so they need a file
    path.write_text(KERNEL)
    return path


def run_kernel(script: Path, *arguments: str, **environment: str | None):
    """Start Warp; with "launch" also compile a kernel, which takes most of the time."""
    clean = {"WARP_CACHE_PATH": None, "XDG_CACHE_HOME": None, "TMPDIR": str(script.parent)}
    return run_script(script, *arguments, **clean | environment)


def result_of(finished):
    return json.loads(output_of(finished).splitlines()[-1])


def test_home_that_cannot_exist(tmp_path, kernel_script):
    (tmp_path / "file").write_text("not a folder")
    numbers, folder, messages = result_of(run_kernel(kernel_script, "launch", HOME=str(tmp_path / "file" / "home")))
    assert numbers == [2.0, 4.0, 6.0]
    assert Path(folder).is_relative_to(tmp_path)
    assert re.search(rf"nvalchemiops-{re.escape(nvalchemiops.__version__)}-warp-[\d.]+-", folder)
    assert len(messages) == 1
    assert "WARP_CACHE_PATH" in messages[0]
    assert list(Path(folder).glob("wp_*"))
    assert Path(folder).parent.stat().st_mode & 0o077 == 0

    again = result_of(run_kernel(kernel_script, HOME=str(tmp_path / "file" / "home")))
    assert again[1] == folder, "processes of one user share the replacement"


def test_no_home_at_all(tmp_path, kernel_script):
    # Warp alone would make a folder below the working directory
    _, folder, messages = result_of(run_kernel(kernel_script, XDG_CACHE_HOME=""))
    assert Path(folder).is_relative_to(tmp_path)
    assert len(messages) == 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that even root cannot write into")
def test_existing_cache_that_is_read_only(tmp_path, kernel_script):
    (tmp_path / "warp").mkdir()
    (tmp_path / "warp" / importlib.metadata.version("warp-lang")).symlink_to("/proc")
    _, folder, messages = result_of(run_kernel(kernel_script, XDG_CACHE_HOME=str(tmp_path)))
    assert "nvalchemiops" in folder
    assert len(messages) == 1


@pytest.mark.later
def test_replacement_folder_of_somebody_else_is_not_trusted(tmp_path, kernel_script):
    (tmp_path / "file").write_text("not a folder")
    environment = {"HOME": str(tmp_path / "file" / "home")}
    folder = Path(result_of(run_kernel(kernel_script, **environment))[1])
    folder.parent.chmod(0o777)  # now others could put compiled code there
    assert result_of(run_kernel(kernel_script, **environment))[1] != str(folder)


def test_cache_chosen_by_the_user_is_kept(tmp_path, kernel_script):
    chosen = tmp_path / "chosen"
    _, folder, messages = result_of(run_kernel(kernel_script, WARP_CACHE_PATH=str(chosen)))
    assert Path(folder).is_relative_to(chosen)
    assert messages == []


def test_cache_chosen_by_the_user_is_never_replaced(tmp_path, kernel_script):
    (tmp_path / "file").write_text("not a folder")
    finished = run_kernel(kernel_script, WARP_CACHE_PATH=str(tmp_path / "file" / "cache"))
    assert finished.returncode != 0
    assert "NotADirectoryError" in finished.stderr
