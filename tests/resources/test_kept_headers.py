"""Warp's precompiled header is kept: made once for all processes and threads, and again after any fault."""

import json

import pytest
import warp as wp

from nvalchemiops import _warp_internals as internals
from nvalchemiops._warp import ensure_warp
from nvalchemiops.kernels import kept_headers
from tests.support.processes import output_of, run_python

NAME = "builtin_o2.pch"


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """A function that compiles in a new process, of which it returns what Warp had at first. There is no compiler."""
    ensure_warp()
    monkeypatch.setattr(wp.config, "kernel_cache_dir", str(tmp_path))

    def compile_once(number, made=b"header", refuses=False):
        folder = tmp_path / f"of_process_{number}"
        folder.mkdir()
        monkeypatch.setattr(kept_headers, "header_folder", lambda: folder)
        with kept_headers.kept_headers():
            found = {path.name: path.read_bytes() for path in folder.iterdir()}
            if refuses:
                (folder / NAME).unlink()
            elif not found:
                (folder / NAME).write_bytes(made)
        return found

    return compile_once


@pytest.fixture
def kept(tmp_path):
    return lambda: list((tmp_path / kept_headers.FOLDER).rglob("*.pch"))


def test_a_header_is_made_once(compiles, kept):
    assert [compiles(n, b"header %d" % n) for n in range(3)] == [{}, {NAME: b"header 0"}, {NAME: b"header 0"}]
    assert len(kept()) == 1


def test_what_the_compiler_refuses_is_made_again(compiles, kept):
    compiles(0)
    assert compiles(1, refuses=True) == {NAME: b"header"} and kept() == []
    assert compiles(2, b"new") == {} and compiles(3) == {NAME: b"new"}


def test_a_damaged_header_is_made_again(compiles, kept):
    compiles(0)
    (path,) = kept()
    path.write_bytes(b"hEader")
    assert compiles(1) == {} and compiles(2) == {NAME: b"header"}


def test_other_sources_or_processors_have_other_headers(compiles, monkeypatch):
    compiles(0)
    monkeypatch.setattr(kept_headers, "header_identity", lambda: "another processor")
    assert compiles(1) == {}


def test_nothing_is_kept_where_it_cannot_or_must_not_be(compiles, kept, tmp_path, monkeypatch):
    with monkeypatch.context() as settings:
        settings.setattr(wp.config, "cache_kernels", False)
        assert compiles(0) == {} and compiles(1) == {} and kept() == []
    (tmp_path / kept_headers.FOLDER).write_text("a file is here")
    assert compiles(2) == {} and compiles(3) == {}


def test_headers_of_few_installations_are_kept(compiles, kept, monkeypatch):
    for n in range(3 + kept_headers.KEPT):
        monkeypatch.setattr(kept_headers, "header_identity", lambda n=n: f"installation {n}")
        compiles(n, b"header %d" % n)
    assert len(kept()) == kept_headers.KEPT and b"header %d" % n in [path.read_bytes() for path in kept()]


def test_a_warp_that_precompiles_no_header_or_does_not_tell(monkeypatch):
    monkeypatch.setattr(wp.config, "use_precompiled_headers", False)
    assert internals.header_folder() is None
    monkeypatch.undo()
    for name, other in (("_get_cpu_target_hash", lambda: ""), ("runtime", object())):
        internals.header_identity.cache_clear()
        monkeypatch.setattr(wp._src.context, name, other)
        with kept_headers.kept_headers():
            pass
    internals.header_identity.cache_clear()


PROGRAM = """
import json, warp as wp
from nvalchemiops._warp_internals import header_folder
from nvalchemiops.launch import load
from nvalchemiops.neighbors.rows import inspect_rows
from warp._src import build

compiled, compile = [], build.build_cpu
def look(*args, **options):
    compiled.append(len(list(header_folder().glob("*.pch"))))
    compile(*args, **options)
build.build_cpu = look
wp.init()
load(inspect_rows(), wp.get_device("cpu"))
print(json.dumps(compiled))
"""


@pytest.mark.later
def test_the_compiler_takes_the_header_of_another_process(tmp_path):
    found = []
    for _ in range(2):
        finished = run_python(PROGRAM, WARP_CACHE_PATH=tmp_path)
        found.append(json.loads(output_of(finished).splitlines()[-1]))
        assert "PCH" not in finished.stderr
        (module,) = (path for path in tmp_path.glob("*/wp_*") if path.is_dir())
        module.rename(tmp_path / f"aside_{len(found)}")
    assert found == [[0], [1]]
    assert len(list(tmp_path.rglob("*.pch"))) == 1
