// Which way a copy takes between host and device, or within a device: a table for each device, made by measuring there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace blockyard {

enum class Way : int64_t {
    kBatch = 1,   // one batched call to the copy engines
    kLoop = 2,    // one call to the copy engines for each piece
    kKernel = 3,  // a kernel: on few multiprocessors beside the host, on all within a device
    kBulk = 4,    // the bulk engine of sm_90 and later, driven by few multiprocessors
};
constexpr int64_t kNumWays = 4;

enum class Direction : int64_t { kToDevice = 0, kToHost = 1, kWithin = 2 };
constexpr int64_t kNumDirections = 3;

// A rule holds for pieces of up to max_bytes (on average) that are up to max_count.
struct WayRule {
    Direction direction;
    int64_t max_bytes;
    int64_t max_count;
    Way way;
};

constexpr int32_t kMaxDevices = 64;

// Replaces a device's rules; the first that holds decides.
void set_ways(int32_t device, std::vector<WayRule> rules);

// Where no rule holds: the kernel within a device, else the batched call.
Way choose_way(int32_t device, Direction direction, int64_t bytes, int64_t count);

}  // namespace blockyard
