// Copy strategies between host and device and within a device: a table for each device, measured on such a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace blockyard {

enum class Strategy : int64_t {
    kBatch = 1,   // one batched call to the copy engines
    kLoop = 2,    // one call to the copy engines for each piece
    kKernel = 3,  // a kernel: few multiprocessors for copies with the host, all within a device
    kBulk = 4,    // the bulk engine of sm_90 and later, driven by few multiprocessors
};
constexpr int64_t kNumStrategies = 4;

enum class Direction : int64_t { kToDevice = 0, kToHost = 1, kWithin = 2 };
constexpr int64_t kNumDirections = 3;

// A rule holds for up to max_count pieces of up to max_bytes on average.
struct StrategyRule {
    Direction direction;
    int64_t max_bytes;
    int64_t max_count;
    Strategy strategy;
};

constexpr int32_t kMaxDevices = 64;

// Replaces a device's rules; the first that holds decides.
void set_strategies(int32_t device, std::vector<StrategyRule> rules);

// Pieces of one batched call, unless a device's calibration says otherwise. Some drivers crash with tens of thousands,
// and a call's pieces start to move once it has returned.
constexpr size_t kBatchPieces = 1024;

// Sets a device's most pieces of one batched call, at least 1.
void set_batch_pieces(int32_t device, size_t most);
size_t batch_pieces(int32_t device);

// Without a matching rule: the kernel within a device, else the batched call.
Strategy choose_strategy(int32_t device, Direction direction, int64_t bytes, int64_t count);

}  // namespace blockyard
