"""Numbers of systems where nobody knows how many there are, and the host must not wait to learn it."""

import warp as wp

from nvalchemiops.kernels.native import row_kernel
from nvalchemiops.launch import kernel_module, kernel_variants


@wp.func
def number_by_first_atom(
    i: wp.int32, given: wp.array(dtype=wp.int32), falls: wp.array(dtype=wp.bool), system: wp.array(dtype=wp.int32)
):
    """Number the system of atom i by the first atom of this system. A negative number stays.

    ``falls`` (1,) says whether any atom is of a system with a lower number than that of the atom before.
    """
    number = given[i]
    first = int(0)
    if number < 0:
        first = number
    elif falls[0]:
        while given[first] != number:
            first += 1
    else:
        beyond = int(i)
        while first < beyond:
            middle = first + (beyond - first) // 2
            if given[middle] < number:
                first = middle + 1
            else:
                beyond = middle
    system[i] = first


@kernel_variants(())
def number_systems() -> wp.Kernel:
    """Kernel that numbers systems by their first atoms: with an atom for each number there are enough numbers.

    Atoms in the order of their systems find the first one by bisection. In another order an atom looks at all atoms up
    to the first one of its system: about as many as there are systems, if atoms are in no order at all.
    """
    return row_kernel("number_systems", number_by_first_atom, kernel_module("number_systems"))
