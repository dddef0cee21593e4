"""How many numbers the C++ text of kernels takes at once: lanes of a vector on a CPU, threads of a warp on a GPU."""

LANES = 8
"""Numbers in a vector: one register of 512 bits, or two of 256."""

WARP = 32
"""Threads of a GPU that run together, and share a row, a point or an atom."""


def lanes_of_masks() -> str:
    """For each set of lanes, as a bit mask: the numbers of its lanes, packed into the low bytes of an integer."""
    entries = []
    for mask in range(1 << LANES):
        lanes = [lane for lane in range(LANES) if mask >> lane & 1]
        entries.append(f"0x{sum(lane << (8 * n) for n, lane in enumerate(lanes)):x}ULL")
    return ",".join(entries)
