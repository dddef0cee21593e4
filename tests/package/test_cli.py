"""The ``nvalchemiops`` command: versions and devices, and kernels compiled ahead of their use."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nvalchemiops
from nvalchemiops import _warp, cli
from tests.support.processes import command, output_of, run_interpreter, run_python, run_script


def test_without_docstrings():
    run = run_interpreter("-OO", "-m", "nvalchemiops", "--version")
    assert (run.returncode, run.stdout) == (0, f"nvalchemiops {nvalchemiops.__version__}\n"), run.stderr


@pytest.mark.later
def test_info_as_json():
    finished = command("info", "--json")
    assert finished.returncode == 0
    assert finished.stderr == ""
    facts = json.loads(finished.stdout)
    assert facts["versions"]["nvalchemiops"] == nvalchemiops.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert all(facts["versions"].values())
    assert facts["devices"][0]["name"] == "cpu"
    assert facts["devices"][0]["threads"] >= 1
    assert len(facts["devices"]) == 1 + torch.cuda.device_count()
    assert Path(facts["kernel_cache"]["path"]).is_dir()


def test_info_as_text_is_clean():
    finished = command("info", OMP_NUM_THREADS="1")
    assert finished.returncode == 0
    assert finished.stderr == ""
    first_words = [line.split()[0] for line in finished.stdout.splitlines()]
    assert first_words[:6] == ["nvalchemiops", "python", "torch", "warp", "numpy", "sympy"]
    assert "initialized" not in finished.stdout, "Warp's banner"
    assert ", 1 thread\n" in finished.stdout


def test_installed_script_and_module_are_the_same_command():
    script = Path(sys.executable).with_name("nvalchemiops")
    if not script.exists():
        pytest.skip("the package is not installed beside this interpreter")
    finished = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert finished.stdout == command("--version").stdout == f"nvalchemiops {nvalchemiops.__version__}\n"


def test_info_without_torch():
    finished = run_python(
        """
        import sys
        sys.modules["torch"] = None
        from nvalchemiops.cli import main
        sys.exit(main(["info"]))
        """
    )
    assert finished.returncode == 0, finished.stderr
    assert "torch         not installed" in finished.stdout


@pytest.mark.later
def test_info_where_the_home_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    unset = {"WARP_CACHE_PATH": None, "XDG_CACHE_HOME": None}
    finished = command("info", HOME=str(tmp_path / "file" / "home"), TMPDIR=str(tmp_path), **unset)
    assert finished.returncode == 0
    assert finished.stderr.startswith("note: Warp's kernel cache cannot be written")
    assert len(finished.stderr.splitlines()) == 1
    assert str(tmp_path) in finished.stdout


def test_only_the_line_about_a_missing_driver_is_dropped(capfd, monkeypatch):
    for stderr in (sys.stderr, None):  # None in a process without standard error
        monkeypatch.setattr(sys, "stderr", stderr)
        with _warp.without_driver_message():
            os.write(2, b"one\nWarp: " + _warp.NO_DRIVER_MESSAGE + b" here\nother\n")
        said = capfd.readouterr().err.splitlines()
        assert said[:1] + said[-1:] == ["one", "other"] and len(said) == (3 if stderr is None else 2)


@pytest.mark.parametrize("arguments", [(), ("dance",), ("warmup", "--device", "abacus")])
def test_misuse_prints_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: nvalchemiops")


# Kernels of the test, not of the library: warming up everything takes a while and is a slow test below.
KERNELS = """
import sys
import warp as wp
from nvalchemiops import cli

@wp.kernel(module="unique")
def good(x: wp.array(dtype=wp.float64)):
    x[wp.tid()] = wp.float64(1.0)

@wp.kernel(module="unique")
def bad(x: wp.array(dtype=wp.float64)):
    x[wp.tid()] = wp.float32(1.0) + wp.float64(1.0)

kernels = {"good": good, "bad": bad}
cli.all_kernels = lambda: [(name, lambda name=name: kernels[name]) for name in sys.argv[1].split(",")]
if "no-bar" in sys.argv:
    sys.modules["tqdm"] = None
    cli.importlib.util.find_spec = lambda name: None
