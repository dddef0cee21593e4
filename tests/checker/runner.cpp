// Runs the blocks of a launch, lane by lane, and checks what the lanes do: every access to memory is reported here by the
// hooks of -fsanitize=thread, whose own library is not used. Lanes are fibers of one thread, so a launch with the same
// order of lanes always does the same.

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define HOOK extern "C" __attribute__((visibility("default")))

namespace {

const int WARP = 32;
const size_t STACK = 256 << 10;
const int PAGE = 12;
const uint32_t POISON = 0x7ffc5eed;  // as POISON of memory.py

enum Order { FORWARD, BACKWARD, RANDOM };
enum Meeting { SYNC, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, BALLOT };
enum Kind {
    NOTHING, OUTSIDE, READ_ONLY, UNWRITTEN, RACE_OF_LANES, RACE_OF_WARPS, MISSING, DIVERGENT, NOT_IN_MASK, NO_VALUE
};

// What has touched four bytes of an array (or one byte) in this launch. Warps are counted from 1; 0 is none.
struct Cell {
    uint32_t writer, reader;  // warps
    uint32_t written_at, read_at;  // moments of these warps
    uint32_t readers;  // lanes of the reader
    uint32_t written_by;  // the place in the code
    uint8_t writer_lane;
    bool many_readers;  // other warps have read it, too
    bool atomic;  // the last write
};

enum Access { READ, WRITE, ATOMIC };

struct Region {
    uintptr_t low, high;
    int32_t shift;  // bytes of a cell, as a power of two
    int32_t item;  // bytes of an element
    const uint8_t *gaps;  // for each cell of an element whether it lies between fields; or null: there are no such cells
    Cell *cells;
};

struct Finding {
    int32_t kind, lane, other_lane, line, other_line, region, is_write, meeting;
    int64_t block, warp, other_warp, offset, size;
    uint64_t other_place;  // in the code, from the beginning of the module
    uint64_t places[8];  // the same of the lane itself: the access, then the calls that led there
};

struct Launch {
    void (*entry)(void *bounds, size_t task, void *arguments);
    void *bounds;
    char *arguments;
    uint64_t argument_bytes, n_tasks;
    int32_t block, order, seed, checks;
    uintptr_t arena_low, arena_high, module_low, module_high;
    const uint16_t *pages;  // for each page of the arena: the number of its region from 1, or 0
    const Region *regions;
    int32_t n_regions, padding;
    uint64_t longest, total, longest_task, n_meetings;
    uint64_t *of_warps;  // accesses of the longest lane of each warp
    Finding finding;
};

enum State { READY, WAITING, FINISHED };

struct Lane {
    State state;
    int number;
    size_t task;
    uint64_t accesses;
    int depth;  // of calls
    const void *calls[64];
    char *stack;
    bool started;
    jmp_buf here;
    ucontext_t begin;
    // of a meeting
    Meeting meeting;
    unsigned mask;
    uint64_t value, result;
    int argument, width, line;
};

Lane lanes[WARP];
Lane *current = nullptr;
Launch *launch = nullptr;
jmp_buf scheduler, out;
int64_t warp;  // from 0, in the launch
uint32_t moment;  // grows with each barrier of a warp
uint32_t seen[WARP][WARP];  // what lane a knows of lane b: all that b did before this moment
uint64_t random_state;

unsigned next_random(unsigned n) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<unsigned>((random_state >> 33) % n);
}

uint64_t place_of(const void *address) {
    return reinterpret_cast<uintptr_t>(address) - 1 - launch->module_low;
}

[[noreturn]] void report(Finding finding, const Lane &lane, const void *from = nullptr) {
    int n = 0;
    if (from != nullptr) finding.places[n++] = place_of(from);
    for (int depth = lane.depth < 64 ? lane.depth : 64; depth > 0 && n < 8; --depth)
        finding.places[n++] = place_of(lane.calls[depth - 1]);
    finding.lane = lane.number;
    finding.warp = warp;
    finding.block = static_cast<int64_t>(lane.task) / launch->block;
    launch->finding = finding;
    current = nullptr;
    _longjmp(out, 1);
}

