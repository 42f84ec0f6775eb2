// Limits of one launch, and how wide its accesses can be.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "steps.h"

namespace blockyard {

constexpr size_t kMaxTensors = 256;
constexpr size_t kMaxSteps = 2048;

// The bits set in any address, stride or width: an access of 2^k bytes is aligned if the low k bits are clear.
inline uint64_t misalignment(const CopyTensor* tensors, size_t num_tensors) {
    uint64_t bits = 0;
    for (const CopyTensor* t = tensors; t != tensors + num_tensors; ++t) {
        bits |= reinterpret_cast<uintptr_t>(t->src) | reinterpret_cast<uintptr_t>(t->dst);
        bits |= static_cast<uint64_t>(t->src_stride | t->dst_stride | t->width);
    }
    return bits;
}

}  // namespace blockyard
