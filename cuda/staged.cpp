#include "staged.h"

#include <algorithm>
#include <array>
#include <mutex>

#include "strategy.h"

namespace blockyard {
namespace {

struct Slot {
    unsigned char* memory = nullptr;
    cudaEvent_t used = nullptr;  // recorded after the work that fills it, then after the work that empties it
};

// Copies on any number of streams share a ring; its own stream carries the large copies.
struct Ring {
    std::mutex mutex;
    bool tried = false, ready = false;
    unsigned char* memory = nullptr;
    cudaStream_t rows = nullptr;
    cudaEvent_t fence = nullptr;
    std::array<Slot, kSlots> slots;
    size_t next = 0;
};

// Neighbouring tensors whose pieces of a block fit one slot.
struct Columns {
    std::vector<CopyTensor> tensors;
    int64_t width = 0;
};

Ring& ring_of(int device, bool to_host) {
    // Never destroyed: at exit the driver may be gone before static objects are.
    static auto* const rings = new std::array<std::array<Ring, 2>, kMaxDevices>;
    return rings->at(static_cast<size_t>(device))[to_host];
}

cudaError_t allocate(Ring& ring) {
    cudaError_t status = cudaMalloc(reinterpret_cast<void**>(&ring.memory), kSlots * kSlotBytes);
    if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&ring.rows, cudaStreamNonBlocking);
    if (status == cudaSuccess) status = cudaEventCreateWithFlags(&ring.fence, cudaEventDisableTiming);
    for (size_t n = 0; n < kSlots && status == cudaSuccess; ++n) {
        ring.slots[n].memory = ring.memory + n * kSlotBytes;
        status = cudaEventCreateWithFlags(&ring.slots[n].used, cudaEventDisableTiming);
    }
    if (status != cudaSuccess && ring.memory != nullptr) cudaFree(ring.memory);
    return status;
}

std::vector<Columns> split_columns(const std::vector<CopyTensor>& tensors) {
    std::vector<Columns> columns;
    for (const CopyTensor& tensor : tensors) {
        if (columns.empty() || columns.back().width + tensor.width > kSlotBytes) columns.emplace_back();
        columns.back().tensors.push_back(tensor);
        columns.back().width += tensor.width;
    }
    return columns;
}

// Rows of the next part, at least one: at most `max_bytes` in the middle of a copy, and half of the remaining rows
// towards its end.
size_t rows_of_part(int64_t width, size_t left, int64_t max_bytes) {
    const auto rows = [width](int64_t bytes) {
        return std::max<size_t>(static_cast<size_t>(bytes / std::max<int64_t>(width, 1)), 1);
    };
    return std::min(left, std::max(rows(kMinPartBytes), std::min(rows(max_bytes), left / 2)));
}

// One staged copy; these fields are the same for all of its parts.
struct StagedCopy {
    Ring& ring;
    const std::vector<CopyPair>& pairs;
    bool to_host;
    unsigned blocks;
    const CopyRows& copy_rows;
    cudaStream_t stream;

    // Copies pairs [first, end) in some columns through the next slot.
    cudaError_t copy_part(const Columns& columns, size_t first, size_t end) const {
        Slot& slot = ring.slots[ring.next++ % kSlots];
        const cudaStream_t fills = to_host ? stream : ring.rows, empties = to_host ? ring.rows : stream;
        cudaError_t status = cudaStreamWaitEvent(fills, slot.used, 0);
        if (status == cudaSuccess)
            status = to_host ? copy_views(slot, columns, first, end) : copy_host_rows(slot, columns, first, end);
        if (status == cudaSuccess) status = order(slot.used, fills, empties);
        if (status == cudaSuccess)
            status = to_host ? copy_host_rows(slot, columns, first, end) : copy_views(slot, columns, first, end);
        return status == cudaSuccess ? cudaEventRecord(slot.used, empties) : status;
    }

