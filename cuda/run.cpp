#include "run.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "copy.h"
#include "ways.h"

// A torch without CUDA lacks it; the library must load there too.
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

// Pairs of views, one of each side; neighbours that lie side by side on both sides become one.
std::vector<CopyTensor> join(const Side& src, const Side& dst) {
    std::vector<CopyTensor> tensors;
    tensors.reserve(src.views.size());
    for (size_t i = 0; i < src.views.size(); ++i) {
        const View &from = src.views[i], &to = dst.views[i];
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

void run_on_device(const Side& src, const Side& dst, const Steps& plan) {
    const std::vector<CopyTensor> tensors = join(src, dst);
    const DeviceGuard guard(dst.device);
    const cudaStream_t stream = current_stream(dst.device);
    check_cuda(copy_on_device(tensors.data(), tensors.size(), plan, stream), "copying blocks within the device");
}

bool is_pinned(const Side& host) {
    uintptr_t known = 0;
    for (const View& view : host.views) {
        if (view.storage == known) continue;
        cudaPointerAttributes attributes{};
        check_cuda(cudaPointerGetAttributes(&attributes, view.data), "asking what memory a pointer is of");
        if (attributes.type == cudaMemoryTypeUnregistered) return false;
        known = view.storage;
    }
    return true;
}

bool is_dense(const CopyTensor& tensor) {
    return tensor.src_stride == tensor.width && tensor.dst_stride == tensor.width;
}

// Pieces of a copy between host and device; neighbours become one piece where rows follow one another on both sides.
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

Way way_of(const std::vector<CopyTensor>& tensors, const std::vector<CopyPair>& pairs, int32_t device, bool to_host) {
    int64_t runs = 1, bytes = 0, count = 0;
    for (size_t n = 1; n < pairs.size(); ++n) {
        runs += pairs[n].src != pairs[n - 1].src + 1 || pairs[n].dst != pairs[n - 1].dst + 1;
    }
    const auto num_pairs = static_cast<int64_t>(pairs.size());
    for (const CopyTensor& tensor : tensors) {
        bytes += tensor.width * num_pairs;
        count += is_dense(tensor) ? runs : num_pairs;
    }
    const Way way = choose_way(device, to_host, bytes / std::max<int64_t>(count, 1), count);
    // Narrow accesses would waste most of what crosses the link.
    const bool fits = way != Way::kKernel || misalignment(tensors.data(), tensors.size()) % 16 == 0;
    return fits ? way : Way::kBatch;
}

void run_between(const Side& src, const Side& dst, const std::vector<CopyPair>& pairs) {
    const bool to_host = dst.device == Side::kHost;
    const int32_t device = to_host ? src.device : dst.device;
    const std::vector<CopyTensor> tensors = join(src, dst);
    const DeviceGuard guard(device);
    const cudaStream_t stream = current_stream(device);
    const bool pinned = is_pinned(to_host ? dst : src);
    const Way way = pinned ? way_of(tensors, pairs, device, to_host) : Way::kLoop;
    if (way == Way::kKernel) {
        check_cuda(copy_far(tensors.data(), tensors.size(), independent(pairs), stream),
                   "copying blocks between host and device by a kernel");
        return;
    }
    Pieces pieces;
    for (const CopyTensor& tensor : tensors) {
        if (tensor.width > 0) pieces.add(tensor, pairs);
    }
    const CopyBatch batch{pieces.dsts.data(), pieces.srcs.data(), pieces.sizes.data(), pieces.sizes.size(),
                          to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice};
    check_cuda(copy_batch(batch, way == Way::kBatch, stream), "copying blocks between host and device");
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

}  // namespace blockyard
