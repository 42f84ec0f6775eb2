// The kernels that copy blocks: all steps of all tensors in one launch.

#include <algorithm>
#include <memory>

#include "copy.h"
#include "copy_kernel.h"

namespace blockyard {
namespace {

// Multiprocessors that a copy from the host may take; they keep the link busy, and more would take them from compute.
constexpr unsigned kFarBlocks = 12;
constexpr unsigned kFarThreads = 512;

template <typename Access>
__global__ void __launch_bounds__(kThreads) copy_groups(const __grid_constant__ CopyParams params) {
    static_assert(sizeof(Access) == 1 || sizeof(Access) == 4 || sizeof(Access) == 8 || sizeof(Access) == 16,
                  "an access is 1, 4, 8 or 16 bytes wide");
    walk_group<Access>(params, blockIdx.x, blockIdx.y, blockIdx.z, static_cast<int>(threadIdx.x));
}

template <typename Access>
__global__ void __launch_bounds__(kFarThreads)
    copy_pieces(const __grid_constant__ CopyParams params, uint32_t num_tensors, uint32_t chunks) {
    const uint32_t warps = kFarThreads / kWarp;
    move_far<Access>(params, num_tensors, chunks, blockIdx.x * warps + threadIdx.x / kWarp, gridDim.x * warps,
                     static_cast<int>(threadIdx.x % kWarp));
}

// How a launch is made of one set of parameters.
struct OnDevice {
    template <typename Access>
    static cudaError_t launch(const CopyParams& params, size_t num_tensors, int64_t widest, cudaStream_t stream) {
        const int64_t chunks = (widest + kChunk<Access> - 1) / kChunk<Access>;
        if (chunks > INT32_MAX) return cudaErrorInvalidValue;
        const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(num_tensors), params.num_groups);
        copy_groups<Access><<<grid, kThreads, 0, stream>>>(params);
        return cudaGetLastError();
    }
};

struct BesideHost {
    template <typename Access>
    static cudaError_t launch(const CopyParams& params, size_t num_tensors, int64_t widest, cudaStream_t stream) {
        const int64_t chunks = (widest + kFarChunk<Access> - 1) / kFarChunk<Access>;
        if (chunks > INT32_MAX / static_cast<int64_t>(kMaxTensors)) return cudaErrorInvalidValue;
        const auto total = static_cast<uint64_t>(chunks) * num_tensors * params.num_groups;
        constexpr uint64_t kPerBlock = kFarThreads / kWarp;
        const auto blocks = static_cast<unsigned>(std::min<uint64_t>(kFarBlocks, (total + kPerBlock - 1) / kPerBlock));
        copy_pieces<Access><<<blocks, kFarThreads, 0, stream>>>(params, static_cast<uint32_t>(num_tensors),
                                                                static_cast<uint32_t>(chunks));
        return cudaGetLastError();
    }
};

template <typename Launcher>
cudaError_t launch_widest(const CopyParams& params, size_t num_tensors, cudaStream_t stream) {
    int64_t widest = 0;
    for (size_t i = 0; i < num_tensors; ++i) widest = std::max(widest, params.tensors[i].width);
    if (widest == 0) return cudaSuccess;
    const uint64_t bits = misalignment(params.tensors, num_tensors);
    if (bits % 16 == 0) return Launcher::template launch<uint4>(params, num_tensors, widest, stream);
    if (bits % 8 == 0) return Launcher::template launch<uint2>(params, num_tensors, widest, stream);
    if (bits % 4 == 0) return Launcher::template launch<uint32_t>(params, num_tensors, widest, stream);
    return Launcher::template launch<uint8_t>(params, num_tensors, widest, stream);
}

template <typename Launcher>
cudaError_t launch_parts(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream) {
    const auto params = std::make_unique<CopyParams>();
    // Steps outside, tensors inside: a part of the steps is done in all tensors before the next one starts, and in
    // each tensor parts follow one another in stream order.
    for (const StepRange& part : split_steps(plan, kMaxSteps)) {
        std::copy_n(part.steps, part.num_steps, params->steps);
        std::copy(part.starts.begin(), part.starts.end(), params->starts);
        params->num_groups = static_cast<uint16_t>(part.starts.size() - 1);
        for (size_t t = 0; t < num_tensors; t += kMaxTensors) {
            const size_t some = std::min(kMaxTensors, num_tensors - t);
            std::copy_n(tensors + t, some, params->tensors);
            const cudaError_t status = launch_widest<Launcher>(*params, some, stream);
            if (status != cudaSuccess) return status;
        }
    }
    return cudaSuccess;
}

}  // namespace

uint64_t misalignment(const CopyTensor* tensors, size_t num_tensors) {
    uint64_t bits = 0;
    for (const CopyTensor* t = tensors; t != tensors + num_tensors; ++t) {
        bits |= reinterpret_cast<uintptr_t>(t->src) | reinterpret_cast<uintptr_t>(t->dst);
        bits |= static_cast<uint64_t>(t->src_stride | t->dst_stride | t->width);
    }
    return bits;
}

cudaError_t copy_on_device(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream) {
    return launch_parts<OnDevice>(tensors, num_tensors, plan, stream);
}

cudaError_t copy_far(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream) {
    return launch_parts<BesideHost>(tensors, num_tensors, plan, stream);
}

}  // namespace blockyard
