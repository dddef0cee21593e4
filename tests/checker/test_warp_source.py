"""What the checker uses of Warp that is not public; `tests/checker` is slow but for this file."""

from pathlib import Path

from nvalchemiops.kernels.segments import sum_rows
from nvalchemiops.neighbors.search import search_neighbors
from tests.checker import warp_source


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
