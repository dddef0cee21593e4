"""The nearest neighbors of each atom among those within the cutoff, selected while they are searched for.

Neighbors are ordered by their *level*. This is either only the exact squared distance, or the squared distance in
steps, with ties ordered by the number of the neighbor, then by its image. A first launch of the kernel visits all
neighbors and keeps for each atom the last of its first k neighbors: the *bound* of the atom. Further launches find the
neighbors up to the bound, by the same arithmetic, and count or write them like any search. At most k neighbors are kept
at any time, for the few atoms that are processed at once.

On a CPU the first k neighbors are a heap whose top is the last of them. On a GPU the lanes of a warp append neighbors
to a memory with room for at least 32 more than k. When it is full, and at the end, they sort it and keep the first k.
From then on only neighbors that precede the last of these are appended.
"""

from typing import Any

import warp as wp

from nvalchemiops.kernels.native import by_device, filled, native_kernel, signature
from nvalchemiops.kernels.simd import LANES, WARP
from nvalchemiops.launch import kernel_variants
from nvalchemiops.neighbors.search import BINS, BLOCK, COUNT, FORM, GROUP, LISTED, Addition, search_text

STEPS = 2.0**30
"""Steps of the squared distance up to that of the cutoff, in the order by index.

Distances that are equal in a crystal differ by rounding, 1e-15 relative, which is far less than a step; and a step ends
at no fraction of the squared cutoff with a denominator below a million."""

ROWS_PER_THREAD = 512
"""Number of rows for which a task on a CPU reuses its heaps, one for each atom of a group."""

WARPS = 16
"""Number of warps of this kernel that run at once on a multiprocessor of a GPU: as many as its registers allow."""


def room_of_task(nearest: int, warps: bool) -> int:
    """Number of neighbors that a task holds: on a CPU in heaps for the atoms of a group; in a warp a power of two."""
    return 1 << (nearest + WARP - 1).bit_length() if warps else GROUP * nearest


GUESSES = 4
"""Number of guesses by which a CPU finds neighbors in a block that are too far away to be among the nearest."""

_NO_BOUND = 1e308

_DECLARATIONS = f"""
    const bool keyed = bound_key.shape[0] > 0;
    int *const bound_keys = reinterpret_cast<int *>(bound_key.data);
    const auto level_of = [&](double squared) {{ return steps > 0.0 ? ::floor(squared * steps + 0.5) : squared; }};
    // keys are j and the image of j
    const auto precedes = [&](double level, const int *key, double other_level, const int *other_key) {{
        if (level != other_level || !keyed) return level < other_level;
        for (int a = 0; a < 3; ++a)
            if (key[a] != other_key[a]) return key[a] < other_key[a];
        return key[3] < other_key[3];
    }};
    const auto set_bound = [&](long long k, bool full, const double *level, const int *key) {{
        const int i = atoms[4 * k];
        bound_level.data[i] = full ? *level + tolerance : {_NO_BOUND!r};
        if (keyed)
            for (int a = 0; a < 4; ++a) bound_keys[4LL * i + a] = full ? key[a] : 0;
    }};
    // no neighbor beyond it is chosen by the atom of a row alone
    const auto reach_of = [&](int i) {{
        if (nearest > 0 || symmetric) return cutoff_squared;
        const double last = bound_level.data[i];
        const double bound = steps > 0.0 ? (last + 1.0) / steps : last * (1.0 + 1e-15) + 1e-300;
        return bound < cutoff_squared ? bound : cutoff_squared;
    }};
    const auto is_chosen = [&](int i, double level, const int *key) {{
        if (!precedes(bound_level.data[i], bound_keys + (keyed ? 4LL * i : 0), level, key)) return true;
        if (!symmetric) return false;
        const int j = key[0], back[4] = {{i, -key[1], -key[2], -key[3]}};
        return !precedes(bound_level.data[j], bound_keys + (keyed ? 4LL * j : 0), level, back);
    }};
"""

