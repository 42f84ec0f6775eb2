// Queues checked copies on the current stream of their device.
#pragma once

#include <cstdint>
#include <vector>

#include "check.h"
#include "steps.h"

namespace blockyard {

// Copies between two sides that share no byte. Throws unless at least one is on a CUDA device.
void run(const Side& src, const Side& dst, const std::vector<CopyPair>& pairs);

// Runs steps within one side. Throws unless it is on a CUDA device.
void run_within(const Side& caches, const Steps& plan);

// Allocates the slots for staged copies of a device in advance, while it has memory for them.
void prepare(int32_t device);

// Copies with one call per piece: the baseline of the benchmarks.
void run_loop(const Side& src, const Side& dst, const std::vector<CopyPair>& pairs);

}  // namespace blockyard
