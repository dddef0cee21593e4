"""What the checker uses of Warp that is not public, and of the library; `tests/checker` is slow but for this file."""

from pathlib import Path

import nvalchemiops
from nvalchemiops.kernels.segments import sum_rows
from nvalchemiops.neighbors.search import search_neighbors
from tests.checker import warp_source
from tests.checker.seeded import LIBRARY


def test_warp_generates_source_with_the_text_of_a_kernel():
    for kernel, text in ((sum_rows("float64"), "sums.data["), (search_neighbors(), "__ballot_sync(all,")):
        source = warp_source.generated_source(kernel)
        function, arguments, ndim = warp_source.function_of(kernel, source)
        assert f"struct {arguments} {{" in source and f" {function}(" in source and ndim in (1, 2)
        assert text in source
        assert source.index('#include "builtin.h"') < source.index(function)
    assert Path(warp_source.NATIVE, "builtin.h").exists()


def test_bounds_of_a_grid():
    bounds = warp_source.bounds((5, 32))
    assert (list(bounds.shape), bounds.size, bounds.share) == ([5, 32], 160, 1)


def test_faults_are_put_where_kernels_have_the_text_that_they_replace():
    files = Path(nvalchemiops.__file__).parent.rglob("*.py")
    kernels = "\n".join(path.read_text() for path in files)
    assert [old for (_, _, old, _), _ in LIBRARY.values() if old not in kernels] == []
