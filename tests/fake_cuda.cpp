// The CUDA runtime over memory of the CPU, as far as the op library calls it, with the library's own dispatch on top.
// For tests/test_run.py: tensors of the CPU stand for a device's, and what a device would not survive is counted as a
// fault.

#include <cuda.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "../cuda/batch.cpp"
#include "../cuda/check.cpp"
#include "../cuda/mapping.cpp"
#include "../cuda/run.cpp"
#include "../cuda/staged.cpp"
#include "../cuda/steps.cpp"
#include "../cuda/strategy.cpp"
#include "launch.h"

namespace {

using blockyard::CopyPair;
using blockyard::CopyTensor;
using blockyard::kAside;
using blockyard::Side;
using blockyard::Steps;
using torch::stable::Tensor;

struct Range {
    uintptr_t first = 0, end = 0;
    bool touches(const void* address, size_t bytes) const {
        const auto start = reinterpret_cast<uintptr_t>(address);
        return start < end && first < start + bytes;
    }
    bool holds(const void* address, size_t bytes) const {
        const auto start = reinterpret_cast<uintptr_t>(address);
        return first <= start && start + bytes <= end;
    }
};

struct Fake {
    Range host, pinned;
    bool own_stream = true, capturing = false, mapped = true, has_bulk = true;
    int faults = 0;
    // m: one copy, B: a batch, r: an event is recorded, w: waited for, K: a kernel on all, F: on few, U: the bulk
    // engine, A: memory is allocated.
    std::string calls;
    unsigned blocks = 0;  // of the last kernel on few
};
Fake fake;
bool is_dry = false;  // nothing is copied: the time of a call is what checks and submission take
int side_stream;

bool is_pinned_or_device(const void* address, size_t bytes) {
    return !fake.host.touches(address, bytes) || fake.pinned.holds(address, bytes);
}

void copy_by_engine(void* dst, const void* src, size_t bytes) {
    // A graph would copy from there long after.
    if (fake.capturing) fake.faults += !is_pinned_or_device(src, bytes) + !is_pinned_or_device(dst, bytes);
    if (!is_dry) std::memcpy(dst, src, bytes);
}

void copy_steps(const CopyTensor* tensors, size_t num_tensors, const Steps& plan) {
    if (is_dry) {
        blockyard::launch_parts(tensors, num_tensors, plan,
                                [](const blockyard::CopyParams&, size_t, int64_t) { return cudaSuccess; });
        return;
    }
    for (size_t t = 0; t < num_tensors; ++t) {
        const CopyTensor& tensor = tensors[t];
        const auto width = static_cast<size_t>(tensor.width);
        std::vector<unsigned char> aside(width);
        for (const CopyPair& step : plan.steps) {
            const unsigned char* src = step.src == kAside ? aside.data() : tensor.src + step.src * tensor.src_stride;
            unsigned char* dst = step.dst == kAside ? aside.data() : tensor.dst + step.dst * tensor.dst_stride;
            // A kernel cannot touch memory of the host that is not page-locked, or has another address there.
            fake.faults += !is_pinned_or_device(src, width) + !is_pinned_or_device(dst, width);
            fake.faults += !fake.mapped && (fake.host.touches(src, width) || fake.host.touches(dst, width));
            std::memmove(dst, src, width);
        }
    }
}

CUresult copy_as_batch(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                       CUmemcpyAttributes* attributes, size_t*, size_t num_attributes, CUstream stream) {
    const bool in_order = attributes->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    fake.faults += stream == nullptr || fake.capturing || num_attributes != 1 || !in_order || count == 0;
    fake.calls += 'B';
    for (size_t n = 0; n < count; ++n) {
        copy_by_engine(reinterpret_cast<void*>(dsts[n]), reinterpret_cast<void*>(srcs[n]), sizes[n]);
    }
    return CUDA_SUCCESS;
}

}  // namespace

// ---- the runtime ----

