// Which way a copy between host and device takes: a table for each device, made by measuring on that device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace blockyard {

enum class Way : int64_t {
    kBatch = 1,   // one batched call to the copy engines
    kLoop = 2,    // one call to the copy engines for each piece
    kKernel = 3,  // a kernel on few multiprocessors
};

// A rule holds for pieces of up to max_bytes (on average) that are up to max_count.
struct WayRule {
    int64_t to_host;
    int64_t max_bytes;
    int64_t max_count;
    Way way;
};

constexpr int32_t kMaxDevices = 64;

// Replaces a device's rules; the first that holds decides.
void set_ways(int32_t device, std::vector<WayRule> rules);

// The batched call where no rule holds.
Way choose_way(int32_t device, bool to_host, int64_t bytes, int64_t count);

}  // namespace blockyard
