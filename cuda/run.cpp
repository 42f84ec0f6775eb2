#include "run.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "copy.h"
#include "staged.h"
#include "strategy.h"

// A torch without CUDA lacks it; the library must load there as well.
#pragma weak aoti_torch_get_current_cuda_stream

namespace blockyard {
namespace {

using torch::stable::accelerator::DeviceGuard;

void check_cuda(cudaError_t status, const char* action) {
    if (status != cudaSuccess) {
        fail("cuda", action, " failed: ", cudaGetErrorString(status), " (", static_cast<int>(status), ")");
    }
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

// Uses the bulk engine if the strategy asks for it and it can, else a kernel.
cudaError_t copy_by_kernel(const std::vector<CopyTensor>& tensors, const Steps& plan, StrategyChoice choice,
                           Direction direction, int32_t device, cudaStream_t stream) {
    if (choice.strategy == Strategy::kBulk && is_independent(plan) && fits_bulk(tensors.data(), tensors.size()) &&
        has_bulk(device)) {
        return copy_bulk(tensors.data(), tensors.size(), plan, choice.blocks, stream);
    }
    return direction == Direction::kWithin
               ? copy_on_device(tensors.data(), tensors.size(), plan, stream)
               : copy_host_kernel(tensors.data(), tensors.size(), plan, choice.blocks, stream);
}

bool is_dense(const CopyTensor& tensor) {
    return tensor.src_stride == tensor.width && tensor.dst_stride == tensor.width;
}

// Pieces of a copy between host and device; rows that are adjacent on both sides become one piece.
struct Pieces {
    std::vector<void*> dsts;
    std::vector<const void*> srcs;
    std::vector<size_t> sizes;

    void add(const CopyTensor& tensor, const std::vector<CopyPair>& pairs) {
        const bool dense = is_dense(tensor);
        for (size_t n = 0; n < pairs.size(); ++n) {
            const CopyPair pair = pairs[n];
            if (dense && n > 0 && pair.src == pairs[n - 1].src + 1 && pair.dst == pairs[n - 1].dst + 1) {
                sizes.back() += static_cast<size_t>(tensor.width);
                continue;
            }
            srcs.push_back(tensor.src + pair.src * tensor.src_stride);
            dsts.push_back(tensor.dst + pair.dst * tensor.dst_stride);
            sizes.push_back(static_cast<size_t>(tensor.width));
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
    const std::vector<CopyTensor> tensors = join(src, dst);
    const DeviceGuard guard(dst.device);
    const cudaStream_t stream = current_stream(dst.device);
    const StrategyChoice choice = strategy_of(tensors, plan.steps, dst.device, Direction::kWithin, false);
    check_cuda(copy_by_kernel(tensors, plan, choice, Direction::kWithin, dst.device, stream),
               "copying blocks within the device");
}

struct HostMemory {
    bool pinned = true;  // all copied memory is page-locked
    bool mapped = true;  // and kernels reach it by its host address
};

HostMemory ask_pointer(uintptr_t address) {
    void* pointer = reinterpret_cast<void*>(address);
    cudaPointerAttributes attributes{};
    check_cuda(cudaPointerGetAttributes(&attributes, pointer), "asking what memory a pointer is of");
    return {attributes.type != cudaMemoryTypeUnregistered, attributes.devicePointer == pointer};
}

// Asks at both ends of the copied range of each storage. A host pool is page-locked from its start, chunk by chunk.
HostMemory ask_host(const Side& host, uint32_t first_block, uint32_t last_block) {
    HostMemory found;
    uintptr_t low = 0, high = 0;
    for (size_t i = 0; i < host.views.size(); ++i) {
        const View& view = host.views[i];
        const auto start = reinterpret_cast<uintptr_t>(view.data);
        const uintptr_t first = start + first_block * static_cast<uintptr_t>(view.stride);
        const uintptr_t end = start + last_block * static_cast<uintptr_t>(view.stride) + view.width;
        const bool opens = i == 0 || host.views[i - 1].storage != view.storage;
        low = opens ? first : std::min(low, first);
        high = opens ? end : std::max(high, end);
        const bool closes = i + 1 == host.views.size() || host.views[i + 1].storage != view.storage;
        if (!closes || high == low) continue;
        for (const uintptr_t address : {low, high - 1}) {
            const HostMemory there = ask_pointer(address);
            found = {found.pinned && there.pinned, found.mapped && there.mapped};
        }
    }
    return found;
}

HostMemory ask_host(const Side& host, const std::vector<CopyPair>& pairs, bool to_host) {
    uint32_t first = UINT32_MAX, last = 0;
    for (const CopyPair& pair : pairs) {
        const uint32_t block = to_host ? pair.dst : pair.src;
        first = std::min(first, block);
        last = std::max(last, block);
    }
    return ask_host(host, first, last);
}

bool is_kernel(Strategy strategy) { return strategy == Strategy::kKernel || strategy == Strategy::kBulk; }

StrategyChoice strategy_between(const std::vector<CopyTensor>& tensors, const std::vector<CopyPair>& pairs,
                                int32_t device, Direction direction, const HostMemory& memory, cudaStream_t stream) {
    if (!memory.pinned) return {Strategy::kLoop, kFewBlocks};
    const bool to_host = direction == Direction::kToHost;
    const bool rows = has_host_rows(tensors, to_host);
    StrategyChoice choice = strategy_of(tensors, pairs, device, direction, rows);
    if (choice.strategy == Strategy::kStaged && (is_capturing(stream) || !has_staging(device, to_host))) {
        choice = strategy_of(tensors, pairs, device, direction, false);
    }
    // Narrow accesses would waste most of the link's bandwidth.
    const bool fits = memory.mapped && misalignment(tensors.data(), tensors.size()) % 16 == 0;
    if (is_kernel(choice.strategy) && !fits) choice.strategy = Strategy::kBatch;
    return choice;
}

// Copies pieces between host and device by the copy engines.
cudaError_t copy_pieces(const std::vector<CopyTensor>& tensors, const std::vector<CopyPair>& pairs, bool to_host,
                        bool batched, cudaStream_t stream) {
    Pieces pieces;
    for (const CopyTensor& tensor : tensors) pieces.add(tensor, pairs);
    const CopyBatch batch{pieces.dsts.data(), pieces.srcs.data(), pieces.sizes.data(), pieces.sizes.size(),
                          to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice};
    return copy_batch(batch, batched, stream);
}

void run_between(const Side& src, const Side& dst, const std::vector<CopyPair>& pairs) {
    const bool to_host = dst.device == Side::kHost;
    const Direction direction = to_host ? Direction::kToHost : Direction::kToDevice;
    const int32_t device = to_host ? src.device : dst.device;
    const std::vector<CopyTensor> tensors = join(src, dst);
    const DeviceGuard guard(device);
    const cudaStream_t stream = current_stream(device);
    const HostMemory memory = ask_host(to_host ? dst : src, pairs, to_host);
    if (!memory.pinned && is_capturing(stream)) {
        fail("capture", to_host ? dst.name : src.name,
             " is not page-locked: a graph would copy from or to memory that may move before it is replayed");
    }
    const StrategyChoice choice = strategy_between(tensors, pairs, device, direction, memory, stream);
    if (is_kernel(choice.strategy)) {
        check_cuda(copy_by_kernel(tensors, independent(pairs), choice, direction, device, stream),
                   "copying blocks between host and device by a kernel");
        return;
    }
    if (choice.strategy == Strategy::kStaged) {
        const CopyRows copy_rows = [&](const CopyTensor& rows, const std::vector<CopyPair>& part, cudaStream_t on) {
            return copy_pieces({rows}, part, to_host, memory.mapped, on);
        };
        check_cuda(copy_staged(device, tensors, pairs, to_host, choice.blocks, copy_rows, stream),
                   "copying blocks between host and device through staging");
        return;
    }
    check_cuda(copy_pieces(tensors, pairs, to_host, choice.strategy == Strategy::kBatch, stream),
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
