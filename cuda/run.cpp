#include "run.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "copy.h"
#include "extents.h"
#include "staged.h"
#include "strategy.h"

// A torch without CUDA lacks it; the library must load there as well.
#pragma weak aoti_torch_get_current_cuda_stream

namespace blockyard {
namespace {

using torch::stable::accelerator::DeviceGuard;

void check_cuda(cudaError_t status, const char* action) {
    if (status != cudaSuccess) {
        cudaGetLastError();  // Reported here; the next launch must not find it.
        fail("cuda", action, " failed: ", cudaGetErrorString(status), " (", static_cast<int>(status), ")");
    }
}

// The check after a launch would also find errors that earlier calls of this thread left in this library's own copy of
// the runtime, so report those before the first launch. Torch's calls leave their errors in torch's copy, for torch to
// report. After an error that cannot be cleared, the process can no longer use the device.
void report_stale(const char* action) {
    const cudaError_t stale = cudaGetLastError();
    if (stale == cudaSuccess) return;
    if (cudaPeekAtLastError() != cudaSuccess) {
        fail("cuda", "before ", action, ", nothing was copied: an earlier call failed: ", cudaGetErrorString(stale),
             " (", static_cast<int>(stale), ")");
    }
    std::ostringstream message;
    message << "a CUDA error from before " << action << " was cleared: " << cudaGetErrorString(stale) << " ("
            << static_cast<int>(stale) << ")";
    aoti_torch_warn(__func__, __FILE__, __LINE__, message.str().c_str());
}

cudaStream_t current_stream(int32_t device) {
    if (aoti_torch_get_current_cuda_stream == nullptr) fail("cuda", "this torch was built without CUDA");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return static_cast<cudaStream_t>(stream);
}

// Pairs the views of both sides that hold bytes; neighbours that are adjacent on both sides become one.
std::vector<CopyTensor> join(const Side& src, const Side& dst) {
    std::vector<CopyTensor> tensors;
    tensors.reserve(src.views.size());
    for (size_t i = 0; i < src.views.size(); ++i) {
        const View &from = src.views[i], &to = dst.views[i];
        if (from.width == 0) continue;
        CopyTensor* last = tensors.empty() ? nullptr : &tensors.back();
        if (last != nullptr && from.stride == last->src_stride && to.stride == last->dst_stride &&
            from.data == last->src + last->width && to.data == last->dst + last->width &&
            last->width + from.width <= std::min(from.stride, to.stride)) {
            last->width += from.width;
        } else {
            tensors.push_back({from.data, to.data, from.stride, to.stride, from.width});
        }
    }
    return tensors;
}

bool is_dense(const CopyTensor& tensor) {
    return tensor.src_stride == tensor.width && tensor.dst_stride == tensor.width;
}

// The rows that pairs name on one side, and their extents.
struct Reach {
    Extents extents;
    uint32_t first = UINT32_MAX, last = 0;

    Reach(const std::vector<CopyPair>& pairs, uint32_t CopyPair::* block, bool is_host) : extents(is_host) {
        for (const CopyPair& pair : pairs) {
            first = std::min(first, pair.*block);
            last = std::max(last, pair.*block);
        }
    }

    uintptr_t start(const unsigned char* base, int64_t stride) const {
        return reinterpret_cast<uintptr_t>(base) + first * static_cast<uintptr_t>(stride);
    }
    uintptr_t end(const unsigned char* base, int64_t stride, int64_t width) const {
        return reinterpret_cast<uintptr_t>(base) + last * static_cast<uintptr_t>(stride) +
               static_cast<uintptr_t>(width);
    }
    Fit fit(const unsigned char* base, int64_t stride, int64_t width) {
        return extents.fit(start(base, stride), end(base, stride, width), stride, width);
    }
};

// Pieces of a copy between host and device. Rows that are adjacent on both sides become one piece, up to the ends of
// their extents.
struct Pieces {
    std::vector<void*> dsts;
    std::vector<const void*> srcs;
    std::vector<size_t> sizes;

