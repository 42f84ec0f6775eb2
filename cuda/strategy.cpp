#include "strategy.h"

#include <array>
#include <mutex>
#include <utility>

namespace blockyard {
namespace {

struct Table {
    std::mutex mutex;
    std::array<std::vector<StrategyRule>, kMaxDevices> rules;
    std::array<std::optional<size_t>, kMaxDevices> batch_pieces;
};

Table& table() {
    // Never destroyed: copies may still run while the process exits.
    static auto* const only = new Table;
    return *only;
}

}  // namespace

void set_strategies(int32_t device, std::vector<StrategyRule> rules) {
    const std::lock_guard<std::mutex> lock(table().mutex);
    table().rules.at(static_cast<size_t>(device)) = std::move(rules);
}

void set_batch_pieces(int32_t device, std::optional<size_t> max_pieces) {
    const std::lock_guard<std::mutex> lock(table().mutex);
    table().batch_pieces.at(static_cast<size_t>(device)) = max_pieces;
}

size_t batch_pieces(int32_t device) {
    if (device >= 0 && device < kMaxDevices) {
        const std::lock_guard<std::mutex> lock(table().mutex);
        if (const auto max_pieces = table().batch_pieces[static_cast<size_t>(device)]) return *max_pieces;
    }
    return compute_capability(device) < kUntriedCapability ? kBatchPieces : 0;
}

StrategyChoice choose_strategy(int32_t device, Direction direction, int64_t bytes, int64_t count, bool host_rows) {
    if (device >= 0 && device < kMaxDevices) {
        const std::lock_guard<std::mutex> lock(table().mutex);
        for (const StrategyRule& rule : table().rules[static_cast<size_t>(device)]) {
            const bool holds = rule.direction == direction && bytes <= rule.max_bytes && count <= rule.max_count;
            if (holds && (host_rows || rule.strategy != Strategy::kStaged)) return {rule.strategy, rule.blocks};
        }
    }
    if (bytes >= (host_rows ? kLargeStagedPiece : kLargePiece) || count < kMinPieces) return {Strategy::kBatch, 1};
    if (host_rows) return {Strategy::kStaged, kSlotBlocks};
    return {Strategy::kKernel, kHostBlocks};
}

}  // namespace blockyard
