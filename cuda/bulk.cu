// Copies by the bulk engine of devices from sm_90 on: global memory to shared memory and back, with few instructions a
// piece. Machine code for older devices has none of it.

#include "bulk_kernel.h"
#include "copy.h"
#include "launch.h"

namespace blockyard {
namespace {

constexpr int kBulkArch = 90;
constexpr size_t kRingBytes = kStages * (kStageBytes + sizeof(uint64_t));
// What every device from sm_90 on gives one block of threads.
static_assert(kRingBytes <= 99 << 10, "the ring fits shared memory");

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Stages, then one barrier for each. Only the bulk engine touches the stages, so a load and its store need no fence
// between them. One thread does everything, so no other needs a signal.
class SharedRing {
  public:
    __device__ explicit SharedRing(const unsigned char* memory)
        : stages_(shared_address(memory)), barriers_(stages_ + kStages * kStageBytes) {
        for (uint32_t stage = 0; stage < kStages; ++stage) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier(stage)) : "memory");
        }
        // The engine must see the barriers.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }

    __device__ void load(uint32_t stage, const unsigned char* src, uint32_t bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier(stage)), "r"(bytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(at(stage)),
            "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(barrier(stage))
            : "memory");
    }

    __device__ void wait_loaded(uint32_t stage, uint32_t parity) const {
        uint32_t landed = 0;
        while (landed == 0) {
            asm volatile(
                "{\n"
                ".reg .pred landed;\n"
                "mbarrier.try_wait.parity.shared::cta.b64 landed, [%1], %2;\n"
                "selp.u32 %0, 1, 0, landed;\n"
                "}\n"
                : "=r"(landed)
                : "r"(barrier(stage)), "r"(parity)
                : "memory");
        }
    }

    __device__ void store(uint32_t stage, unsigned char* dst, uint32_t bytes) const {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(dst)),
                     "r"(at(stage)), "r"(bytes)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }

    template <uint32_t kLast>
    __device__ void wait_read() const {
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLast) : "memory");
    }

    // The stages must live until every store has landed.
    __device__ void drain() const { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

  private:
    __device__ uint32_t at(uint32_t stage) const { return stages_ + stage * kStageBytes; }
    __device__ uint32_t barrier(uint32_t stage) const { return barriers_ + stage * sizeof(uint64_t); }

    uint32_t stages_, barriers_;
};

#endif

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
