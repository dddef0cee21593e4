"""The import paths that clients use lead to the objects of this package, in whatever order they are imported."""

import importlib
import warnings

import pytest
import torch
import warp as wp

import nvalchemiops.neighbors
from nvalchemiops.neighbors.neighbor_utils import NeighborOverflowError, estimate_max_neighbors
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.interactions import dispersion, electrostatics
from nvalchemiops.torch.neighbors import formats
from nvalchemiops.torch.types import get_wp_dtype, get_wp_mat_dtype, get_wp_vec_dtype
from tests.support.processes import python_says

LISTS = {
    "naive": ["naive_neighbor_list"],
    "batch_naive": ["batch_naive_neighbor_list"],
    "cell_list": ["cell_list", "estimate_cell_list_sizes"],
    "batch_cell_list": ["batch_cell_list", "estimate_batch_cell_list_sizes"],
    "naive_dual_cutoff": ["naive_neighbor_list_dual_cutoff"],
    "batch_naive_dual_cutoff": ["batch_naive_neighbor_list_dual_cutoff"],
}
SUMS = {
    "coulomb": ["coulomb_energy", "coulomb_forces", "coulomb_energy_forces"],
    "dsf": ["dsf_coulomb"],
    "ewald": ["ewald_real_space", "ewald_reciprocal_space", "ewald_summation"],
    "k_vectors": [
        "generate_ewald_miller_indices",
        "generate_k_squared_pme",
        "generate_k_vectors_ewald_summation",
        "generate_k_vectors_pme",
        "k_vectors_from_miller_indices",
    ],
    "multipole_electrostatics": ["multipole_electrostatic_energy"],
    "multipole_ewald": ["multipole_ewald_summation"],
    "multipole_features": ["multipole_electrostatic_features"],
    "parameters": [
        "EwaldParameters",
        "PMEParameters",
        "compute_bspline_moduli_1d",
        "estimate_ewald_parameters",
        "estimate_pme_mesh_dimensions",
        "estimate_pme_parameters",
        "mesh_spacing_to_dimensions",
    ],
    "pme": ["compute_bspline_moduli_1d", "particle_mesh_ewald", "pme_reciprocal_space"],
    "pme_multipole": ["multipole_particle_mesh_ewald"],
    "slab": ["compute_slab_correction"],
}
MOVED = {
    "nvalchemiops.neighborlist": {
        "nvalchemiops.torch.neighbors": [
            "neighbor_list",
            *(name for names in LISTS.values() for name in names),
        ],
        "nvalchemiops.neighbors": ["NeighborOverflowError", "estimate_max_neighbors"],
    },
    "nvalchemiops.neighborlist.neighborlist": {"nvalchemiops.torch.neighbors": ["neighbor_list"]},
    "nvalchemiops.neighborlist.neighbor_utils": {
        "nvalchemiops.neighbors": ["NeighborOverflowError", "estimate_max_neighbors"],
        "nvalchemiops.torch.neighbors.neighbor_utils": ["get_neighbor_list_from_neighbor_matrix"],
    },
    "nvalchemiops.interactions.dispersion": {
        "nvalchemiops.torch.interactions.dispersion": ["dftd3", "D3Parameters"],
    },
    "nvalchemiops.interactions.electrostatics": {
        "nvalchemiops.torch.interactions.electrostatics": [
            "coulomb_energy",
            "coulomb_energy_forces",
            "coulomb_forces",
            "dsf_coulomb",
            "estimate_ewald_parameters",
            "estimate_pme_parameters",
            "ewald_real_space",
            "ewald_reciprocal_space",
            "ewald_summation",
            "particle_mesh_ewald",
            "pme_reciprocal_space",
        ],
    },
}


def flat(table):
    return [(path, name) for path, names in table.items() for name in names]


@pytest.mark.parametrize(("module", "name"), flat(LISTS))
def test_neighbor_lists(module, name):
    home = importlib.import_module(f"nvalchemiops.torch.neighbors.{module}")
    assert getattr(home, name) is getattr(neighbors, name)


@pytest.mark.parametrize(("module", "name"), flat(SUMS))
def test_electrostatics(module, name):
    home = importlib.import_module(f"nvalchemiops.torch.interactions.electrostatics.{module}")
    assert getattr(home, name) is getattr(electrostatics, name)
    assert name in getattr(home, "__all__", [name])


