"""The examples in docstrings run, with a small crystal of sodium chloride at hand."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import warp as wp
from ase.build import bulk

import nvalchemiops
from nvalchemiops.ase import Calculator, Dispersion, Electrostatics, Pair
from nvalchemiops.cli import import_all
from nvalchemiops.torch import System
from nvalchemiops.torch.interactions.pair import PairPotential


def with_examples():
    for module in import_all(nvalchemiops):
        yield from (test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples)


EXAMPLES = list(with_examples())


def surroundings():
    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    return {
        "torch": torch,
        "wp": wp,
        "atoms": atoms,
        "positions": torch.tensor(atoms.positions),
        "cell": torch.tensor(atoms.cell.array),
        "numbers": torch.tensor(atoms.numbers),
        "charges": torch.tensor([1.0 if s == "Na" else -1.0 for s in atoms.symbols], dtype=torch.float64),
        "Calculator": Calculator,
        "Dispersion": Dispersion,
        "Electrostatics": Electrostatics,
        "Pair": Pair,
        "PairPotential": PairPotential,
        "System": System,
    }


def test_there_are_some():
    assert len(EXAMPLES) >= 8


@pytest.fixture
def quiet():
    """Warp says on the standard output what it loads, which the examples would be blamed for."""
    before, wp.config.log_level = wp.config.log_level, wp.LOG_WARNING
    yield
    wp.config.log_level = before


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda test: test.name.removeprefix("nvalchemiops."))
def test_example(example):
    example.globs = surroundings() | example.globs
    said = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert not failed, "".join(said)


ROOT = Path(__file__).resolve().parents[2]


def documented_functions():
    """The public functions of the API pages with a section of parameters, by module and name."""
    for name in re.findall(r"automodule:: (\S+)", (ROOT / "docs" / "api.md").read_text()):
        if "jax" in name:
            pytest.importorskip("jax")
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            is_own = not key.startswith("_") and getattr(value, "__module__", "").startswith("nvalchemiops")
            text = (inspect.getdoc(value) or "") if is_own and not inspect.isclass(value) else ""
            if callable(value) and "\nParameters\n---" in text:
                yield f"{name}.{key}", value, text


def test_parameters_in_docstrings_are_those_of_the_functions():
    """In torch and in JAX, whose docstrings are made of those of torch."""
    wrong, count = [], 0
    for name, function, text in documented_functions():
        parameters = inspect.signature(function).parameters
        section = re.split(r"\n\n[A-Z]\w+\n-+\n", text.split("\nParameters\n----------\n")[1])[0]
        headings = re.findall(r"^\*{0,2}\w.*?(?= : |$)", section, re.MULTILINE)
        listed = {part.strip(" *") for heading in headings for part in heading.split(",")}
        takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        absent = set() if takes_more else listed - parameters.keys()
        unsaid = {p for p in parameters if not re.search(rf"\b{p}\b", text)}
        for how, names in (("absent", absent), ("not said", unsaid)):
            wrong += [f"{name}: {', '.join(sorted(names))} {how}"] if names else []
        count += 1
    assert not wrong, wrong
    assert count > 100
