"""The folder of compiled kernels: shared by processes that start at once, read-only, deleted, or damaged.

`tests/package/test_package.py` looks at where the folder is and at one kernel of its own; here are the library's.
"""

import ctypes
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warp as wp

from nvalchemiops._warp_internals import compiled_folder
from nvalchemiops.launch import load
from nvalchemiops.neighbors.grid import prepare_search
from tests.support.processes import in_threads, output_of, python_says, run_python

# What most programs do first: a list, and the sum of a potential over it.
WORK = """
import json, sys, torch
from nvalchemiops.torch.interactions.lj import lj_energy_forces
from nvalchemiops.torch.neighbors import neighbor_list

generator = torch.Generator().manual_seed(0)
x = 6.0 * torch.rand(40, 3, dtype=torch.float64, generator=generator)
cell = 6.0 * torch.eye(3, dtype=torch.float64)

def work(dtype=torch.float64):
    given = x.to(dtype), cell.to(dtype)
    pairs, ptr, shifts = neighbor_list(given[0], 3.0, given[1], return_neighbor_list=True)
    near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
    energies, forces = lj_energy_forces(given[0], 0.5, 0.1, 3.0, given[1], **near)
    return [pairs.shape[1], float(energies.sum()), float(forces.abs().sum())]
"""
ONCE = WORK + "print(json.dumps(work()))\n"


def run(folder, code=ONCE, **options):
    """A finished process whose kernels are in this folder."""
    return run_python(code, WARP_CACHE_PATH=folder, **options)


def result_of(folder, code=ONCE, **options):
    return json.loads(output_of(run(folder, code, **options)).splitlines()[-1])


def results_at_once(folder, number):
    return in_threads(lambda _: result_of(folder, fresh=True), range(number))


USED = """
from nvalchemiops import loading
from nvalchemiops._warp_internals import compiled_folder

find, used = loading.find_kernel, set()

def watch(kernel, *where):
    used.add(compiled_folder(kernel, 1))
    return find(kernel, *where)

loading.find_kernel = watch
print(json.dumps([work(), *map(str, used)]))
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> tuple[Path, list[float]]:
    """A folder with the kernels of the work, to be copied; and its result. They are copies from the usual folder."""
    result, *paths = python_says(WORK + USED)
    folder = tmp_path_factory.mktemp("filled")
    for path in map(Path, paths):
        shutil.copytree(path, folder / path.parent.name / path.name)
    return folder, result


@pytest.fixture
def folder(filled, tmp_path) -> Path:
    return Path(shutil.copytree(filled[0], tmp_path / "kernels"))


def compiled(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.o"))
    assert len(found) >= 4, "bins, search, compaction and the sum over pairs"
    return found


@pytest.mark.slow
def test_eight_processes_start_at_once_on_an_empty_folder(tmp_path, filled):
    """They compile the same kernels into one folder, and all get the same numbers."""
    assert results_at_once(tmp_path / "empty", 8) == [filled[1]] * 8
    assert len(compiled(tmp_path / "empty")) == len(compiled(filled[0]))


@pytest.mark.later
def test_processes_start_at_once_on_a_folder_that_one_of_them_fills(folder, filled):
    """Some kernels are there, the others are compiled by two processes at the same time."""
    for path in compiled(folder)[::2]:
        shutil.rmtree(path.parent)
    assert results_at_once(folder, 2) == [filled[1]] * 2
    assert len(compiled(folder)) == len(compiled(filled[0]))


@pytest.mark.later
def test_a_folder_that_is_deleted_while_a_process_works(folder, filled):
    """What is loaded stays; what is not is compiled again, into a new folder."""
    code = WORK + textwrap.dedent(f"""
        import shutil
        results = [work()]
        shutil.rmtree({str(folder)!r})
        results += [work(), work(torch.float32), work()]
        print(json.dumps(results))
        """)
    first, second, single, third = result_of(folder, code)
    assert first == second == third == filled[1]
    assert single[0] == first[0] and single[1] == pytest.approx(first[1], rel=1e-4)
    assert list(folder.rglob("*.o")), "the kernel for float32"
    assert result_of(folder) == filled[1]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def scrambled(path: Path) -> None:
    path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))


def ending_in_zeros(path: Path) -> None:
    """As after a power failure: Warp loads such a file, and finds nothing in it."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2].ljust(len(content), b"\0"))


def cut_notes(path: Path) -> None:
    cut(next(path.parent.glob("*.meta")))


DAMAGE = [cut, emptied, scrambled, ending_in_zeros, cut_notes]


