// Extents of memory: what was registered, mapped or allocated by one call. No torch here.
//
// A batch refuses a piece that leaves its extent, and a single copy refuses one that is page-locked only in part. So
// pieces are cut where an extent ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace blockyard {

// Addresses from `first` on, `end` excluded.
struct Extent {
    uintptr_t first = 0;
    uintptr_t end = 0;
    bool pinned = false;  // page-locked, or the device's
    bool known = true;    // false: the driver does not say where it starts and ends
    int64_t shift = 0;    // the device's address minus the host's
};

// Declares that [first, first + bytes) consists of extents of `chunk` bytes, all page-locked or mapped; replaces what
// was declared to start there. No bytes: takes it back. Calls over such memory need not ask the driver for each extent.
// Chunk 0: memory of the device that stays as it is, in extents that nobody knows: each is asked for once, by any call.
void declare_region(uintptr_t first, size_t bytes, size_t chunk);

// What rows of a view fit into: one extent holds all of them, or each row, or not even that.
enum class Fit { kAll, kRows, kNone };

// The extents on one side of one call, as far as it has asked. A question about declared memory takes no driver call;
// any other extent is asked for once.
class Extents {
  public:
    explicit Extents(bool is_host) : is_host_(is_host) {}

    // The extent around an address. Memory that CUDA does not know ends nowhere, as far as this can tell.
    Extent at(uintptr_t address);

    // Whether every byte of [first, end) is page-locked or the device's.
    bool pinned(uintptr_t first, uintptr_t end);

    // The device's address of a host byte minus the host's address.
    int64_t shift(uintptr_t address);

    // What rows of `width` bytes fit into that start `stride` bytes apart, the first at `first` and the last one's end
    // at `end`.
    Fit fit(uintptr_t first, uintptr_t end, int64_t stride, int64_t width);

    // How many of these bytes one copy may take: at least 1, at most `bytes`. Page-locked memory with pageable memory
    // on both sides is not found where all of it lies within one piece.
    size_t room(uintptr_t address, size_t bytes);

    // The driver's code where it has refused a question about memory of the host; 0 if it has not.
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
    Region region_;              // the declared memory that was asked about last
    std::vector<Extent> asked_;  // by address
};

}  // namespace blockyard
