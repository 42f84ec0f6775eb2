// Copies of blocks over raw pointers. No torch here: ops.cpp checks, these launch.
//
// Everything a launch needs travels in its parameters, and everything a batched copy needs is read before the call
// returns. So no mapping buffer outlives the call, and none can be overwritten while a copy still reads it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "fit.h"

namespace blockyard {

// One piece of a batched copy between host and device.
struct CopyBatch {
    void* const* dsts;
    const void* const* srcs;
    const size_t* sizes;
    size_t count;
    cudaMemcpyKind kind;
};

// Makes every step in every tensor with one kernel; plans of more than kMaxSteps steps or kMaxTensors tensors take
// several launches. Both sides are memory of the current device; within one group of steps both may be the same.
cudaError_t copy_on_device(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream);

// Blocks of threads of a copy that runs beside the device's own work, at most one a multiprocessor. They keep the link
// to the host busy; more would take multiprocessors from compute.
constexpr unsigned kFewBlocks = 12;

// Copies every pair in every tensor between the device and page-locked memory of the host by a kernel on few
// multiprocessors, which the device's own work hardly notices.
cudaError_t copy_host_kernel(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream);

// Whether a device has a bulk engine, and the library machine code for it.
bool has_bulk(int device);

// Copies every pair in every tensor by the bulk engine, driven by few multiprocessors; pairs do not depend on one
// another, both sides are memory of the current device or page-locked. For what has_bulk and fits_bulk allow.
cudaError_t copy_bulk(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream);

// Copies pieces between host and device by the copy engines: in one batch where the driver has batches and the host
// memory is page-locked (`pinned`), else one call per piece. Sources are read in stream order.
cudaError_t copy_batch(const CopyBatch& batch, bool pinned, cudaStream_t stream);

// Whether work queued on this stream goes into a graph.
bool is_capturing(cudaStream_t stream);

// Copies the pieces one call each, as engines without batches do.
cudaError_t copy_one_by_one(const CopyBatch& batch, cudaStream_t stream);

}  // namespace blockyard
