// Queues checked copies on the current stream of their device.
#pragma once

#include <vector>

#include "check.h"
#include "steps.h"

namespace blockyard {

// Copies between two sides that share no byte; one of them at least is on a CUDA device, else it throws.
void run(const Side& src, const Side& dst, const std::vector<CopyPair>& pairs);

// Makes steps within one side, which is on a CUDA device, else it throws.
void run_within(const Side& caches, const Steps& plan);

// Copies piece by piece, one call for each, as engines do that have nothing better: what benchmarks compare with.
void run_loop(const Side& src, const Side& dst, const std::vector<CopyPair>& pairs);

}  // namespace blockyard
