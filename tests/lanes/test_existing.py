"""Tests of physics and exactness from elsewhere, once more with the layout of a GPU and its 32 lanes.

Beside these, each test with the fixture ``device`` or ``gpu`` runs so.
"""

# ruff: noqa: F401

from collections.abc import Iterator

import pytest

from tests.derivatives.test_all_calls import test_gradients_without_pairs
from tests.lanes.fibers import gpu_layout
from tests.values import test_neighbors_exact as exactness
from tests.values.test_all_calls import (
    test_a_batch_is_its_systems_one_by_one,
    test_an_empty_system_in_a_batch_has_nothing_and_changes_nothing,
    test_nan_in_one_system_does_not_reach_the_others,
    test_the_form_of_neighbors_does_not_matter,
)
from tests.values.test_dispersion_references import test_slow_reference_of_few_atoms
from tests.values.test_dispersion_three_body import (
    test_all_shapes_of_lists,
    test_molecules_equal_s_dftd3,
    test_molecules_without_cells_have_a_virial,
)
from tests.values.test_ewald_physics import test_madelung_constants, test_torch_pme_gives_the_same
from tests.values.test_exclusions import test_an_excluded_pair_at_the_same_spot, test_exclusions_in_a_batch
from tests.values.test_neighbors_exact import (
    test_pairs_a_rounding_error_below_the_cutoff_are_seen_from_both_sides,
)
from tests.values.test_slab import test_a_batch_of_slabs_and_bulk


@pytest.fixture(autouse=True)
def lanes() -> Iterator[None]:
    with gpu_layout():
        yield


@pytest.mark.parametrize("name", [name for name in exactness.NAMED if "thousand" not in name])
def test_named_systems(name):
    exactness.test_named_systems(name)


@pytest.mark.parametrize("seed", range(8))
def test_random_systems(seed):
    exactness.test_random_systems.hypothesis.inner_test(seed)


@pytest.mark.parametrize("seed", range(3))
def test_random_batches(seed):
    exactness.test_random_batches.hypothesis.inner_test(seed, "both")
    exactness.test_two_cutoffs_at_once.hypothesis.inner_test(seed, seed == 1)


def test_a_larger_system():
    exactness.test_larger_random_systems(500, 0.1, 5.0, (False, True, True))


@pytest.mark.parametrize("block", [(3, 4, 4), (5, 5, 4)])
def test_atoms_within_rounding_of_the_faces_of_bins(block):
    exactness.test_atoms_within_rounding_of_the_faces_of_bins(block, exactness.FULLY)
