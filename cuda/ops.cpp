// The CUDA implementations of the ops that python/blockyard/transfer/ops.py defines, over torch's stable ABI.
//
// Each: check everything on the host, enter the device, launch on its current stream, check the result.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "check.h"
#include "copy.h"
#include "mapping.h"
#include "ways.h"

// A torch without CUDA lacks it; the library must load there too.
#pragma weak aoti_torch_get_current_cuda_stream

namespace blockyard {
namespace {

using torch::stable::Tensor;
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

// Copies between two sides that share no byte.
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

// Makes steps within one side.
void run_within(const Side& caches, const Steps& plan) {
    if (caches.device == Side::kHost) fail("layout", caches.name, " are not on a CUDA device");
    if (!plan.steps.empty()) run_on_device(caches, caches, plan);
}

// ---- the ops ----

void swap_blocks(std::vector<Tensor> src_views, std::vector<Tensor> dst_views, Tensor pairs) {
    const Side src("src", src_views), dst("dst", dst_views);
    check_swap(src, dst);
    run(src, dst, read_pairs(pairs, src.blocks, dst.blocks));
}

void copy_blocks(std::vector<Tensor> views, Tensor pairs) {
    const Side caches("caches", views);
    caches.check_apart();
    const std::vector<CopyPair> checked = read_pairs(pairs, caches.blocks, caches.blocks);
    check_parted(checked, caches.blocks);
    run_within(caches, independent(checked));
}

void move_blocks(std::vector<Tensor> views, Tensor pairs) {
    const Side caches("caches", views);
    caches.check_apart();
    const std::vector<CopyPair> checked = read_pairs(pairs, caches.blocks, caches.blocks);
    run_within(caches, order_moves(checked, static_cast<size_t>(caches.blocks)));
}

void exchange_blocks(std::vector<Tensor> views, Tensor pairs) {
    const Side caches("caches", views);
    caches.check_apart();
    run_within(caches, order_exchanges(read_exchanges(pairs, caches.blocks)));
}

void gather_blocks(std::vector<Tensor> views, Tensor staging, Tensor blocks) {
    const Side caches("caches", views), rows("rows", {staging});
    const Side pieces = rows.split(caches.views);
    check_swap(caches, pieces);
    run(caches, pieces, read_blocks(blocks, caches.blocks, rows.blocks, false));
}

void scatter_blocks(Tensor staging, std::vector<Tensor> views, Tensor blocks) {
    const Side caches("caches", views), rows("rows", {staging});
    const Side pieces = rows.split(caches.views);
    check_swap(pieces, caches);
    std::vector<CopyPair> pairs = read_blocks(blocks, caches.blocks, rows.blocks, true);
    for (CopyPair& pair : pairs) std::swap(pair.src, pair.dst);
    run(pieces, caches, pairs);
}

void set_device_ways(int64_t device, Tensor rules) {
    if (device < 0 || device >= kMaxDevices) fail("mapping", "device ", device, ", there can be ", kMaxDevices);
    if (!rules.is_cpu() || rules.scalar_type() != torch::headeronly::ScalarType::Long || rules.dim() != 2 ||
        rules.size(1) != 4 || rules.stride(1) != 1) {
        fail("mapping", "rules are not int64 [n, 4] on the CPU");
    }
    const auto* first = static_cast<const int64_t*>(rules.const_data_ptr());
    std::vector<WayRule> read;
    for (int64_t n = 0; n < rules.size(0); ++n) {
        const int64_t* rule = first + n * rules.stride(0);
        if (rule[3] < 1 || rule[3] > 3) fail("mapping", "rule ", n, " names way ", rule[3], ", there are 3");
        read.push_back({rule[0], rule[1], rule[2], static_cast<Way>(rule[3])});
    }
    set_ways(static_cast<int32_t>(device), read);
}

}  // namespace
}  // namespace blockyard

STABLE_TORCH_LIBRARY_IMPL(blockyard, CPU, m) { m.impl("set_ways", TORCH_BOX(&blockyard::set_device_ways)); }

STABLE_TORCH_LIBRARY_IMPL(blockyard, CUDA, m) {
    m.impl("swap_blocks", TORCH_BOX(&blockyard::swap_blocks));
    m.impl("copy_blocks", TORCH_BOX(&blockyard::copy_blocks));
    m.impl("move_blocks", TORCH_BOX(&blockyard::move_blocks));
    m.impl("exchange_blocks", TORCH_BOX(&blockyard::exchange_blocks));
    m.impl("gather_blocks", TORCH_BOX(&blockyard::gather_blocks));
    m.impl("scatter_blocks", TORCH_BOX(&blockyard::scatter_blocks));
}
