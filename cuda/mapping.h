// The mappings of the ops, checked and ordered by `blockyard._core.Mapping`: read from CPU tensors, ids within bounds.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "steps.h"

namespace blockyard {

// Reads pairs (from, to), int64 [n, 2]. Throws if an id is out of range.
std::vector<CopyPair> read_pairs(const torch::stable::Tensor& pairs, int64_t src_blocks, int64_t dst_blocks);

// Reads steps, int64 [n, 2] with -1 for kAside, and where their groups start, int64 [groups + 1]. Throws if an id is
// out of range, the starts do not rise from 0 to n, or a block set aside is not put back within its group and kMaxRing
// steps.
Steps read_steps(const torch::stable::Tensor& steps, const torch::stable::Tensor& starts, int64_t blocks);

}  // namespace blockyard