// -- memory ---------------------------------------------------------------------------------------

void check_cells(const Region &region, uintptr_t at, size_t size, Access access, const void *from) {
    const bool write = access != READ;
    const uint32_t me = static_cast<uint32_t>(warp + 1);
    const int lane = current->number;
    const size_t last = (at + size - 1 - region.low) >> region.shift;
    for (size_t c = (at - region.low) >> region.shift; c <= last; ++c) {
        Cell &cell = region.cells[c];
        const auto fault = [&](Kind kind, int other_lane, int64_t other_warp, uint64_t other_place) {
            Finding finding = {};
            finding.kind = kind;
            finding.other_lane = other_lane;
            finding.other_warp = other_warp;
            finding.other_place = other_place;
            finding.is_write = write;
            finding.region = static_cast<int32_t>(&region - launch->regions);
            finding.offset = static_cast<int64_t>(at - region.low);
            finding.size = static_cast<int64_t>(size);
            report(finding, *current, from);
        };
        if (cell.writer != 0) {
            if (access == ATOMIC && cell.atomic) {
                // ordered by the hardware
            } else if (cell.writer != me) fault(RACE_OF_WARPS, cell.writer_lane, int64_t(cell.writer) - 1, cell.written_by);
            else if (cell.writer_lane != lane && seen[lane][cell.writer_lane] <= cell.written_at)
                fault(RACE_OF_LANES, cell.writer_lane, warp, cell.written_by);
        } else if (!write && region.shift == 2 && !(region.gaps && region.gaps[c % (region.item >> 2)])) {
            uint32_t value;
            memcpy(&value, reinterpret_cast<const void *>(region.low + (c << 2)), sizeof(value));
            if (value == POISON) fault(UNWRITTEN, -1, -1, 0);
        }
        if (!write) {
            if (cell.reader != me) {
                cell.many_readers = cell.many_readers || cell.reader != 0;
                cell.reader = me;
                cell.readers = 0;
            }
            // one moment is kept for all readers: forget those that this lane has met since, for whom meets this lane
            // has met them, too
            for (int other = 0; other < WARP; ++other)
                if ((cell.readers >> other & 1) && seen[lane][other] > cell.read_at) cell.readers &= ~(1u << other);
            cell.readers |= 1u << lane;
            cell.read_at = moment;
            continue;
        }
        if (cell.reader != 0 && (cell.many_readers || cell.reader != me))
            fault(RACE_OF_WARPS, -1, cell.reader != me ? int64_t(cell.reader) - 1 : -1, 0);
        if (cell.reader == me)
            for (int other = 0; other < WARP; ++other)
                if (other != lane && (cell.readers >> other & 1) && seen[lane][other] <= cell.read_at)
                    fault(RACE_OF_LANES, other, warp, 0);
        cell.atomic = access == ATOMIC;
        cell.writer = me;
        cell.writer_lane = static_cast<uint8_t>(lane);
        cell.written_at = moment;
        cell.written_by = static_cast<uint32_t>(place_of(from));
        cell.readers = 0;
    }
}

void touch(const void *address, size_t size, Access access, const void *from) {
    if (current == nullptr || size == 0) return;
    const uintptr_t at = reinterpret_cast<uintptr_t>(address), end = at + size;
    const uintptr_t stack = reinterpret_cast<uintptr_t>(current->stack);
    if (at >= stack && end <= stack + STACK) return;
    Finding finding = {};
    finding.kind = OUTSIDE;
    finding.region = -1;
    if (at >= launch->arena_low && end <= launch->arena_high) {
        const int number = launch->pages[(at - launch->arena_low) >> PAGE];
        const Region *region = launch->regions + number - 1;
        if (number > 0 && at >= region->low && end <= region->high) {
            ++current->accesses;
            if (launch->checks) check_cells(*region, at, size, access, from);
            return;
        }
        // the closest array
        for (int r = 0; r < launch->n_regions; ++r) {
            const Region &other = launch->regions[r];
            const int64_t offset = static_cast<int64_t>(at) - static_cast<int64_t>(other.low);
            const int64_t beyond = offset < 0 ? -offset : static_cast<int64_t>(end - other.high);
            const int64_t before = finding.region < 0 ? INT64_MAX : finding.other_warp;
            if (beyond < before) finding.region = r, finding.offset = offset, finding.other_warp = beyond;
        }
    } else {
        const uintptr_t arguments = reinterpret_cast<uintptr_t>(launch->arguments);
        const bool known = (at >= arguments && end <= arguments + launch->argument_bytes)
            || (at >= launch->module_low && end <= launch->module_high);
        if (known && access == READ) return;
        if (known) finding.kind = READ_ONLY;
    }
    finding.other_warp = -1;
    finding.other_lane = -1;
    finding.is_write = access != READ;
    finding.size = static_cast<int64_t>(size);
    report(finding, *current, from);
}

