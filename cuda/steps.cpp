#include "steps.h"

#include <numeric>

namespace blockyard {

Steps independent(const std::vector<CopyPair>& pairs) {
    Steps plan{pairs, std::vector<uint32_t>(pairs.size() + 1)};
    std::iota(plan.starts.begin(), plan.starts.end(), 0U);
    return plan;
}

std::vector<StepRange> split_steps(const Steps& plan, size_t max_steps) {
    std::vector<StepRange> parts;
    size_t begin = 0, group = 0;
    const auto close = [&](size_t end) {
        parts.back().starts.push_back(static_cast<uint16_t>(end - begin));
        parts.back().num_steps = end - begin;
    };
    for (size_t at = 0; at < plan.steps.size();) {
        size_t next = at + 1;
        if (plan.steps[at].dst == kAside) {
            while (plan.steps[next++].src != kAside) {
            }
        }
        const bool opens_part = parts.empty() || next - begin > max_steps;
        if (opens_part) {
            if (!parts.empty()) close(at);
            begin = at;
            parts.push_back({plan.steps.data() + at, 0, {}});
        }
        const bool opens_group = plan.starts[group] == at;
        if (opens_group) ++group;
        if (opens_group || opens_part) parts.back().starts.push_back(static_cast<uint16_t>(at - begin));
        at = next;
    }
    if (!parts.empty()) close(plan.steps.size());
    return parts;
}

}  // namespace blockyard
