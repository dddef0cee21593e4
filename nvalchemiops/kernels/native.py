"""Pieces of the C++ text of kernels that Warp Python cannot express well."""

import re

SYSTEM_OF = """
    // the last system that begins at this place or before
    const auto system_of = [](const wp::array_t<wp::int32> &begin, int place) {
        int low = 0, high = begin.shape[0] - 1;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (begin.data[middle] <= place) low = middle;
            else high = middle;
        }
        return low;
    };
"""


def filled(text: str, **values: object) -> str:
    """``text`` with values in the place of ``@name@``."""
    return re.sub(r"@(\w+)@", lambda match: str(values[match[1]]), text)


def by_device(cpu: str, gpu: str = "") -> str:
    """Text that differs between CPU and GPU."""
    return f"\n#if defined(__CUDA_ARCH__)\n{gpu}\n#else\n{cpu}\n#endif\n"
