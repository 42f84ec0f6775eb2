// Asks a device and its driver, without torch, what they refuse and how fast each copy strategy can be.
//   nvcc -O3 -std=c++17 -arch=sm_90 -Icuda benches/gpu/survey/probe.cu cuda/steps.cpp -o probe
//   ./probe limits | ./probe batch PIECES BYTES | ./probe rates | ./probe counters
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "copy.cu"

using namespace blockyard;
#define OK(x)                                                                              \
    do {                                                                                   \
        cudaError_t e_ = (x);                                                              \
        if (e_ != cudaSuccess) {                                                           \
            printf("FAIL %s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
            exit(2);                                                                       \
        }                                                                                  \
    } while (0)

template <typename F>
F driver(const char* name, unsigned version) {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult r;
    if (cudaGetDriverEntryPointByVersion(name, &p, version, cudaEnableDefault, &r) != cudaSuccess || r != 0)
        p = nullptr;
    return reinterpret_cast<F>(p);
}
using Batch = CUresult (*)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, CUstream);
Batch batch_fn() {
    static Batch f = driver<Batch>("cuMemcpyBatchAsync", 13000);
    return f;
}

struct Job {
    std::vector<CUdeviceptr> dst, src;
    std::vector<size_t> size;
};
int submit(const Job& j, size_t step, cudaStream_t s, int order = 1, unsigned flags = 0) {
    Job k = j;
    for (size_t at = 0; at < k.dst.size(); at += step) {
        CUmemcpyAttributes a{};
        a.srcAccessOrder = static_cast<CUmemcpySrcAccessOrder>(order);
        a.flags = flags;
        size_t first = 0, n = std::min(step, k.dst.size() - at);
        CUresult r = batch_fn()(&k.dst[at], &k.src[at], &k.size[at], n, &a, &first, 1, s);
        if (r) return r;
    }
    return 0;
}
std::vector<uint32_t> shuffled(uint32_t n, unsigned seed) {
    std::vector<uint32_t> v(n);
    std::iota(v.begin(), v.end(), 0u);
    std::shuffle(v.begin(), v.end(), std::mt19937(seed));
    return v;
}
std::vector<CopyPair> pairs_of(uint32_t n) {
    auto a = shuffled(n, 1), b = shuffled(n, 2);
    std::vector<CopyPair> p(n);
    for (uint32_t i = 0; i < n; ++i) p[i] = {a[i], b[i]};
    return p;
}
Job job_of(void* dst, const void* src, const std::vector<CopyPair>& pairs, size_t bytes) {
    Job j;
    for (auto p : pairs) {
        j.dst.push_back((CUdeviceptr)((char*)dst + p.dst * bytes));
        j.src.push_back((CUdeviceptr)((const char*)src + p.src * bytes));
        j.size.push_back(bytes);
    }
    return j;
}
double seconds(const std::function<void()>& work, double* host = nullptr, int repeat = 5) {
    double best = 1e9, best_host = 1e9;
    for (int i = 0; i <= repeat; ++i) {
        OK(cudaDeviceSynchronize());
        auto t0 = std::chrono::steady_clock::now();
        work();
        auto t1 = std::chrono::steady_clock::now();
        OK(cudaDeviceSynchronize());
        auto t2 = std::chrono::steady_clock::now();
        if (i == 0) continue;
        best = std::min(best, std::chrono::duration<double>(t2 - t0).count());
        best_host = std::min(best_host, std::chrono::duration<double>(t1 - t0).count());
    }
    if (host) *host = best_host;
    return best;
}

constexpr size_t half = 64 << 10;
constexpr unsigned kFew = 3;  // thread blocks: kHostBlocks of strategy.h

void report(cudaStream_t s, const char* what, int r) {
    cudaError_t later = cudaStreamSynchronize(s);
    printf("%-66s -> %d, at sync %d (%s)\n", what, r, later, cudaGetErrorString(later));
    cudaGetLastError();
}

// A batch of two pieces, the second twice as long.
Job two(void* d0, const void* s0, void* d1, const void* s1) {
    return Job{{(CUdeviceptr)d0, (CUdeviceptr)d1}, {(CUdeviceptr)s0, (CUdeviceptr)s1}, {half, 2 * half}};
}

