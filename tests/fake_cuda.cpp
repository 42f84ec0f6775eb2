// The CUDA runtime and driver over memory of the CPU, as far as Blockyard calls them, with the library's own dispatch
// on top. Tensors of the CPU stand for a device's. It refuses what the real ones refuse: pieces of a batch that leave
// their registration or mapping, copies of memory that is page-locked in part, registration while a capture forbids it,
// the legacy stream. What a device would not survive is counted as a fault.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

// Built with a newer toolkit than the driver's release, as a user's own may be.
#undef CUDART_VERSION
#define CUDART_VERSION 13010

#include "../cuda/batch.cpp"
#include "../cuda/check.cpp"
#include "../cuda/extents.cpp"
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

// What one call registered, mapped or allocated.
struct Range {
    uintptr_t first = 0, end = 0;
    int64_t shift = 0;  // the device's address less the host's
    bool touches(uintptr_t start, size_t bytes) const { return start < end && first < start + bytes; }
    bool holds(uintptr_t start, size_t bytes) const { return first <= start && start + bytes <= end; }
};

struct Capture {
    std::thread::id thread;
    cudaStreamCaptureMode mode;
    bool valid = true;
};

struct Fake {
    Range host;
    std::vector<Range> registered, mapped;
    bool own_stream = true, capturing = false, reports_ranges = true;
    int answer = 0;      // to questions about memory of the host
    int capability = 9;  // major
    bool full = false;   // the device has no memory left
    size_t max_pieces = SIZE_MAX;
    int faults = 0, questions = 0;
    // m: one copy, B: a batch, r: an event is recorded, w: waited for, K: a kernel on all, F: on few, A:
    // memory is allocated.
    std::string calls;
    unsigned blocks = 0;  // of the last kernel on few
};
Fake fake;
// Of the driver; a test that wants another sets it before the first call.
unsigned driver_version = 13000;
bool is_dry = false;  // nothing is copied: the time of a call is what checks and submission take
int side_stream;
std::mutex mutex;  // of what the threads of host pools change
std::vector<Capture> captures;
std::vector<Range> allocated;  // for the life of the process, as the rings of staged copies
thread_local cudaStreamCaptureMode interaction = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool has_context = false;  // the driver's calls need one, the runtime's take one
cudaError_t lost = cudaSuccess;         // what no call clears

uintptr_t number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

cudaError_t failed(cudaError_t error) { return last_error = error; }

const Range* find(const std::vector<Range>& ranges, uintptr_t address, size_t bytes) {
    const auto found =
        std::find_if(ranges.begin(), ranges.end(), [&](auto& range) { return range.holds(address, bytes); });
    return found == ranges.end() ? nullptr : &*found;
}

size_t pinned_bytes(uintptr_t address, size_t bytes) {
    size_t count = 0;
    for (const Range& range : fake.registered) {
        if (!range.touches(address, bytes)) continue;
        count += std::min(range.end, address + bytes) - std::max(range.first, address);
    }
    return count;
}

// Single copies cross registrations, but not into memory that is not page-locked.
bool takes_single(const void* address, size_t bytes) {
    const size_t pinned = pinned_bytes(number(address), bytes);
    if (!fake.host.touches(number(address), bytes)) return true;
    // A graph would copy from there long after.
    if (fake.capturing) fake.faults += pinned != bytes;
    return pinned == 0 || pinned == bytes;
}

// What holds an address of a device: a mapping, or what one call allocated.
const Range* find_on_device(uintptr_t address, size_t bytes) {
    const Range* range = find(fake.mapped, address, bytes);
    return range != nullptr ? range : find(allocated, address, bytes);
}

// A batch takes what lies in one registration or mapping.
bool takes_batched(const void* address, size_t bytes) {
    const bool is_host = fake.host.touches(number(address), bytes);
    const Range* range =
        is_host ? find(fake.registered, number(address), bytes) : find_on_device(number(address), bytes);
    if (range == nullptr) return false;
    // It takes the host's address for the device's, and fails when nobody looks.
    if (range->shift != 0) lost = cudaErrorIllegalAddress;
    return true;
}

// The memory behind an address that a kernel uses.
unsigned char* reach(const unsigned char* address, size_t bytes) {
    const uintptr_t start = number(address);
    for (const Range& range : fake.registered) {
        if (range.shift != 0 && range.first + range.shift <= start && start + bytes <= range.end + range.shift) {
            return const_cast<unsigned char*>(address - range.shift);
        }
        fake.faults += range.shift != 0 && range.touches(start, bytes);
    }
    fake.faults += fake.host.touches(start, bytes) && pinned_bytes(start, bytes) != bytes;
    return const_cast<unsigned char*>(address);
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
            std::memmove(reach(dst, width), reach(src, width), width);
        }
    }
}

