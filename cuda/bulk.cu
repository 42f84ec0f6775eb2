// Copies by the bulk engine of devices from sm_90 on: global memory to shared memory and back, with few instructions a
// piece. Machine code for older devices has none of it.

#include "bulk_kernel.h"
#include "copy.h"
#include "launch.h"
#include "shared_ring.h"

namespace blockyard {
namespace {

constexpr int kBulkArch = 90;
// What every device from sm_90 on gives one block of threads.
static_assert(kRingBytes <= 99 << 10, "the ring fits shared memory");

__global__ void __launch_bounds__(kWarp)
    copy_by_bulk(const __grid_constant__ CopyParams params, uint32_t num_tensors, uint32_t chunks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    if (threadIdx.x != 0) return;
    SharedRing ring(memory);
    drive_ring(BulkPieces(params, num_tensors, chunks, blockIdx.x, gridDim.x), ring);
#else
    // has_bulk prevents launches.
    __trap();
#endif
}

}  // namespace

// PTX of an older architecture was not compiled for the bulk engine, even if the device has one.
cudaError_t ask_bulk(bool* found) {
    cudaFuncAttributes attributes{};
    cudaError_t status = cudaFuncGetAttributes(&attributes, copy_by_bulk);
    // No code that this device runs, or too little shared memory, is an answer.
    if (status == cudaErrorInvalidDeviceFunction || status == cudaErrorNoKernelImageForDevice) status = cudaSuccess;
    *found = status == cudaSuccess && attributes.ptxVersion >= kBulkArch;
    if (!*found) return status;
    status = cudaFuncSetAttribute(copy_by_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes);
    *found = status == cudaSuccess;
    return status == cudaErrorInvalidValue ? cudaSuccess : status;
}

cudaError_t copy_bulk(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, unsigned most,
                      cudaStream_t stream) {
    const auto launch = [most, stream](const CopyParams& params, size_t some, int64_t widest) {
        const auto chunks = static_cast<uint64_t>(widest + kStageBytes - 1) / kStageBytes;
        const uint64_t pieces = chunks * some * params.num_groups;
        if (pieces > kMostBulkPieces) return cudaErrorInvalidValue;
        const auto blocks = static_cast<unsigned>(std::min<uint64_t>(most, pieces));
        copy_by_bulk<<<blocks, kWarp, kRingBytes, stream>>>(params, static_cast<uint32_t>(some),
                                                            static_cast<uint32_t>(chunks));
        return cudaGetLastError();
    };
    return launch_parts(tensors, num_tensors, plan, launch);
}

}  // namespace blockyard
