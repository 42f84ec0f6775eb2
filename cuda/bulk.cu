// Copies by the bulk engine of devices from sm_90 on: global memory to shared memory and back, with few instructions a
// piece. Machine code for older devices has none of it.

#include <array>
#include <atomic>

#include "bulk_kernel.h"
#include "copy.h"
#include "launch.h"
#include "shared_ring.h"
#include "strategy.h"

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

// Whether the code that this device runs was compiled for the bulk engine. PTX of an older architecture was not, even
// if the device has the engine.
bool prepare_bulk() {
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, copy_by_bulk) == cudaSuccess && attributes.ptxVersion >= kBulkArch &&
           cudaFuncSetAttribute(copy_by_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes) == cudaSuccess;
}

}  // namespace

bool has_bulk(int device) {
    enum State : int8_t { kUnknown, kNo, kYes };
    static std::array<std::atomic<int8_t>, kMaxDevices> states;
    if (device < 0 || device >= kMaxDevices) return false;
    std::atomic<int8_t>& state = states[static_cast<size_t>(device)];
    if (state == kUnknown) {
        int before = 0;
        // Without a device there is no bulk engine.
        const bool entered = cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
        state = entered && prepare_bulk() ? kYes : kNo;
        if (entered) cudaSetDevice(before);
        cudaGetLastError();  // A missing engine is not the caller's error: clear it.
    }
    return state == kYes;
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
