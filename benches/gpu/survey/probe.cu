// Asks a device and its driver, without torch, what they refuse and how fast each copy strategy can be.
//   nvcc -O3 -std=c++17 -arch=sm_90 -Icuda benches/gpu/survey/probe.cu cuda/steps.cpp -o probe
//   ./probe limits | ./probe batch PIECES BYTES | ./probe rates
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

#include "bulk.cu"
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
    double best = 1e9, least = 1e9;
    for (int i = 0; i <= repeat; ++i) {
        OK(cudaDeviceSynchronize());
        auto t0 = std::chrono::steady_clock::now();
        work();
        auto t1 = std::chrono::steady_clock::now();
        OK(cudaDeviceSynchronize());
        auto t2 = std::chrono::steady_clock::now();
        if (i == 0) continue;
        best = std::min(best, std::chrono::duration<double>(t2 - t0).count());
        least = std::min(least, std::chrono::duration<double>(t1 - t0).count());
    }
    if (host) *host = least;
    return best;
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
    auto say = [&](const char* what, int r) {
        cudaError_t later = cudaStreamSynchronize(s);
        printf("%-66s -> %d, at sync %d (%s)\n", what, r, later, cudaGetErrorString(later));
        cudaGetLastError();
    };
    const size_t half = 64 << 10;
    say("cudaMemcpyAsync H2D over two registrations",
        cudaMemcpyAsync(dev, host + C - half, 2 * half, cudaMemcpyHostToDevice, s));
    say("cudaMemcpyAsync D2H over two registrations",
        cudaMemcpyAsync(host + C - half, dev, 2 * half, cudaMemcpyDeviceToHost, s));
    say("cudaMemcpyAsync H2D registered -> pageable",
        cudaMemcpyAsync(dev, host + 2 * C - half, 2 * half, cudaMemcpyHostToDevice, s));
    say("cudaMemcpyAsync D2H registered -> pageable",
        cudaMemcpyAsync(host + 2 * C - half, dev, 2 * half, cudaMemcpyDeviceToHost, s));
    auto two = [&](void* d0, const void* s0, void* d1, const void* s1) {
        return Job{{(CUdeviceptr)d0, (CUdeviceptr)d1}, {(CUdeviceptr)s0, (CUdeviceptr)s1}, {half, 2 * half}};
    };
    say("batch H2D, second piece over two registrations", submit(two(dev, host, dev + C, host + C - half), 2, s));
    say("batch D2H, second piece over two registrations", submit(two(host, dev, host + C - half, dev + C), 2, s));
    say("batch H2D on the legacy stream (1 is expected)", submit(two(dev, host, dev + C, host + C), 2, nullptr));
    // Virtual memory: two mappings side by side.
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
    say("cudaMemcpyAsync H2D into two mappings",
        cudaMemcpyAsync(vm + unit - half, host, 2 * half, cudaMemcpyHostToDevice, s));
    say("batch H2D, second piece into two mappings", submit(two(vm, host, vm + unit - half, host + half), 2, s));
    say("batch D2H, second piece out of two mappings", submit(two(host, vm, host + half, vm + unit - half), 2, s));
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