CUresult copy_as_batch(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                       CUmemcpyAttributes* attributes, size_t*, size_t num_attributes, CUstream stream) {
    const bool in_order = attributes->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    fake.calls += 'B';
    fake.faults += fake.capturing || num_attributes != 1 || !in_order || count == 0;
    fake.faults += count > fake.max_pieces;  // the process would have crashed
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    if (stream == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (size_t n = 0; n < count; ++n) {
        auto* dst = reinterpret_cast<void*>(dsts[n]);
        auto* src = reinterpret_cast<void*>(srcs[n]);
        if (!takes_batched(dst, sizes[n]) || !takes_batched(src, sizes[n])) return CUDA_ERROR_INVALID_VALUE;
        if (!is_dry) std::memcpy(dst, src, sizes[n]);
    }
    return CUDA_SUCCESS;
}

CUresult describe_pointer(unsigned count, CUpointer_attribute* names, void** values, CUdeviceptr address) {
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    if (fake.answer != 0) return static_cast<CUresult>(fake.answer);
    ++fake.questions;
    const Range* range = find(fake.registered, address, 1);
    for (unsigned n = 0; n < count; ++n) {
        if (names[n] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
            *static_cast<unsigned*>(values[n]) = range == nullptr ? 0 : CU_MEMORYTYPE_HOST;
        } else if (names[n] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
            *static_cast<CUdeviceptr*>(values[n]) = range == nullptr ? 0 : address + range->shift;
        } else if (names[n] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) {
            *static_cast<CUdeviceptr*>(values[n]) = range == nullptr ? 0 : range->first + range->shift;
        } else if (names[n] == CU_POINTER_ATTRIBUTE_RANGE_SIZE) {
            *static_cast<size_t*>(values[n]) = range == nullptr || !fake.reports_ranges ? 0 : range->end - range->first;
        }
    }
    return CUDA_SUCCESS;
}

CUresult describe_range(CUdeviceptr* start, size_t* size, CUdeviceptr address) {
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    ++fake.questions;
    const Range* range = find_on_device(address, 1);
    if (range == nullptr) return CUDA_ERROR_NOT_FOUND;
    *start = range->first;
    *size = range->end - range->first;
    return CUDA_SUCCESS;
}

// Whether a capture forbids this thread what may be unsafe; such a capture is lost then.
bool is_forbidden() {
    bool forbidden = false;
    for (Capture& capture : captures) {
        const bool own = capture.thread == std::this_thread::get_id();
        const bool strict =
            own ? capture.mode != cudaStreamCaptureModeRelaxed
                : capture.mode == cudaStreamCaptureModeGlobal && interaction == cudaStreamCaptureModeGlobal;
        if (interaction == cudaStreamCaptureModeRelaxed || !strict) continue;
        capture.valid = false;
        forbidden = true;
    }
    return forbidden;
}

}  // namespace

// ---- the runtime ----

extern "C" {

const char* cudaGetErrorString(cudaError_t) { return "as the test wants it"; }
cudaError_t cudaPeekAtLastError() { return lost != cudaSuccess ? lost : last_error; }
cudaError_t cudaGetLastError() { return lost != cudaSuccess ? lost : std::exchange(last_error, cudaSuccess); }
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, interaction);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (is_forbidden()) return failed(cudaErrorStreamCaptureUnsupported);
    fake.faults += fake.capturing;
    fake.calls += 'A';
    *memory = fake.full ? nullptr : std::malloc(bytes);
    if (*memory == nullptr) return failed(cudaErrorMemoryAllocation);
    allocated.push_back({number(*memory), number(*memory) + bytes, 0});
    return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
    has_context = true;
    return lost;
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (is_forbidden()) return failed(cudaErrorStreamCaptureUnsupported);
    if (pinned_bytes(number(pointer), bytes) > 0) return failed(cudaErrorHostMemoryAlreadyRegistered);
    fake.registered.push_back({number(pointer), number(pointer) + bytes, 0});
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (is_forbidden()) return failed(cudaErrorStreamCaptureUnsupported);
    const auto found = std::find_if(fake.registered.begin(), fake.registered.end(),
                                    [&](auto& range) { return range.first == number(pointer); });
    if (found == fake.registered.end()) return failed(cudaErrorHostMemoryNotRegistered);
    fake.registered.erase(found);
    return cudaSuccess;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    const auto before = static_cast<CUstreamCaptureMode>(interaction);
    interaction = static_cast<cudaStreamCaptureMode>(*mode);
    *mode = before;
    return CUDA_SUCCESS;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    if (kind != cudaMemcpyDefault) {
        const bool to_host = fake.host.holds(number(dst), bytes);
        fake.faults += kind != (to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice);
    }
    fake.calls += 'm';
    if (lost != cudaSuccess) return lost;
    if (!takes_single(src, bytes) || !takes_single(dst, bytes)) return failed(cudaErrorInvalidValue);
    if (!is_dry) std::memcpy(dst, src, bytes);
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    struct Call {
        void* function;
        unsigned since;  // the release that introduced this signature
    };
    static const std::map<std::string, Call> calls{
        {"cuMemcpyBatchAsync", {reinterpret_cast<void*>(&copy_as_batch), 13000}},
        {"cuPointerGetAttributes", {reinterpret_cast<void*>(&describe_pointer), 7000}},
        {"cuMemGetAddressRange", {reinterpret_cast<void*>(&describe_range), 3020}},
    };
    *function = nullptr;
    if (version > driver_version) return failed(cudaErrorInvalidValue);
    const auto found = calls.find(name);
    const bool known = found != calls.end();
    if (known && version >= found->second.since) *function = found->second.function;
    // A version from before a call had this signature gives the older one.
    *result = *function != nullptr ? cudaDriverEntryPointSuccess
              : known              ? cudaDriverEntryPointVersionNotSufficent
                                   : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    if (attribute != cudaDevAttrComputeCapabilityMajor) return failed(cudaErrorInvalidValue);
    *value = fake.capability;
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

