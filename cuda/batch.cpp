// Batched copies between host and device. The batch call is looked up at run time, since older drivers lack it.

#include <cuda.h>

#include <algorithm>
#include <climits>
#include <mutex>
#include <vector>

#include "copy.h"
#include "strategy.h"

namespace blockyard {
namespace {

// cuMemcpyBatchAsync as of CUDA 13.0; the version of 12.8 has another signature.
constexpr unsigned kBatchVersion = 13000;
using BatchCopy = CUresult (*)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t,
                               CUstream);

// The batch call refuses the legacy default stream, which is torch's default. Work meant for that stream goes through
// one of these, tied to it by events on both sides.
struct SideStream {
    std::mutex mutex;
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
};

BatchCopy find_batch_copy() {
    static const BatchCopy found = [] {
        void* symbol = nullptr;
        cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
        const cudaError_t status =
            cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &symbol, kBatchVersion, cudaEnableDefault, &result);
        if (status != cudaSuccess) {
            cudaGetLastError();  // A missing function is not the caller's error: clear it.
            return static_cast<BatchCopy>(nullptr);
        }
        return result == cudaDriverEntryPointSuccess ? reinterpret_cast<BatchCopy>(symbol) : nullptr;
    }();
    return found;
}

// Submits part after part: each is copied while the next is submitted, and drivers fail with very long batches.
cudaError_t submit(BatchCopy batch_copy, const CopyBatch& batch, size_t max_pieces, cudaStream_t stream) {
    // The driver's signature wants integers it may write to.
    const size_t longest = std::min(max_pieces, batch.count);
    std::vector<CUdeviceptr> dsts(longest), srcs(longest);
    std::vector<size_t> sizes(longest);
    // Any other order could read a host block before an earlier copy of the same stream has written it.
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    for (size_t start = 0; start < batch.count; start += longest) {
        const size_t count = std::min(longest, batch.count - start);
        for (size_t i = 0; i < count; ++i) {
            dsts[i] = reinterpret_cast<CUdeviceptr>(batch.dsts[start + i]);
            srcs[i] = reinterpret_cast<CUdeviceptr>(batch.srcs[start + i]);
            sizes[i] = batch.sizes[start + i];
        }
        size_t first = 0;
        const CUresult status =
            batch_copy(dsts.data(), srcs.data(), sizes.data(), count, &attributes, &first, 1, stream);
        if (status == CUDA_ERROR_INVALID_VALUE) {
            // A piece crosses the end of its extent, which the driver did not report. Single copies accept it, unless
            // it spans two registrations. They repeat whatever the batch has already copied.
            const CopyBatch part{batch.dsts + start, batch.srcs + start, batch.sizes + start, count, batch.kind};
            const cudaError_t copied = copy_one_by_one(part, stream);
            if (copied != cudaSuccess) return copied;
        } else if (status != CUDA_SUCCESS) {
            // Both enumerations use the same number for the same error.
            return static_cast<cudaError_t>(status);
        }
    }
    return cudaSuccess;
}

cudaError_t prepare(SideStream& side) {
    if (side.stream == nullptr) {
        const cudaError_t status = cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking);
        if (status != cudaSuccess) return status;
    }
    return side.event != nullptr ? cudaSuccess : cudaEventCreateWithFlags(&side.event, cudaEventDisableTiming);
}

cudaError_t submit_beside(BatchCopy batch_copy, const CopyBatch& batch, size_t max_pieces, cudaStream_t stream) {
    // Never destroyed: at exit the driver may be gone before static objects are.
    static auto* const sides = new SideStream[kMaxDevices];
    int device = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess) return status;
    if (device >= kMaxDevices) return copy_one_by_one(batch, stream);
    SideStream& side = sides[device];
    const std::lock_guard<std::mutex> lock(side.mutex);
    status = prepare(side);
    if (status == cudaSuccess) status = order(side.event, stream, side.stream);
    if (status != cudaSuccess) return status;
    status = submit(batch_copy, batch, max_pieces, side.stream);
    // A batch that fails half-way has queued its first half: later work waits for that as well.
    const cudaError_t joined = order(side.event, side.stream, stream);
    return status != cudaSuccess ? status : joined;
}

}  // namespace

int compute_capability(int32_t device) {
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess) return major;
    cudaGetLastError();  // The copy itself will report what is wrong with the device.
    return INT_MAX;
}

cudaError_t order(cudaEvent_t event, cudaStream_t earlier, cudaStream_t later) {
    const cudaError_t status = cudaEventRecord(event, earlier);
    return status != cudaSuccess ? status : cudaStreamWaitEvent(later, event, 0);
}

bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
    cudaGetLastError();  // The capture reports it; no later launch of ours must.
    return true;
}

cudaError_t copy_one_by_one(const CopyBatch& batch, cudaStream_t stream) {
    for (size_t i = 0; i < batch.count; ++i) {
        const cudaError_t status = cudaMemcpyAsync(batch.dsts[i], batch.srcs[i], batch.sizes[i], batch.kind, stream);
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

cudaError_t copy_batch(const CopyBatch& batch, size_t max_pieces, cudaStream_t stream) {
    if (batch.count == 0) return cudaSuccess;
    const BatchCopy batch_copy = max_pieces > 0 && batch.count > 1 ? find_batch_copy() : nullptr;
    if (batch_copy == nullptr) return copy_one_by_one(batch, stream);
    if (stream == nullptr || stream == cudaStreamLegacy) return submit_beside(batch_copy, batch, max_pieces, stream);
    // A graph accepts single copies as nodes, but no batch.
    return is_capturing(stream) ? copy_one_by_one(batch, stream) : submit(batch_copy, batch, max_pieces, stream);
}

}  // namespace blockyard
