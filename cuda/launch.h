// Splits a plan into launches whose parameters fit.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>

#include "copy_kernel.h"

namespace blockyard {

// Calls launch(params, num_tensors, widest) for each part; `widest` is the greatest width, above 0.
template <typename Launch>
cudaError_t launch_parts(const CopyTensor* tensors, size_t num_tensors, const Steps& plan, const Launch& launch) {
    // Not zeroed: it has 30 KB per launch.
    const std::unique_ptr<CopyParams> params(new CopyParams);
    // Each part of the steps covers all tensors before the next part starts. In each tensor, parts run in stream order.
    for (const StepRange& part : split_steps(plan, kMaxSteps)) {
        std::copy_n(part.steps, part.num_steps, params->steps);
        std::copy(part.starts.begin(), part.starts.end(), params->starts);
        params->num_groups = static_cast<uint16_t>(part.starts.size() - 1);
        for (size_t t = 0; t < num_tensors; t += kMaxTensors) {
            const size_t some = std::min(kMaxTensors, num_tensors - t);
            std::copy_n(tensors + t, some, params->tensors);
            int64_t widest = 0;
            for (size_t i = 0; i < some; ++i) widest = std::max(widest, params->tensors[i].width);
            if (widest == 0) continue;
            const cudaError_t status = launch(*params, some, widest);
            if (status != cudaSuccess) return status;
        }
    }
    return cudaSuccess;
}

}  // namespace blockyard
