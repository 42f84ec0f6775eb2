// Copies of blocks over raw pointers. No torch here: ops.cpp checks, these launch.
//
// A launch carries its mapping in its parameters, and a batched copy reads it before the call returns. So nobody can
// overwrite a mapping that a copy still reads.
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

// Runs every step in every tensor with one kernel. Plans of more than kMaxSteps steps or kMaxTensors tensors take
// several launches. Both sides are memory of the current device; within one group of steps they may be the same memory.
cudaError_t copy_on_device(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream);

// Blocks of threads of a copy that overlaps the device's own work, at most one a multiprocessor. They keep the link
// to the host busy; more would take multiprocessors from compute.
constexpr unsigned kFewBlocks = 12;

// Copies every pair in every tensor between the device and page-locked host memory by a kernel on few multiprocessors,
// so the device's own work hardly slows down.
cudaError_t copy_host_kernel(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream);

// Whether a device has a bulk engine and the library has machine code for it.
bool has_bulk(int device);

// Copies every pair in every tensor by the bulk engine, driven by few multiprocessors. Pairs must be independent; both
// sides are memory of the current device or page-locked. Requires has_bulk and fits_bulk.
cudaError_t copy_bulk(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream);

// Copies pieces between host and device by the copy engines: in batches of up to `most` pieces if the driver has them,
// with one call a piece if it has none or `most` is 0. In batches the host memory must be page-locked and have the same
// addresses on the device. Sources are read in stream order.
cudaError_t copy_batch(const CopyBatch& batch, size_t most, cudaStream_t stream);

// Whether this stream is being captured into a graph.
bool is_capturing(cudaStream_t stream);

// Copies the pieces with one call each.
cudaError_t copy_one_by_one(const CopyBatch& batch, cudaStream_t stream);

}  // namespace blockyard
