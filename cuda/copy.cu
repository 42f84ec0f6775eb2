// The kernel that copies blocks within one device: all pairs of all tensors in one launch.

#include <algorithm>

#include "copy.h"

namespace blockyard {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr size_t kMaxTensors = 256;
constexpr size_t kMaxPairs = 2560;
// Devices from sm_70 on take this many bytes of parameters.
constexpr size_t kMaxParams = 32764;

struct CopyParams {
    CopyTensor tensors[kMaxTensors];
    CopyPair pairs[kMaxPairs];
};
static_assert(sizeof(CopyParams) <= kMaxParams, "the parameters of one launch have a limit");
static_assert(kMaxTensors <= 65535 && kMaxPairs <= 65535, "they are the grid's second and third dimension");

// One thread block moves one chunk (x) of one block of one tensor (y) for one pair (z).
template <typename Access>
__global__ void __launch_bounds__(kThreads) copy_pieces(const __grid_constant__ CopyParams params) {
    static_assert(sizeof(Access) == 1 || sizeof(Access) == 4 || sizeof(Access) == 8 || sizeof(Access) == 16,
                  "an access is 1, 4, 8 or 16 bytes wide");
    const CopyTensor& tensor = params.tensors[blockIdx.y];
    const CopyPair pair = params.pairs[blockIdx.z];
    const auto* src = reinterpret_cast<const Access*>(tensor.src + pair.src * tensor.src_stride);
    auto* dst = reinterpret_cast<Access*>(tensor.dst + pair.dst * tensor.dst_stride);
    const int64_t count = tensor.width / static_cast<int64_t>(sizeof(Access));
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;

    // All loads are under way before the first store waits for one.
    Access values[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = first + i * kThreads;
        if (at < count) values[i] = src[at];
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = first + i * kThreads;
        if (at < count) dst[at] = values[i];
    }
}

template <typename Access>
cudaError_t launch(const CopyParams& params, size_t num_tensors, size_t num_pairs, int64_t widest,
                   cudaStream_t stream) {
    constexpr int64_t kChunk = static_cast<int64_t>(sizeof(Access)) * kThreads * kUnroll;
    const int64_t chunks = (widest + kChunk - 1) / kChunk;
    if (chunks > INT32_MAX) return cudaErrorInvalidValue;
    const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(num_tensors),
                    static_cast<unsigned>(num_pairs));
    copy_pieces<Access><<<grid, kThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

// The bits that any address, stride or width has set: an access of 2^k bytes is aligned if the low k are clear.
uint64_t misalignment(const CopyTensor* tensors, size_t num_tensors) {
    uint64_t bits = 0;
    for (const CopyTensor* t = tensors; t != tensors + num_tensors; ++t) {
        bits |= reinterpret_cast<uintptr_t>(t->src) | reinterpret_cast<uintptr_t>(t->dst);
        bits |= static_cast<uint64_t>(t->src_stride | t->dst_stride | t->width);
    }
    return bits;
}

cudaError_t launch_widest(const CopyParams& params, size_t num_tensors, size_t num_pairs, cudaStream_t stream) {
    int64_t widest = 0;
    for (size_t i = 0; i < num_tensors; ++i) widest = std::max(widest, params.tensors[i].width);
    if (widest == 0) return cudaSuccess;
    const uint64_t bits = misalignment(params.tensors, num_tensors);
    if (bits % 16 == 0) return launch<uint4>(params, num_tensors, num_pairs, widest, stream);
    if (bits % 8 == 0) return launch<uint2>(params, num_tensors, num_pairs, widest, stream);
    if (bits % 4 == 0) return launch<uint32_t>(params, num_tensors, num_pairs, widest, stream);
    return launch<uint8_t>(params, num_tensors, num_pairs, widest, stream);
}

}  // namespace

cudaError_t copy_on_device(const CopyTensor* tensors, size_t num_tensors, const CopyPair* pairs, size_t num_pairs,
                           cudaStream_t stream) {
    CopyParams params;
    for (size_t t = 0; t < num_tensors; t += kMaxTensors) {
        const size_t some_tensors = std::min(kMaxTensors, num_tensors - t);
        std::copy_n(tensors + t, some_tensors, params.tensors);
        for (size_t p = 0; p < num_pairs; p += kMaxPairs) {
            const size_t some_pairs = std::min(kMaxPairs, num_pairs - p);
            std::copy_n(pairs + p, some_pairs, params.pairs);
            const cudaError_t status = launch_widest(params, some_tensors, some_pairs, stream);
            if (status != cudaSuccess) return status;
        }
    }
    return cudaSuccess;
}

}  // namespace blockyard
