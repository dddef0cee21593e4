"""A checker of the GPU branches of kernels, like compute-sanitizer, that runs on a CPU.

The C++ that Warp generates for a kernel is compiled by g++, with a hook at each access to memory (``build.py``), and
with a header that defines what CUDA has (``device.h``). ``runner.cpp`` runs a launch with all lanes of its warps as
fibers, three times, with lanes in another order each time, and stops at the first finding:

- a lane that is missing from a shuffle, a vote or a barrier, waits elsewhere, or is not in its mask;
- an access beyond the arrays of the launch, which are copied far apart from each other (``memory.py``);
- two lanes or two blocks that touch the same place, one of them to write, with no ``__syncwarp`` between;
- a read of memory of a new tensor, or of a local variable, that nothing was written to;
- results that depend on the order of lanes.

`tests.checker.session.checked` runs all launches of the library that way, with the layout of a GPU. ``programs.py``
runs the problems of all kernels in `tests.lanes.problems`. Faults in CUDA's own functions, between several streams, or
in the code that NVRTC generates are not found.
"""
