// The CUDA implementations of the ops that python/blockyard/engine/ops/__init__.py defines, over torch's stable ABI.
//
// Each: check everything on the host, enter the device, launch on its current stream, check the result.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <utility>
#include <vector>

#include "check.h"
#include "copy.h"
#include "mapping.h"
#include "run.h"
#include "strategy.h"

namespace blockyard {
namespace {

using torch::stable::Tensor;

// ---- the ops ----

void swap_blocks(std::vector<Tensor> src_views, std::vector<Tensor> dst_views, Tensor pairs) {
    const Side src("src", src_views), dst("dst", dst_views);
    check_swap(src, dst);
    run(src, dst, read_pairs(pairs, src.blocks, dst.blocks));
}

// Only for benchmarks: the baseline.
void bench_copy_loop(std::vector<Tensor> src_views, std::vector<Tensor> dst_views, Tensor pairs) {
    const Side src("src", src_views), dst("dst", dst_views);
    check_swap(src, dst);
    run_loop(src, dst, read_pairs(pairs, src.blocks, dst.blocks));
}

void copy_blocks(std::vector<Tensor> views, Tensor pairs) {
    const Side caches("caches", views);
    caches.check_apart();
    const std::vector<CopyPair> checked = read_pairs(pairs, caches.blocks, caches.blocks);
    check_parted(checked, caches.blocks);
    run_within(caches, independent(checked));
}

void move_blocks(std::vector<Tensor> views, Tensor pairs) {
    const Side caches("caches", views);
    caches.check_apart();
    const std::vector<CopyPair> checked = read_pairs(pairs, caches.blocks, caches.blocks);
    run_within(caches, order_moves(checked, static_cast<size_t>(caches.blocks)));
}

void exchange_blocks(std::vector<Tensor> views, Tensor pairs) {
    const Side caches("caches", views);
    caches.check_apart();
    run_within(caches, order_exchanges(read_exchanges(pairs, caches.blocks)));
}

void gather_blocks(std::vector<Tensor> views, Tensor staging, Tensor blocks) {
    const Side caches("caches", views), rows("rows", {staging});
    const Side pieces = rows.split(caches.views);
    check_swap(caches, pieces);
    run(caches, pieces, read_blocks(blocks, caches.blocks, rows.blocks, false));
}

void scatter_blocks(Tensor staging, std::vector<Tensor> views, Tensor blocks) {
    const Side caches("caches", views), rows("rows", {staging});
    const Side pieces = rows.split(caches.views);
    check_swap(pieces, caches);
    std::vector<CopyPair> pairs = read_blocks(blocks, caches.blocks, rows.blocks, true);
    for (CopyPair& pair : pairs) std::swap(pair.src, pair.dst);
    run(pieces, caches, pairs);
}

void set_device_strategies(int64_t device, Tensor rules) {
    if (device < 0 || device >= kMaxDevices) fail("mapping", "device ", device, ", there can be ", kMaxDevices);
    if (!rules.is_cpu() || rules.scalar_type() != torch::headeronly::ScalarType::Long || rules.dim() != 2 ||
        rules.size(1) != 4 || rules.stride(1) != 1) {
        fail("mapping", "rules are not int64 [n, 4] on the CPU");
    }
    const auto* first = static_cast<const int64_t*>(rules.const_data_ptr());
    std::vector<StrategyRule> read;
    for (int64_t n = 0; n < rules.size(0); ++n) {
        const int64_t* rule = first + n * rules.stride(0);
        if (rule[0] < 0 || rule[0] >= kNumDirections) {
            fail("mapping", "rule ", n, " names direction ", rule[0], ", there are ", kNumDirections);
        }
        if (rule[3] < 1 || rule[3] > kNumStrategies) {
            fail("mapping", "rule ", n, " names strategy ", rule[3], ", there are ", kNumStrategies);
        }
        read.push_back({static_cast<Direction>(rule[0]), rule[1], rule[2], static_cast<Strategy>(rule[3])});
    }
    set_strategies(static_cast<int32_t>(device), read);
}

bool has_device_bulk(int64_t device) { return has_bulk(static_cast<int>(device)); }

}  // namespace
}  // namespace blockyard

// It takes no tensor that would select a device.
STABLE_TORCH_LIBRARY_IMPL(blockyard, CompositeExplicitAutograd, m) {
    m.impl("has_bulk", TORCH_BOX(&blockyard::has_device_bulk));
}

STABLE_TORCH_LIBRARY_IMPL(blockyard, CPU, m) { m.impl("set_strategies", TORCH_BOX(&blockyard::set_device_strategies)); }

STABLE_TORCH_LIBRARY_IMPL(blockyard, CUDA, m) {
    m.impl("swap_blocks", TORCH_BOX(&blockyard::swap_blocks));
    m.impl("copy_blocks", TORCH_BOX(&blockyard::copy_blocks));
    m.impl("move_blocks", TORCH_BOX(&blockyard::move_blocks));
    m.impl("exchange_blocks", TORCH_BOX(&blockyard::exchange_blocks));
    m.impl("gather_blocks", TORCH_BOX(&blockyard::gather_blocks));
    m.impl("scatter_blocks", TORCH_BOX(&blockyard::scatter_blocks));
    m.impl("bench_copy_loop", TORCH_BOX(&blockyard::bench_copy_loop));
}
