// Streams and events of a device as a model, for cuda/test_staged.py: what was queued runs only at the end, in any
// order that streams and events allow. The staged copies above it are the library's own, with the kernel's own
// arithmetic.

#include <cuda_runtime_api.h>

#include <cstring>
#include <functional>
#include <map>
#include <random>

#include "copy_kernel.h"
#include "launch.h"
#include "staged.cpp"
#include "steps.cpp"

using namespace blockyard;

namespace {

constexpr size_t kNone = SIZE_MAX;

struct Work {
    std::function<void()> run;
    std::vector<size_t> after;
    cudaStream_t stream;
    bool done = false;
};

// Streams are numbered; those of the caller come first.
struct Model {
    std::vector<Work> queued;
    std::map<cudaStream_t, size_t> ends;
    std::map<cudaEvent_t, size_t> records;
    uintptr_t handles = 100;
    size_t allocations = 0;
    bool relaxed = false, has_memory = true;
    int faults = 0;

    size_t end(cudaStream_t stream) const {
        const auto found = ends.find(stream);
        return found == ends.end() ? kNone : found->second;
    }

    void add(cudaStream_t stream, std::function<void()> run, size_t also = kNone) {
        Work work{std::move(run), {}, stream};
        for (const size_t earlier : {end(stream), also}) {
            if (earlier != kNone) work.after.push_back(earlier);
        }
        ends[stream] = queued.size();
        queued.push_back(std::move(work));
    }

    // Policies: the lowest stream first, the highest first, or any.
    void finish(int policy, unsigned seed) {
        std::mt19937 random(seed);
        for (size_t left = queued.size(); left > 0; --left) {
            std::vector<size_t> ready;
            for (size_t n = 0; n < queued.size(); ++n) {
                const auto done = [&](size_t earlier) { return queued[earlier].done; };
                const bool may = std::all_of(queued[n].after.begin(), queued[n].after.end(), done);
                if (!queued[n].done && may) ready.push_back(n);
            }
            const auto by_stream = [&](size_t a, size_t b) { return queued[a].stream < queued[b].stream; };
            size_t chosen = ready[random() % ready.size()];
            if (policy == 0) chosen = *std::min_element(ready.begin(), ready.end(), by_stream);
            if (policy == 1) chosen = *std::max_element(ready.begin(), ready.end(), by_stream);
            queued[chosen].run();
            queued[chosen].done = true;
        }
        queued.clear();
        ends.clear();
        records.clear();
    }
};
Model model;

cudaStream_t numbered(int stream) { return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(stream)); }

}  // namespace

// ---- the runtime ----

extern "C" {

cudaError_t cudaMalloc(void** memory, size_t bytes) {
    model.faults += !model.relaxed;
    ++model.allocations;
    // A slot that is read before it is filled delivers other bytes.
    *memory = model.has_memory ? std::malloc(bytes) : nullptr;
    if (*memory != nullptr) std::memset(*memory, 0xee, bytes);
    return model.has_memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) {
    std::free(memory);
    return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    const bool before = model.relaxed;
    model.relaxed = *mode == cudaStreamCaptureModeRelaxed;
    *mode = before ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    model.faults += flags != cudaStreamNonBlocking;
    *stream = reinterpret_cast<cudaStream_t>(++model.handles);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(++model.handles);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    model.records[event] = model.end(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    const auto found = model.records.find(event);
    // An event that was never recorded, or was recorded on an empty stream, has fired.
    model.add(stream, [] {}, found == model.records.end() ? kNone : found->second);
    return cudaSuccess;
}

// ---- what the test calls ----

void queue_copy(int stream, void* dst, const void* src, size_t bytes) {
    model.add(numbered(stream), [=] { std::memcpy(dst, src, bytes); });
}

int queue_staged(int stream, const CopyTensor* tensors, size_t num_tensors, const CopyPair* pairs, size_t num_pairs,
                 bool to_host, unsigned blocks) {
    const std::vector<CopyTensor> views(tensors, tensors + num_tensors);
    if (!has_host_rows(views, to_host)) return -1;
    if (!has_staging(0, to_host)) return -2;
    const CopyRows copy_rows = [](const CopyTensor& rows, const std::vector<CopyPair>& part, cudaStream_t on) {
        for (const CopyPair& pair : part) {
            const unsigned char* src = rows.src + pair.src * rows.src_stride;
            unsigned char* dst = rows.dst + pair.dst * rows.dst_stride;
            model.add(on, [=] { std::memcpy(dst, src, static_cast<size_t>(rows.width)); });
        }
        return cudaSuccess;
    };
    return copy_staged(0, views, {pairs, pairs + num_pairs}, to_host, blocks, copy_rows, numbered(stream));
}

void finish(int policy, unsigned seed) { model.finish(policy, seed); }
void has_memory(bool has) { model.has_memory = has; }
int faults() { return model.faults; }
size_t allocations() { return model.allocations; }
}

// ---- the kernel and the batch file's part ----

namespace blockyard {

cudaError_t order(cudaEvent_t event, cudaStream_t earlier, cudaStream_t later) {
    cudaEventRecord(event, earlier);
    return cudaStreamWaitEvent(later, event, 0);
}

cudaError_t copy_host_kernel(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, unsigned blocks,
                             cudaStream_t stream) {
    model.faults += !is_independent(plan);
    return launch_parts(tensors, num_tensors, plan, [=](const CopyParams& params, size_t some, int64_t widest) {
        const auto copied = std::make_shared<CopyParams>(params);
        const auto chunks = static_cast<uint32_t>((widest + kHostChunk<uint8_t> - 1) / kHostChunk<uint8_t>);
        model.add(stream, [=] {
            for (uint32_t warp = 0; warp < blocks; ++warp) {
                for (int lane = 0; lane < kWarp; ++lane) {
                    walk_host_pieces<uint8_t>(*copied, static_cast<uint32_t>(some), chunks, warp, blocks, lane);
                }
            }
        });
        return cudaSuccess;
    });
}

}  // namespace blockyard
