#include "extents.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace blockyard {
namespace {

// Declared memory of unknown extents, and the extents that the driver has reported so far.
struct Queried {
    uintptr_t end = 0;
    std::map<uintptr_t, Extent> reported;  // by the last byte
};

struct Declared {
    std::mutex mutex;
    std::map<uintptr_t, Queried> queried;                       // by the first byte
    std::map<uintptr_t, std::pair<uintptr_t, size_t>> regions;  // first byte: end, bytes of an extent
};

Declared& declared() {
    // Never destroyed: copies may still run while the process exits.
    static auto* const only = new Declared;
    return *only;
}

using GetAttributes = CUresult (*)(unsigned, CUpointer_attribute*, void**, CUdeviceptr);
using GetRange = CUresult (*)(CUdeviceptr*, size_t*, CUdeviceptr);

// Looked up at run time: the library must load where there is no driver. `version` is the release that introduced the
// call: a driver refuses versions above its own, such as those of a newer toolkit.
template <typename Function>
Function find_driver_call(const char* name, unsigned version) {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (cudaGetDriverEntryPointByVersion(name, &symbol, version, cudaEnableDefault, &result) != cudaSuccess) {
        cudaGetLastError();  // The extent is unknown then, which the caller survives.
        return nullptr;
    }
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(symbol) : nullptr;
}

// If nothing is known: this byte alone.
Extent unknown(uintptr_t address, bool pinned) { return {address, address + 1, pinned, false, 0}; }

Extent ask_device_extent(uintptr_t address) {
    static const auto get_range = find_driver_call<GetRange>("cuMemGetAddressRange", 3020);
    CUdeviceptr start = 0;
    size_t size = 0;
    // For mapped memory it returns the mapping, not the whole reservation.
    const bool answered = get_range != nullptr && get_range(&start, &size, address) == CUDA_SUCCESS;
    if (!answered || address < start || address - start >= size) return unknown(address, true);
    return {start, start + size, true, true, 0};
}

}  // namespace

void declare_region(uintptr_t first, size_t bytes, size_t chunk) {
    const std::lock_guard<std::mutex> lock(declared().mutex);
    if (chunk == 0) {
        declared().queried.erase(first);
        if (bytes > 0) declared().queried[first].end = first + bytes;
    } else if (bytes == 0) {
        declared().regions.erase(first);
    } else {
        declared().regions[first] = {first + bytes, chunk};
    }
}

bool Extents::in_region(uintptr_t address) {
    if (region_.first <= address && address < region_.end) return true;
    const std::lock_guard<std::mutex> lock(declared().mutex);
    auto next = declared().regions.upper_bound(address);
    if (next == declared().regions.begin()) return false;
    --next;
    if (next->second.first <= address) return false;
    region_ = {next->first, next->second.first, next->second.second};
    return true;
}

Extent Extents::ask_host_extent(uintptr_t address) {
    static const auto get_attributes = find_driver_call<GetAttributes>("cuPointerGetAttributes", 7000);
    if (get_attributes == nullptr) return unknown(address, false);
    unsigned type = 0;
    CUdeviceptr on_device = 0, start = 0;
    size_t size = 0;
    CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                   CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    void* values[] = {&type, &on_device, &start, &size};
    const CUresult status = get_attributes(4, names, values, address);
    if (status != CUDA_SUCCESS) {
        error_ = status;
        return unknown(address, false);
    }
    if (type == 0) return {address, UINTPTR_MAX, false, true, 0};
    const auto shift = static_cast<int64_t>(on_device - address);
    // The driver returns an allocation's range as device addresses.
    if (on_device < start || on_device - start >= size) return {address, address + 1, true, false, shift};
    const uintptr_t first = address - (on_device - start);
    return {first, first + size, true, true, shift};
}

Extent Extents::ask(uintptr_t address) {
    if (is_host_) return ask_host_extent(address);
    const std::lock_guard<std::mutex> lock(declared().mutex);
    auto next = declared().queried.upper_bound(address);
    if (next == declared().queried.begin() || std::prev(next)->second.end <= address) return ask_device_extent(address);
    std::map<uintptr_t, Extent>& reported = std::prev(next)->second.reported;
    const auto found = reported.lower_bound(address);
    if (found != reported.end() && found->second.first <= address) return found->second;
    const Extent answer = ask_device_extent(address);
    if (answer.known) reported.emplace(answer.end - 1, answer);
    return answer;
}

Extent Extents::at(uintptr_t address) {
    if (in_region(address)) {
        const uintptr_t first = address - (address - region_.first) % region_.chunk;
        return {first, std::min(first + region_.chunk, region_.end), true, true, 0};
    }
    const auto after = std::upper_bound(asked_.begin(), asked_.end(), address,
                                        [](uintptr_t sought, const Extent& extent) { return sought < extent.first; });
    if (after != asked_.begin() && address < std::prev(after)->end) return *std::prev(after);
    Extent found = ask(address);
    // Memory that is not page-locked ends where the next known extent begins.
    if (!found.pinned && after != asked_.end()) found.end = std::min(found.end, after->first);
    // An answer about pageable memory holds only for this address: later ones may lie in an extent.
    if (found.pinned) asked_.insert(after, found);
    return found;
}

bool Extents::pinned(uintptr_t first, uintptr_t end) {
    for (uintptr_t next = first; next < end;) {
        if (in_region(next)) {
            next = region_.end;
            continue;
        }
        const Extent extent = at(next);
        if (!extent.pinned) return false;
        // Nothing is known of the bytes in between, so only the other end is checked.
        if (!extent.known) return at(end - 1).pinned;
        next = extent.end;
    }
    return true;
}

int64_t Extents::shift(uintptr_t address) {
    return in_region(address) ? ask_host_extent(address).shift : at(address).shift;
}

Fit Extents::fit(uintptr_t first, uintptr_t end, int64_t stride, int64_t width) {
    const Extent extent = at(first);
    if (end <= extent.end) {
        // Pageable memory has no known end, so only the far end is checked.
        return extent.pinned || !at(end - 1).pinned ? Fit::kAll : Fit::kNone;
    }
    if (!in_region(first) || end > region_.end || stride <= 0) return Fit::kNone;
    // Each chunk holds whole strides, and each row lies within one stride of them.
    const auto period = static_cast<size_t>(stride), wide = static_cast<size_t>(width);
    const bool whole = region_.chunk % period == 0 && (first - region_.first) % period + wide <= period;
    return whole ? Fit::kRows : Fit::kNone;
}

size_t Extents::room(uintptr_t address, size_t bytes) {
    const Extent extent = at(address);
    if (extent.pinned) return extent.known ? std::min(bytes, extent.end - address) : bytes;
    // The end of pageable memory is unknown, so it is taken from the extents behind it.
    uintptr_t end = address + bytes;
    for (Extent last = at(end - 1); last.pinned && last.known && last.first > address; last = at(end - 1)) {
        end = last.first;
    }
    return end - address;
}

}  // namespace blockyard
