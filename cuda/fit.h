// Limits of one launch, and which tensors fit which kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "steps.h"

namespace blockyard {

constexpr size_t kMaxTensors = 256;
constexpr size_t kMaxSteps = 2048;
// Bytes of one stage of the bulk engine's ring.
constexpr uint32_t kStageBytes = 8192;
// Alignment of the addresses and sizes of the bulk engine.
constexpr uint64_t kBulkAlignment = 16;
// Pieces of one launch are counted in 32 bits, with room for a step beyond the last.
constexpr uint64_t kMostBulkPieces = INT32_MAX;

// The bits set in any address, stride or width: an access of 2^k bytes is aligned if the low k bits are clear.
inline uint64_t misalignment(const CopyTensor* tensors, size_t num_tensors) {
    uint64_t bits = 0;
    for (const CopyTensor* t = tensors; t != tensors + num_tensors; ++t) {
        bits |= reinterpret_cast<uintptr_t>(t->src) | reinterpret_cast<uintptr_t>(t->dst);
        bits |= static_cast<uint64_t>(t->src_stride | t->dst_stride | t->width);
    }
    return bits;
}

// Whether the bulk engine can copy rows of these tensors, however many steps a launch has.
inline bool fits_bulk(const CopyTensor* tensors, size_t num_tensors) {
    int64_t widest = 0;
    for (size_t i = 0; i < num_tensors; ++i) widest = std::max(widest, tensors[i].width);
    const auto chunks = static_cast<uint64_t>(widest) / kStageBytes + 1;
    return misalignment(tensors, num_tensors) % kBulkAlignment == 0 &&
           chunks <= kMostBulkPieces / (kMaxSteps * kMaxTensors);
}

// Whether no step has to wait for another.
inline bool is_independent(const Steps& plan) { return plan.steps.size() + 1 == plan.starts.size(); }

}  // namespace blockyard
