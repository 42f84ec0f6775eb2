// Copies of blocks over raw pointers. No torch here: ops.cpp checks, these launch.
//
// A launch carries its mapping in its parameters, and a batched copy reads it before the call returns. So no copy still
// reads a mapping after its call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "launch_limits.h"

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

// Copies every pair in every tensor by a kernel of at most `blocks` thread blocks, so that the device's own work
// hardly slows down. Both sides are memory of the current device or page-locked; pairs must be independent.
cudaError_t copy_host_kernel(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, unsigned blocks,
                             cudaStream_t stream);

// Copies pieces between host and device by the copy engines: in batches of up to `max_pieces` pieces, or with one call
// per piece if the driver has no batch call or `max_pieces` is 0. In batches the host memory must be page-locked and
// have the same addresses on the device. Sources are read in stream order.
cudaError_t copy_batch(const CopyBatch& batch, size_t max_pieces, cudaStream_t stream);

// Makes `later` wait for everything queued on `earlier`. A wait uses the event's last record, so one event serves any
// number of calls.
cudaError_t order(cudaEvent_t event, cudaStream_t earlier, cudaStream_t later);

// Lets this thread make calls, such as allocations, that a capture by any thread would forbid.
class RelaxedCapture {
  public:
    RelaxedCapture() : exchanged_(cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess) {}
    ~RelaxedCapture() {
        if (exchanged_) cudaThreadExchangeStreamCaptureMode(&mode_);
    }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
    bool exchanged_;
};

// Whether this stream is being captured into a graph.
bool is_capturing(cudaStream_t stream);

// Copies the pieces with one call each.
cudaError_t copy_one_by_one(const CopyBatch& batch, cudaStream_t stream);

}  // namespace blockyard