@pytest.mark.everyday_cases("scrambled")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_made_again(damage, folder, filled):
    """As after a full disk: the same numbers, a warning that names the folder, and whole files for the next one."""
    victims = compiled(folder)[: 2 if damage is cut else 1]
    for victim in victims:
        damage(victim)
    first, second = run(folder), run(folder)
    assert [json.loads(output_of(finished).splitlines()[-1]) for finished in (first, second)] == [filled[1]] * 2
    for victim in victims:
        assert f"RuntimeWarning: the compiled kernels in {victim.parent} could not" in first.stderr
    assert "RuntimeWarning" not in second.stderr
    assert len(compiled(folder)) == len(compiled(filled[0])) and not list(folder.rglob("*damaged*"))


@pytest.mark.later
def test_files_without_notes_are_made_again(folder, filled):
    for victim in compiled(folder):
        for notes in victim.parent.glob("*.meta"):
            notes.unlink()
    assert result_of(folder) == filled[1]


@pytest.mark.later
def test_processes_that_meet_damage_at_once(folder, filled):
    """One of them may remove what another has just made, which then makes it again or has it loaded."""
    cut(compiled(folder)[0])
    assert results_at_once(folder, 2) == [filled[1]] * 2


BROKEN = """
import json
from pathlib import Path

import warp as wp

from nvalchemiops.launch import launch

wp.init()


@wp.func_native("this is no C++;")
def broken(i: wp.int32): ...


@wp.kernel(module=wp.get_module("broken_module"), enable_backward=False)
def kernel(values: wp.array(dtype=wp.int32)):
    broken(wp.tid())


folder = Path(wp.config.kernel_cache_dir, kernel.module.get_module_identifier(1))
folder.mkdir(parents=True)
(folder / "mine").touch()
try:
    launch(kernel, 1, [wp.zeros(1, dtype=wp.int32, device="cpu")], device="cpu", record_tape=False)
except Exception:
    print(json.dumps((folder / "mine").exists()))
"""


def test_a_kernel_that_does_not_compile_leaves_the_folder_alone(tmp_path):
    """Files are removed because they are damaged, not because of a mistake in the source."""
    path = tmp_path / "broken.py"  # Warp reads the source of a kernel from its file
    path.write_text(BROKEN)
    assert result_of(tmp_path / "kernels", f"import runpy; runpy.run_path({str(path)!r})") is True


CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24


def obey_permissions() -> None:
    """Before a process starts: take from root what lets it write where permissions say no."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


@pytest.fixture
def read_only(folder) -> Iterator[Callable[[], None]]:
    """A function after which nobody who obeys permissions can write below the folder."""
    everything: list[Path] = []

    def close() -> None:
        everything.extend([folder, *folder.rglob("*")])
        for path in everything:
            path.chmod(0o555 if path.is_dir() else 0o444)
        probe = f"import json, os; print(json.dumps(os.access({str(folder)!r}, os.W_OK)))"
        if result_of(folder, probe, fresh=True, preexec_fn=obey_permissions):
            pytest.skip("this user may write anywhere")

    yield close
    for path in everything:
        path.chmod(0o755)


@pytest.mark.later_cases("True")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="permissions and capabilities of Linux")
@pytest.mark.parametrize("complete", [True, False])
def test_a_folder_that_cannot_be_written(complete, folder, filled, read_only):
    """Kernels compiled ahead are enough; if one is missing, the error says where it could not be put."""
    if not complete:
        shutil.rmtree(compiled(folder)[-1].parent)
    read_only()
    finished = run(folder, fresh=True, preexec_fn=obey_permissions)
    if complete:
        assert json.loads(output_of(finished).splitlines()[-1]) == filled[1]
    else:
        assert finished.returncode == 1
        assert "PermissionError" in finished.stderr and str(folder) in finished.stderr, finished.stderr[-2000:]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="permissions and capabilities of Linux")
def test_damaged_files_that_cannot_be_removed(folder, read_only):
    """The error says which folder has to be deleted."""
    victim = compiled(folder)[0]
    cut(victim)
    read_only()
    finished = run(folder, fresh=True, preexec_fn=obey_permissions)
    assert finished.returncode == 1
    last = finished.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError") and str(victim.parent) in last and "delete that folder" in last, last


def test_the_bins_of_a_small_search_are_a_short_text():
    """The first module that most programs compile: with unrolled loops it has half as much again to read."""
    kernel = prepare_search()
    load(kernel, wp.get_device("cpu"))
    (text,) = compiled_folder(kernel, 1).glob("*.cpp")
    assert text.stat().st_size < 160_000
