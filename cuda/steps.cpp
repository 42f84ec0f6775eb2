#include "steps.h"

#include <algorithm>
#include <numeric>

namespace blockyard {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

// The role of each block in a set of moves.
struct Graph {
    std::vector<CopyPair> pairs;      // without those that move a block onto itself
    std::vector<uint32_t> writer;     // the pair that writes a block, or kNone
    std::vector<uint32_t> unread;     // pairs that still have to read a block
    std::vector<uint32_t> component;  // of a pair, as a union-find tree
    bool independent = true;

    Graph(const std::vector<CopyPair>& all, size_t num_blocks) : writer(num_blocks, kNone), unread(num_blocks) {
        pairs.reserve(all.size());
        for (const CopyPair& pair : all) {
            if (pair.src == pair.dst) continue;
            writer[pair.dst] = static_cast<uint32_t>(pairs.size());
            ++unread[pair.src];
            pairs.push_back(pair);
        }
        component.resize(pairs.size());
        std::iota(component.begin(), component.end(), 0U);
        for (uint32_t p = 0; p < pairs.size(); ++p) {
            const uint32_t overwrites = writer[pairs[p].src];
            if (overwrites == kNone) continue;
            independent = false;
            component[root(p)] = root(overwrites);
        }
    }

    uint32_t root(uint32_t pair) {
        while (component[pair] != pair) pair = component[pair] = component[component[pair]];
        return pair;
    }
};

// Emits all pairs outside rings, each after the pairs that read what it overwrites.
void order_trees(Graph& graph, std::vector<bool>& done, std::vector<uint32_t>& order) {
    for (uint32_t start = 0; start < graph.pairs.size(); ++start) {
        uint32_t p = start;
        while (p != kNone && !done[p] && graph.unread[graph.pairs[p].dst] == 0) {
            done[p] = true;
            order.push_back(p);
            const uint32_t source = graph.pairs[p].src;
            p = --graph.unread[source] == 0 ? graph.writer[source] : kNone;
        }
    }
}

// The blocks of a ring in the direction of its moves; each pair's source is what the pair before it writes.
std::vector<uint32_t> ring_of(const Graph& graph, uint32_t pair) {
    std::vector<uint32_t> blocks{graph.pairs[pair].dst};
    for (uint32_t at = graph.pairs[pair].src; at != blocks[0]; at = graph.pairs[graph.writer[at]].src) {
        blocks.push_back(at);
    }
    std::reverse(blocks.begin(), blocks.end());
    return blocks;
}

// Emits a ring c0 -> c1 -> ... -> c0, given as its blocks. A long ring becomes short ones that share the first block:
// after the ring c0 ... ck, block c0 holds what ck had.
void add_ring(const std::vector<uint32_t>& blocks, std::vector<CopyPair>& steps) {
    for (size_t first = 1; first < blocks.size(); first += kMaxRing - 1) {
        const size_t last = std::min(first + kMaxRing - 1, blocks.size()) - 1;
        steps.push_back({blocks[last], kAside});
        for (size_t i = last; i > first; --i) steps.push_back({blocks[i - 1], blocks[i]});
        steps.push_back({blocks[0], blocks[first]});
        steps.push_back({kAside, blocks[0]});
    }
}

}  // namespace

Steps independent(const std::vector<CopyPair>& pairs) {
    Steps plan{pairs, std::vector<uint32_t>(pairs.size() + 1)};
    std::iota(plan.starts.begin(), plan.starts.end(), 0U);
    return plan;
}

Steps order_exchanges(const std::vector<CopyPair>& pairs) {
    Steps plan;
    plan.steps.reserve(3 * pairs.size());
    plan.starts.reserve(pairs.size() + 1);
    for (const CopyPair& pair : pairs) {
        plan.starts.push_back(static_cast<uint32_t>(plan.steps.size()));
        plan.steps.push_back({pair.src, kAside});
        plan.steps.push_back({pair.dst, pair.src});
        plan.steps.push_back({kAside, pair.dst});
    }
    plan.starts.push_back(static_cast<uint32_t>(plan.steps.size()));
    return plan;
}

Steps order_moves(const std::vector<CopyPair>& pairs, size_t num_blocks) {
    Graph graph(pairs, num_blocks);
    if (graph.independent) return independent(graph.pairs);
    std::vector<bool> done(graph.pairs.size());
    std::vector<uint32_t> order;
    order.reserve(graph.pairs.size());
    order_trees(graph, done, order);
    // The rest are rings: one pair represents each, after the pairs that depend on it.
    std::vector<bool> is_ring(graph.pairs.size());
    for (uint32_t p = 0; p < graph.pairs.size(); ++p) {
        if (done[p]) continue;
        is_ring[p] = true;
        order.push_back(p);
        for (uint32_t q = p; !done[q]; q = graph.writer[graph.pairs[q].src]) done[q] = true;
    }
    std::stable_sort(order.begin(), order.end(),
                     [&graph](uint32_t a, uint32_t b) { return graph.root(a) < graph.root(b); });
    Steps plan;
    uint32_t group = kNone;
    for (const uint32_t p : order) {
        if (graph.root(p) != group) plan.starts.push_back(static_cast<uint32_t>(plan.steps.size()));
        group = graph.root(p);
        if (is_ring[p]) {
            add_ring(ring_of(graph, p), plan.steps);
        } else {
            plan.steps.push_back(graph.pairs[p]);
        }
    }
    plan.starts.push_back(static_cast<uint32_t>(plan.steps.size()));
    return plan;
}

std::vector<StepRange> split_steps(const Steps& plan, size_t most) {
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
        const bool opens_part = parts.empty() || next - begin > most;
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
