"""Beside the distribution whose import name this package has: an error instead of a mixture, and a stand-in for it."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import nvalchemiops
from nvalchemiops.compat.stand_in import write_stand_in

ROOT = Path(__file__).resolve().parents[2]

THEIRS = {
    "nvalchemiops/__init__.py": "__version__ = '0.5.0'\n",
    "nvalchemiops/torch/__init__.py": "",
    "nvalchemiops/torch/autograd.py": "warp_custom_op = 'theirs'\n",
    "nvalchemiops/torch/spline.py": "from nvalchemiops.torch.autograd import warp_custom_op\n",
    "nvalchemiops/warp_dispatch.py": "",
}
"""Files as the other distribution has them: some that we have too, and a module where we have a package."""


def run(*command, **options):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env, timeout=300, **options)


class Environment:
    """A virtual environment in which torch and Warp are found, but not this checkout."""

    def __init__(self, folder):
        venv.create(folder, with_pip=False)
        self.folder, self.python = folder, folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        (self.site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *arguments):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        finished = run(*pip, *arguments)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    def install(self, *wheels):
        for wheel in wheels:
            self.pip("install", "-q", "--no-index", "--no-deps", "--no-compile", wheel)

    def says(self, code):
        """What a program prints last, or the error that it ends with."""
        finished = run(self.python, "-W", "ignore", "-c", code, cwd=self.folder)
        return (finished.stdout if finished.returncode == 0 else finished.stderr).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, ROOT]
    assert run(*build).returncode == 0
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    info = "nvalchemi_toolkit_ops-0.5.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: nvalchemi-toolkit-ops\nVersion: 0.5.0\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {**THEIRS, f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    path = tmp_path_factory.mktemp("theirs") / "nvalchemi_toolkit_ops-0.5.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


VERSION = "import nvalchemiops; print(nvalchemiops.__version__)"
BOTH = r"ImportError: nvalchemi-toolkit-ops 0.5.0 is installed over nvalchemiops.*pip uninstall nvalchemi-toolkit-ops"


def matches(pattern, text):
    assert re.search(pattern, text), text


def test_files_of_both_are_an_error(tmp_path):
    """As pip leaves them, without pip."""
    place = Environment(tmp_path / "place")
    here, info = place.site / "nvalchemiops", place.site / "nvalchemi_toolkit_ops-0.5.0.dist-info"
    shutil.copytree(ROOT / "nvalchemiops", here, ignore=shutil.ignore_patterns("__pycache__"))
    assert place.says(VERSION) == nvalchemiops.__version__
    info.mkdir()
    matches(BOTH, place.says(VERSION))
    info.rmdir()
    (here / "__init__.py").unlink()
    matches("has lost its `__init__.py`.*install nvalchemiops again", place.says("import nvalchemiops.torch.neighbors"))


@pytest.mark.later  # with pip, what the test above sees without it
def test_ours_over_theirs_is_an_error(tmp_path, ours, theirs):
    place = Environment(tmp_path / "place")
    place.install(theirs, ours)
    matches(BOTH, place.says(VERSION))
    # pip takes our files away with theirs; what is left says so
    place.pip("uninstall", "-q", "-y", "nvalchemi-toolkit-ops")
    matches("has lost its `__init__.py`.*install nvalchemiops again", place.says("import nvalchemiops.torch.neighbors"))
    # the way out that the message names
    place.pip("uninstall", "-q", "-y", "nvalchemi-toolkit-ops", "nvalchemiops")
    place.install(ours)
    assert place.says(VERSION) == nvalchemiops.__version__


@pytest.mark.later
def test_theirs_over_ours_is_an_error_where_a_file_of_ours_is_reached(tmp_path, ours, theirs):
    place = Environment(tmp_path / "place")
    place.install(ours, theirs)
    assert place.says(VERSION) == "0.5.0"  # their file replaced ours, and nothing of ours runs
    matches(BOTH, place.says("import nvalchemiops.torch.spline"))  # theirs, which meets our package `autograd`
    matches(BOTH, place.says("from nvalchemiops.torch.neighbors import neighbor_list"))


def test_another_folder_is_no_mixture(tmp_path, theirs):
    """First on the path is this checkout, whole; the other distribution is installed, and not seen."""
    place = Environment(tmp_path / "place")
    place.install(theirs)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {VERSION}"
    assert place.says(code) == nvalchemiops.__version__


@pytest.mark.later
def test_stand_in(tmp_path, ours):
    place = Environment(tmp_path / "place")
    wheel = write_stand_in(tmp_path / "dist")
    place.install(ours, wheel)
    assert place.says(VERSION) == nvalchemiops.__version__
    version = "import importlib.metadata as m; print(m.version('nvalchemi-toolkit-ops'))"
    assert place.says(version) == "0.5.0+nvalchemiops"
    said = place.pip("install", "--no-index", "nvalchemi-toolkit-ops[torch]>=0.4.1,==0.5.0")
    assert "already satisfied" in said and "extra" not in said
    assert sorted(p.name for p in place.site.iterdir() if "toolkit" in p.name) == [
        "nvalchemi_toolkit_ops-0.5.0+nvalchemiops.dist-info"
    ]
    place.install(write_stand_in(tmp_path / "dist", "0.3.1"))
    assert place.says(version) == "0.3.1+nvalchemiops" and place.says(VERSION) == nvalchemiops.__version__
    said = place.pip("install", "--no-index", "nvalchemi-toolkit-ops[torch]<0.4,>=0.3.1")
    assert "already satisfied" in said and "extra" not in said
    place.pip("uninstall", "-q", "-y", "nvalchemi-toolkit-ops")
    assert place.says(VERSION) == nvalchemiops.__version__


def unpacked(wheel, folder):
    """The distribution in a wheel, as an environment has it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (found,) = importlib.metadata.distributions(path=[str(folder)])
    return found


