"""Every Python example in the README and the docs runs, page by page, as a reader would run it."""

import re
from pathlib import Path

import pytest

from tests.support.processes import output_of, run_interpreter

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.everyday_cases("README.md")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_examples_run(page, tmp_path):
    if page.name == "jax.md":
        pytest.importorskip("jax")
    script = tmp_path / "example.py"
    script.write_text("\n".join(BLOCK.findall(page.read_text())))
    said = output_of(run_interpreter(script))
    if page.name == "README.md":
        assert "1.747564595" in said


def test_pages_with_examples_are_found():
    assert {page.name for page in WITH_CODE} >= {"README.md", "custom_ops.md", "neighbors.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_clients_are_the_installed_releases():
    """The page says what was tried: the first ten rows of its table are what `make clients` installs."""
    _, table = (ROOT / "docs" / "coming_from.md").read_text().split("| client |")
    tried = re.findall(r"^\| (\S+) ([\d.]+)", table, re.MULTILINE)[:10]
    installed = (ROOT / "tests" / "clients" / "clients.txt").read_text().split()
    assert {f"{name}=={release}" for name, release in tried} <= set(installed)
