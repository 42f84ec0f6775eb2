// The bulk engine of a device and the barriers of one block of threads, as a model: what has been started makes
// progress at any time, in any order and in lumps, and is done only where a wait says so. For
// tests/test_bulk_kernel.py.

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "bulk_kernel.h"

using namespace blockyard;

namespace {

enum Fault {
    kOverwritten = 1,  // a load was started into a stage that a store had yet to read
    kTooEarly = 2,     // a store was started from a stage that its load had yet to fill
    kLeft = 4,         // the block of threads ended before its copies
    kStuck = 8,        // a wait without end
    kMalformed = 16,   // what the engine does not take: alignment, size, a stage that is none
};

struct Barrier {
    int pending = 1;
    int64_t bytes = 0;
    uint32_t completed = 0;

    void update(int arrivals, int64_t expected) {
        pending -= arrivals;
        bytes += expected;
        if (pending > 0 || bytes != 0) return;
        ++completed;
        pending = 1;
    }
    // True when the phase of this parity is the one that was completed last.
    bool passes(uint32_t parity) const { return completed % 2 != parity; }
};

struct Copy {
    uint32_t stage;
    const unsigned char* src;
    unsigned char* dst;
    uint32_t bytes;
    bool is_load;
    uint32_t read = 0, written = 0;
    std::vector<unsigned char> inside;
    bool has_read() const { return read == bytes; }
    bool has_landed() const { return written == bytes; }
};

class Ring {
  public:
    explicit Ring(unsigned seed) : random_(seed), stages_(kStages * kStageBytes), barriers_(kStages) {
        patience_ = below(4);
    }

    void load(uint32_t stage, const unsigned char* src, uint32_t bytes) {
        check(stage, src, bytes);
        for (const Copy& copy : copies_) {
            if (copy.stage == stage && !(copy.is_load ? copy.has_landed() : copy.has_read())) fault |= kOverwritten;
        }
        barriers_[stage].update(1, bytes);
        copies_.push_back({stage, src, &stages_[stage * kStageBytes], bytes, true, 0, 0, {}});
        progress();
    }

    void wait_loaded(uint32_t stage, uint32_t parity) {
        until([&] { return barriers_[stage].passes(parity); });
    }

    void store(uint32_t stage, unsigned char* dst, uint32_t bytes) {
        check(stage, dst, bytes);
        for (const Copy& copy : copies_) {
            if (copy.stage == stage && copy.is_load && !copy.has_landed()) fault |= kTooEarly;
        }
        copies_.push_back({stage, &stages_[stage * kStageBytes], dst, bytes, false, 0, 0, {}});
        progress();
    }

    template <uint32_t kLast>
    void wait_read() {
        until([&] { return unfinished(&Copy::has_read, kLast) == 0; });
    }

    void drain() {
        until([&] { return unfinished(&Copy::has_landed, 0) == 0; });
    }

    // What the hardware does when the block of threads ends: nothing that is left may be relied on.
    void end() {
        for (const Copy& copy : copies_) fault |= copy.has_landed() ? 0 : kLeft;
    }

    int fault = 0;

  private:
    uint32_t below(uint32_t limit) { return static_cast<uint32_t>(random_() % limit); }

    void check(uint32_t stage, const unsigned char* address, uint32_t bytes) {
        const bool aligned = (reinterpret_cast<uintptr_t>(address) | bytes) % kBulkAlignment == 0;
        if (!aligned || stage >= kStages || bytes == 0 || bytes > kStageBytes) throw std::invalid_argument("malformed");
    }

    // Stores, but for the last few, that have not come so far.
    size_t unfinished(bool (Copy::*is_done)() const, size_t last) const {
        std::vector<const Copy*> stores;
        for (const Copy& copy : copies_) {
            if (!copy.is_load) stores.push_back(&copy);
        }
        stores.resize(stores.size() - std::min(last, stores.size()));
        return std::count_if(stores.begin(), stores.end(), [&](const Copy* copy) { return !(copy->*is_done)(); });
    }

    template <typename Condition>
    void until(const Condition& holds) {
        progress();
        while (!holds()) {
            if (!advance()) throw std::runtime_error("stuck");
        }
    }

