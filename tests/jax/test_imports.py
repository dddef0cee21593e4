"""JAX is optional: the torch half neither needs nor loads it, and the JAX half says what to install."""

import pytest

from tests.support.processes import python_says

WORK = """
import json, sys, torch
from nvalchemiops.torch.interactions.electrostatics import ewald_summation

x, cell = torch.tensor([[0.1, 0.0, 0.2], [2.0, 2.1, 1.9]], dtype=torch.float64), 4.0 * torch.eye(3, dtype=torch.float64)
x.requires_grad_()
energy = ewald_summation(x, torch.tensor([1.0, -1.0], dtype=torch.float64), cell).sum()
energy.backward()
print(json.dumps([float(energy), x.grad.tolist(), "jax" in sys.modules]))
"""


@pytest.fixture(scope="module")
def usual():
    return python_says(WORK)


def broken(folder, how: str) -> str:
    """A folder whose ``jax`` cannot be imported."""
    (folder / "jax.py").write_text(f"raise {how}\n")
    return f"import sys\nsys.path.insert(0, {str(folder)!r})\n"


def test_torch_neither_loads_jax_nor_minds_that_it_is_broken(usual, tmp_path):
    assert usual[-1] is False
    assert python_says(broken(tmp_path, "RuntimeError('broken')") + WORK) == usual


@pytest.mark.later
def test_torch_computes_the_same_after_jax(usual):
    """The other order is that of this process."""
    first = "import jax, jax.numpy as jnp\nassert jax.jit(jnp.sum)(jnp.ones(3)) == 3\n"
    assert python_says(first + WORK)[:-1] == usual[:-1]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("ModuleNotFoundError(\"No module named 'jax'\", name='jax')", "ModuleNotFoundError: No module named 'jax'"),
        ("RuntimeError('jaxlib version 0.1 is older than required')", "RuntimeError: jaxlib version 0.1 is older"),
    ],
)
def test_what_to_install_is_said_in_one_line(tmp_path, how, reason):
    message, name = python_says(
        broken(tmp_path, how)
        + """
import json
for statement in ("import nvalchemiops.jax", "from nvalchemiops.jax.utils import tree_map"):
    try:
        exec(statement)
    except ImportError as error:
        said = [str(error), error.name]
print(json.dumps(said))
"""
    )
    assert name == "jax" and "\n" not in message
    assert reason in message and message.endswith("pip install 'nvalchemiops[jax]' (in a checkout '.[jax]')")
