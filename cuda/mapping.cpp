#include "mapping.h"

#include "check.h"

namespace blockyard {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The blocks named so far.
class Named {
  public:
    explicit Named(int64_t blocks) : by_(static_cast<size_t>(blocks)) {}

    void add(uint32_t block, int64_t entry, const char* verb) {
        if (by_[block]) fail("mapping", "block ", block, " is ", verb, " twice, the second time by entry ", entry);
        by_[block] = true;
    }

    bool has(uint32_t block) const { return by_[block]; }

  private:
    std::vector<bool> by_;
};

uint32_t bounded(int64_t id, int64_t blocks, int64_t entry, const char* verb) {
    if (id < 0 || id >= blocks) {
        fail("mapping", "entry ", entry, ": block ", id, " is to be ", verb, ", there are ", blocks, " blocks");
    }
    return static_cast<uint32_t>(id);
}

// Throws unless the ids are int64 of this many dimensions on the CPU.
void check_ids(const char* name, const Tensor& ids, int64_t dim, const char* wanted) {
    if (!ids.is_cpu()) fail("mapping", name, " are not on the CPU");
    if (ids.scalar_type() != ScalarType::Long || ids.dim() != dim || (dim == 2 && ids.size(1) != 2)) {
        fail("mapping", name, " have ", ids.dim(), " dimensions of ", ids.element_size(), " bytes, wanted int64 ",
             wanted);
    }
}

// Calls `take(from, to, entry)` for each pair.
template <typename Take>
void for_each_pair(const Tensor& pairs, const Take& take) {
    check_ids("pairs", pairs, 2, "[n, 2]");
    const auto* ids = static_cast<const int64_t*>(pairs.const_data_ptr());
    const int64_t row = pairs.stride(0), column = pairs.stride(1);
    for (int64_t n = 0; n < pairs.size(0); ++n) take(ids[n * row], ids[n * row + column], n);
}

}  // namespace

std::vector<CopyPair> read_pairs(const Tensor& pairs, int64_t src_blocks, int64_t dst_blocks) {
    std::vector<CopyPair> checked;
    Named written(dst_blocks);
    for_each_pair(pairs, [&](int64_t from, int64_t to, int64_t n) {
        checked.push_back({bounded(from, src_blocks, n, "read"), bounded(to, dst_blocks, n, "written")});
        written.add(checked.back().dst, n, "written");
    });
    return checked;
}

void check_parted(const std::vector<CopyPair>& pairs, int64_t blocks) {
    Named written(blocks);
    for (const CopyPair& pair : pairs) written.add(pair.dst, 0, "written");
    for (const CopyPair& pair : pairs) {
        if (written.has(pair.src)) fail("mapping", "block ", pair.src, " is both read and written in one copy");
    }
}

std::vector<CopyPair> read_exchanges(const Tensor& pairs, int64_t num_blocks) {
    std::vector<CopyPair> checked;
    Named exchanged(num_blocks);
    for_each_pair(pairs, [&](int64_t one, int64_t other, int64_t n) {
        if (one == -1 && other == -1) return;
        checked.push_back({bounded(one, num_blocks, n, "exchanged"), bounded(other, num_blocks, n, "exchanged")});
        exchanged.add(checked.back().src, n, "exchanged");
        exchanged.add(checked.back().dst, n, "exchanged");
    });
    return checked;
}

std::vector<CopyPair> read_blocks(const Tensor& blocks, int64_t num_blocks, int64_t num_rows, bool unique) {
    check_ids("blocks", blocks, 1, "[n]");
    if (num_rows >= kAside) fail("layout", "there are ", num_rows, " rows, the limit is ", kAside - 1);
    const auto* ids = static_cast<const int64_t*>(blocks.const_data_ptr());
    std::vector<CopyPair> checked;
    Named written(unique ? num_blocks : 0);
    for (int64_t n = 0; n < blocks.size(0); ++n) {
        const uint32_t block = bounded(ids[n * blocks.stride(0)], num_blocks, n, unique ? "written" : "read");
        if (unique) written.add(block, n, "written");
        checked.push_back({block, static_cast<uint32_t>(n)});
    }
    if (blocks.size(0) != num_rows) fail("mapping", blocks.size(0), " blocks are named, there are ", num_rows, " rows");
    return checked;
}

}  // namespace blockyard