def test_sizes_and_overflow():
    ours = importlib.import_module("nvalchemiops.torch.neighbors.neighbor_utils")
    for home in (nvalchemiops.neighbors, ours):
        assert home.NeighborOverflowError is NeighborOverflowError
        assert home.estimate_max_neighbors is estimate_max_neighbors
    assert neighbors.NeighborOverflowError is NeighborOverflowError
    assert ours.get_neighbor_list_from_neighbor_matrix is formats.get_neighbor_list_from_neighbor_matrix
    assert issubclass(NeighborOverflowError, RuntimeError)


def test_warp_types():
    wp.init()
    assert [f(torch.float32) for f in (get_wp_dtype, get_wp_vec_dtype, get_wp_mat_dtype)] == [
        wp.float32,
        wp.vec3f,
        wp.mat33f,
    ]
    assert [f(torch.float64) for f in (get_wp_dtype, get_wp_vec_dtype, get_wp_mat_dtype)] == [
        wp.float64,
        wp.vec3d,
        wp.mat33d,
    ]
    assert get_wp_vec_dtype(torch.float16) is wp.vec3h
    x = torch.rand(4, 3, dtype=torch.float64)
    assert wp.from_torch(x, dtype=get_wp_vec_dtype(x.dtype)).shape == (4,)
    for f in (get_wp_dtype, get_wp_vec_dtype, get_wp_mat_dtype):
        with pytest.raises(ValueError, match=r"`dtype` must be .*bfloat16"):
            f(torch.bfloat16)


# -- functions that have the name of their module -------------------------------------------------------------

PATH = "nvalchemiops.torch.neighbors"


IMPORTS = {
    "package first": ["from {path} import {name} as a", "from {path}.{name} import {name} as b"],
    "module first": ["from {path}.{name} import {name} as b", "from {path} import {name} as a"],
    "attribute": ["import {path}.{name}", "a = {path}.{name}", "from {path}.{name} import {name} as b"],
    # the attribute of the package is the function, so this is the function too
    "as": ["import {path}.{name} as a", "from {path}.{name} import *", "b = {name}"],
    "star": [
        "from {path} import *",
        "a = {name}",
        "import importlib",
        "b = importlib.import_module('{path}.{name}').{name}",
    ],
    "another module first": [
        "import {path}.naive, {path}.{name}",
        "import {path}",
        "a = {path}.{name}",
        "from {path}.{name} import {name} as b",
    ],
}


@pytest.mark.later_cases("*-batch_cell_list")
@pytest.mark.parametrize("name", ["cell_list", "batch_cell_list"])
@pytest.mark.parametrize("way", IMPORTS)
def test_function_with_the_name_of_its_module(name, way):
    code = [
        *(line.format(path=PATH, name=name) for line in IMPORTS[way]),
        "import json, pickle, sys, types",
        f"module = sys.modules['{PATH}.{name}']",
        "same = a is b is pickle.loads(pickle.dumps(a)) is getattr(module, a.__name__)",
        "print(json.dumps([same, isinstance(a, types.FunctionType), isinstance(module, types.ModuleType)]))",
    ]
    assert python_says("\n".join(code)) == [True, True, True]


def test_dftd3_is_a_function():
    assert callable(dispersion.dftd3)
    for name in ("dftd3", "_dftd3"):
        home = importlib.import_module(f"nvalchemiops.torch.interactions.dispersion.{name}")
        assert home.dftd3 is dispersion.dftd3 and home.D3Parameters is dispersion.D3Parameters
    assert callable(dispersion.dftd3)


def test_dftd3_of_an_older_release_is_a_function_and_a_module():
    """AIMNet 0.1 and orb-models 0.6 import it from its module, others from the package, in one process."""
    lines = [
        "from nvalchemiops.interactions.dispersion.dftd3 import D3Parameters, dftd3",
        "from nvalchemiops.interactions.dispersion import dftd3 as of_the_package",
    ]
    code = [
        "import json, warnings",
        "with warnings.catch_warnings(record=True) as caught:",
        "    warnings.simplefilter('always')",
        *(f"    {line}" for line in lines),
        "said = [[w.lineno, w.filename] for w in caught if 'older' in str(w.message)]",
        "from nvalchemiops.torch.interactions import dispersion",
        "said += [dftd3 is dispersion.dftd3, D3Parameters is dispersion.D3Parameters]",
        "warnings.simplefilter('ignore')",
        "try:",
        "    of_the_package(a1=0.4)",
        "except TypeError as error:",
        "    said.append(str(error).split(' missing')[0])",
        "print(json.dumps(said))",
    ]
    assert python_says("\n".join(code)) == [*[[4, "<string>"]] * 3, True, True, "dftd3()"]


