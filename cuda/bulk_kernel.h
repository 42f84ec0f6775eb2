// How one thread drives bulk asynchronous copies through a ring of stages. Plain C++ over a ring: on a device the ring
// is shared memory with barriers, in the tests a model of both.
#pragma once

#include "copy_kernel.h"

namespace blockyard {

constexpr uint32_t kStages = 12;
// Loads in flight. Stores may still read the other stages.
constexpr uint32_t kAhead = 8;
constexpr uint32_t kReading = kStages - kAhead;
static_assert(kAhead > 0 && kReading > 0, "loads and stores overlap");

struct BulkPiece {
    const unsigned char* src;
    unsigned char* dst;
    uint32_t bytes;
};

// The pieces, at most a stage long, of one of several blocks of threads: every `stride`-th from `first`. If a row's
// tensors are adjacent, neighbouring blocks of threads copy neighbouring bytes.
class BulkPieces {
  public:
    __device__ BulkPieces(const CopyParams& params, uint32_t num_tensors, uint32_t chunks, uint32_t first,
                          uint32_t stride)
        : params_(params),
          chunks_(chunks),
          per_step_(num_tensors * chunks),
          total_(per_step_ * params.num_groups),
          at_(first),
          stride_(stride) {}

    // False if none is left.
    __device__ bool next(BulkPiece& piece) {
        for (; at_ < total_; at_ += stride_) {
            const uint32_t rest = at_ % per_step_;
            const CopyTensor& tensor = params_.tensors[rest / chunks_];
            const int64_t offset = static_cast<int64_t>(rest % chunks_) * kStageBytes;
            if (offset >= tensor.width) continue;
            const CopyPair pair = params_.steps[at_ / per_step_];
            const int64_t left = tensor.width - offset;
            piece.src = tensor.src + pair.src * tensor.src_stride + offset;
            piece.dst = tensor.dst + pair.dst * tensor.dst_stride + offset;
            piece.bytes = left < kStageBytes ? static_cast<uint32_t>(left) : kStageBytes;
            at_ += stride_;
            return true;
        }
        return false;
    }

  private:
    const CopyParams& params_;
    uint32_t chunks_, per_step_, total_, at_, stride_;
};

// Copies all pieces. The ring gives:
//   load(stage, src, bytes)     starts to fill a stage
//   wait_loaded(stage, parity)  until its fill of this parity (0 for the first) has landed
//   store(stage, dst, bytes)    starts to write a stage out
//   wait_read<n>()              until all stores but the last n have read their stages
//   drain()                     until all stores have landed
template <typename Ring>
__device__ void drive_ring(BulkPieces stores, Ring& ring) {
    BulkPieces loads = stores;
    BulkPiece piece{};
    uint32_t loaded = 0;
#pragma unroll 1
    while (loaded < kAhead && loads.next(piece)) ring.load(loaded++, piece.src, piece.bytes);
#pragma unroll 1
    for (uint32_t stored = 0; stores.next(piece); ++stored) {
        const uint32_t stage = stored % kStages;
        ring.wait_loaded(stage, stored / kStages % 2);
        ring.store(stage, piece.dst, piece.bytes);
        if (!loads.next(piece)) continue;
        // The next load's stage was last read by the store before the last kReading.
        ring.template wait_read<kReading>();
        ring.load(loaded++ % kStages, piece.src, piece.bytes);
    }
    ring.drain();
}

}  // namespace blockyard
