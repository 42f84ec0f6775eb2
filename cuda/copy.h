// Copies of blocks over raw pointers. No torch here: ops.cpp checks, these launch.
//
// Everything a launch needs travels in its parameters, and everything a batched copy needs is read before the call
// returns. So no mapping buffer outlives the call, and none can be overwritten while a copy still reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace blockyard {

// One pair of cache views: row b starts at base + b * stride, all in bytes.
struct CopyTensor {
    const unsigned char* src;
    unsigned char* dst;
    int64_t src_stride;
    int64_t dst_stride;
    int64_t width;
};

struct CopyPair {
    uint32_t src;
    uint32_t dst;
};

// One piece of a batched copy between host and device.
struct CopyBatch {
    void* const* dsts;
    const void* const* srcs;
    const size_t* sizes;
    size_t count;
    cudaMemcpyKind kind;
};

// Copies every pair of blocks in every tensor with one kernel; more than kMaxPairs pairs or kMaxTensors tensors take
// several launches. Both sides are memory of the current device; no byte may be both read and written.
cudaError_t copy_on_device(const CopyTensor* tensors, size_t num_tensors, const CopyPair* pairs, size_t num_pairs,
                           cudaStream_t stream);

// Copies pieces between host and device by the copy engines: in one batch where the driver has batches and the host
// memory is page-locked (`pinned`), else one call per piece. Sources are read in stream order.
cudaError_t copy_batch(const CopyBatch& batch, bool pinned, cudaStream_t stream);

}  // namespace blockyard