void rates() {
    const size_t most = 512u << 20;
    char *host, *dev, *dev2;
    OK(cudaHostAlloc(&host, most, 0));
    memset(host, 5, most);
    OK(cudaMalloc(&dev, most));
    OK(cudaMalloc(&dev2, most));
    OK(cudaMemset(dev, 3, most));
    cudaStream_t s;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaFuncSetAttribute(copy_by_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes));
    auto rate = [](size_t bytes, double sec) { return bytes / sec / 1e9; };
    double large[3] = {rate(most, seconds([&] { cudaMemcpyAsync(dev, host, most, cudaMemcpyHostToDevice, s); })),
                       rate(most, seconds([&] { cudaMemcpyAsync(host, dev, most, cudaMemcpyDeviceToHost, s); })),
                       rate(most, seconds([&] { cudaMemcpyAsync(dev2, dev, most, cudaMemcpyDeviceToDevice, s); }))};
    printf("large GB/s: h2d %.1f d2h %.1f d2d %.1f\n", large[0], large[1], large[2]);
    for (size_t bytes : {4096ul, 8192ul, 16384ul, 28672ul, 65536ul}) {
        const uint32_t n = std::min<size_t>(8192, most / bytes);
        auto p = pairs_of(n);
        for (int to_host = 0; to_host < 2; ++to_host) {
            char *src = to_host ? dev : host, *dst = to_host ? host : dev;
            Job j = job_of(dst, src, p, bytes);
            const char* dir = to_host ? "d2h" : "h2d";
            printf("%s %6zu B x %u:", dir, bytes, n);
            for (size_t step : {(size_t)n, (size_t)2048, (size_t)512, (size_t)128}) {
                double h, sec = seconds([&] { submit(j, step, s); }, &h);
                printf(" batch/%zu %.1f (%.2f, %.2f us/piece)", step, rate(n * bytes, sec),
                       rate(n * bytes, sec) / large[to_host], h * 1e6 / n);
            }
            double sec = seconds([&] { submit(j, 512, s, 3, 0); });
            printf(" any %.1f", rate(n * bytes, sec));
            sec = seconds([&] { submit(j, 512, s, 1, 1); });
            printf(" overlap-flag %.1f", rate(n * bytes, sec));
            sec = seconds([&] {
                for (uint32_t i = 0; i < n; ++i)
                    cudaMemcpyAsync((void*)j.dst[i], (void*)j.src[i], bytes, cudaMemcpyDefault, s);
            });
            printf(" loop %.1f\n", rate(n * bytes, sec));
            static CopyParams q;
            for (int bulk = 0; bulk < 2; ++bulk) {
                printf("    %s blocks:", bulk ? "bulk  " : "kernel");
                for (unsigned blocks : {1u, 2u, 3u, 4u, 6u, 8u, 12u, 16u, 24u, 48u, 132u}) {
                    double k = seconds([&] {
                        for (size_t at = 0; at < n; at += kMaxSteps) {
                            size_t some = std::min<size_t>(kMaxSteps, n - at);
                            fill(q, &p[at], some, src, dst, bytes);
                            if (bulk)
                                copy_by_bulk<<<blocks, kWarp, kRingBytes, s>>>(q, 1,
                                                                               (bytes + kStageBytes - 1) / kStageBytes);
                            else
                                copy_pieces<uint4><<<blocks, kHostKernelThreads, 0, s>>>(
                                    q, 1, (bytes + kHostChunk<uint4> - 1) / kHostChunk<uint4>);
                        }
                    });
                    OK(cudaGetLastError());
                    printf(" %u:%.1f(%.2f)", blocks, rate(n * bytes, k), rate(n * bytes, k) / large[to_host]);
                }
                printf("\n");
            }
            // Rows of 1 MiB side by side on the host, pieces scattered on the device: by way of a stage on the device.
            const size_t row = 1 << 20, rows = n * bytes / row;
            Steps plan = independent(p);
            CopyTensor t{(unsigned char*)(to_host ? dev : dev2), (unsigned char*)(to_host ? dev2 : dev), (int64_t)bytes,
                         (int64_t)bytes, (int64_t)bytes};
            auto r = pairs_of(rows);
            Job big = to_host ? job_of(host, dev2, r, row) : job_of(dev2, host, r, row);
            double st = seconds([&] {
                if (to_host) copy_on_device(&t, 1, plan, s);
                submit(big, 512, s);
                if (!to_host) copy_on_device(&t, 1, plan, s);
            });
            printf("    staged by rows of 1 MiB: %.1f (%.2f), in one part, not yet overlapped\n", rate(n * bytes, st),
                   rate(n * bytes, st) / large[to_host]);
        }
        for (uint32_t m : {1024u, n, (uint32_t)std::min<size_t>(50000, most / bytes)}) {
            auto pd = pairs_of(m);
            Steps plan = independent(pd);
            CopyTensor t{(unsigned char*)dev, (unsigned char*)dev2, (int64_t)bytes, (int64_t)bytes, (int64_t)bytes};
            double same = seconds([&] { cudaMemcpyAsync(dev2, dev, m * bytes, cudaMemcpyDeviceToDevice, s); });
            double k = seconds([&] { copy_on_device(&t, 1, plan, s); });
            printf("d2d %6zu B x %u: kernel %.0f, one copy of as much %.0f, ratio %.2f\n", bytes, m, rate(m * bytes, k),
                   rate(m * bytes, same), same / k);
        }
    }
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
}