extern "C" {

const char* cudaGetErrorString(cudaError_t) { return "as the test wants it"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    *mode = cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
    fake.faults += fake.capturing;
    fake.calls += 'A';
    *memory = std::malloc(bytes);
    return *memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) {
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    *attributes = {};
    const bool is_host = fake.pinned.holds(pointer, 1);
    attributes->type = is_host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->devicePointer = is_host && fake.mapped ? const_cast<void*>(pointer) : nullptr;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    if (kind != cudaMemcpyDefault) {
        const bool to_host = fake.host.holds(dst, bytes);
        fake.faults += kind != (to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice);
    }
    fake.calls += 'm';
    copy_by_engine(dst, src, bytes);
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    *function = reinterpret_cast<void*>(&copy_as_batch);
    *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = reinterpret_cast<cudaStream_t>(&side_stream);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(&side_stream);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) {
    fake.calls += stream == nullptr ? "r0" : "r1";
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
    fake.calls += stream == nullptr ? "w0" : "w1";
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = fake.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

// ---- torch's part of a device ----

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
    *stream = fake.own_stream ? &side_stream : nullptr;
    return 0;
}
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
    *guard = nullptr;
    return 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }

// ---- what the test sets and reads ----

void fake_reset(uintptr_t host, uintptr_t host_end, uintptr_t pinned_end, bool own_stream, bool capturing, bool mapped,
                bool has_bulk) {
    fake = {{host, host_end}, {host, pinned_end}, own_stream, capturing, mapped, has_bulk, 0, "", 0};
}
unsigned fake_blocks() { return fake.blocks; }
void fake_dry(bool dry) { is_dry = dry; }
int fake_faults() { return fake.faults; }
const char* fake_calls() { return fake.calls.c_str(); }
// Strategy 0 leaves the choice to the rule without a table.
void fake_strategy(int64_t direction, int64_t strategy, unsigned blocks) {
    const int64_t most = INT64_MAX;
    const blockyard::StrategyRule rule{static_cast<blockyard::Direction>(direction), most, most,
                                       static_cast<blockyard::Strategy>(strategy), blocks};
    blockyard::set_strategies(0, strategy ? std::vector{rule} : std::vector<blockyard::StrategyRule>{});
}
}

// ---- the kernels ----

namespace blockyard {

bool has_bulk(int) { return fake.has_bulk; }

cudaError_t copy_on_device(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t) {
    fake.calls += 'K';
    copy_steps(tensors, num_tensors, plan);
    return cudaSuccess;
}

cudaError_t copy_host_kernel(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, unsigned blocks,
                             cudaStream_t) {
    fake.calls += 'F';
    fake.blocks = blocks;
    fake.faults += !is_independent(plan);
    copy_steps(tensors, num_tensors, plan);
    return cudaSuccess;
}

cudaError_t copy_bulk(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, unsigned blocks, cudaStream_t) {
    fake.calls += 'U';
    fake.blocks = blocks;
    fake.faults += !is_independent(plan) || !fake.has_bulk || !fits_bulk(tensors, num_tensors);
    copy_steps(tensors, num_tensors, plan);
    return cudaSuccess;
}

}  // namespace blockyard

namespace {

void swap(std::vector<Tensor> src_views, std::vector<Tensor> dst_views, Tensor pairs, bool from_device,
          bool to_device) {
    Side src("src", src_views), dst("dst", dst_views);
    if (from_device) src.device = 0;
    if (to_device) dst.device = 0;
    check_swap(src, dst);
    run(src, dst, blockyard::read_pairs(pairs, src.blocks, dst.blocks));
}

void move(std::vector<Tensor> views, Tensor steps, Tensor starts) {
    Side caches("caches", views);
    caches.device = 0;
    run_within(caches, blockyard::read_steps(steps, starts, caches.blocks));
}

void loop(std::vector<Tensor> src_views, std::vector<Tensor> dst_views, Tensor pairs) {
    Side src("src", src_views), dst("dst", dst_views);
    dst.device = 0;
    run_loop(src, dst, blockyard::read_pairs(pairs, src.blocks, dst.blocks));
}

}  // namespace

STABLE_TORCH_LIBRARY(blockyard_fake, m) {
    m.def("swap(Tensor[] src, Tensor(a!)[] dst, Tensor pairs, bool from_device, bool to_device) -> ()");
    m.def("move(Tensor(a!)[] caches, Tensor steps, Tensor starts) -> ()");
    m.def("loop(Tensor[] src, Tensor(a!)[] dst, Tensor pairs) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(blockyard_fake, CPU, m) {
    m.impl("swap", TORCH_BOX(&swap));
    m.impl("move", TORCH_BOX(&move));
    m.impl("loop", TORCH_BOX(&loop));
}
