// The copy kernels with their own launches, for a CPU. As a library for test_kernels.py; as a program,
// `kernels SEED LAUNCHES MISTAKE`, it copies at random beside a plain model until it has made LAUNCHES launches;
// mistake 0 is none. Each memory is allocated separately and ends with its last row, so AddressSanitizer sees any byte
// beyond it.

#include "grid.h"

// The rest is CUDA's, or follows it.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "copy.cu"
#include "steps.cpp"

using namespace blockyard;

namespace {

enum Route { kWithinDevice, kBesideHost };

cudaError_t copy_by(Route route, const std::vector<CopyTensor>& tensors, const Steps& plan, unsigned blocks) {
    if (route == kWithinDevice) return copy_on_device(tensors.data(), tensors.size(), plan, nullptr);
    return copy_host_kernel(tensors.data(), tensors.size(), plan, blocks, nullptr);
}

// ---- random cases ----

int64_t between(int64_t first, int64_t last) { return first + static_cast<int64_t>(drawn() % (last - first + 1)); }
bool one_in(uint32_t count) { return below(count) == 0; }

// Views of one side: apart or in common rows, strides with and without gaps, from a multiple of `unit` on.
struct Memory {
    std::vector<unsigned char> before;
    unsigned char* bytes = nullptr;
    std::vector<int64_t> offsets, strides;

    Memory(const std::vector<int64_t>& widths, int64_t blocks, int64_t unit) {
        int64_t end = unit * between(0, 3), row = 0;
        const auto gap = [unit] { return one_in(2) ? 0 : unit * between(0, 5); };
        const bool in_rows = one_in(2);
        for (const int64_t width : widths) {
            offsets.push_back(end);
            strides.push_back(width + (in_rows ? 0 : gap()));
            end += in_rows ? width : (blocks - 1) * strides.back() + width + gap();
            row += width;
        }
        if (in_rows) {
            row += gap();
            strides.assign(widths.size(), row);
        }
        int64_t size = 0;
        for (size_t t = 0; t < widths.size(); ++t) {
            size = std::max(size, offsets[t] + (blocks - 1) * strides[t] + widths[t]);
        }
        before.resize(static_cast<size_t>(size));
        // Each word has another value than its neighbours and than those of other memories.
        uint32_t word = static_cast<uint32_t>(drawn());
        for (unsigned char& byte : before)
            byte = static_cast<unsigned char>((word = word * 1664525 + 1013904223) >> 24);
        bytes = static_cast<unsigned char*>(std::malloc(before.size()));
        std::copy(before.begin(), before.end(), bytes);
    }
    Memory(const Memory&) = delete;
    ~Memory() { std::free(bytes); }
};

std::vector<uint32_t> shuffled(uint32_t count) {
    std::vector<uint32_t> ids(count);
    std::iota(ids.begin(), ids.end(), 0U);
    std::shuffle(ids.begin(), ids.end(), drawn);
    return ids;
}

// Pairs whose destinations do not repeat.
std::vector<CopyPair> draw_pairs(uint32_t count, uint32_t sources, uint32_t targets, bool is_permutation) {
    const std::vector<uint32_t> to = shuffled(targets), from = shuffled(sources);
    std::vector<CopyPair> pairs;
    for (uint32_t n = 0; n < count; ++n)
        pairs.push_back({is_permutation ? to[(n + 1) % count] : from[below(sources)], to[n]});
    if (one_in(3)) std::sort(pairs.begin(), pairs.end(), [](CopyPair a, CopyPair b) { return a.dst < b.dst; });
    return pairs;
}

// Moves as if all were read first: a block is written once nobody has to read it any more, and rings go through aside.
Steps order_moves(const std::vector<CopyPair>& pairs, uint32_t blocks) {
    std::vector<uint32_t> source(blocks, kAside), readers(blocks, 0), group(blocks);
    std::iota(group.begin(), group.end(), 0U);
    const auto root = [&](uint32_t block) {
        while (group[block] != block) block = group[block];
        return block;
    };
    for (const CopyPair& pair : pairs) {
        if (pair.src == pair.dst) continue;
        source[pair.dst] = pair.src;
        ++readers[pair.src];
        group[root(pair.src)] = root(pair.dst);
    }
    std::vector<std::vector<CopyPair>> groups(blocks);
    std::vector<bool> is_written(blocks, false);
    const auto write = [&](uint32_t block) {
        // What was read last becomes free in turn.
        while (source[block] != kAside && !is_written[block] && readers[block] == 0) {
            groups[root(block)].push_back({source[block], block});
            is_written[block] = true;
            block = source[block];
            --readers[block];
        }
    };
    for (uint32_t block = 0; block < blocks; ++block) write(block);
    for (uint32_t first = 0; first < blocks; ++first) {
        if (source[first] == kAside || is_written[first]) continue;
        std::vector<CopyPair>& steps = groups[root(first)];
        steps.push_back({first, kAside});
        uint32_t block = first;
        for (; source[block] != first; block = source[block]) {
            steps.push_back({source[block], block});
            is_written[block] = true;
        }
        steps.push_back({kAside, block});
        is_written[block] = true;
    }
    Steps plan{{}, {0}};
    for (const std::vector<CopyPair>& steps : groups) {
        if (steps.empty()) continue;
        plan.steps.insert(plan.steps.end(), steps.begin(), steps.end());
        plan.starts.push_back(static_cast<uint32_t>(plan.steps.size()));
    }
    return plan;
}

std::vector<int64_t> draw_widths(size_t count, int64_t unit, bool narrow) {
    // Around what one block of threads and one warp take.
    static constexpr int64_t kEdges[] = {1024, 4096, 8192, 16384, 32768};
    std::vector<int64_t> widths(count, unit * between(1, 16));
    const bool alike = one_in(2);
    for (size_t t = 0; t < count; ++t) {
        int64_t& width = widths[t];
        if (t > 0 && alike) {
            width = widths[0];
        } else if (!narrow && one_in(12)) {
            width = kEdges[below(5)] + unit * between(-2, 2);
        } else if (!narrow && one_in(4)) {
            width = unit * between(0, 4096 / unit);
        } else {
            width = unit * between(one_in(8) ? 0 : 1, 16);
        }
    }
    return widths;
}

struct Totals {
    size_t cases = 0, pieces = 0, bytes = 0;
};

// One copy of each kind of plan and layout; false if another byte differs from the plain model.
bool run_case(Totals& totals) {
    const Route route = static_cast<Route>(below(2));
    static constexpr int64_t kUnits[] = {1, 4, 8, 16};
    const int64_t unit = kUnits[below(4)];
    // Now and then more than one launch takes.
    const bool many_blocks = one_in(400), many_tensors = one_in(400);
    const auto num_tensors = static_cast<size_t>(many_tensors ? between(257, 300) : between(1, 4));
    const std::vector<int64_t> widths = draw_widths(num_tensors, unit, many_blocks || many_tensors);
    const auto targets = static_cast<uint32_t>(many_blocks ? between(2049, 4500) : between(1, 24));
    const bool moves = route == kWithinDevice && one_in(2);
    const auto sources = moves ? targets : static_cast<uint32_t>(between(1, targets + 5));
    const auto count = static_cast<uint32_t>(between(1, many_blocks ? targets : std::min<uint32_t>(targets, 12)));
    // Of rings, only those fit one launch that have up to kMaxRing blocks.
    const bool rings = moves && one_in(2) && count <= kMaxRing;
    const std::vector<CopyPair> pairs = draw_pairs(count, sources, targets, rings);
    const Memory dst(widths, targets, unit), other(widths, sources, unit);
    const Memory& src = moves ? dst : other;
    std::vector<CopyTensor> tensors;
    std::vector<unsigned char> wanted = dst.before;
    for (size_t t = 0; t < num_tensors; ++t) {
        tensors.push_back(
            {src.bytes + src.offsets[t], dst.bytes + dst.offsets[t], src.strides[t], dst.strides[t], widths[t]});
        for (const CopyPair& pair : pairs) {
            std::copy_n(src.before.begin() + src.offsets[t] + pair.src * src.strides[t], widths[t],
                        wanted.begin() + dst.offsets[t] + pair.dst * dst.strides[t]);
        }
        totals.bytes += static_cast<size_t>(widths[t]) * count;
    }
    const Steps plan = moves ? order_moves(pairs, targets) : independent(pairs);
    ++totals.cases;
    totals.pieces += num_tensors * count;
    const cudaError_t status = copy_by(route, tensors, plan, static_cast<unsigned>(between(1, 14)));
    const bool right = std::equal(wanted.begin(), wanted.end(), dst.bytes) &&
                       std::equal(other.before.begin(), other.before.end(), other.bytes);
    if (status == cudaSuccess && right) return true;
    std::printf("route %d, %zu tensors, unit %d, %u pairs, moves %d: status %d, %s bytes\n", route, num_tensors,
                static_cast<int>(unit), count, moves, status, right ? "right" : "other");
    return false;
}

}  // namespace