// -- fibers ---------------------------------------------------------------------------------------

void lane_main() {
    for (;;) {
        launch->entry(launch->bounds, current->task, launch->arguments);
        current->state = FINISHED;
        if (_setjmp(current->here) == 0) _longjmp(scheduler, 1);
    }
}

void resume(Lane &lane) {
    if (_setjmp(scheduler) == 0) {
        current = &lane;
        if (lane.started) _longjmp(lane.here, 1);
        lane.started = true;
        getcontext(&lane.begin);
        lane.begin.uc_stack.ss_sp = lane.stack;
        lane.begin.uc_stack.ss_size = STACK;
        lane.begin.uc_link = nullptr;
        makecontext(&lane.begin, lane_main, 0);
        setcontext(&lane.begin);
    }
    current = nullptr;
}

// Whether all lanes that ``lane`` waits for wait for it; otherwise the one that does not.
bool is_complete(const Lane &lane, int &other) {
    for (other = 0; other < WARP; ++other) {
        const Lane &it = lanes[other];
        if (!(lane.mask >> other & 1)) continue;
        if (it.state != WAITING || it.line != lane.line || it.meeting != lane.meeting || it.mask != lane.mask)
            return false;
    }
    return true;
}

void meet(Lane &first) {
    const unsigned mask = first.mask;
    ++launch->n_meetings;
    unsigned votes = 0;
    for (int l = 0; l < WARP; ++l)
        if (mask >> l & 1) votes |= (lanes[l].value != 0 ? 1u : 0u) << l;
    for (int l = 0; l < WARP; ++l) {
        if (!(mask >> l & 1)) continue;
        Lane &lane = lanes[l];
        lane.state = READY;
        if (first.meeting == SYNC) continue;
        if (first.meeting == BALLOT) {
            lane.result = votes;
            continue;
        }
        const int begin = l / lane.width * lane.width, end = begin + lane.width;
        int from = l;
        if (first.meeting == SHUFFLE) from = begin + (lane.argument & (lane.width - 1));
        if (first.meeting == SHUFFLE_XOR) from = l ^ lane.argument;
        if (first.meeting == SHUFFLE_UP) from = l - lane.argument;
        if (first.meeting == SHUFFLE_DOWN) from = l + lane.argument;
        if (from < (first.meeting == SHUFFLE_XOR ? 0 : begin) || from >= end) from = l;
        if (!(mask >> from & 1)) {
            Finding finding = {};
            finding.kind = NO_VALUE;
            finding.line = lane.line;
            finding.meeting = lane.meeting;
            finding.other_lane = from;
            report(finding, lane);
        }
        lane.result = lanes[from].value;
    }
    if (first.meeting != SYNC) return;  // others order no memory
    ++moment;
    for (int a = 0; a < WARP; ++a)
        for (int b = 0; b < WARP; ++b)
            if ((mask >> a & 1) && (mask >> b & 1)) seen[a][b] = moment;
    // what one of them knew of others, all know
    for (int c = 0; c < WARP; ++c) {
        uint32_t latest = 0;
        for (int a = 0; a < WARP; ++a)
            if ((mask >> a & 1) && seen[a][c] > latest) latest = seen[a][c];
        for (int a = 0; a < WARP; ++a)
            if (mask >> a & 1) seen[a][c] = latest;
    }
}

