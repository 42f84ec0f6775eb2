// Copies of blocks over raw pointers. No torch here: ops.cpp checks, these launch.
//
// Everything a launch needs travels in its parameters, and everything a batched copy needs is read before the call
// returns. So no mapping buffer outlives the call, and none can be overwritten while a copy still reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "steps.h"

namespace blockyard {

// One piece of a batched copy between host and device.
struct CopyBatch {
    void* const* dsts;
    const void* const* srcs;
    const size_t* sizes;
    size_t count;
    cudaMemcpyKind kind;
};

// The bits that any address, stride or width has set: an access of 2^k bytes is aligned if the low k are clear.
uint64_t misalignment(const CopyTensor* tensors, size_t num_tensors);

// Makes every step in every tensor with one kernel; plans of more than kMaxSteps steps or kMaxTensors tensors take
// several launches. Both sides are memory of the current device; within one group of steps both may be the same.
cudaError_t copy_on_device(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream);

// Copies every pair in every tensor between the device and page-locked memory of the host by a kernel on few
// multiprocessors, which the device's own work hardly notices.
cudaError_t copy_far(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream);

// Copies pieces between host and device by the copy engines: in one batch where the driver has batches and the host
// memory is page-locked (`pinned`), else one call per piece. Sources are read in stream order.
cudaError_t copy_batch(const CopyBatch& batch, bool pinned, cudaStream_t stream);

// The same, one call per piece, as engines without batches do.
cudaError_t copy_one_by_one(const CopyBatch& batch, cudaStream_t stream);

}  // namespace blockyard
