#include "check.h"

#include <algorithm>
#include <numeric>

namespace blockyard {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int32_t device_of(const char* name, size_t index, const Tensor& tensor) {
    if (tensor.is_cpu()) return Side::kHost;
    if (!tensor.is_cuda()) fail("layout", name, "[", index, "] is neither on the CPU nor on a CUDA device");
    return tensor.get_device_index();
}

bool overlap(const View& one, const View& other) {
    if (one.storage != other.storage) return false;
    return reinterpret_cast<uintptr_t>(one.data) < other.end && reinterpret_cast<uintptr_t>(other.data) < one.end;
}

uint32_t bounded(int64_t id, int64_t blocks, int64_t entry, const char* verb) {
    if (id < 0 || id >= blocks) {
        fail("mapping", "entry ", entry, ": block ", id, " is to be ", verb, ", there are ", blocks, " blocks");
    }
    return static_cast<uint32_t>(id);
}

}  // namespace

Side::Side(const char* side_name, const std::vector<Tensor>& tensors) : name(side_name), blocks(0), device(kHost) {
    if (tensors.empty()) fail("layout", name, " holds no tensors");
    blocks = tensors[0].dim() == 2 ? tensors[0].size(0) : 0;
    if (blocks > UINT32_MAX) fail("layout", name, " has ", blocks, " blocks, the limit is ", UINT32_MAX);
    device = device_of(name, 0, tensors[0]);
    views.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) views.push_back(read(i, tensors[i]));
}

View Side::read(size_t index, const Tensor& tensor) const {
    if (tensor.scalar_type() != ScalarType::Byte || tensor.dim() != 2) {
        fail("layout", name, "[", index, "] has ", tensor.dim(), " dimensions of ", tensor.element_size(),
             " bytes, wanted uint8 [blocks, bytes]");
    }
    const int64_t width = tensor.size(1), stride = tensor.stride(0);
    if ((width > 1 && tensor.stride(1) != 1) || (blocks > 1 && stride < width)) {
        fail("layout", name, "[", index, "] has strides ", stride, ", ", tensor.stride(1),
             ", wanted contiguous rows of ", width, " bytes");
    }
    const int32_t has_device = device_of(name, index, tensor);
    if (tensor.size(0) != blocks || has_device != device) {
        fail("layout", name, "[", index, "] has ", tensor.size(0), " blocks on device ", has_device, ", ", name, "[0] ",
             blocks, " on ", device);
    }
    auto* data = static_cast<unsigned char*>(tensor.data_ptr());
    const auto start = reinterpret_cast<uintptr_t>(data);
    const int64_t reach = blocks > 0 && width > 0 ? (blocks - 1) * stride + width : 0;
    return {data, stride, width, start - static_cast<uintptr_t>(tensor.storage_offset()),
            start + static_cast<uintptr_t>(reach)};
}

void Side::check_apart() const {
    std::vector<size_t> order(views.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) { return views[a].data < views[b].data; });
    // Views that follow one another start anew; the others must alternate within one distance of rows.
    uintptr_t base = 0, row_end = 0, reach = 0;
    int64_t period = 0;
    size_t last = 0;
    for (const size_t index : order) {
        const View& view = views[index];
        const auto start = reinterpret_cast<uintptr_t>(view.data), width = static_cast<uintptr_t>(view.width);
        if (start >= reach) {
            base = start;
            period = view.stride;
            reach = view.end;
        } else if (view.stride != period || start < row_end || start + width > base + static_cast<uintptr_t>(period)) {
            fail("layout", name, "[", last, "] and ", name, "[", index, "] share memory");
        }
        row_end = start + width;
        reach = std::max(reach, view.end);
        last = index;
    }
}

void check_swap(const Side& src, const Side& dst) {
    if (src.views.size() != dst.views.size()) {
        fail("layout", "src holds ", src.views.size(), " tensors, dst ", dst.views.size());
    }
    for (size_t i = 0; i < src.views.size(); ++i) {
        if (src.views[i].width != dst.views[i].width) {
            fail("layout", "src[", i, "] has rows of ", src.views[i].width, " bytes, dst[", i, "] of ",
                 dst.views[i].width);
        }
    }
    dst.check_apart();
    for (const View& from : src.views) {
        for (const View& to : dst.views) {
            if (overlap(from, to)) fail("layout", "src and dst share memory: use copy_blocks within one cache");
        }
    }
}

std::vector<CopyPair> read_pairs(const Tensor& pairs, int64_t src_blocks, int64_t dst_blocks, bool in_place) {
    if (!pairs.is_cpu()) fail("mapping", "pairs are not on the CPU");
    if (pairs.scalar_type() != ScalarType::Long || pairs.dim() != 2 || pairs.size(1) != 2) {
        fail("mapping", "pairs have ", pairs.dim(), " dimensions of ", pairs.element_size(),
             " bytes, wanted int64 [n, 2]");
    }
    const auto* ids = static_cast<const int64_t*>(pairs.const_data_ptr());
    const int64_t row = pairs.stride(0), column = pairs.stride(1);
    std::vector<CopyPair> checked(static_cast<size_t>(pairs.size(0)));
    std::vector<bool> written(static_cast<size_t>(dst_blocks));
    for (int64_t n = 0; n < pairs.size(0); ++n) {
        const uint32_t from = bounded(ids[n * row], src_blocks, n, "read");
        const uint32_t to = bounded(ids[n * row + column], dst_blocks, n, "written");
        if (written[to]) fail("mapping", "block ", to, " is written twice, the second time by entry ", n);
        written[to] = true;
        checked[static_cast<size_t>(n)] = {from, to};
    }
    for (const CopyPair& pair : checked) {
        if (in_place && written[pair.src]) fail("mapping", "block ", pair.src, " is both read and written in one copy");
    }
    return checked;
}

}  // namespace blockyard
