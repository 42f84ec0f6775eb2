// Copy strategies between host and device: a table per device, measured on a device of that kind.
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
    kStaged = 4,  // large copies between host rows and device slots, a kernel between slots and views
};
constexpr int64_t kNumStrategies = 4;

enum class Direction : int64_t { kToDevice = 0, kToHost = 1 };
constexpr int64_t kNumDirections = 2;

// Thread blocks of the two kernels if no rule matches, at most one per multiprocessor. Between slots and views,
// more blocks leave more of the device to compute, since the kernel ends sooner. With the host, fewer blocks do, as
// long as they keep the link busy (docs/benchmarks/copies.md).
constexpr unsigned kSlotBlocks = 12;
constexpr unsigned kHostBlocks = 3;

// A rule matches copies of up to max_count pieces of up to max_bytes on average. A rule for kStaged matches only if the
// host's pieces of a block are contiguous.
struct StrategyRule {
    Direction direction;
    int64_t max_bytes;
    int64_t max_count;
    Strategy strategy;
    unsigned blocks;  // thread blocks of a kernel on few multiprocessors
};

struct StrategyChoice {
    Strategy strategy;
    unsigned blocks;
};

// Without a table, kMinPieces or more pieces between host and device are staged if each has less than
// kLargeStagedPiece bytes, or take a kernel if each has less than kLargePiece bytes: docs/benchmarks/copies.md.
constexpr int64_t kMinPieces = 32;
constexpr int64_t kLargeStagedPiece = 512 << 10;
constexpr int64_t kLargePiece = 28 << 10;

constexpr int32_t kMaxDevices = 64;

// Replaces a device's rules; the first one that matches decides.
void set_strategies(int32_t device, std::vector<StrategyRule> rules);

// Maximum pieces of one batched call, unless a device's calibration says otherwise. Some drivers crash with tens of
// thousands, and a call's pieces start to move only once it has returned.
constexpr size_t kBatchPieces = 1024;
// From this major compute capability on, other projects report that batched calls crash the process. Without a
// calibration, they are not used there.
constexpr int kUntriedCapability = 10;

// The major compute capability of a device; INT_MAX if the runtime does not say.
int compute_capability(int32_t device);

// Sets a device's maximum number of pieces per batched call. 0: pieces are copied one by one. nullopt: the default.
void set_batch_pieces(int32_t device, std::optional<size_t> max_pieces);
size_t batch_pieces(int32_t device);

// Chooses for `count` pieces of `bytes` bytes on average; `host_rows`: the host's pieces of a block are contiguous, and
// more than one. Without a matching rule, many small pieces are staged, or take the kernel if there are no host rows.
// Others take the batched call.
StrategyChoice choose_strategy(int32_t device, Direction direction, int64_t bytes, int64_t count, bool host_rows);

}  // namespace blockyard