@pytest.mark.parametrize(
    ("client", "requirement", "release"),
    [
        ("aimnet 0.2.5, fairchem-core 2.24.0", "nvalchemi-toolkit-ops>=0.4.1", "0.5.0"),
        ("torch-sim-atomistic 0.6.2", "nvalchemi-toolkit-ops[torch]>=0.4.0", "0.5.0"),
        ("deepmd-kit 3.2.0", "nvalchemi-toolkit-ops>=0.3.1", "0.5.0"),
        ("matgl[ops] 4.1.2", "nvalchemi-toolkit-ops", "0.5.0"),
        ("nvalchemi-toolkit 0.2.0", "nvalchemi-toolkit-ops>=0.4.1", "0.5.0"),
        ("orb-models 0.7.0", "nvalchemi-toolkit-ops[torch]<0.4,>=0.3.1", "0.3.1"),
        ("matgl[alchmtk] 4.1.2", "nvalchemi-toolkit-ops<0.4.0", "0.3.1"),
        ("programs with JAX", "nvalchemi-toolkit-ops[jax-cu13,torch-cu13]>=0.5", "0.5.0"),
    ],
)
def test_stand_in_is_what_a_client_requires(tmp_path, client, requirement, release):
    """Of the release that docs/coming_from.md names for it, with the extras that it asks for."""
    found, asked = unpacked(write_stand_in(tmp_path / "dist", release), tmp_path / "site"), Requirement(requirement)
    assert found.name == asked.name and asked.specifier.contains(found.version), client
    assert asked.extras <= set(found.metadata.get_all("Provides-Extra"))
    assert found.requires is None


@pytest.mark.later
def test_stand_in_by_command(tmp_path):
    command = [sys.executable, "-m", "nvalchemiops", "stand-in", "--folder", tmp_path, "--release"]
    finished = run(*command, "0.3.1", cwd=ROOT)
    assert finished.returncode == 0, finished.stderr
    path = Path(finished.stdout.strip())
    assert path.name == "nvalchemi_toolkit_ops-0.3.1+nvalchemiops-py3-none-any.whl"
    found = unpacked(path, tmp_path / "site")
    assert (found.name, found.version, found.requires) == ("nvalchemi-toolkit-ops", "0.3.1+nvalchemiops", None)
    assert all("dist-info" in str(file) for file in found.files)
    assert path.read_bytes() == write_stand_in(tmp_path / "again", "0.3.1").read_bytes()
    wrong = run(*command, "latest", cwd=ROOT)
    assert wrong.returncode == 2 and "`release` must be numbers" in wrong.stderr and not wrong.stdout
