// Copy strategies between host and device: a table for each device, measured on such a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace blockyard {

enum class Strategy : int64_t {
    kBatch = 1,   // one batched call to the copy engines
    kLoop = 2,    // one call to the copy engines for each piece
    kKernel = 3,  // a kernel on few multiprocessors
    kStaged = 4,  // large copies between rows of the host and slots on the device, a kernel between slots and views
};
constexpr int64_t kNumStrategies = 4;

enum class Direction : int64_t { kToDevice = 0, kToHost = 1 };
constexpr int64_t kNumDirections = 2;

// Blocks of threads of the two kernels where no rule holds, at most one a multiprocessor. Between slots and views more
// of them leave more to compute, since they end sooner; with the host fewer do, as long as they keep the link busy
// (docs/benchmarks/copies.md).
constexpr unsigned kSlotBlocks = 12;
constexpr unsigned kHostBlocks = 3;

// A rule holds for up to max_count pieces of up to max_bytes on average; one for kStaged only if the host's pieces of a
// block are contiguous.
struct StrategyRule {
    Direction direction;
    int64_t max_bytes;
    int64_t max_count;
    Strategy strategy;
    unsigned blocks;  // of threads, for kernels on few multiprocessors
};

struct StrategyChoice {
    Strategy strategy;
    unsigned blocks;
};

// Without a table, at least this many pieces between host and device are staged if they have fewer bytes than the first
// each, or take a kernel if they have fewer than the second: docs/benchmarks/copies.md.
constexpr int64_t kLeastPieces = 32;
constexpr int64_t kLargeStagedPiece = 512 << 10;
constexpr int64_t kLargePiece = 28 << 10;

constexpr int32_t kMaxDevices = 64;

// Replaces a device's rules; the first that holds decides.
void set_strategies(int32_t device, std::vector<StrategyRule> rules);

// Pieces of one batched call, unless a device's calibration says otherwise. Some drivers crash with tens of thousands,
// and a call's pieces start to move once it has returned.
constexpr size_t kBatchPieces = 1024;
// From this major compute capability on, peers report that batched calls crash the process: without a calibration
// there are none.
constexpr int kUntriedCapability = 10;

// The major compute capability of a device; INT_MAX if the runtime does not say.
int compute_capability(int32_t device);

// Sets a device's most pieces of one batched call; 0: pieces are copied one by one. None: takes back what was set.
void set_batch_pieces(int32_t device, std::optional<size_t> most);
size_t batch_pieces(int32_t device);

// Chooses for `count` pieces of `bytes` bytes on average; `host_rows`: the host's pieces of a block are contiguous, and
// more than one. Without a matching rule many pieces are staged, or take the kernel without host rows if they are
// small, and others take the batched call.
StrategyChoice choose_strategy(int32_t device, Direction direction, int64_t bytes, int64_t count, bool host_rows);

}  // namespace blockyard