void fake_reset(uintptr_t host, uintptr_t host_end, bool own_stream, bool capturing, bool reports_ranges,
                size_t max_pieces) {
    fake = {{host, host_end}, {}, {}, own_stream, capturing, reports_ranges, 0, 9, false, max_pieces, 0, 0, "", 0};
    has_context = false;
    last_error = lost = cudaSuccess;
    blockyard::declared().regions.clear();
    blockyard::declared().queried.clear();
    blockyard::set_batch_pieces(0, std::nullopt);
}
void fake_capability(int major) { fake.capability = major; }
void fake_full(bool full) { fake.full = full; }
void fake_prepare(int device) { blockyard::prepare(device); }
void fake_driver(unsigned version) { driver_version = version; }
unsigned fake_blocks() { return fake.blocks; }
void fake_dry(bool dry) { is_dry = dry; }
void fake_host(uintptr_t first, uintptr_t end) { fake.host = {first, end}; }
void fake_register(uintptr_t first, uintptr_t end, int64_t shift) { fake.registered.push_back({first, end, shift}); }
void fake_map(uintptr_t first, uintptr_t end) { fake.mapped.push_back({first, end, 0}); }
void fake_declare(uintptr_t first, size_t bytes, size_t chunk) { blockyard::declare_region(first, bytes, chunk); }
bool fake_is_declared(uintptr_t first) { return blockyard::declared().regions.count(first) > 0; }
void fake_fail(int error, bool for_good) { (for_good ? lost : last_error) = static_cast<cudaError_t>(error); }
void fake_begin_capture(int mode) {
    const std::lock_guard<std::mutex> lock(mutex);
    captures.push_back({std::this_thread::get_id(), static_cast<cudaStreamCaptureMode>(mode)});
}
// Ends the capture of this thread.
int fake_end_capture() {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto own = std::find_if(captures.begin(), captures.end(),
                                  [](auto& capture) { return capture.thread == std::this_thread::get_id(); });
    const bool valid = own->valid;
    captures.erase(own);
    return valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
}
// Whether this thread must not make unsafe calls now. The captures that forbid it are lost.
bool fake_is_forbidden() {
    const std::lock_guard<std::mutex> lock(mutex);
    return is_forbidden();
}
int fake_registered() { return static_cast<int>(fake.registered.size()); }
int fake_questions() { return fake.questions; }
void fake_answer(int code) { fake.answer = code; }
void fake_batch_pieces(size_t max_pieces) { blockyard::set_batch_pieces(0, max_pieces); }
int fake_faults() { return fake.faults; }
const char* fake_calls() { return fake.calls.c_str(); }
// Strategy 0 leaves the choice to the rule without a table.
void fake_strategy(int64_t direction, int64_t strategy, unsigned blocks) {
    const int64_t no_limit = INT64_MAX;
    const blockyard::StrategyRule rule{static_cast<blockyard::Direction>(direction), no_limit, no_limit,
                                       static_cast<blockyard::Strategy>(strategy), blocks};
    blockyard::set_strategies(0, strategy ? std::vector{rule} : std::vector<blockyard::StrategyRule>{});
}
}

// ---- the kernels ----

namespace blockyard {

cudaError_t copy_on_device(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, cudaStream_t) {
    fake.calls += 'K';
    copy_steps(tensors, num_tensors, plan);
    return cudaGetLastError();
}

cudaError_t copy_host_kernel(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, unsigned blocks,
                             cudaStream_t) {
    fake.calls += 'F';
    fake.blocks = blocks;
    fake.faults += !is_independent(plan);
    copy_steps(tensors, num_tensors, plan);
    return cudaGetLastError();
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
