// The checks of the ops before a launch, and what they establish about the arguments.
//
// Messages start with "blockyard mapping:" or "blockyard layout:", which tells Python the class to raise.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace blockyard {

template <typename... Parts>
[[noreturn]] void fail(const char* kind, const Parts&... parts) {
    std::ostringstream message;
    message << "blockyard " << kind << ": ";
    (message << ... << parts);
    throw std::runtime_error(message.str());
}

// One canonical view: uint8 [blocks, width], rows contiguous, `stride` bytes apart.
struct View {
    unsigned char* data;
    int64_t stride;
    int64_t width;
    // Where its storage starts: the driver is asked once per storage whether it is page-locked.
    uintptr_t storage;
    // One past its last byte.
    uintptr_t end;
};

// All views on one side of a copy; they have the same number of blocks and one device.
class Side {
  public:
    static constexpr int32_t kHost = -1;

    // Throws unless `tensors` are canonical views on one device; `name` is the argument's name.
    Side(const char* name, const std::vector<torch::stable::Tensor>& tensors);

    // Cuts rows (a side of one view) into pieces of these views' widths; throws unless they fill a row.
    Side split(const std::vector<View>& like) const;

    // Throws if any views share memory.
    void check_apart() const;

    const char* name;
    int64_t blocks;
    int32_t device;  // a CUDA device's index, or kHost
    std::vector<View> views;

  private:
    View read(size_t index, const torch::stable::Tensor& tensor) const;
};

// Throws unless views of the same index match and no byte belongs to both sides.
void check_swap(const Side& src, const Side& dst);

}  // namespace blockyard
