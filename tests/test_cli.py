"""The ``nvalchemiops`` command: says what is asked, and nothing else."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import nvalchemiops
from nvalchemiops import cli


def command(*arguments: str, code: str | None = None, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run ``python -m nvalchemiops`` (or ``code``) in a process of its own: the command silences Warp there.

    An environment variable given as None is unset.
    """
    start = ["-m", "nvalchemiops"] if code is None else ["-c", textwrap.dedent(code)]
    env = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
    return subprocess.run([sys.executable, *start, *arguments], env=env, capture_output=True, text=True, timeout=600)


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
    finished = command("info")
    assert finished.returncode == 0
    assert finished.stderr == ""
    first_words = [line.split()[0] for line in finished.stdout.splitlines()]
    assert first_words[:6] == ["nvalchemiops", "python", "torch", "warp", "numpy", "sympy"]
    assert "initialized" not in finished.stdout, "Warp's banner"


def test_installed_script_and_module_are_the_same_command():
    script = Path(sys.executable).with_name("nvalchemiops")
    if not script.exists():
        pytest.skip("the package is not installed beside this interpreter")
    finished = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert finished.stdout == command("--version").stdout == f"nvalchemiops {nvalchemiops.__version__}\n"


def test_info_without_torch():
    finished = command(
        code="""
        import sys
        sys.modules["torch"] = None
        from nvalchemiops.cli import main
        sys.exit(main(["info"]))
        """
    )
    assert finished.returncode == 0, finished.stderr
    assert "torch         not installed" in finished.stdout


def test_info_where_the_home_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    unset = {"WARP_CACHE_PATH": None, "XDG_CACHE_HOME": None}
    finished = command("info", HOME=str(tmp_path / "file" / "home"), TMPDIR=str(tmp_path), **unset)
    assert finished.returncode == 0
    assert finished.stderr.startswith("note: Warp's kernel cache cannot be written")
    assert len(finished.stderr.splitlines()) == 1
    assert str(tmp_path) in finished.stdout


@pytest.mark.parametrize("arguments", [(), ("dance",), ("warmup", "--device", "abacus")])
def test_misuse_prints_usage(arguments):
    finished = command(*arguments)
    assert finished.returncode == 2
    assert finished.stderr.startswith("usage: nvalchemiops")


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
sys.exit(cli.main(["warmup", "--device", "cpu", *[a[1:] for a in sys.argv if a.startswith("=")]]))
"""


@pytest.fixture
def warmup(tmp_path):
    script = tmp_path / "warmup_script.py"
    script.write_text(KERNELS)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "WARP_CACHE_PATH": str(tmp_path / "cache")}
        return subprocess.run([sys.executable, script, *arguments], env=env, capture_output=True, text=True)

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


def test_warmup_without_tqdm_prints_plain_lines(warmup):
    finished = warmup("good", "no-bar")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == "[1/1] good [cpu]\n"


def test_warmup_reports_a_broken_kernel_and_builds_the_others(warmup):
    finished = warmup("bad,good", "no-bar")
    assert finished.returncode == 1
    assert finished.stdout.startswith("1 of 2 kernels ready in ")
    assert "nvalchemiops warmup: bad [cpu]: " in finished.stderr


def test_warmup_of_named_kernels_only(warmup):
    finished = warmup("bad,good", "no-bar", "=goo")
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == "[1/1] good [cpu]\n"
    finished = warmup("bad,good", "=nothing")
    assert finished.returncode == 2
    assert finished.stderr == "nvalchemiops warmup: no kernel is called nothing; there are bad, good\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_warmup_for_a_device_that_is_not_there():
    finished = command("warmup", "--device", "cuda")
    assert finished.returncode == 2
    assert finished.stderr == "nvalchemiops warmup: there is no CUDA device that Warp can use\n"
    assert finished.stdout == ""


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