void run_warp(size_t first_task, int n) {
    int order[WARP];
    for (int l = 0; l < WARP; ++l) {
        Lane &lane = lanes[l];
        lane.state = l < n ? READY : FINISHED;
        lane.task = first_task + l;
        lane.accesses = 0;
        lane.depth = 0;
        lane.number = l;
        order[l] = launch->order == BACKWARD ? WARP - 1 - l : l;
    }
    moment = 1;
    memset(seen, 0, sizeof(seen));
    for (;;) {
        if (launch->order == RANDOM)
            for (int l = WARP - 1; l > 0; --l) {
                const int other = static_cast<int>(next_random(l + 1)), kept = order[l];
                order[l] = order[other];
                order[other] = kept;
            }
        for (const int l : order)
            if (lanes[l].state == READY) resume(lanes[l]);
        Lane *waiting = nullptr;
        int other = -1;
        bool met = false;
        for (Lane &lane : lanes) {
            if (lane.state != WAITING) continue;
            int missing;
            if (is_complete(lane, missing)) {
                meet(lane);
                met = true;
                break;
            }
            if (waiting == nullptr) waiting = &lane, other = missing;
        }
        if (met) continue;
        if (waiting == nullptr) break;
        Finding finding = {};
        finding.kind = lanes[other].state == FINISHED ? MISSING : DIVERGENT;
        finding.line = waiting->line;
        finding.meeting = waiting->meeting;
        finding.other_lane = other;
        finding.other_line = lanes[other].line;
        report(finding, *waiting);
    }
    uint64_t longest = 0;
    for (const Lane &lane : lanes) {
        launch->total += lane.accesses;
        if (lane.accesses > longest) longest = lane.accesses;
        if (lane.accesses > launch->longest) launch->longest = lane.accesses, launch->longest_task = lane.task;
    }
    launch->of_warps[warp] = longest;
}

}  // namespace

