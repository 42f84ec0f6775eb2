// Copies between rows on the host and views on the device through slots in device memory: a few large copies between
// rows and slots, and a kernel between slots and views. No torch here.
#pragma once

#include <functional>
#include <vector>

#include "copy.h"

namespace blockyard {

// Each direction of a device has a ring of slots. It is allocated once, at the first staged copy.
constexpr size_t kSlots = 3;
constexpr int64_t kSlotBytes = 16 << 20;
// Bytes of a copy's first and last part. They are small, since the other half of the work waits for the first part, and
// nothing overlaps the last. In between, parts grow to a slot, since each part costs the caller a few driver calls.
constexpr int64_t kMinPartBytes = 2 << 20;
// Shorter rows would not reach the rate of a large copy.
constexpr int64_t kMinRowBytes = 64 << 10;

// Whether the host's pieces of a block are contiguous, in the order of the tensors, and long enough together. All
// tensors hold bytes.
bool has_host_rows(const std::vector<CopyTensor>& tensors, bool to_host);

// Whether the current device has its ring for a direction. Allocates it on first use, even while another thread
// captures a graph. If there is no memory for it, the process does without it from then on.
bool has_staging(int device, bool to_host);

// Copies rows on the host to or from a slot by the copy engines.
using CopyRows = std::function<cudaError_t(const CopyTensor& rows, const std::vector<CopyPair>& pairs, cudaStream_t)>;

// Copies every pair in every tensor, in the order of `stream`, which must not be capturing: a graph would keep slots
// that other copies use. Requires has_host_rows and has_staging; `blocks` is the kernel's.
cudaError_t copy_staged(int device, const std::vector<CopyTensor>& tensors, const std::vector<CopyPair>& pairs,
                        bool to_host, unsigned blocks, const CopyRows& copy_rows, cudaStream_t stream);

}  // namespace blockyard
