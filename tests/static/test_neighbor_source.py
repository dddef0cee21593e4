"""What can be told about the GPU code without running it: it compiles. `tests/lanes` runs it on a CPU."""

import pytest
import warp as wp

import nvalchemiops
from nvalchemiops.cli import import_all
from nvalchemiops.launch import registered_kernels


@pytest.mark.slow  # a second or two for each kernel
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    list(import_all(nvalchemiops))
    for number, (_, build) in enumerate(registered_kernels()):
        wp.compile_aot_module(build().module, arch=90, module_dir=tmp_path / str(number))
        assert list((tmp_path / str(number)).glob("*.cubin"))