// Run a launch to its end or its first finding. Returns whether it came to its end.
HOOK int checker_run(Launch *given) {
    launch = given;
    current = nullptr;
    launch->finding = {};
    launch->longest = launch->total = launch->longest_task = launch->n_meetings = 0;
    random_state = static_cast<uint64_t>(launch->seed) * 2654435761u + 1;
    for (Lane &lane : lanes) {
        if (lane.stack == nullptr) {
            // a page below the stack that cannot be touched
            char *memory = static_cast<char *>(
                mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
            if (memory == MAP_FAILED || mprotect(memory, 4096, PROT_NONE) != 0) abort();
            lane.stack = memory + 4096;
        }
        lane.started = false;
    }
    if (_setjmp(out) != 0) return 0;
    const size_t block = launch->block, in_block = (block + WARP - 1) / WARP;
    const size_t n_blocks = (launch->n_tasks + block - 1) / block, n_warps = n_blocks * in_block;
    size_t stride = 1;  // for a random order, a number without a factor in common with that of warps
    if (launch->order == RANDOM) {
        const auto divisor = [](size_t a, size_t b) {
            while (b) {
                const size_t rest = a % b;
                a = b;
                b = rest;
            }
            return a;
        };
        for (stride = n_warps / 2 + next_random(7) + 1; divisor(stride, n_warps) != 1; ++stride) {}
    }
    for (size_t n = 0; n < n_warps; ++n) {
        const size_t w = launch->order == BACKWARD ? n_warps - 1 - n : n * stride % n_warps;
        const size_t first = w / in_block * block + w % in_block * WARP;
        const size_t end_of_block = (w / in_block + 1) * block;
        const size_t end = end_of_block < launch->n_tasks ? end_of_block : launch->n_tasks;
        if (first >= end) continue;
        warp = static_cast<int64_t>(w);
        run_warp(first, static_cast<int>(end - first < WARP ? end - first : WARP));
    }
    return 1;
}

HOOK int checker_thread() { return static_cast<int>(current->task % launch->block); }
HOOK int checker_block() { return static_cast<int>(current->task / launch->block); }
HOOK int checker_block_size() { return launch->block; }
HOOK int checker_grid_size() { return static_cast<int>((launch->n_tasks + launch->block - 1) / launch->block); }

// Wait for all lanes of the mask.
HOOK uint64_t checker_meet(int meeting, unsigned mask, uint64_t value, int argument, int width, int line) {
    Lane &lane = *current;
    lane.meeting = static_cast<Meeting>(meeting);
    lane.mask = mask;
    lane.value = value;
    lane.argument = argument;
    lane.width = width;
    lane.line = line;
    if (!(mask >> lane.number & 1)) {
        Finding finding = {};
        finding.kind = NOT_IN_MASK;
        finding.line = line;
        finding.meeting = meeting;
        finding.other_lane = -1;
        report(finding, lane);
    }
    lane.state = WAITING;
    if (_setjmp(lane.here) == 0) _longjmp(scheduler, 1);
    return lane.result;
}

// -- hooks of -fsanitize=thread -------------------------------------------------------------------

#define ACCESS(n) \
    HOOK void __tsan_read##n(void *p) { touch(p, n, READ, __builtin_return_address(0)); } \
    HOOK void __tsan_write##n(void *p) { touch(p, n, WRITE, __builtin_return_address(0)); } \
    HOOK void __tsan_unaligned_read##n(void *p) { touch(p, n, READ, __builtin_return_address(0)); } \
    HOOK void __tsan_unaligned_write##n(void *p) { touch(p, n, WRITE, __builtin_return_address(0)); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
HOOK void __tsan_read_range(void *p, size_t n) { touch(p, n, READ, __builtin_return_address(0)); }
HOOK void __tsan_write_range(void *p, size_t n) { touch(p, n, WRITE, __builtin_return_address(0)); }
HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void *caller) {
    if (current == nullptr) return;
    if (current->depth < 64) current->calls[current->depth] = caller;
    ++current->depth;
}
HOOK void __tsan_func_exit() {
    if (current != nullptr) --current->depth;
}
// the linker gives us the calls of these (--wrap)
HOOK void *__wrap_memset(void *to, int value, size_t n) {
    touch(to, n, WRITE, __builtin_return_address(0));
    return memset(to, value, n);
}
HOOK void *__wrap_memmove(void *to, const void *from, size_t n) {
    touch(from, n, READ, __builtin_return_address(0));
    touch(to, n, WRITE, __builtin_return_address(0));
    return memmove(to, from, n);
}
HOOK void *__wrap_memcpy(void *to, const void *from, size_t n) {
    touch(from, n, READ, __builtin_return_address(0));
    touch(to, n, WRITE, __builtin_return_address(0));
    return memmove(to, from, n);
}

// before a thread changes a value that others change, too
HOOK void checker_atomic(void *p, size_t n) { touch(p, n, ATOMIC, __builtin_return_address(0)); }
HOOK void checker_copy(void *to, const void *from, size_t n) { memcpy(to, from, n); }

// -- what code that Warp generates for a CPU refers to ----------------------------------------------

HOOK void _wp_assert(const char *message, const char *file, unsigned line) {
    fprintf(stderr, "%s:%u: assertion failed: %s\n", file, line, message);
    abort();
}
HOOK int _wp_isfinite(double x) { return __builtin_isfinite(x); }
HOOK int _wp_isnan(double x) { return __builtin_isnan(x); }
HOOK int _wp_isinf(double x) { return __builtin_isinf(x); }

// -- for launches.py ------------------------------------------------------------------------------

HOOK int checker_cell_size() { return sizeof(Cell); }
HOOK int checker_launch_size() { return sizeof(Launch); }

// Warp, lane and place in the code of the last write to a byte of a region; -1 if there was none.
HOOK void checker_writer(const Region *region, uint64_t offset, int64_t *to) {
    const Cell &cell = region->cells[offset >> region->shift];
    to[0] = static_cast<int64_t>(cell.writer) - 1;
    to[1] = cell.writer != 0 ? cell.writer_lane : -1;
    to[2] = cell.written_by;
}
