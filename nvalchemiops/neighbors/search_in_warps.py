"""The part of the search for neighbors that a GPU runs (`nvalchemiops.neighbors.search`).

Each lane of a warp looks up a row. Rows with the same bins within reach, or one bin further along x, then share their
candidates, a few rows at a time: each lane looks up one line of bins, and then each lane tests one candidate at a time
against all of these rows. Candidates are compared in float32, and in float64 where that may be wrong.

What is needed once for a group is read from memory again or shuffled, and loops over rows are not unrolled, since
registers limit how many warps run at once.
"""

MOST_ROWS_OF_WARP, WARPS_OF_MULTIPROCESSOR = 16, 32
"""Largest number of rows of a warp of a GPU, and the number of warps below which they have fewer."""


def rows_of_warp(n_rows: int, multiprocessors: int) -> int:
    """Rows of a warp, a power of two, which share candidates if they are close; 1 if rows are too few for a GPU.

    A CPU that runs the code for GPUs, in tests, has no multiprocessors, and counts as a GPU with one.
    """
    rows = max(1, min(MOST_ROWS_OF_WARP, n_rows // (WARPS_OF_MULTIPROCESSOR * max(multiprocessors, 1))))
    return 1 << (rows.bit_length() - 1)


def text_of_lanes(sharing: int, chosen: str, row: str) -> str:
    """The C++ text; its arguments are those of `nvalchemiops.neighbors.search.Addition`."""
    return f"""    struct alignas(16) Four {{
        int of[4];
    }};
    const Four *fours = reinterpret_cast<const Four *>(atoms);
    const unsigned all = 0xffffffffu;
    const int lane = threadIdx.x & 31;
    const auto any_of = [=](unsigned bits) {{
#if __CUDA_ARCH__ >= 800
        return __reduce_or_sync(all, bits);
#else
        for (int step = 16; step > 0; step /= 2) bits |= __shfl_xor_sync(all, bits, step);
        return bits;
#endif
    }};
    for (int task = first_task; task < last_task; task += 32) {{
        // Each lane looks up one row, and keeps its count. Rows with the same bins within reach share their candidates.
        const bool has_row = task + lane < last_task;
        const Row mine = look_up(has_row ? task + lane : task);
        const int mine_at = static_cast<int>(mine.k);
        int count_of_mine = 0;
        unsigned left = __ballot_sync(all, has_row && mine.wanted);
        while (left) {{
            const int leader = __ffs(left) - 1, system = __shfl_sync(all, mine.system, leader);
            const bool known = __shfl_sync(all, static_cast<int>(mine.known), leader);
            // Also those that reach one bin further along x, along which rows stand: the ring has room for it.
            bool same = mine.known && mine.system == system;
            int low[3], high[3];
            for (int a = 0; a < 3; ++a) {{
                low[a] = __shfl_sync(all, mine.low[a], leader);
                high[a] = __shfl_sync(all, mine.high[a], leader);
                const unsigned later = mine.low[a] - low[a], further = mine.high[a] - high[a];
                same = same && later <= (a == 0) && further <= (a == 0);
            }}
            unsigned together = __ballot_sync(all, known ? same : lane == leader) & left;
            // Most candidates are told from neighbors in float32, by places relative to the first atom.
            const int center = __shfl_sync(all, mine_at, leader);
            float own[3] = {{}};
            if (mine.known && known) {{
                own[0] = static_cast<float>(x[mine_at] - x[center]);
                own[1] = static_cast<float>(y[mine_at] - y[center]);
                own[2] = static_cast<float>(z[mine_at] - z[center]);
            }}
            float at[{sharing}][3], apart = 0.0f;
            int n_members = 0;
            unsigned members = 0;  // bits of their lanes
            for (int g = 0; g < {sharing}; ++g) {{
                const bool is_member = together != 0;
                const int source = is_member ? __ffs(together) - 1 : leader;
                members |= together & -together;
                n_members += is_member;
                together &= together - 1;
                float from_first = 0.0f;
                for (int a = 0; a < 3; ++a) {{
                    const float place = __shfl_sync(all, own[a], source);
                    from_first += fabs(place);
                    at[g][a] = is_member ? place : 1e30f;  // far away
                }}
                apart = from_first > apart ? from_first : apart;
            }}
            left &= ~members;
            high[0] += (__ballot_sync(all, mine.high[0] > high[0]) & members) != 0;
            if (known) {{
                const auto &grid = grids.data[system];
                const float reach = static_cast<float>(cutoff), reach_squared = reach * reach;
                float images = 1.0f;  // or more
                for (int a = 0; a < 3; ++a) images += fabs(1.0f * low[a]) + fabs(1.0f * high[a]);
                const double x_0 = x[center], y_0 = y[center], z_0 = z[center];
                const float largest = 4.0f * (reach + images * static_cast<float>(grid.extent))
                    + static_cast<float>(::fabs(x_0) + ::fabs(y_0) + ::fabs(z_0));
                // More than the error of a squared distance near the cutoff: 2^-20 of the cutoff times the largest
                // place, and what the test in float64 loses itself. All are tested again if the square is no float32,
                // or if the square of the error counts.
                const bool is_float = reach > 1e-15f && reach < 1e15f && apart < 1e7f * reach;
                const float doubt = is_float ? reach * (2e-6f * (reach + apart) + 8e-15f * largest)
                                             : static_cast<float>(1e300);
                const int end_of_ring = begin.data[grid.ring[0] + grid.ring[1]];
                const int atoms_of_ring = end_of_ring - begin.data[grid.ring[0]];
                // lines by image along x, bin along y, bin along z: the digits of a number
                const int first_image = image_of(low[0], grid.bins[0]);
                const unsigned radix[3] = {{
                    static_cast<unsigned>(image_of(high[0], grid.bins[0])) - first_image + 1u,
                    static_cast<unsigned>(high[1]) - low[1] + 1u, static_cast<unsigned>(high[2]) - low[2] + 1u}};
                // Each lane looks up one of 32 lines; then the lanes share the atoms of all of them, since most lines
                // have fewer atoms than there are lanes.
                const long long n_lines = static_cast<long long>(radix[0]) * radix[1] * radix[2];
                unsigned digit[3] = {{static_cast<unsigned>(lane), 0, 0}};
                for (long long line_base = 0; line_base < n_lines; line_base += 32, digit[0] += 32) {{
                    for (int a = 0; a < 2; ++a) {{
                        const unsigned carry = digit[a] / radix[a];
                        digit[a] -= carry * radix[a];
                        digit[a + 1] += carry;
                    }}
                    Line line = {{}};
                    if (digit[2] < radix[2])
                        line = line_at(
                            grid, low[0], high[0], first_image + static_cast<int>(digit[0]),
                            low[1] + static_cast<int>(digit[1]), low[2] + static_cast<int>(digit[2]));
                    const int n_here = (line.to - line.from) + (line.to_after - line.from_after);
                    int end = n_here;
                    for (int step = 1; step < 32; step *= 2) {{
                        const int before = __shfl_up_sync(all, end, step);
                        if (lane >= step) end += before;
                    }}
                    const int n_candidates = __shfl_sync(all, end, 31);
                    const bool moves = __any_sync(all, line.image[0] || line.image[1] || line.image[2]);
                    // lines with atoms go to the first lanes
                    const unsigned some = __ballot_sync(all, n_here > 0);
                    int owner = 0;
                    for (int step = 16; step > 0; step /= 2)
                        owner += __popc(some & ((1u << (owner + step)) - 1u)) <= lane ? step : 0;
                    const int from = __shfl_sync(all, line.from - (end - n_here), owner);
                    if (moves)
                        for (int a = 0; a < 3; ++a) line.image[a] = __shfl_sync(all, line.image[a], owner);
                    unsigned ahead = n_here > 0 ? end - n_here : 1u << 31, packed = 0;  // candidates before this line
                    int n_begun = 0;  // lines
                    for (int base = 0; base < n_candidates; base += 32) {{
                        const int candidate = base + lane;
                        const unsigned begins = any_of(ahead < 32u ? 1u << ahead : 0u);
                        const int source = n_begun + __popc(begins & ((2u << lane) - 1u)) - 1;  // whose line has it
                        n_begun += __popc(begins);
                        ahead -= 32u;
                        int k = candidate + __shfl_sync(all, from, source);
                        if (k >= end_of_ring) k -= atoms_of_ring;  // the line goes on at the begin of the ring
                        int image[3] = {{}};
                        double moved[3] = {{}};
                        if (moves) {{
                            for (int a = 0; a < 3; ++a) image[a] = __shfl_sync(all, line.image[a], source);
                            move(grid, image, moved);
                        }}
                        const int sign = image[0] ? image[0] : image[1] ? image[1] : image[2];
                        const auto squared = [&](int i) {{
                            // seldom needed: nothing is kept in registers for it
                            const volatile double *const x_k = x + k, *const y_k = y + k, *const z_k = z + k;
                            double moved[3] = {{}};
                            move(grid, image, moved);
                            const double dx = (*x_k - x[i]) + moved[0], dy = (*y_k - y[i]) + moved[1];
                            const double dz = (*z_k - z[i]) + moved[2];
                            return fma(dz, dz, fma(dy, dy, dx * dx));
                        }};
                        unsigned close = 0;  // a byte for each member
                        float margin = 1e38f;
                        const bool exists = candidate < n_candidates;
                        if (exists) {{
                            const float to_x = static_cast<float>((x[k] - x_0) + moved[0]);
                            const float to_y = static_cast<float>((y[k] - y_0) + moved[1]);
                            const float to_z = static_cast<float>((z[k] - z_0) + moved[2]);
                            for (int g = 0; g < {sharing}; ++g) {{
                                if (g % 2 == 0 && g >= n_members) break;
                                const float dx = to_x - at[g][0], dy = to_y - at[g][1], dz = to_z - at[g][2];
                                const float near = fma(dz, dz, fma(dy, dy, dx * dx)), within = reach_squared - near;
                                if (within > 0.0f) close |= 1u << 8 * g;
                                const float least = near < fabs(within) ? near : fabs(within);
                                margin = least < margin ? least : margin;  // it is in doubt itself, too
                            }}
                        }}
                        const bool in_doubt = exists && !(margin > doubt);
                        if (__any_sync(all, in_doubt)) {{
                            unsigned rest = members;
#pragma unroll 1
                            for (int g = 0; g < n_members; ++g, rest &= rest - 1) {{
                                const int i = __shfl_sync(all, mine_at, __ffs(rest) - 1);
                                if (!in_doubt) continue;
                                close &= ~(1u << 8 * g);
                                if (squared(i) < cutoff_squared && (sign || k != i)) close |= 1u << 8 * g;
                            }}
                        }}
                        if (!half && !fill) {{
                            // each lane counts its own, until the bytes may be full
                            packed += close;
                            if (base + 32 < n_candidates && (base / 32) % 255 != 254) continue;
                            unsigned even = packed & 0xff00ffu, odd = packed >> 8 & 0xff00ffu;
                            packed = 0;
                            for (int bits = 16; bits > 0; bits /= 2) {{
                                even += __shfl_xor_sync(all, even, bits);
                                odd += __shfl_xor_sync(all, odd, bits);
                            }}
                            unsigned rest = members;
#pragma unroll 1
                            for (int g = 0; g < n_members; ++g, rest &= rest - 1)
                                if (lane == __ffs(rest) - 1)
                                    count_of_mine += ((g & 1 ? odd : even) >> 8 * (g & 2)) & 0xffffu;
                            continue;
                        }}
                        const Four other = exists ? fours[k] : Four{{}};
                        unsigned rest = members;
#pragma unroll 1
                        for (int g = 0; g < n_members; ++g, rest &= rest - 1) {{
                            const int member = __ffs(rest) - 1;
                            bool hit = close >> 8 * g & 1;
                            unsigned hits = __ballot_sync(all, hit);
                            if (!hits) continue;
                            const int i = __shfl_sync(all, mine_at, member);
                            const Four own = fours[i];
                            if (half) {{
                                hit = hit && other.of[0] >= own.of[0] + (sign <= 0);
                                hits = __ballot_sync(all, hit);
                            }}{chosen}
                            const int found = __shfl_sync(all, count_of_mine, member);
                            const int slot = found + __popc(hits & ((1u << lane) - 1u));
                            if (lane == member) count_of_mine += __popc(hits);
                            const long long start = __shfl_sync(all, mine.start, member);
                            const int room = __shfl_sync(all, mine.room, member);
                            if (hit && slot < room) {{
                                index.data[start + slot] = other.of[0];
                                if (first.shape[0] > 0) first.data[start + slot] = own.of[0];
                                if (shifts.shape[0] > 0) {{
                                    int *to = reinterpret_cast<int *>(shifts.data) + 3 * (start + slot);
                                    for (int a = 0; a < 3; ++a) to[a] = (image[a] + own.of[1 + a]) - other.of[1 + a];
                                }}
                            }}
                        }}
                    }}
                }}
            }}
#pragma unroll 1
            for (; members; members &= members - 1) {{
                const int member = __ffs(members) - 1, found = __shfl_sync(all, count_of_mine, member);
                {row}
            }}
        }}
        if (has_row && mine.wanted) tell(mine, count_of_mine);
    }}
"""
