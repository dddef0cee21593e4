"""Vectors of numbers in the C++ text of kernels for the CPU."""

LANES = 8
"""Numbers in a vector: one register of 512 bits, or two of 256."""


def lanes_of_masks() -> str:
    """For each set of lanes, as a bit mask: the numbers of its lanes, packed into the low bytes of an integer."""
    entries = []
    for mask in range(1 << LANES):
        lanes = [lane for lane in range(LANES) if mask >> lane & 1]
        entries.append(f"0x{sum(lane << (8 * n) for n, lane in enumerate(lanes)):x}ULL")
    return ",".join(entries)
