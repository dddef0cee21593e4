"""Widths for which the C++ of kernels is written: lanes of a vector on a CPU, threads of a warp on a GPU."""

LANES = 8
"""Number of float64 values in a vector: one register of 512 bits, or two of 256 bits."""

WARP = 32
"""Number of threads of a GPU that run together and share a row, a point or an atom."""


def lanes_of(precision: str) -> int:
    """Number of values of "float64" or "float32" in a vector of this size."""
    return LANES if precision == "float64" else 2 * LANES


def lanes_of_masks() -> str:
    """A C++ table over bit masks of lanes: the indices of the lanes in a mask, packed into the bytes of an integer."""
    entries = []
    for mask in range(1 << LANES):
        lanes = [lane for lane in range(LANES) if mask >> lane & 1]
        entries.append(f"0x{sum(lane << (8 * n) for n, lane in enumerate(lanes)):x}ULL")
    return ",".join(entries)