    // The engine may be ahead of the thread or far behind it.
    void progress() {
        for (uint32_t n = below(1 + 6 * patience_); n > 0 && advance(); --n) {
        }
    }

    bool advance() {
        std::vector<Copy*> open;
        for (Copy& copy : copies_) {
            if (!copy.has_landed()) open.push_back(&copy);
        }
        if (open.empty()) return false;
        Copy& copy = *open[below(open.size())];
        if (copy.inside.empty()) copy.inside.resize(copy.bytes);
        uint32_t& at = copy.has_read() ? copy.written : copy.read;
        const uint32_t lump = std::min(16 * (1 + below(256)), copy.bytes - at);
        if (!copy.has_read()) {
            std::memcpy(&copy.inside[at], copy.src + at, lump);
        } else {
            std::memcpy(copy.dst + at, &copy.inside[at], lump);
            if (copy.is_load) barriers_[copy.stage].update(0, -static_cast<int64_t>(lump));
        }
        at += lump;
        return true;
    }

    std::mt19937 random_;
    uint32_t patience_;
    std::vector<unsigned char> stages_;
    std::vector<Barrier> barriers_;
    std::vector<Copy> copies_;
};

// Rings that a mistaken driver would have.
struct ReusesAtOnce : Ring {
    using Ring::Ring;
    template <uint32_t kLast>
    void wait_read() {}
};
struct ReusesOneTooEarly : Ring {
    using Ring::Ring;
    template <uint32_t kLast>
    void wait_read() {
        Ring::wait_read<kLast + 1>();
    }
};
struct StoresAtOnce : Ring {
    using Ring::Ring;
    void wait_loaded(uint32_t, uint32_t) {}
};
struct KeepsParity : Ring {
    using Ring::Ring;
    void wait_loaded(uint32_t stage, uint32_t) { Ring::wait_loaded(stage, 0); }
};
struct LeavesEarly : Ring {
    using Ring::Ring;
    void drain() { wait_read<0>(); }
};

template <typename Model>
int run(const CopyParams& params, uint32_t num_tensors, uint32_t chunks, uint32_t blocks, unsigned seed) {
    int fault = 0;
    for (uint32_t block = 0; block < blocks; ++block) {
        Model ring(seed + block);
        try {
            drive_ring(BulkPieces(params, num_tensors, chunks, block, blocks), ring);
        } catch (const std::runtime_error&) {
            fault |= kStuck;
        } catch (const std::invalid_argument&) {
            fault |= kMalformed;
        }
        ring.end();
        fault |= ring.fault;
    }
    return fault;
}

}  // namespace

extern "C" int launch(int model, const CopyPair* pairs, size_t num_pairs, const CopyTensor* tensors, size_t num_tensors,
                      uint32_t blocks, unsigned seed) {
    static CopyParams params;
    std::memset(&params, 0xff, sizeof params);
    std::copy_n(pairs, num_pairs, params.steps);
    std::copy_n(tensors, num_tensors, params.tensors);
    params.num_groups = static_cast<uint16_t>(num_pairs);
    int64_t widest = 0;
    for (size_t t = 0; t < num_tensors; ++t) widest = std::max(widest, tensors[t].width);
    const auto chunks = static_cast<uint32_t>((widest + kStageBytes - 1) / kStageBytes);
    const auto count = static_cast<uint32_t>(num_tensors);
    switch (model) {
        case 1:
            return run<ReusesAtOnce>(params, count, chunks, blocks, seed);
        case 2:
            return run<ReusesOneTooEarly>(params, count, chunks, blocks, seed);
        case 3:
            return run<StoresAtOnce>(params, count, chunks, blocks, seed);
        case 4:
            return run<KeepsParity>(params, count, chunks, blocks, seed);
        case 5:
            return run<LeavesEarly>(params, count, chunks, blocks, seed);
        default:
            return run<Ring>(params, count, chunks, blocks, seed);
    }
}

extern "C" bool fits(const CopyTensor* tensors, size_t num_tensors) { return fits_bulk(tensors, num_tensors); }
