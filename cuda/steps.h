// Moves within one cache, put into groups of steps that may run beside one another. No CUDA and no torch here.
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

// As a destination: the source is set aside. As a source: what was set aside is put down.
constexpr uint32_t kAside = UINT32_MAX;

// Steps of one group run one after the other, as each may overwrite what the one before has read; groups do not touch
// one another's blocks. Group g is steps[starts[g]] up to steps[starts[g + 1]].
struct Steps {
    std::vector<CopyPair> steps;
    std::vector<uint32_t> starts;
};

// A part of a plan that one launch takes: `steps` holds at most the wanted number.
struct StepRange {
    const CopyPair* steps;
    size_t num_steps;
    std::vector<uint16_t> starts;  // relative to `steps`, one more than there are groups
};

// The steps of one ring, with the two that set its first block aside and put it down, are never parted.
constexpr size_t kMaxRing = 512;

// Steps that have the same effect as reading all sources before writing any destination; no destination repeats, and
// ids are below num_blocks.
Steps order_moves(const std::vector<CopyPair>& pairs, size_t num_blocks);

// Steps by which the two blocks of every pair change places; no block is named twice.
Steps order_exchanges(const std::vector<CopyPair>& pairs);

// Each pair by itself.
Steps independent(const std::vector<CopyPair>& pairs);

// Parts of at most `most` steps (at least kMaxRing + 1) that run one after the other.
std::vector<StepRange> split_steps(const Steps& plan, size_t most);

}  // namespace blockyard
