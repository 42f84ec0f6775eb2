#include "check.h"

#include <algorithm>
#include <array>
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

uintptr_t start_of(const View& view) { return reinterpret_cast<uintptr_t>(view.data); }

// One past the last byte of a view that starts at `start`.
uintptr_t end_of(uintptr_t start, int64_t blocks, int64_t stride, int64_t width) {
    return start + static_cast<uintptr_t>(blocks > 0 && width > 0 ? (blocks - 1) * stride + width : 0);
}

// Whether a view of one side overlaps a view of the other. Addresses decide, not storages: two storages may share one
// buffer. Host and device addresses are distinct.
bool overlap(const Side& one, const Side& other) {
    struct Span {
        uintptr_t start, end;
        size_t side;
    };
    std::vector<Span> order;
    order.reserve(one.views.size() + other.views.size());
    for (size_t side = 0; side < 2; ++side) {
        for (const View& view : (side == 0 ? one : other).views) order.push_back({start_of(view), view.end, side});
    }
    std::sort(order.begin(), order.end(), [](const Span& a, const Span& b) { return a.start < b.start; });
    std::array<uintptr_t, 2> max_end{};
    for (const Span& next : order) {
        if (next.start == next.end) continue;
        if (next.start < max_end[1 - next.side]) return true;
        max_end[next.side] = std::max(max_end[next.side], next.end);
    }
    return false;
}

}  // namespace

Side::Side(const char* side_name, const std::vector<Tensor>& tensors) : name(side_name), blocks(0), device(kHost) {
    if (tensors.empty()) fail("layout", name, " holds no tensors");
    blocks = tensors[0].dim() == 2 ? tensors[0].size(0) : 0;
    if (blocks >= UINT32_MAX) fail("layout", name, " has ", blocks, " blocks, the limit is ", UINT32_MAX - 1);
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
    if ((blocks > 0 && width > 1 && tensor.stride(1) != 1) || (blocks > 1 && stride < width)) {
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
    return {data, stride, width, start - static_cast<uintptr_t>(tensor.storage_offset()),
            end_of(start, blocks, stride, width)};
}

Side Side::split(const std::vector<View>& like) const {
    int64_t width = 0;
    for (const View& view : like) width += view.width;
    const View row = views[0];
    if (row.width != width) {
        fail("layout", name, " have ", row.width, " bytes, a block of all caches has ", width);
    }
    Side pieces = *this;
    pieces.views.clear();
    unsigned char* start = row.data;
    for (const View& view : like) {
        const uintptr_t end = end_of(reinterpret_cast<uintptr_t>(start), blocks, row.stride, view.width);
        pieces.views.push_back({start, row.stride, view.width, row.storage, end});
        start += view.width;
    }
    return pieces;
}

void Side::check_apart() const {
    std::vector<size_t> order(views.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) { return views[a].data < views[b].data; });
    // Views that follow one another start a new group; within a group, views alternate within one row distance.
    uintptr_t base = 0, row_end = 0, max_end = 0;
    int64_t period = 0;
    size_t last = 0;
    for (const size_t index : order) {
        const View& view = views[index];
        const auto start = reinterpret_cast<uintptr_t>(view.data), width = static_cast<uintptr_t>(view.width);
        if (start >= max_end) {
            base = start;
            period = view.stride;
            max_end = view.end;
        } else if (view.stride != period || start < row_end || start + width > base + static_cast<uintptr_t>(period)) {
            fail("layout", name, "[", last, "] and ", name, "[", index, "] share memory");
        }
        row_end = start + width;
        max_end = std::max(max_end, view.end);
        last = index;
    }
}

void check_swap(const Side& src, const Side& dst) {
    if (src.views.size() != dst.views.size()) {
        fail("layout", src.name, " holds ", src.views.size(), " tensors, ", dst.name, " ", dst.views.size());
    }
    for (size_t i = 0; i < src.views.size(); ++i) {
        if (src.views[i].width != dst.views[i].width) {
            fail("layout", src.name, "[", i, "] has rows of ", src.views[i].width, " bytes, ", dst.name, "[", i,
                 "] of ", dst.views[i].width);
        }
    }
    dst.check_apart();
    if (overlap(src, dst)) {
        fail("layout", src.name, " and ", dst.name, " share memory: use copy_blocks within one cache");
    }
}

}  // namespace blockyard