// Carries a plan out in parts of at most `max_steps` steps; gives the launches, -1 if a part is malformed.
extern "C" int launch(int route, const CopyPair* steps, size_t num_steps, const uint32_t* starts, size_t num_starts,
                      const CopyTensor* tensors, size_t num_tensors, unsigned blocks, size_t max_steps, unsigned seed) {
    const Steps plan{{steps, steps + num_steps}, {starts, starts + num_starts}};
    drawn.seed(seed);
    num_launches = 0;
    for (const StepRange& part : split_steps(plan, max_steps)) {
        if (part.num_steps > max_steps || part.starts.back() != part.num_steps) return -1;
        const Steps some{{part.steps, part.steps + part.num_steps}, {part.starts.begin(), part.starts.end()}};
        if (copy_by(static_cast<Route>(route), {tensors, tensors + num_tensors}, some, blocks) != cudaSuccess)
            return -1;
    }
    return static_cast<int>(num_launches);
}

int main(int argc, char** argv) {
    if (argc != 4) return std::puts("kernels SEED LAUNCHES MISTAKE"), 2;
    const auto seed = static_cast<unsigned>(std::atoll(argv[1]));
    const auto wanted = static_cast<size_t>(std::atoll(argv[2]));
    planted = std::atoi(argv[3]);
    Totals totals;
    while (num_launches < wanted) {
        const auto number = static_cast<unsigned>(totals.cases);
        drawn.seed(seed * 1000003 + number);
        bool right = false;
        try {
            right = run_case(totals);
        } catch (const std::exception& refused) {
            std::puts(refused.what());
        }
        if (!right) return std::printf("case %u of seed %u differs\n", number, seed), 1;
    }
    std::printf("%zu launches, %zu cases, %zu pieces, %zu bytes: all as the model\n", num_launches, totals.cases,
                totals.pieces, totals.bytes);
    return 0;
}