@pytest.mark.parametrize("home", ["fire2", "lbfgs", "segment_ops", "types"])
def test_short_paths(home):
    """Names that clients import from `nvalchemiops.torch`."""
    module = importlib.import_module(f"nvalchemiops.torch.{home}")
    names = [name for name in module.__all__ if name not in ("segmented_max", "segmented_min")]
    assert names and all(getattr(nvalchemiops.torch, name) is getattr(module, name) for name in names)
    assert set(names) <= set(dir(nvalchemiops.torch))


def test_errors_that_were_pickled():
    code = (
        "import json, pickle\n"
        "from nvalchemiops.torch.neighbors import NeighborOverflowError\n"
        "error = pickle.loads(pickle.dumps(NeighborOverflowError(8, 20, 1)))\n"
        "print(json.dumps([error.max_neighbors, error.num_neighbors, error.system_index]))"
    )
    assert python_says(code) == [8, 20, 1]


# -- paths of an older release --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MOVED)
def test_moved_names(path):
    with warnings.catch_warnings():  # the first import of a path that is nothing else warns
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module(path)
    for home, names in MOVED[path].items():
        for name in names:
            vars(module).pop(name, None)  # a module of this name, if another test has imported it
            with pytest.warns(DeprecationWarning) as caught:
                found = getattr(module, name)
            assert found is getattr(importlib.import_module(home), name)
            assert f"`{path}.{name}`" in str(caught[0].message) and f"`{home}`" in str(caught[0].message)
            assert caught[0].filename == __file__
    assert not hasattr(module, "no_such_name")
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from {path} import no_such_name")


def test_clients_that_import_the_old_paths():
    """As matgl writes it; the path, and each name, is warned of once, with the line of the import."""
    lines = [
        "from nvalchemiops.neighborlist import estimate_max_neighbors, neighbor_list",
        "from nvalchemiops.neighborlist.neighbor_utils import NeighborOverflowError",
    ]
    code = [
        "import json, warnings",
        "with warnings.catch_warnings(record=True) as caught:",
        "    warnings.simplefilter('always')",
        *(f"    {line}" for line in lines),
        "print(json.dumps([[w.lineno, w.filename] for w in caught if 'older' in str(w.message)]))",
    ]
    assert python_says("\n".join(code)) == [[4, "<string>"]] * 3 + [[5, "<string>"]]


@pytest.mark.parametrize(
    "line",
    ["import nvalchemiops.neighborlist", "import nvalchemiops; nvalchemiops.neighborlist", "import {}.neighbor_utils"],
)
def test_an_old_path_warns_when_it_is_first_imported(line):
    """Once, and whoever imports it; the modules of today that have old names do not."""
    code = [
        "import json, warnings",
        "with warnings.catch_warnings(record=True) as caught:",
        "    warnings.simplefilter('always')",
        "    import nvalchemiops.interactions.dispersion, nvalchemiops.interactions.electrostatics",
        f"    {line.format('nvalchemiops.neighborlist')}",
        "    import nvalchemiops.neighborlist",
        "print(json.dumps([[w.lineno, w.filename, w.category.__name__] for w in caught if 'older' in str(w.message)]))",
    ]
    assert python_says("\n".join(code)) == [[5, "<string>", "DeprecationWarning"]]


def test_submodules_are_attributes():
    code = "import json, nvalchemiops\nprint(json.dumps(nvalchemiops.torch.segment_ops.__name__))"
    assert python_says(code) == "nvalchemiops.torch.segment_ops"


def test_old_paths_load_torch_only_when_they_are_used():
    code = (
        "import json, sys\n"
        "import nvalchemiops.neighborlist.neighbor_utils\n"
        "import nvalchemiops.interactions.electrostatics, nvalchemiops.interactions.dispersion\n"
        "print(json.dumps('torch' in sys.modules))"
    )
    assert python_says(code, fresh=True) is False


def test_star_imports_of_an_older_release():
    with pytest.warns(DeprecationWarning):
        namespace: dict = {}
        exec("from nvalchemiops.neighborlist import *", namespace)
    assert namespace["cell_list"] is neighbors.cell_list
