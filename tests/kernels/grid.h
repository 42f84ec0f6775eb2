// CUDA's words for a CPU: a launch is a loop over its blocks and their threads. The build in
// tests/support/host_kernels.py writes `kernel<<<..>>>(..)` as `on_grid(kernel, ..)(..)` and passes parameters by
// reference.
#pragma once

#include <cuda_runtime_api.h>

#include <numeric>
#include <random>
#include <stdexcept>

#undef __global__
#undef __launch_bounds__
#define __global__
#define __launch_bounds__(threads)

inline dim3 gridDim, blockIdx, threadIdx;
inline std::mt19937 drawn;  // whatever a device leaves open
inline int planted = 0;     // the number of a mistake, see tests/support/host_kernels.py
inline size_t num_launches = 0;

inline uint32_t below(uint32_t limit) { return static_cast<uint32_t>(drawn() % limit); }

// Blocks run in a drawn order, as a device runs them in any, and the threads of each up or down.
template <typename Kernel>
auto on_grid(Kernel* kernel, dim3 grid, unsigned threads, size_t, cudaStream_t) {
    return [=](const auto&... arguments) {
        const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
        const bool is_malformed = blocks == 0 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535;
        if (is_malformed || threads == 0 || threads > 1024) throw std::invalid_argument("a launch out of range");
        ++num_launches;
        gridDim = grid;
        uint64_t step = drawn() % blocks + 1, block = drawn() % blocks;
        while (std::gcd(step, blocks) > 1) ++step;
        for (uint64_t n = 0; n < blocks; ++n, block = (block + step) % blocks) {
            blockIdx = dim3(static_cast<unsigned>(block % grid.x), static_cast<unsigned>(block / grid.x % grid.y),
                            static_cast<unsigned>(block / grid.x / grid.y));
            const bool down = below(2) == 1;
            for (unsigned t = 0; t < threads; ++t) {
                threadIdx = dim3(down ? threads - 1 - t : t);
                kernel(arguments...);
            }
        }
    };
}

// ---- the runtime, of a device that has everything ----

extern "C" {
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
}