target = sys.argv[sys.argv.index("for") + 1 :] if "for" in sys.argv else ["--device", "cpu"]
sys.exit(cli.main(["warmup", *target, *[a[1:] for a in sys.argv if a.startswith("=")]]))
"""


@pytest.fixture
def warmup(tmp_path):
    script = tmp_path / "warmup_script.py"
    script.write_text(KERNELS)

    def run(*arguments):
        return run_script(script, *arguments, WARP_CACHE_PATH=tmp_path / "cache")

    run.cache = tmp_path / "cache"
    return run


def test_warmup_compiles_into_the_cache(warmup):
    finished = warmup("good")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("1 of 1 kernels ready in ")
    assert len(finished.stdout.splitlines()) == 1
    assert "100%" in finished.stderr
    assert "driver" not in finished.stderr
    assert list(warmup.cache.rglob("wp_*/*.o"))


def test_warmup_for_another_gpu(warmup):
    """The compiled kernel is where a launch on such a GPU looks for it, and nothing else stays."""
    finished = warmup("good", "no-bar", "for", "--compute-capability", "9.0", "--compute-capability", "10.0")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == "[1/2] good [sm_90]\n[2/2] good [sm_100]\n"
    (folder,) = (path for path in warmup.cache.rglob("wp_*") if path.is_dir())
    assert {path.name for path in folder.glob("*.cubin")} == {f"{folder.name}.sm{n}.cubin" for n in (90, 100)}
    assert not [path for path in folder.parent.iterdir() if path != folder]


@pytest.mark.later
def test_warmup_without_tqdm_prints_plain_lines(warmup):
    finished = warmup("good", "no-bar")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == "[1/1] good [cpu]\n"


@pytest.mark.later
def test_warmup_reports_a_broken_kernel_and_builds_the_others(warmup):
    finished = warmup("bad,good", "no-bar")
    assert finished.returncode == 1
    assert finished.stdout.startswith("1 of 2 kernels ready in ")
    assert "nvalchemiops warmup: bad [cpu]: " in finished.stderr


@pytest.mark.later
def test_warmup_of_named_kernels_only(warmup):
    finished = warmup("bad,good", "no-bar", "=goo")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == "[1/1] good [cpu]\n"
    finished = warmup("bad,good", "=nothing")
    assert finished.returncode == 2
    assert finished.stderr == "nvalchemiops warmup: no kernel is called nothing; there are bad, good\n"


def test_warmup_refuses_each_name_without_a_kernel(monkeypatch, capsys):
    monkeypatch.setattr(cli, "all_kernels", lambda: [(f"spline({order})", None) for order in (4, 5)])
    assert cli.main(["warmup", "--device", "cpu", "spline", "real_space"]) == 2
    assert capsys.readouterr().err == "nvalchemiops warmup: no kernel is called real_space; there are spline\n"


FIRST_ORDER = """
import itertools
import torch
from nvalchemiops import cli, loading
from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald

known = {build().module.name for _, build in cli.all_kernels()}
used = set()
find = loading.find_kernel

def watch(kernel, *where):
    used.add(kernel.module.name)
    return find(kernel, *where)

loading.find_kernel = watch
for dtype, accuracy, order in ((torch.float64, 1e-6, 5), (torch.float64, 1e-6, 8), (torch.float32, 1e-4, 5)):
    positions = torch.tensor([[0.0, 0.0, 0.0], [1.7, 1.2, 1.4]], dtype=dtype)
    system = (positions, torch.tensor([1.0, -1.0], dtype=dtype), 3.0 * torch.eye(3, dtype=dtype))
    for sums, options in ((ewald_summation, {}), (particle_mesh_ewald, {"spline_order": order})):
        for asked in ((), ("forces",), ("forces", "virial"), ("forces", "charge_gradients")):
            flags = {f"compute_{name}": True for name in asked}
            for by in itertools.product((False, True), repeat=3):
                inputs = [t.clone().requires_grad_(wanted) for t, wanted in zip(system, by)]
                found = sums(*inputs, accuracy=accuracy, **options, **flags)
                energies = found[0] if asked else found
                if any(by):
                    energies.sum().backward()
missing = sorted(used - known)
assert used and not missing, missing
"""


@pytest.mark.later
def test_warmup_has_what_ewald_sums_and_their_gradients_need():
    output_of(run_python(FIRST_ORDER))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_warmup_for_a_device_that_is_not_there(capsys):
    assert cli.main(["warmup", "--device", "cuda"]) == 2
    assert capsys.readouterr() == ("", "nvalchemiops warmup: there is no CUDA device that Warp can use\n")


def test_names_of_kernels_are_distinct_and_every_module_loads():
    names = [name for name, _ in cli.all_kernels()]
    assert names
    assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_warmup_builds_every_kernel_of_the_library(device, tmp_path):
    finished = command("warmup", "--device", device, WARP_CACHE_PATH=str(tmp_path))
    assert finished.returncode == 0, finished.stderr
    compiled = len(list(tmp_path.rglob("wp_*")))
    assert compiled > 0
    again = command("warmup", "--device", device, WARP_CACHE_PATH=str(tmp_path))
    assert again.returncode == 0
    assert len(list(tmp_path.rglob("wp_*"))) == compiled, "a warm cache is complete"
    if device == "cpu":
        writes_nothing(FIRST_CALL + FIRST_ORDER, tmp_path)


FIRST_CALL = """
import sys
import torch
from nvalchemiops.torch.neighbors import neighbor_list

x = torch.tensor([[0.0, 0.0, 0.0], [1.7, 1.2, 1.4]], dtype=torch.float64)
pairs, pointers, shifts = neighbor_list(x, 2.9, 3.0 * torch.eye(3, dtype=torch.float64), return_neighbor_list=True)
assert pairs.shape[1] == pointers[-1] > 0
try:
    print("can be written", file=open(sys.argv[1], "w"), flush=True)
except OSError:
    pass
else:
    raise AssertionError("this process may write files")
"""


def writes_nothing(code, folder):
    """It runs as if every file could only be read, for all users."""
    no_files = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))}
    output_of(run_python(code, folder / "a file", fresh=True, WARP_CACHE_PATH=folder, **no_files))


@pytest.mark.later
def test_after_warmup_a_first_call_writes_and_compiles_nothing(tmp_path):
    names = ("search_neighbors", "compact_neighbors", "prepare_search", "shortest_vectors")
    finished = command("warmup", "--device", "cpu", *names, WARP_CACHE_PATH=tmp_path)
    assert finished.returncode == 0, finished.stderr
    writes_nothing(FIRST_CALL, tmp_path)