_HEAP_CPU = """
    const auto heap_of = [&](int member) { return static_cast<long long>(thread) * room + member * nearest; };
    const auto key_in = [&](long long heap) { return reinterpret_cast<int *>(heap_key.data) + (keyed ? 4 * heap : 0); };
    const auto push = [&](long long heap, int &size, double level, const int *key) {
        double *const levels = heap_level.data + heap;
        int *const keys = key_in(heap);
        const auto put = [&](int slot, double level, const int *key) {
            levels[slot] = level;
            if (keyed)
                for (int a = 0; a < 4; ++a) keys[4LL * slot + a] = key[a];
        };
        int slot = 0;
        if (size < nearest) {
            for (slot = size++; slot > 0;) {
                const int parent = (slot - 1) / 2;
                if (!precedes(levels[parent], keys + 4LL * parent, level, key)) break;
                put(slot, levels[parent], keys + 4LL * parent);
                slot = parent;
            }
        } else {
            if (!precedes(level, key, levels[0], keys)) return;
            for (int child = 1; child < size; child = 2 * slot + 1) {
                const int other = child + 1 < size ? child + 1 : child;
                if (precedes(levels[child], keys + 4LL * child, levels[other], keys + 4LL * other)) child = other;
                if (!precedes(level, key, levels[child], keys + 4LL * child)) break;
                put(slot, levels[child], keys + 4LL * child);
                slot = child;
            }
        }
        put(slot, level, key);
    };
"""

_MEMORY_GPU = """
    struct alignas(16) Key {
        int of[4];
    };
    double *const levels = heap_level.data + static_cast<long long>(thread) * room;
    Key *const keys = reinterpret_cast<Key *>(heap_key.data) + (keyed ? static_cast<long long>(thread) * room : 0);
    // the last of the first neighbors, as far as it is known
    double last_level = @no_bound@;
    Key last_key = {};
    // sort what is there, more than is wanted, by a bitonic network: the first ones are kept
    const auto select = [&](int size, int lane) {
        for (int slot = size + lane; slot < room; slot += 32) {
            levels[slot] = @no_bound@;
            if (keyed) keys[slot] = Key{};
        }
        __syncwarp();
        for (int run = 2; run <= room; run *= 2)
            for (int apart = run / 2; apart > 0; apart /= 2) {
                for (int t = lane; t < room / 2; t += 32) {
                    const int low = 2 * t - (t & (apart - 1)), high = low + apart;
                    const int a = low & run ? high : low, b = low & run ? low : high;
                    const double level_a = levels[a], level_b = levels[b];
                    if (!precedes(level_b, keys[keyed ? b : 0].of, level_a, keys[keyed ? a : 0].of)) continue;
                    levels[a] = level_b;
                    levels[b] = level_a;
                    if (!keyed) continue;
                    const Key key = keys[a];
                    keys[a] = keys[b];
                    keys[b] = key;
                }
                __syncwarp();
            }
        last_level = levels[nearest - 1];
        if (keyed) last_key = keys[nearest - 1];
        __syncwarp();
    };
"""

_CHOSEN = """
                            int key[4];
                            double level = 0.0;
                            if (hit) {
                                key[0] = other.of[0];
                                for (int a = 0; a < 3; ++a) key[1 + a] = (image[a] + own.of[1 + a]) - other.of[1 + a];
                                level = level_of(squared(i));
                                hit = nearest > 0 ? precedes(level, key, last_level, last_key.of)
                                                  : is_chosen(own.of[0], level, key);
                            }
                            hits = __ballot_sync(all, hit);
                            if (nearest > 0) {
                                int found = __shfl_sync(all, count_of_mine, member);
                                if (found + __popc(hits) > room) {
                                    select(found, lane);
                                    found = nearest;
                                }
                                const int slot = found + __popc(hits & ((1u << lane) - 1u));
                                if (hit) {
                                    levels[slot] = level;
                                    if (keyed)
                                        for (int a = 0; a < 4; ++a) keys[slot].of[a] = key[a];
                                }
                                if (lane == member) count_of_mine = found + __popc(hits);
                                continue;
                            }"""

_ROW = """if (nearest == 0) {
                    if (width > 0) pad(look_up(task + member), found, lane, 32);
                } else if (known) {
                    const bool full = found >= nearest;
                    if (full) select(found, lane);
                    if (lane == member) set_bound(mine.k, full, &last_level, last_key.of);
                    last_level = @no_bound@;
                }"""

