// Remembers which devices have a bulk engine.

#include <array>
#include <atomic>

#include "copy.h"
#include "strategy.h"

namespace blockyard {

bool has_bulk(int device) {
    enum State : int8_t { kUnknown, kNo, kYes };
    static std::array<std::atomic<int8_t>, kMaxDevices> states;
    if (device < 0 || device >= kMaxDevices) return false;
    std::atomic<int8_t>& state = states[static_cast<size_t>(device)];
    if (state == kUnknown) {
        const RelaxedCapture relaxed;
        int before = 0;
        if (cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(device) == cudaSuccess) {
            // A question that fails has no answer to remember: the next copy asks again.
            bool found = false;
            if (ask_bulk(&found) == cudaSuccess) state = found ? kYes : kNo;
            cudaSetDevice(before);
        }
        cudaGetLastError();  // A missing engine is not the caller's error: clear it.
    }
    return state == kYes;
}

}  // namespace blockyard