// Copies over the bound of two mappings of virtual memory, and what thousands of mappings cost.
void mappings(char* host, cudaStream_t s) {
    auto cg = driver<CUresult (*)(size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags)>(
        "cuMemGetAllocationGranularity", 10020);
    auto cr = driver<CUresult (*)(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long)>("cuMemAddressReserve",
                                                                                                  10020);
    auto cc =
        driver<CUresult (*)(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long)>(
            "cuMemCreate", 10020);
    auto cm = driver<CUresult (*)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)>(
        "cuMemMap", 10020);
    auto ca = driver<CUresult (*)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t)>("cuMemSetAccess", 10020);
    auto crel = driver<CUresult (*)(CUmemGenericAllocationHandle)>("cuMemRelease", 10020);
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemAccessDesc access{prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    size_t unit = 0;
    CUdeviceptr va = 0;
    int r = cg(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    const size_t chunks = 4096;
    r |= cr(&va, chunks * unit, 0, 0, 0);
    auto t0 = std::chrono::steady_clock::now();
    for (size_t i = 0; i < chunks; ++i) {
        CUmemGenericAllocationHandle h = 0;
        r |= cc(&h, unit, &prop, 0);
        r |= cm(va + i * unit, unit, 0, h, 0);
        r |= crel(h);
    }
    auto t1 = std::chrono::steady_clock::now();
    r |= ca(va, chunks * unit, &access, 1);
    auto t2 = std::chrono::steady_clock::now();
    printf("VMM unit %zu: %zu chunks mapped in %.1f ms, access over all in %.1f ms -> %d\n", unit, chunks,
           std::chrono::duration<double>(t1 - t0).count() * 1e3, std::chrono::duration<double>(t2 - t1).count() * 1e3,
           r);
    char* vm = (char*)va;
    report(s, "cudaMemcpyAsync H2D into two mappings",
           cudaMemcpyAsync(vm + unit - half, host, 2 * half, cudaMemcpyHostToDevice, s));
    report(s, "batch H2D, second piece into two mappings", submit(two(vm, host, vm + unit - half, host + half), 2, s));
    report(s, "batch D2H, second piece out of two mappings",
           submit(two(host, vm, host + half, vm + unit - half), 2, s));
}

void limits() {
    int v = 0, d = 0, uva = 0;
    cudaRuntimeGetVersion(&v);
    cudaDriverGetVersion(&d);
    OK(cudaDeviceGetAttribute(&uva, cudaDevAttrCanUseHostPointerForRegisteredMem, 0));
    printf("runtime %d driver %d batch %p CanUseHostPointerForRegisteredMem %d\n", v, d, (void*)batch_fn(), uva);
    cudaStream_t s;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    const size_t C = 4 << 20;
    char* host = (char*)mmap(nullptr, 4 * C, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(host, 7, 4 * C);
    OK(cudaHostRegister(host, C, 3));
    OK(cudaHostRegister(host + C, C, 3));  // 2*C.. stays pageable
    char* dev;
    OK(cudaMalloc(&dev, 4 * C));
    report(s, "cudaMemcpyAsync H2D over two registrations",
           cudaMemcpyAsync(dev, host + C - half, 2 * half, cudaMemcpyHostToDevice, s));
    report(s, "cudaMemcpyAsync D2H over two registrations",
           cudaMemcpyAsync(host + C - half, dev, 2 * half, cudaMemcpyDeviceToHost, s));
    report(s, "cudaMemcpyAsync H2D registered -> pageable",
           cudaMemcpyAsync(dev, host + 2 * C - half, 2 * half, cudaMemcpyHostToDevice, s));
    report(s, "cudaMemcpyAsync D2H registered -> pageable",
           cudaMemcpyAsync(host + 2 * C - half, dev, 2 * half, cudaMemcpyDeviceToHost, s));
    report(s, "batch H2D, second piece over two registrations", submit(two(dev, host, dev + C, host + C - half), 2, s));
    report(s, "batch D2H, second piece over two registrations", submit(two(host, dev, host + C - half, dev + C), 2, s));
    report(s, "batch H2D on the legacy stream (1 is expected)", submit(two(dev, host, dev + C, host + C), 2, nullptr));
    mappings(host, s);
    // A batch while a graph is captured.
    cudaGraph_t graph;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    int c = submit(two(dev, host, dev + C, host + half), 2, s);
    printf("batch under capture -> %d, capture ends %d\n", c, cudaStreamEndCapture(s, &graph));
}

void one_batch(size_t n, size_t bytes) {
    char *host, *dev;
    OK(cudaHostAlloc(&host, n * bytes, 0));
    OK(cudaMalloc(&dev, n * bytes));
    cudaStream_t s;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    auto p = pairs_of(n);
    for (int turn = 0; turn < 20; ++turn) {
        int a = submit(job_of(dev, host, p, bytes), n, s), b = submit(job_of(host, dev, p, bytes), n, s);
        if (a || b) {
            printf("batch of %zu: %d %d\n", n, a, b);
            exit(3);
        }
    }
    OK(cudaStreamSynchronize(s));
    printf("batch of %zu x %zu, 20 turns each way: fine\n", n, bytes);
}

void fill(CopyParams& q, const CopyPair* p, size_t n, const void* src, void* dst, size_t bytes) {
    q.tensors[0] = {(const unsigned char*)src, (unsigned char*)dst, (int64_t)bytes, (int64_t)bytes, (int64_t)bytes};
    std::copy_n(p, n, q.steps);
    for (size_t i = 0; i <= n; ++i) q.starts[i] = i;
    q.num_groups = n;
}

struct Link {
    char *host, *dev, *dev2;
    cudaStream_t s;
    double large[3];  // GB/s of one large copy: h2d, d2h, d2d
};
constexpr size_t kMaxBytes = 512u << 20;
double rate(size_t bytes, double sec) { return bytes / sec / 1e9; }
CopyTensor tensor(char* src, char* dst, size_t bytes) {
    return {(unsigned char*)src, (unsigned char*)dst, (int64_t)bytes, (int64_t)bytes, (int64_t)bytes};
}

Link make_link() {
    Link l;
    OK(cudaHostAlloc(&l.host, kMaxBytes, 0));
    memset(l.host, 5, kMaxBytes);
    OK(cudaMalloc(&l.dev, kMaxBytes));
    OK(cudaMalloc(&l.dev2, kMaxBytes));
    OK(cudaMemset(l.dev, 3, kMaxBytes));
    OK(cudaStreamCreateWithFlags(&l.s, cudaStreamNonBlocking));
    auto one = [&](char* dst, char* src, cudaMemcpyKind kind) {
        return rate(kMaxBytes, seconds([&] { cudaMemcpyAsync(dst, src, kMaxBytes, kind, l.s); }));
    };
    l.large[0] = one(l.dev, l.host, cudaMemcpyHostToDevice);
    l.large[1] = one(l.host, l.dev, cudaMemcpyDeviceToHost);
    l.large[2] = one(l.dev2, l.dev, cudaMemcpyDeviceToDevice);
    printf("large GB/s: h2d %.1f d2h %.1f d2d %.1f\n", l.large[0], l.large[1], l.large[2]);
    return l;
}

void by_calls(const Link& l, bool to_host, const Job& j, size_t bytes, uint32_t n) {
    printf("%s %6zu B x %u:", to_host ? "d2h" : "h2d", bytes, n);
    for (size_t step : {(size_t)n, (size_t)2048, (size_t)512, (size_t)128}) {
        double h, sec = seconds([&] { submit(j, step, l.s); }, &h);
        printf(" batch/%zu %.1f (%.2f, %.2f us/piece)", step, rate(n * bytes, sec),
               rate(n * bytes, sec) / l.large[to_host], h * 1e6 / n);
    }
    printf(" any %.1f", rate(n * bytes, seconds([&] { submit(j, 512, l.s, 3, 0); })));
    printf(" overlap-flag %.1f", rate(n * bytes, seconds([&] { submit(j, 512, l.s, 1, 1); })));
    auto loop = [&] {
        for (uint32_t i = 0; i < n; ++i)
            cudaMemcpyAsync((void*)j.dst[i], (void*)j.src[i], bytes, cudaMemcpyDefault, l.s);
    };
    printf(" loop %.1f\n", rate(n * bytes, seconds(loop)));
}

void by_kernel(const Link& l, bool to_host, const std::vector<CopyPair>& p, size_t bytes) {
    char *src = to_host ? l.dev : l.host, *dst = to_host ? l.host : l.dev;
    const size_t n = p.size();
    static CopyParams q;
    printf("    kernel blocks:");
    for (unsigned blocks : {1u, 2u, 3u, 4u, 6u, 8u, 12u, 16u, 24u, 48u, 132u}) {
        auto work = [&] {
            for (size_t at = 0; at < n; at += kMaxSteps) {
                fill(q, &p[at], std::min<size_t>(kMaxSteps, n - at), src, dst, bytes);
                copy_pieces<uint4>
                    <<<blocks, kHostKernelThreads, 0, l.s>>>(q, 1, (bytes + kHostChunk<uint4> - 1) / kHostChunk<uint4>);
            }
        };
        const double reached = rate(n * bytes, seconds(work));
        OK(cudaGetLastError());
        printf(" %u:%.1f(%.2f)", blocks, reached, reached / l.large[to_host]);
    }
    printf("\n");
}

// Rows of 1 MiB side by side on the host, pieces scattered on the device: by way of a stage on the device.
void staged(const Link& l, bool to_host, const std::vector<CopyPair>& p, size_t bytes) {
    const size_t row = 1 << 20, rows = p.size() * bytes / row;
    Steps plan = independent(p);
    CopyTensor t = to_host ? tensor(l.dev, l.dev2, bytes) : tensor(l.dev2, l.dev, bytes);
    auto r = pairs_of(rows);
    Job big = to_host ? job_of(l.host, l.dev2, r, row) : job_of(l.dev2, l.host, r, row);
    const double reached = rate(p.size() * bytes, seconds([&] {
                                    if (to_host) copy_on_device(&t, 1, plan, l.s);
                                    submit(big, 512, l.s);
                                    if (!to_host) copy_on_device(&t, 1, plan, l.s);
                                }));
    printf("    staged by rows of 1 MiB: %.1f (%.2f), in one part, not overlapped\n", reached,
           reached / l.large[to_host]);
}

void within_device(const Link& l, uint32_t n, size_t bytes) {
    auto pairs = pairs_of(n);
    Steps plan = independent(pairs);
    CopyTensor t = tensor(l.dev, l.dev2, bytes);
    double same = seconds([&] { cudaMemcpyAsync(l.dev2, l.dev, n * bytes, cudaMemcpyDeviceToDevice, l.s); });
    double k = seconds([&] { copy_on_device(&t, 1, plan, l.s); });
    printf("d2d %6zu B x %u: kernel %.0f, one copy of as much %.0f, ratio %.2f\n", bytes, n, rate(n * bytes, k),
           rate(n * bytes, same), same / k);
}

void rates() {
    const Link l = make_link();
    for (size_t bytes : {4096ul, 8192ul, 16384ul, 28672ul, 65536ul}) {
        const uint32_t n = std::min<size_t>(8192, kMaxBytes / bytes);
        auto p = pairs_of(n);
        for (bool to_host : {false, true}) {
            Job j = to_host ? job_of(l.host, l.dev, p, bytes) : job_of(l.dev, l.host, p, bytes);
            by_calls(l, to_host, j, bytes, n);
            by_kernel(l, to_host, p, bytes);
            staged(l, to_host, p, bytes);
        }
        for (uint32_t m : {1024u, n, (uint32_t)std::min<size_t>(50000, kMaxBytes / bytes)}) within_device(l, m, bytes);
    }
}

// Each kernel once, with the grid that a copy of an engine gives it: 160 views of 8 KiB.
void counters() {
    const Link l = make_link();
    const size_t views = 160, bytes = 8 << 10, blocks = kMaxBytes / views / bytes;
    const auto pairs = pairs_of(blocks);
    std::vector<CopyTensor> apart, to_host, to_device;
    for (size_t v = 0; v < views; ++v) {
        char *row = l.host + v * bytes, *view = l.dev + v * blocks * bytes, *other = l.dev2 + v * blocks * bytes;
        apart.push_back(tensor(view, other, bytes));
        to_host.push_back(tensor(view, row, bytes));
        to_host.back().dst_stride = views * bytes;
        to_device.push_back(tensor(row, view, bytes));
        to_device.back().src_stride = views * bytes;
    }
    Steps ring{{{0, kAside}}, {0, static_cast<uint32_t>(blocks + 1)}};
    for (uint32_t b = 0; b + 1 < blocks; ++b) ring.steps.push_back({b + 1, b});
    ring.steps.push_back({kAside, static_cast<uint32_t>(blocks - 1)});
    const Steps plan = independent(pairs);
    OK(copy_on_device(apart.data(), views, plan, l.s));
    OK(copy_on_device(apart.data(), views, ring, l.s));
    for (const auto& tensors : {to_host, to_device}) OK(copy_host_kernel(tensors.data(), views, plan, kFew, l.s));
    OK(cudaDeviceSynchronize());
    printf("%zu pieces of %zu bytes by each kernel\n", views * blocks, bytes);
}

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    std::string what = argc > 1 ? argv[1] : "limits";
    OK(cudaSetDevice(0));
    if (!batch_fn()) {
        printf("no cuMemcpyBatchAsync of 13.0 here\n");
        return 4;
    }
    if (what == "limits") limits();
    if (what == "batch") one_batch(atoll(argv[2]), atoll(argv[3]));
    if (what == "rates") rates();
    if (what == "counters") counters();
}
