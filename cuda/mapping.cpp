#include "mapping.h"

#include "check.h"

namespace blockyard {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kAsideId = -1;

uint32_t bounded(int64_t id, int64_t blocks, int64_t entry, const char* verb) {
    if (id < 0 || id >= blocks) {
        fail("mapping", "entry ", entry, ": block ", id, " cannot be ", verb, ", there are ", blocks, " blocks");
    }
    return static_cast<uint32_t>(id);
}

// Throws unless the ids are int64 on the CPU, with this many dimensions.
const int64_t* read_ids(const char* name, const Tensor& ids, int64_t dim, const char* wanted) {
    if (!ids.is_cpu()) fail("mapping", name, " are not on the CPU");
    if (ids.scalar_type() != ScalarType::Long || ids.dim() != dim || (dim == 2 && ids.size(1) != 2)) {
        fail("mapping", name, " have ", ids.dim(), " dimensions of ", ids.element_size(), " bytes, wanted int64 ",
             wanted);
    }
    return static_cast<const int64_t*>(ids.const_data_ptr());
}

std::vector<uint32_t> read_starts(const Tensor& starts, int64_t num_steps) {
    const int64_t* values = read_ids("starts", starts, 1, "[n]");
    std::vector<uint32_t> read;
    int64_t last = -1;
    for (int64_t n = 0; n < starts.size(0); ++n) {
        const int64_t start = values[n * starts.stride(0)];
        if ((n == 0 && start != 0) || start <= last || start > num_steps) {
            fail("mapping", "start ", n, " is ", start, ", wanted them to rise from 0 to ", num_steps);
        }
        last = start;
        read.push_back(static_cast<uint32_t>(start));
    }
    if (last != num_steps) fail("mapping", "starts end at ", last, ", there are ", num_steps, " steps");
    return read;
}

}  // namespace

std::vector<CopyPair> read_pairs(const Tensor& pairs, int64_t src_blocks, int64_t dst_blocks) {
    const int64_t* ids = read_ids("pairs", pairs, 2, "[n, 2]");
    const int64_t row = pairs.stride(0), column = pairs.stride(1);
    std::vector<CopyPair> read;
    read.reserve(static_cast<size_t>(pairs.size(0)));
    for (int64_t n = 0; n < pairs.size(0); ++n) {
        const int64_t from = ids[n * row], to = ids[n * row + column];
        read.push_back({bounded(from, src_blocks, n, "read"), bounded(to, dst_blocks, n, "written")});
    }
    return read;
}

Steps read_steps(const Tensor& steps, const Tensor& starts, int64_t blocks) {
    const int64_t* ids = read_ids("steps", steps, 2, "[n, 2]");
    const int64_t row = steps.stride(0), column = steps.stride(1);
    if (steps.size(0) >= UINT32_MAX) fail("mapping", "there are ", steps.size(0), " steps, the limit is ", UINT32_MAX);
    Steps plan{{}, read_starts(starts, steps.size(0))};
    plan.steps.reserve(static_cast<size_t>(steps.size(0)));
    // The first step of the open ring; the steps of a ring stay in one launch.
    int64_t ring = -1;
    size_t group = 0;
    for (int64_t n = 0; n < steps.size(0); ++n) {
        const int64_t from = ids[n * row], to = ids[n * row + column];
        const bool opens = to == kAsideId, closes = from == kAsideId;
        if (opens ? closes || ring >= 0 : closes && ring < 0) fail("mapping", "step ", n, " has nothing set aside");
        if (opens) ring = n;
        plan.steps.push_back(
            {closes ? kAside : bounded(from, blocks, n, "read"), opens ? kAside : bounded(to, blocks, n, "written")});
        if (ring >= 0 && n - ring > static_cast<int64_t>(kMaxRing)) fail("mapping", "step ", ring, " is not put back");
        if (closes) ring = -1;
        if (n + 1 == plan.starts[group + 1]) {
            if (ring >= 0) fail("mapping", "step ", ring, " is not put back");
            ++group;
        }
    }
    return plan;
}

}  // namespace blockyard
