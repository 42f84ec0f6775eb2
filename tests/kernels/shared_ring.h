// The bulk engine of a device and the barriers of one block of threads, as a model: what has been started makes
// progress at any time, in any order and in lumps, and is done only where a wait says so.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <vector>

#include "bulk_kernel.h"
#include "grid.h"

namespace blockyard {

constexpr size_t kRingBytes = kStages * (kStageBytes + sizeof(uint64_t));

enum Fault {
    kOverwritten = 1,  // a load was started into a stage that a store had yet to read
    kTooEarly = 2,     // a store was started from a stage that its load had yet to fill
    kLeft = 4,         // the block of threads ended before its copies
    kStuck = 8,        // a wait without end
    kMalformed = 16,   // what the engine does not take: alignment, size, a stage that is none
};
inline int ring_faults = 0;

// What a mistaken driver would do.
enum class Mistake { kNone, kReusesAtOnce, kReusesOneTooEarly, kStoresAtOnce, kKeepsParity, kLeavesEarly };
inline Mistake mistake = Mistake::kNone;

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

struct BulkCopy {
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

class SharedRing {
  public:
    explicit SharedRing(unsigned char* memory) : stages_(memory), barriers_(kStages), patience_(below(4)) {
        if (shared_bytes != kRingBytes) throw std::invalid_argument("the ring's memory");
        std::fill_n(memory, kRingBytes, static_cast<unsigned char>(0xee));
    }
    SharedRing(const SharedRing&) = delete;
    // The hardware takes the stages when the block of threads ends: nothing that is left may be relied on.
    ~SharedRing() {
        for (const BulkCopy& copy : copies_) ring_faults |= copy.has_landed() ? 0 : kLeft;
    }

    void load(uint32_t stage, const unsigned char* src, uint32_t bytes) {
        check(stage, src, bytes);
        for (const BulkCopy& copy : copies_) {
            if (copy.stage == stage && !(copy.is_load ? copy.has_landed() : copy.has_read())) {
                ring_faults |= kOverwritten;
            }
        }
        barriers_[stage].update(1, bytes);
        copies_.push_back({stage, src, stages_ + stage * kStageBytes, bytes, true, 0, 0, {}});
        progress();
    }

    void wait_loaded(uint32_t stage, uint32_t parity) {
        if (mistake == Mistake::kStoresAtOnce) return;
        if (mistake == Mistake::kKeepsParity) parity = 0;
        until([&] { return barriers_[stage].passes(parity); });
    }

    void store(uint32_t stage, unsigned char* dst, uint32_t bytes) {
        check(stage, dst, bytes);
        for (const BulkCopy& copy : copies_) {
            if (copy.stage == stage && copy.is_load && !copy.has_landed()) ring_faults |= kTooEarly;
        }
        copies_.push_back({stage, stages_ + stage * kStageBytes, dst, bytes, false, 0, 0, {}});
        progress();
    }

    template <uint32_t kLast>
    void wait_read() {
        if (mistake == Mistake::kReusesAtOnce) return;
        const size_t last = kLast + (mistake == Mistake::kReusesOneTooEarly ? 1 : 0);
        until([&] { return unfinished(&BulkCopy::has_read, last) == 0; });
    }

    void drain() {
        const bool leaves = mistake == Mistake::kLeavesEarly;
        until([&] { return unfinished(leaves ? &BulkCopy::has_read : &BulkCopy::has_landed, 0) == 0; });
    }

  private:
    void check(uint32_t stage, const unsigned char* address, uint32_t bytes) {
        const bool aligned = (reinterpret_cast<uintptr_t>(address) | bytes) % kBulkAlignment == 0;
        if (aligned && stage < kStages && bytes > 0 && bytes <= kStageBytes) return;
        ring_faults |= kMalformed;
        throw std::runtime_error("a malformed bulk copy");
    }

    // Stores, but for the last few, that have not come so far.
    size_t unfinished(bool (BulkCopy::*is_done)() const, size_t last) const {
        size_t open = 0;
        for (auto copy = copies_.rbegin(); copy != copies_.rend(); ++copy) {
            if (copy->is_load) continue;
            if (last > 0) {
                --last;
            } else if (!((*copy).*is_done)()) {
                ++open;
            }
        }
        return open;
    }

    template <typename Condition>
    void until(const Condition& holds) {
        progress();
        while (!holds()) {
            if (advance()) continue;
            ring_faults |= kStuck;
            throw std::runtime_error("a wait without end");
        }
    }

    // The engine may be ahead of the thread or far behind it.
    void progress() {
        for (uint32_t n = below(1 + 6 * patience_); n > 0 && advance(); --n) {
        }
    }

    bool advance() {
        while (!copies_.empty() && copies_.front().has_landed()) copies_.pop_front();
        std::vector<BulkCopy*> open;
        for (BulkCopy& copy : copies_) {
            if (!copy.has_landed()) open.push_back(&copy);
        }
        if (open.empty()) return false;
        BulkCopy& copy = *open[below(static_cast<uint32_t>(open.size()))];
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

    unsigned char* stages_;
    std::vector<Barrier> barriers_;
    uint32_t patience_;
    std::deque<BulkCopy> copies_;
};

}  // namespace blockyard
