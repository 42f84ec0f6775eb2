#include "ways.h"

#include <array>
#include <mutex>
#include <utility>

namespace blockyard {
namespace {

struct Table {
    std::mutex mutex;
    std::array<std::vector<WayRule>, kMaxDevices> rules;
};

Table& table() {
    // Never destroyed: copies may still be made while the process leaves.
    static auto* const only = new Table;
    return *only;
}

}  // namespace

void set_ways(int32_t device, std::vector<WayRule> rules) {
    const std::lock_guard<std::mutex> lock(table().mutex);
    table().rules.at(static_cast<size_t>(device)) = std::move(rules);
}

Way choose_way(int32_t device, Direction direction, int64_t bytes, int64_t count) {
    const Way otherwise = direction == Direction::kWithin ? Way::kKernel : Way::kBatch;
    if (device < 0 || device >= kMaxDevices) return otherwise;
    const std::lock_guard<std::mutex> lock(table().mutex);
    for (const WayRule& rule : table().rules[static_cast<size_t>(device)]) {
        if (rule.direction == direction && bytes <= rule.max_bytes && count <= rule.max_count) return rule.way;
    }
    return otherwise;
}

}  // namespace blockyard