_NEAR = """
                const auto name = [&](long long c, int *key) {
                    const four cells = ((const four *)atom)->yzwx, named = block.pair[c] + cells;
                    key[0] = -block.pair[c].w;
                    key[1] = named.x;
                    key[2] = named.y;
                    key[3] = named.z;
                };
                int key[4];
                if (nearest > 0) {
                    typedef long long longs __attribute__((ext_vector_type(@lanes@)));
                    double *const levels = block.level;
                    for (int t = 0; t < n; ++t) levels[t] = level_of(block.squared[block.hits[t]]);
                    for (int t = n; t < n + @lanes@; ++t) levels[t] = @no_bound@;
                    // a level that at least `nearest` do not exceed, by false position, so that few go through the heap
                    double most = level_of(cutoff_squared), least = 0.0;
                    int up_to_most = n, up_to_least = 0;
                    for (int step = 0; step < @guesses@ && up_to_most > nearest + nearest / 8; ++step) {
                        const double share = nearest + 1 - up_to_least;
                        const double guess = least + (most - least) * (share / (up_to_most - up_to_least));
                        longs counts = 0;
                        for (int t = 0; t < n; t += @lanes@) counts -= *(const doubles *)(levels + t) <= guess;
                        const int sum = static_cast<int>(__builtin_reduce_add(counts));
                        if (sum < nearest) {
                            least = guess;
                            up_to_least = sum;
                        } else {
                            most = guess;
                            up_to_most = sum;
                        }
                    }
                    int few = 0;
                    for (int t = 0; t < n; ++t) {
                        block.hits[few] = block.hits[t];
                        levels[few] = levels[t];
                        few += levels[t] <= most;
                    }
                    for (int t = 0; t < few; ++t) {
                        name(block.hits[t], key);
                        push(heap_of(g), found[g], levels[t], key);
                    }
                    continue;
                }
                const double bound = bound_level.data[atom[0]];
                int chosen = 0;
                for (int t = 0; t < n; ++t) {
                    const int c = block.hits[t];
                    const double level = level_of(block.squared[c]);
                    bool within = level < bound;
                    if (!within) {
                        name(c, key);
                        within = is_chosen(atom[0], level, key);
                    }
                    block.hits[chosen] = c;
                    chosen += within;
                }
                n = chosen;
"""

_END = """
            if (nearest == 0) finish(group[g], found[g]);
            else set_bound(group[g].k, found[g] == nearest, heap_level.data + heap_of(g), key_in(heap_of(g)));"""

_SEARCH = search_text(
    Addition(
        declarations=_DECLARATIONS + by_device(_HEAP_CPU, filled(_MEMORY_GPU, no_bound=_NO_BOUND)),
        writes="true",
        sharing=1,
        chosen=_CHOSEN,
        row=filled(_ROW, no_bound=_NO_BOUND),
        member=f"\n        mutable double squared[{BLOCK + LANES}], level[{BLOCK + LANES}];",
        reach="reach_of(atom[0])",
        tested="            *(doubles *)(b.squared + c) = squared;\n",
        near=filled(_NEAR, lanes=LANES, no_bound=_NO_BOUND, guesses=GUESSES),
        end=_END,
    )
)


def tasks_at_once(multiprocessors: int) -> int:
    """Number of warps of a GPU that run at once, each with a heap.

    A CPU that runs the code for GPUs, in tests, has no multiprocessors, and counts as an H100 with its 132.
    """
    return WARPS * (multiprocessors or 132)


@kernel_variants(())
def search_nearest() -> Any:
    """Kernel that finds the bounds of atoms, or with ``nearest`` zero the neighbors up to the bounds.

    It takes the arguments of `search.search_neighbors`, and further ones.
    """
    selection: dict[str, Any] = {
        "nearest": wp.int32,  # find the bounds of this many; 0: find neighbors
        "steps": wp.float64,  # of the squared distance, in one of its units; 0: the squared distance itself
        "tolerance": wp.float64,  # squared length, added to the bounds
        "symmetric": wp.int32,  # whether the bound of either atom counts, or that of the row
        "room": wp.int32,  # of a thread, for neighbors
        "heap_level": wp.array(dtype=wp.float64),  # (threads * room,)
        "heap_key": wp.array(dtype=wp.vec4i),  # the same length; or none
        "bound_level": wp.array(dtype=wp.float64),  # (n_atoms,)
        "bound_key": wp.array(dtype=wp.vec4i),  # (n_atoms,), or none: the levels alone decide
    }
    parameters = signature(**BINS, **FORM, **selection, **COUNT, **LISTED)
    return native_kernel("nearest_search", _SEARCH, lanes=True, blocks=8)(parameters)
