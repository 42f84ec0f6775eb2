// The copy kernels: all steps of all tensors in one launch.

#include <algorithm>

#include "copy.h"
#include "copy_kernel.h"
#include "launch.h"

namespace blockyard {
namespace {

constexpr unsigned kHostKernelThreads = 512;

template <typename Access>
__global__ void __launch_bounds__(kThreads)
    copy_rows(const __grid_constant__ CopyParams params, uint32_t rows_per_block) {
    static_assert(sizeof(Access) == 1 || sizeof(Access) == 4 || sizeof(Access) == 8 || sizeof(Access) == 16,
                  "an access is 1, 4, 8 or 16 bytes wide");
    walk_rows<Access>(params, blockIdx.x, blockIdx.y, blockIdx.z, rows_per_block, static_cast<int>(threadIdx.x));
}

template <typename Access>
__global__ void __launch_bounds__(kThreads) copy_groups(const __grid_constant__ CopyParams params) {
    walk_group<Access>(params, blockIdx.x, blockIdx.y, blockIdx.z, static_cast<int>(threadIdx.x));
}

template <typename Access>
__global__ void __launch_bounds__(kHostKernelThreads)
    copy_pieces(const __grid_constant__ CopyParams params, uint32_t num_tensors, uint32_t chunks) {
    const uint32_t warps = kHostKernelThreads / kWarp;
    walk_host_pieces<Access>(params, num_tensors, chunks, blockIdx.x * warps + threadIdx.x / kWarp, gridDim.x * warps,
                             static_cast<int>(threadIdx.x % kWarp));
}

// Launches one set of parameters.
struct OnDevice {
    bool is_independent;

    template <typename Access>
    cudaError_t launch(const CopyParams& params, size_t num_tensors, int64_t widest, cudaStream_t stream) const {
        const int64_t chunks = (widest + kChunk<Access> - 1) / kChunk<Access>;
        if (chunks > INT32_MAX) return cudaErrorInvalidValue;
        const auto rows = is_independent ? rows_per_block<Access>(widest) : 1;
        const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(num_tensors),
                        (params.num_groups + rows - 1) / rows);
        if (is_independent) {
            copy_rows<Access><<<grid, kThreads, 0, stream>>>(params, rows);
        } else {
            copy_groups<Access><<<grid, kThreads, 0, stream>>>(params);
        }
        return cudaGetLastError();
    }
};

struct BesideHost {
    unsigned max_blocks;  // thread blocks

    template <typename Access>
    cudaError_t launch(const CopyParams& params, size_t num_tensors, int64_t widest, cudaStream_t stream) const {
        const int64_t chunks = (widest + kHostChunk<Access> - 1) / kHostChunk<Access>;
        if (chunks > INT32_MAX / static_cast<int64_t>(kMaxTensors)) return cudaErrorInvalidValue;
        const auto total = static_cast<uint64_t>(chunks) * num_tensors * params.num_groups;
        constexpr uint64_t kPerBlock = kHostKernelThreads / kWarp;
        const auto blocks = static_cast<unsigned>(std::min<uint64_t>(max_blocks, (total + kPerBlock - 1) / kPerBlock));
        copy_pieces<Access><<<blocks, kHostKernelThreads, 0, stream>>>(params, static_cast<uint32_t>(num_tensors),
                                                                       static_cast<uint32_t>(chunks));
        return cudaGetLastError();
    }
};

template <typename Launcher>
cudaError_t launch_all(const Launcher& launcher, const CopyTensor* tensors, size_t num_tensors, const Steps& plan,
                       cudaStream_t stream) {
    const auto launch = [&launcher, stream](const CopyParams& params, size_t some, int64_t widest) {
        const uint64_t bits = misalignment(params.tensors, some);
        if (bits % 16 == 0) return launcher.template launch<uint4>(params, some, widest, stream);
        if (bits % 8 == 0) return launcher.template launch<uint2>(params, some, widest, stream);
        if (bits % 4 == 0) return launcher.template launch<uint32_t>(params, some, widest, stream);
        return launcher.template launch<uint8_t>(params, some, widest, stream);
    };
    return launch_parts(tensors, num_tensors, plan, launch);
}

}  // namespace

cudaError_t copy_on_device(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t stream) {
    return launch_all(OnDevice{is_independent(plan)}, tensors, num_tensors, plan, stream);
}

cudaError_t copy_host_kernel(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, unsigned blocks,
                             cudaStream_t stream) {
    return launch_all(BesideHost{blocks}, tensors, num_tensors, plan, stream);
}

}  // namespace blockyard
