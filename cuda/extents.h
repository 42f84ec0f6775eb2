// Extents of memory: each was registered, mapped or allocated by one call. No torch here.
//
// A batch refuses a piece that crosses the end of an extent, and a single copy refuses a piece that is page-locked only
// in part. So pieces are cut where an extent ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace blockyard {

// Addresses from `first` on, `end` excluded.
struct Extent {
    uintptr_t first = 0;
    uintptr_t end = 0;
    bool pinned = false;  // page-locked, or device memory
    bool known = true;    // false: the driver does not say where it starts and ends
    int64_t shift = 0;    // the device's address minus the host's
};

// Declares that [first, first + bytes) consists of extents of `chunk` bytes, all page-locked or mapped. Replaces any
// declaration that starts there; 0 bytes only withdraws it. Calls over declared memory need not ask the driver for each
// extent. Chunk 0: device memory that stays allocated, in extents that are not known in advance. The driver is asked
// for each of them once in the process.
void declare_region(uintptr_t first, size_t bytes, size_t chunk);

// How rows of a view fit into extents: all rows lie in one extent, or each row lies in one, or not even that.
enum class Fit { kAll, kRows, kNone };

// The extents on one side of one call, as far as they are known. Queries about declared memory make no driver call; for
// any other extent the driver is asked once.
class Extents {
  public:
    explicit Extents(bool is_host) : is_host_(is_host) {}

    // The extent around an address. For memory that CUDA does not know, no end is known.
    Extent at(uintptr_t address);

    // Whether every byte of [first, end) is page-locked or device memory.
    bool pinned(uintptr_t first, uintptr_t end);

    // The device's address of a host byte minus the host's address.
    int64_t shift(uintptr_t address);

    // How rows of `width` bytes, `stride` bytes apart, fit into extents; the first row starts at `first`, and the last
    // one ends at `end`.
    Fit fit(uintptr_t first, uintptr_t end, int64_t stride, int64_t width);

    // How many of these bytes one copy may take: at least 1, at most `bytes`. Does not detect page-locked memory that
    // lies within one piece, with pageable memory on both sides.
    size_t room(uintptr_t address, size_t bytes);

    // The driver's error code if it refused a query about host memory; else 0.
    int error() const { return error_; }

  private:
    struct Region {
        uintptr_t first = 0;
        uintptr_t end = 0;
        size_t chunk = 1;
    };

    bool in_region(uintptr_t address);
    Extent ask(uintptr_t address);
    Extent ask_host_extent(uintptr_t address);

    bool is_host_;
    int error_ = 0;
    Region region_;              // the declared memory queried last
    std::vector<Extent> asked_;  // by address
};

}  // namespace blockyard