    // Between the host and the slot, whose row n belongs to pair first + n.
    cudaError_t copy_host_rows(const Slot& slot, const Columns& columns, size_t first, size_t end) const {
        CopyTensor row = columns.tensors[0];
        row.width = columns.width;
        if (to_host) {
            row.src = slot.memory;
            row.src_stride = columns.width;
        } else {
            row.dst = slot.memory;
            row.dst_stride = columns.width;
        }
        return copy_rows(row, through_slot(first, end, to_host), ring.rows);
    }

    // Between the slot and the device's views.
    cudaError_t copy_views(const Slot& slot, const Columns& columns, size_t first, size_t end) const {
        std::vector<CopyTensor> pieces = columns.tensors;
        unsigned char* start = slot.memory;
        for (CopyTensor& piece : pieces) {
            if (to_host) {
                piece.dst = start;
                piece.dst_stride = columns.width;
            } else {
                piece.src = start;
                piece.src_stride = columns.width;
            }
            start += piece.width;
        }
        const Steps plan = independent(through_slot(first, end, !to_host));
        return copy_host_kernel(pieces.data(), pieces.size(), plan, blocks, stream);
    }

    // Pairs [first, end) with the slot's rows in place of one side.
    std::vector<CopyPair> through_slot(size_t first, size_t end, bool from_slot) const {
        std::vector<CopyPair> part(pairs.begin() + static_cast<ptrdiff_t>(first),
                                   pairs.begin() + static_cast<ptrdiff_t>(end));
        for (size_t n = 0; n < part.size(); ++n) (from_slot ? part[n].src : part[n].dst) = static_cast<uint32_t>(n);
        return part;
    }
};

}  // namespace

bool has_host_rows(const std::vector<CopyTensor>& tensors, bool to_host) {
    int64_t width = 0;
    for (const CopyTensor& tensor : tensors) {
        const CopyTensor& row = tensors[0];
        const bool follows = to_host ? tensor.dst == row.dst + width && tensor.dst_stride == row.dst_stride
                                     : tensor.src == row.src + width && tensor.src_stride == row.src_stride;
        if (!follows || tensor.width > kSlotBytes) return false;
        width += tensor.width;
    }
    return width >= kMinRowBytes;
}

bool has_staging(int device, bool to_host) {
    if (device < 0 || device >= kMaxDevices) return false;
    Ring& ring = ring_of(device, to_host);
    const std::lock_guard<std::mutex> lock(ring.mutex);
    if (!ring.tried) {
        ring.tried = true;
        // An allocation would break a capture of another thread in any other mode.
        const RelaxedCapture relaxed;
        ring.ready = allocate(ring) == cudaSuccess;
        if (!ring.ready) cudaGetLastError();  // Other strategies need no ring: clear the error.
    }
    return ring.ready;
}

cudaError_t copy_staged(int device, const std::vector<CopyTensor>& tensors, const std::vector<CopyPair>& pairs,
                        bool to_host, unsigned blocks, const CopyRows& copy_rows, cudaStream_t stream) {
    Ring& ring = ring_of(device, to_host);
    const std::lock_guard<std::mutex> lock(ring.mutex);
    const StagedCopy copy{ring, pairs, to_host, blocks, copy_rows, stream};
    cudaError_t status = order(ring.fence, stream, ring.rows);
    int64_t part_bytes = kMinPartBytes;
    for (const Columns& columns : split_columns(tensors)) {
        for (size_t first = 0; first < pairs.size() && status == cudaSuccess;) {
            const size_t end = first + rows_of_part(columns.width, pairs.size() - first, part_bytes);
            status = copy.copy_part(columns, first, end);
            first = end;
            part_bytes = std::min(2 * part_bytes, kSlotBytes);
        }
    }
    // A copy that fails half-way has queued its first half: later work waits for that as well.
    const cudaError_t joined = order(ring.fence, ring.rows, stream);
    return status != cudaSuccess ? status : joined;
}

}  // namespace blockyard
