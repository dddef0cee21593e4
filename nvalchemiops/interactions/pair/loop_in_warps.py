"""The part of the loop over a row of neighbors that a GPU runs (`nvalchemiops.interactions.pair.loop`).

A warp has a row, and each lane a neighbor at a time. At the end the lanes add up their sums.
"""

from collections.abc import Sequence

from nvalchemiops.kernels.simd import WARP

TURNS = """\
    @totals_gpu@
    // All lanes make all turns; those beyond the end of the row read its last slot, and do not count. Compilers would
    // move loads down to where values are used, to wait for one after the other; the fences keep them together.
    const place last = end - 1;
    for (place own = begin + lane; own < static_cast<place>(end + lane); own += @warp@) {
        const place slot = own < last ? own : last;
        Neighbor it;
        read(slot, it);
        asm volatile("" ::: "memory");
        const bool counts = look_at(slot, it) && it.close && own <= last;
        const place j = it.j;
        const auto take = [&](const real *from, long long stride) { return one(from[stride * j]); };
        const auto kept = [](one value) { return static_cast<double>(value); };
        @take_both_gpu@
        const one d0 = it.d[0], d1 = it.d[1], d2 = it.d[2];
        @data_gpu@
        asm volatile("" ::: "memory");
        if (counts) {
            @evaluation@
            @tables_gpu@
        }
    }
    broken = __any_sync(0xffffffffu, broken || zero != zero);  // no number is reported
    const auto add_lanes = [](double sum, int step) { return sum + __shfl_xor_sync(0xffffffffu, sum, step); };
    // Half of the lanes goes on with one of two sums, the other half with the other.
    const auto add_lanes_of_two = [=](double sum, double other, int step) {
        const bool goes_on = threadIdx.x & step;
        return (goes_on ? other : sum) + __shfl_xor_sync(0xffffffffu, goes_on ? sum : other, step);
    };
    @sums_gpu@
    @reduce_tables@
"""


def added_up(names: Sequence[str]) -> list[str]:
    """Lines after which these float64 variables of lane 0 of a warp hold their sums over all lanes.

    Lanes divide the sums among themselves while they add, so that each step halves the number of sums of a lane.
    """
    lines = []
    held = [{name: 0} for name in names]  # the sums that a variable, the first of them, holds, and in which lanes
    step = WARP // 2
    while step:
        half = len(held) - len(held) // 2
        first = [next(iter(sums)) for sums in held]
        for sums, name, others, other in zip(held, first, held[half:], first[half:]):
            lines.append(f"{name} = add_lanes_of_two({name}, {other}, {step});")
            sums |= {moved: lane + step for moved, lane in others.items()}
        lines += [f"{name} = add_lanes({name}, {step});" for name in first[len(held) // 2 : half]]
        held = held[:half]
        step //= 2
    for sums in held:
        name = next(iter(sums))
        lines += [f"{moved} = __shfl_sync(0xffffffffu, {name}, {lane});" for moved, lane in sums.items() if lane]
    return lines