    void add(const CopyTensor& tensor, const std::vector<CopyPair>& pairs, Reach& src, Reach& dst) {
        const size_t before = sizes.size();
        merge(tensor, pairs);
        const Fit fit = std::max(src.fit(tensor.src, tensor.src_stride, tensor.width),
                                 dst.fit(tensor.dst, tensor.dst_stride, tensor.width));
        if (fit != Fit::kAll) cut(before, fit == Fit::kRows ? static_cast<size_t>(tensor.width) : 0, src, dst);
    }

  private:
    void push(const unsigned char* src, unsigned char* dst, size_t bytes) {
        srcs.push_back(src);
        dsts.push_back(dst);
        sizes.push_back(bytes);
    }

    void merge(const CopyTensor& tensor, const std::vector<CopyPair>& pairs) {
        const bool dense = is_dense(tensor);
        for (size_t n = 0; n < pairs.size(); ++n) {
            const CopyPair pair = pairs[n];
            if (dense && n > 0 && pair.src == pairs[n - 1].src + 1 && pair.dst == pairs[n - 1].dst + 1) {
                sizes.back() += static_cast<size_t>(tensor.width);
                continue;
            }
            push(tensor.src + pair.src * tensor.src_stride, tensor.dst + pair.dst * tensor.dst_stride,
                 static_cast<size_t>(tensor.width));
        }
    }

