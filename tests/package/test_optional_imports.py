"""What is optional may be absent: imports of it fail, and everything else computes what it computes otherwise.

`tests/package/test_package.py` imports each module without torch, JAX or ASE. Here they are used, and what is absent
is absent for everybody in the process, torch and sympy included.
"""

import textwrap

import pytest

from tests.support import processes

OPTIONAL = ["ase", "matplotlib", "tqdm", "scipy", "matscipy", "hypothesis", "jax", "vesin", "sphinx", "pandas"]

# what is not found in any folder is not installed, for whoever asks and in whichever way
ABSENT = """
import importlib.machinery, json, sys

find_spec = importlib.machinery.PathFinder.find_spec

def without_some(name, path=None, target=None):
    return None if name.split(".")[0] in ABSENT else find_spec(name, path, target)

importlib.machinery.PathFinder.find_spec = without_some
"""

WORK = """
import numpy as np, torch
from nvalchemiops.torch.interactions.electrostatics import estimate_pme_parameters, ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.interactions.pair import PairPotential, damped_shifted_force
from nvalchemiops.torch.neighbors import VerletList, neighbor_list
from nvalchemiops.torch.spline import spline_spread

generator = torch.Generator().manual_seed(0)
grid = torch.cartesian_prod(*[torch.arange(3.0)] * 3).double()
x = (2.5 * grid + 0.5 * torch.rand(27, 3, dtype=torch.float64, generator=generator)).requires_grad_()
q = torch.randn(27, dtype=torch.float64, generator=generator)
cell = 7.5 * torch.eye(3, dtype=torch.float64)
results = [neighbor_list(x, 3.0, cell, return_distances=True)[-1].sum(), VerletList(3.0, 0.5)(x, cell)[1].sum()]
morse = PairPotential("d*((1 - exp(-a*(r - 1.5)))^2 - 1)", global_parameters=("d", "a"), cutoff=3.0, r_switch=2.5)
results += [morse(x, cell, d=0.3, a=1.2).sum(), damped_shifted_force(3.0)(x, cell, q=q, alpha=0.2).sum()]
results += [ewald_summation(x, q, cell, accuracy=1e-4).sum(), particle_mesh_ewald(x, q, cell, accuracy=1e-4).sum()]
results += [spline_spread(x, q, cell, (6, 6, 6)).square().sum(), estimate_pme_parameters(x, cell).alpha.sum()]
(slope,) = torch.autograd.grad(sum(r for r in results if r.requires_grad), x)
results.append(slope.abs().sum())
numbers = [float(r) for r in results]
print(json.dumps([numbers, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def python_says(code: str, absent: list[str]):
    """What a fresh interpreter prints last, as JSON, if it cannot import these."""
    return processes.python_says(ABSENT.replace("ABSENT", repr(absent)) + textwrap.dedent(code), fresh=True)


@pytest.mark.later
def test_torch_alone_is_enough():
    """The same numbers, and with everything installed nothing of it is imported in passing."""
    numbers, _ = python_says(WORK, OPTIONAL)
    as_usual, loaded = python_says(WORK, [])
    assert numbers == as_usual
    known = (
        "import torch.autograd, warp, sympy\nprint(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    assert not set(OPTIONAL) & (set(loaded) - set(python_says(known, [])))


def test_kernels_run_without_torch():
    """On Warp arrays: what another framework would build on."""
    sums, wide, vectors, code = python_says(
        """
        import numpy as np, warp as wp
        from nvalchemiops import launch
        from nvalchemiops.interactions.electrostatics import k_vectors
        from nvalchemiops.interactions.pair.expression import Formula, pair_energy
        from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors
        from nvalchemiops.kernels.segments import sum_rows

        values = wp.array(np.arange(12.0).reshape(6, 2), dtype=wp.float64, device="cpu")
        begin = wp.array([0, 2, 6], dtype=wp.int32, device="cpu")
        sums = wp.zeros((2, 2), dtype=wp.float64, device="cpu")
        launch.launch(sum_rows("float64"), 2, [values, None, begin, None, 0, 0, 6], [sums], device="cpu")
        points, weights, *_ = k_vectors.points_within(6.0 * np.eye(3)[None], np.array([2.0]))
        energy = pair_energy(Formula("k*q1*q2/r", ("q",), ("k",)))
        print(json.dumps([sums.numpy().tolist(), estimate_max_neighbors(5.0), float(weights.sum()), str(energy)]))
        """,
        ["torch", *OPTIONAL],
    )
    assert sums == [[2.0, 4.0], [28.0, 32.0]]
    assert wide == 112
    assert code == "other0*own0*shared0/sqrt(s)"
    # wave vectors of a cubic cell up to |n| <= 2.0 * 6.0 / (2 π) = 1.9: 6 + 12 + 8, and the origin
    assert vectors == 27.0


@pytest.mark.parametrize("missing", ["ase", "torch"])
def test_what_is_missing_is_named_with_what_to_install(missing):
    """A subpackage that cannot work without it says so, and does not hide another reason."""
    module = {"ase": "nvalchemiops.ase", "torch": "nvalchemiops.torch"}[missing]
    message, name = python_says(
        f"""
        import nvalchemiops
        try:
            import {module}
            print(json.dumps(["imported", ""]))
        except ImportError as error:
            print(json.dumps([str(error), error.name]))
        """,
        [missing],
    )
    assert name == missing and missing in message


def test_the_command_works_without_what_is_optional(tmp_path):
    """``info`` tells what is absent; ``warmup`` draws no bar."""
    said = python_says(
        f"""
        import contextlib, io, os
        os.environ["WARP_CACHE_PATH"] = {str(tmp_path)!r}
        from nvalchemiops.cli import main
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = [main(["info"]), main(["warmup", "--device", "cpu", "begin_rows"])]
        print(json.dumps([status, said.getvalue()]))
        """,
        OPTIONAL,
    )
    assert said[0] == [0, 0], said[1]
    assert "begin_rows" in said[1]
