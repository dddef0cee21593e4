"""The examples in docstrings run, with a small crystal of sodium chloride at hand."""

import doctest

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
