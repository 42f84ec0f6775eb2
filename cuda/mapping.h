// The mappings of the ops: read from a CPU tensor and checked against the number of blocks.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "steps.h"

namespace blockyard {

// Reads pairs (from, to); throws if they are malformed, an id is out of range or a destination repeats.
std::vector<CopyPair> read_pairs(const torch::stable::Tensor& pairs, int64_t src_blocks, int64_t dst_blocks);

// Throws if a block is both read and written.
void check_parted(const std::vector<CopyPair>& pairs, int64_t blocks);

// Reads pairs to exchange, without padding (-1, -1); throws if they are malformed, an id is out of range or a block is
// named twice.
std::vector<CopyPair> read_exchanges(const torch::stable::Tensor& pairs, int64_t num_blocks);

// Reads the block of each row, as pairs (block, row); throws if they are malformed or not one for each row, an id is
// out of range, or with `unique` one repeats.
std::vector<CopyPair> read_blocks(const torch::stable::Tensor& blocks, int64_t num_blocks, int64_t num_rows,
                                  bool unique);

}  // namespace blockyard
