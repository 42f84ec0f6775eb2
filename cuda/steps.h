// Groups of steps that may run in parallel, and their parts for one launch. No CUDA and no torch here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace blockyard {

struct CopyPair {
    uint32_t src;
    uint32_t dst;
};

// One pair of cache views: row b starts at base + b * stride, all in bytes.
struct CopyTensor {
    const unsigned char* src;
    unsigned char* dst;
    int64_t src_stride;
    int64_t dst_stride;
    int64_t width;
};

// As a destination: the source is saved aside. As a source: the saved bytes are written.
constexpr uint32_t kAside = UINT32_MAX;

// Steps of a group run one after the other: each may overwrite what the previous one has read. Groups have no block in
// common. Group g is steps[starts[g]] up to steps[starts[g + 1]].
struct Steps {
    std::vector<CopyPair> steps;
    std::vector<uint32_t> starts;
};

// A part of a plan for one launch.
struct StepRange {
    const CopyPair* steps;
    size_t num_steps;
    std::vector<uint16_t> starts;  // relative to `steps`, one more than there are groups
};

// Maximum steps of one ring of blocks, which stay in one part with the step that puts back the block set aside.
constexpr size_t kMaxRing = 512;

// A group for each pair.
Steps independent(const std::vector<CopyPair>& pairs);

// Whether no step has to wait for another.
inline bool is_independent(const Steps& plan) { return plan.steps.size() + 1 == plan.starts.size(); }

// Splits a plan into parts of at most `max_steps` steps (at least kMaxRing + 1), to run one after the other.
std::vector<StepRange> split_steps(const Steps& plan, size_t max_steps);

}  // namespace blockyard
