"""Lennard-Jones kernels, under the path that clients import."""

from nvalchemiops.kernels.launched import (
    _batch_lj_energy_forces_matrix_kernel_overload as _batch_lj_energy_forces_matrix_kernel_overload,
)
from nvalchemiops.kernels.launched import (
    _batch_lj_energy_forces_virial_matrix_kernel_overload as _batch_lj_energy_forces_virial_matrix_kernel_overload,
)