    // Cuts the pieces from index `from` on where an extent ends. Pieces of up to `safe` bytes need no cut.
    void cut(size_t from, size_t safe, Reach& src, Reach& dst) {
        while (from < sizes.size() && sizes[from] <= safe) ++from;
        if (from == sizes.size()) return;
        const auto start = static_cast<std::ptrdiff_t>(from);
        const std::vector<void*> to(dsts.begin() + start, dsts.end());
        const std::vector<const void*> of(srcs.begin() + start, srcs.end());
        const std::vector<size_t> all(sizes.begin() + start, sizes.end());
        dsts.resize(from);
        srcs.resize(from);
        sizes.resize(from);
        for (size_t n = 0; n < all.size(); ++n) {
            const auto* source = static_cast<const unsigned char*>(of[n]);
            auto* target = static_cast<unsigned char*>(to[n]);
            for (size_t done = 0; done < all[n];) {
                size_t bytes = all[n] - done;
                if (all[n] > safe) {
                    bytes = src.extents.room(reinterpret_cast<uintptr_t>(source + done), bytes);
                    bytes = dst.extents.room(reinterpret_cast<uintptr_t>(target + done), bytes);
                }
                push(source + done, target + done, bytes);
                done += bytes;
            }
        }
    }
};

StrategyChoice strategy_of(const std::vector<CopyTensor>& tensors, const std::vector<CopyPair>& pairs, int32_t device,
                           Direction direction, bool host_rows) {
    int64_t runs = 1, bytes = 0, count = 0;
    for (size_t n = 1; n < pairs.size(); ++n) {
        runs += pairs[n].src != pairs[n - 1].src + 1 || pairs[n].dst != pairs[n - 1].dst + 1;
    }
    const auto num_pairs = static_cast<int64_t>(pairs.size());
    for (const CopyTensor& tensor : tensors) {
        bytes += tensor.width * num_pairs;
        count += is_dense(tensor) ? runs : num_pairs;
    }
    return choose_strategy(device, direction, bytes / std::max<int64_t>(count, 1), count, host_rows);
}

void run_on_device(const Side& src, const Side& dst, const Steps& plan) {
    report_stale("copying blocks within the device");
    const std::vector<CopyTensor> tensors = join(src, dst);
    const DeviceGuard guard(dst.device);
    const cudaStream_t stream = current_stream(dst.device);
    check_cuda(copy_on_device(tensors.data(), tensors.size(), plan, stream), "copying blocks within the device");
}

struct HostMemory {
    bool pinned = true;           // all copied memory is page-locked
    bool same = true;             // the device uses the host's addresses
    bool reached = true;          // kernels reach every view by its first address, shifted
    std::vector<int64_t> shifts;  // for each view, the device's address minus the host's
};

// Queries the copied range of each storage.
HostMemory ask_host(const Side& host, Reach& reach) {
    HostMemory found;
    const size_t num_views = host.views.size();
    found.shifts.resize(num_views);
    uintptr_t low = 0, high = 0;
    size_t opened = 0;
    for (size_t i = 0; i < num_views; ++i) {
        const View& view = host.views[i];
        const uintptr_t first = reach.start(view.data, view.stride);
        const uintptr_t end = reach.end(view.data, view.stride, view.width);
        const bool opens = i == 0 || host.views[i - 1].storage != view.storage;
        if (opens) opened = i;
        low = opens ? first : std::min(low, first);
        high = opens ? end : std::max(high, end);
        const bool closes = i + 1 == num_views || host.views[i + 1].storage != view.storage;
        if (!closes || high == low) continue;
        found.pinned = found.pinned && reach.extents.pinned(low, high);
        if (!found.pinned) return found;
        const int64_t shift = reach.extents.shift(low);
        const bool one = reach.extents.at(low).end >= high;
        // Memory that is adjacent on the host need not be adjacent on the device.
        const bool same = shift == 0 && (one || reach.extents.shift(high - 1) == 0);
        found.same = found.same && same;
        found.reached = found.reached && (same || one);
        std::fill(found.shifts.begin() + static_cast<std::ptrdiff_t>(opened),
                  found.shifts.begin() + static_cast<std::ptrdiff_t>(i) + 1, shift);
    }
    return found;
}

// The views as the device addresses them.
Side on_device(Side host, const HostMemory& memory) {
    for (size_t i = 0; i < host.views.size(); ++i) host.views[i].data += memory.shifts[i];
    return host;
}

// Whether copies can be staged. Warns once per device and direction if there is no memory for it.
bool can_stage(int32_t device, bool to_host) {
    static std::array<std::array<std::atomic<bool>, 2>, kMaxDevices> warned;
    if (has_staging(device, to_host)) return true;
    if (device >= 0 && device < kMaxDevices && !warned[static_cast<size_t>(device)][to_host].exchange(true)) {
        std::ostringstream message;
        message << "CUDA device " << device << " has no " << (kSlots * kSlotBytes >> 20) << " MiB left to stage copies "
                << (to_host ? "to" : "from") << " the host: copies of many small pieces will be slower in this process";
        aoti_torch_warn(__func__, __FILE__, __LINE__, message.str().c_str());
    }
    return false;
}

StrategyChoice strategy_between(const std::vector<CopyTensor>& tensors, const std::vector<CopyPair>& pairs,
                                int32_t device, Direction direction, const HostMemory& memory, cudaStream_t stream) {
    if (!memory.pinned) return {Strategy::kLoop, 1};
    const bool to_host = direction == Direction::kToHost;
    // Rows of one piece each would reach a slot no sooner than the view.
    const bool rows = tensors.size() > 1 && has_host_rows(tensors, to_host);
    StrategyChoice choice = strategy_of(tensors, pairs, device, direction, rows);
    if (choice.strategy == Strategy::kStaged && (is_capturing(stream) || !can_stage(device, to_host))) {
        choice = strategy_of(tensors, pairs, device, direction, false);
    }
    // Narrow accesses would waste most of the link's bandwidth.
    const bool fits = memory.reached && misalignment(tensors.data(), tensors.size()) % 16 == 0;
    if (choice.strategy == Strategy::kKernel && !fits) choice.strategy = Strategy::kBatch;
    // A batch uses host addresses on the device; single copies translate them.
    if (choice.strategy == Strategy::kBatch && !memory.same) choice.strategy = Strategy::kLoop;
    return choice;
}

// Copies pieces between host and device by the copy engines, at most `max_pieces` in one batched call; 0: one by one.
cudaError_t copy_pieces(const std::vector<CopyTensor>& tensors, const std::vector<CopyPair>& pairs, Reach& from,
                        Reach& to, bool to_host, size_t max_pieces, cudaStream_t stream) {
    Pieces pieces;
    for (const CopyTensor& tensor : tensors) pieces.add(tensor, pairs, from, to);
    const CopyBatch batch{pieces.dsts.data(), pieces.srcs.data(), pieces.sizes.data(), pieces.sizes.size(),
                          to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice};
    return copy_batch(batch, max_pieces, stream);
}

void run_between(const Side& src, const Side& dst, const std::vector<CopyPair>& pairs) {
    const bool to_host = dst.device == Side::kHost;
    const Direction direction = to_host ? Direction::kToHost : Direction::kToDevice;
    const int32_t device = to_host ? src.device : dst.device;
    report_stale("copying blocks between host and device");
    const std::vector<CopyTensor> tensors = join(src, dst);
    const DeviceGuard guard(device);
    const cudaStream_t stream = current_stream(device);
    // Driver calls need the device's context. The guard does not create it; the first call of the runtime does.
    check_cuda(cudaSetDevice(device), "entering the device");
    Reach from(pairs, &CopyPair::src, !to_host), to(pairs, &CopyPair::dst, to_host);
    const HostMemory memory = to_host ? ask_host(dst, to) : ask_host(src, from);
    if (const int error = to_host ? to.extents.error() : from.extents.error(); error != 0) {
        fail("cuda", "querying the memory of ", to_host ? dst.name : src.name, " failed: driver error ", error);
    }
    if (!memory.pinned && is_capturing(stream)) {
        fail("capture", to_host ? dst.name : src.name,
             " is not page-locked: a graph would copy from or to memory that may move before it is replayed");
    }
    const StrategyChoice choice = strategy_between(tensors, pairs, device, direction, memory, stream);
    if (choice.strategy == Strategy::kKernel) {
        const std::vector<CopyTensor> seen =
            memory.same ? tensors
                        : join(to_host ? src : on_device(src, memory), to_host ? on_device(dst, memory) : dst);
        check_cuda(copy_host_kernel(seen.data(), seen.size(), independent(pairs), choice.blocks, stream),
                   "copying blocks between host and device by a kernel");
        return;
    }
    if (choice.strategy == Strategy::kStaged) {
        const size_t max_pieces = memory.same ? batch_pieces(device) : 0;
        const CopyRows copy_rows = [&](const CopyTensor& rows, const std::vector<CopyPair>& part, cudaStream_t on) {
            Reach slot(part, to_host ? &CopyPair::src : &CopyPair::dst, false);
            return copy_pieces({rows}, part, to_host ? slot : from, to_host ? to : slot, to_host, max_pieces, on);
        };
        check_cuda(copy_staged(device, tensors, pairs, to_host, choice.blocks, copy_rows, stream),
                   "copying blocks between host and device through staging");
        return;
    }
    const size_t max_pieces = choice.strategy == Strategy::kBatch ? batch_pieces(device) : 0;
    check_cuda(copy_pieces(tensors, pairs, from, to, to_host, max_pieces, stream),
               "copying blocks between host and device");
}

}  // namespace

void run(const Side& src, const Side& dst, const std::vector<CopyPair>& pairs) {
    if (src.device == Side::kHost && dst.device == Side::kHost) {
        fail("layout", "neither ", src.name, " nor ", dst.name, " is on a CUDA device");
    }
    const bool within = src.device == dst.device;
    if (!within && src.device != Side::kHost && dst.device != Side::kHost) {
        fail("layout", src.name, " is on CUDA device ", src.device, ", ", dst.name, " on ", dst.device);
    }
    if (pairs.empty()) return;
    within ? run_on_device(src, dst, independent(pairs)) : run_between(src, dst, pairs);
}

void prepare(int32_t device) {
    const DeviceGuard guard(device);
    check_cuda(cudaSetDevice(device), "entering the device");
    for (const bool to_host : {false, true}) can_stage(device, to_host);
}

void run_within(const Side& caches, const Steps& plan) {
    if (caches.device == Side::kHost) fail("layout", caches.name, " are not on a CUDA device");
    if (!plan.steps.empty()) run_on_device(caches, caches, plan);
}

void run_loop(const Side& src, const Side& dst, const std::vector<CopyPair>& pairs) {
    const int32_t device = std::max(src.device, dst.device);
    if (device == Side::kHost) fail("layout", "neither ", src.name, " nor ", dst.name, " is on a CUDA device");
    const DeviceGuard guard(device);
    const cudaStream_t stream = current_stream(device);
    for (const CopyPair& pair : pairs) {
        for (size_t i = 0; i < src.views.size(); ++i) {
            const View &from = src.views[i], &to = dst.views[i];
            check_cuda(cudaMemcpyAsync(to.data + pair.dst * to.stride, from.data + pair.src * from.stride,
                                       static_cast<size_t>(from.width), cudaMemcpyDefault, stream),
                       "copying one piece");
        }
    }
}

}  // namespace blockyard
