// The stages of the bulk engine in shared memory, for machine code from sm_90 on. The tests put a model in its place:
// tests/kernels/shared_ring.h.
#pragma once

#include "bulk_kernel.h"

namespace blockyard {

// Each stage has a barrier.
constexpr size_t kRingBytes = kStages * (kStageBytes + sizeof(uint64_t));

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

inline __device__ uint32_t shared_address(const void* pointer) {
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

}  // namespace blockyard
