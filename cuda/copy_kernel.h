// The work of one thread of each copy kernel. Plain C++ over indices, so tests can run it on a CPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "launch_limits.h"

#ifndef __CUDACC__
#undef __device__
#define __device__
#endif

namespace blockyard {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kWarp = 32;
// Accesses that one lane has in flight, to hide the latency of host memory.
constexpr int kHostUnroll = 8;
// Bytes of parameters that devices from sm_70 on accept.
constexpr size_t kMaxParams = 32764;

struct CopyParams {
    CopyTensor tensors[kMaxTensors];
    CopyPair steps[kMaxSteps];
    uint16_t starts[kMaxSteps + 1];  // first step of each group
    uint16_t num_groups;
};
static_assert(sizeof(CopyParams) <= kMaxParams, "the parameters of one launch have a limit");
static_assert(kMaxTensors <= 65535 && kMaxSteps <= 65535, "they are the grid's second and third dimensions");
static_assert(kMaxSteps > kMaxRing, "a ring stays in one part");

// Bytes of a row that one thread block moves.
template <typename Access>
constexpr int64_t kChunk = static_cast<int64_t>(sizeof(Access)) * kThreads * kUnroll;

// Maximum number of rows, shorter than a chunk, that one thread block moves. More would leave multiprocessors idle
// if there are few rows.
constexpr uint32_t kMaxRows = 16;

// Rows of a launch's widest tensor that fill a thread block.
template <typename Access>
uint32_t rows_per_block(int64_t widest) {
    return static_cast<uint32_t>(std::clamp<int64_t>(kChunk<Access> / widest, 1, kMaxRows));
}

// Copies some rows of one tensor, or one chunk of a row; the steps are independent.
template <typename Access>
__device__ void walk_rows(const CopyParams& params, size_t chunk, size_t tensor_index, size_t part,
                          uint32_t rows_per_block, int thread) {
    const CopyTensor& tensor = params.tensors[tensor_index];
    const int64_t count = tensor.width / static_cast<int64_t>(sizeof(Access));
    if (count == 0) return;
    // All loads are in flight before the first store waits for one.
    Access values[kUnroll];
    Access* targets[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        const auto place = static_cast<uint32_t>(thread + i * kThreads);
        // A chunk holds all of these rows, so their count has 32 bits.
        const uint32_t row = rows_per_block > 1 ? place / static_cast<uint32_t>(count) : 0;
        const int64_t at = static_cast<int64_t>(chunk) * (kThreads * kUnroll) + place - row * count;
        const size_t step = part * rows_per_block + row;
        const bool is_inside = row < rows_per_block && step < params.num_groups && at < count;
        targets[i] = nullptr;
        if (!is_inside) continue;
        const CopyPair pair = params.steps[step];
        values[i] = reinterpret_cast<const Access*>(tensor.src + pair.src * tensor.src_stride)[at];
        targets[i] = reinterpret_cast<Access*>(tensor.dst + pair.dst * tensor.dst_stride) + at;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
        if (targets[i] != nullptr) *targets[i] = values[i];
    }
}

// Moves one chunk of rows of one tensor through the steps of one group.
template <typename Access>
__device__ void walk_group(const CopyParams& params, size_t chunk, size_t tensor_index, size_t group, int thread) {
    const CopyTensor& tensor = params.tensors[tensor_index];
    const int64_t count = tensor.width / static_cast<int64_t>(sizeof(Access));
    const int64_t first = static_cast<int64_t>(chunk) * (kThreads * kUnroll) + thread;
    Access aside[kUnroll];
    for (int step = params.starts[group]; step < params.starts[group + 1]; ++step) {
        const CopyPair pair = params.steps[step];
        const auto* src = reinterpret_cast<const Access*>(tensor.src + pair.src * tensor.src_stride);
        auto* dst = reinterpret_cast<Access*>(tensor.dst + pair.dst * tensor.dst_stride);
        Access values[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int64_t at = first + i * kThreads;
            if (at < count) values[i] = pair.src == kAside ? aside[i] : src[at];
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int64_t at = first + i * kThreads;
            if (at >= count) continue;
            if (pair.dst == kAside) {
                aside[i] = values[i];
            } else {
                dst[at] = values[i];
            }
        }
    }
}

// Bytes of a row that one warp of the host kernel moves at a time.
template <typename Access>
constexpr int64_t kHostChunk = static_cast<int64_t>(sizeof(Access)) * kWarp * kHostUnroll;

// Copies the pieces of one warp: every num_warps-th chunk. If a row's tensors are adjacent, neighbouring warps read
// neighbouring bytes.
template <typename Access>
__device__ void walk_host_pieces(const CopyParams& params, uint32_t num_tensors, uint32_t chunks, uint32_t warp,
                                 uint32_t num_warps, int lane) {
    const uint64_t per_step = static_cast<uint64_t>(num_tensors) * chunks;
    const uint64_t total = per_step * params.num_groups;
    for (uint64_t work = warp; work < total; work += num_warps) {
        const CopyPair pair = params.steps[work / per_step];
        const auto rest = static_cast<uint32_t>(work % per_step);
        const CopyTensor& tensor = params.tensors[rest / chunks];
        const int64_t count = tensor.width / static_cast<int64_t>(sizeof(Access));
        const int64_t first = static_cast<int64_t>(rest % chunks) * (kWarp * kHostUnroll) + lane;
        const auto* src = reinterpret_cast<const Access*>(tensor.src + pair.src * tensor.src_stride);
        auto* dst = reinterpret_cast<Access*>(tensor.dst + pair.dst * tensor.dst_stride);
        Access values[kHostUnroll];
#pragma unroll
        for (int i = 0; i < kHostUnroll; ++i) {
            if (first + i * kWarp < count) values[i] = src[first + i * kWarp];
        }
#pragma unroll
        for (int i = 0; i < kHostUnroll; ++i) {
            if (first + i * kWarp < count) dst[first + i * kWarp] = values[i];
        }
    }
}

}  // namespace blockyard
