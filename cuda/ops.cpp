// The functions that the CUDA implementations of the ops (python/blockyard/engine/ops/compiled.py) call, over torch's
// stable ABI. Each checks the views and that ids are in range, enters the device, launches on its current stream, and
// checks the result.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "check.h"
#include "copy.h"
#include "extents.h"
#include "mapping.h"
#include "run.h"
#include "strategy.h"

namespace blockyard {
namespace {

using torch::stable::Tensor;

// ---- the ops ----

void run_swap(std::vector<Tensor> src_views, std::vector<Tensor> dst_views, Tensor pairs) {
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

void run_steps(std::vector<Tensor> views, Tensor steps, Tensor starts) {
    const Side caches("caches", views);
    caches.check_apart();
    run_within(caches, read_steps(steps, starts, caches.blocks));
}

void run_gather(std::vector<Tensor> views, Tensor staging, Tensor pairs) {
    const Side caches("caches", views), rows("rows", {staging});
    const Side pieces = rows.split(caches.views);
    check_swap(caches, pieces);
    run(caches, pieces, read_pairs(pairs, caches.blocks, rows.blocks));
}

void run_scatter(Tensor staging, std::vector<Tensor> views, Tensor pairs) {
    const Side caches("caches", views), rows("rows", {staging});
    const Side pieces = rows.split(caches.views);
    check_swap(pieces, caches);
    run(pieces, caches, read_pairs(pairs, rows.blocks, caches.blocks));
}

// Throws if a device cannot have this index.
int32_t checked_device(int64_t device) {
    if (device < 0 || device >= kMaxDevices) fail("mapping", "device ", device, ", there can be ", kMaxDevices);
    return static_cast<int32_t>(device);
}

void set_device_strategies(int64_t device, Tensor rules) {
    const int32_t index = checked_device(device);
    if (!rules.is_cpu() || rules.scalar_type() != torch::headeronly::ScalarType::Long || rules.dim() != 2 ||
        rules.size(1) != 5 || rules.stride(1) != 1) {
        fail("mapping", "rules are not int64 [n, 5] on the CPU");
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
        if (rule[4] < 1 || rule[4] > UINT16_MAX) {
            fail("mapping", "rule ", n, " names ", rule[4], " thread blocks, must be 1 to ", UINT16_MAX);
        }
        read.push_back({static_cast<Direction>(rule[0]), rule[1], rule[2], static_cast<Strategy>(rule[3]),
                        static_cast<unsigned>(rule[4])});
    }
    set_strategies(index, read);
}

void set_device_batch_pieces(int64_t device, int64_t max_pieces) {
    const int32_t index = checked_device(device);
    if (max_pieces < 0) fail("mapping", "a batch of at most ", max_pieces, " pieces, must be at least 0");
    set_batch_pieces(index, static_cast<size_t>(max_pieces));
}

void set_region(int64_t address, int64_t num_bytes, int64_t chunk_bytes) {
    if (num_bytes < 0 || chunk_bytes < 0) {
        fail("layout", "a region of ", num_bytes, " bytes in chunks of ", chunk_bytes, ", wanted at least 0 of both");
    }
    declare_region(static_cast<uintptr_t>(address), static_cast<size_t>(num_bytes), static_cast<size_t>(chunk_bytes));
}

void prepare_device(int64_t device) { prepare(checked_device(device)); }

}  // namespace
}  // namespace blockyard

// Registered for every device: these functions check their arguments themselves.
STABLE_TORCH_LIBRARY_IMPL(blockyard, CompositeExplicitAutograd, m) {
    m.impl("prepare", TORCH_BOX(&blockyard::prepare_device));
    m.impl("set_batch_pieces", TORCH_BOX(&blockyard::set_device_batch_pieces));
    m.impl("set_region", TORCH_BOX(&blockyard::set_region));
    m.impl("run_swap", TORCH_BOX(&blockyard::run_swap));
    m.impl("run_steps", TORCH_BOX(&blockyard::run_steps));
    m.impl("run_gather", TORCH_BOX(&blockyard::run_gather));
    m.impl("run_scatter", TORCH_BOX(&blockyard::run_scatter));
}

STABLE_TORCH_LIBRARY_IMPL(blockyard, CPU, m) { m.impl("set_strategies", TORCH_BOX(&blockyard::set_device_strategies)); }

STABLE_TORCH_LIBRARY_IMPL(blockyard, CUDA, m) { m.impl("bench_copy_loop", TORCH_BOX(&blockyard::bench_copy_loop)); }
