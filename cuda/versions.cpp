// The CUDA releases of the driver and of the runtime inside this library, as 1000 * major + 10 * minor. Plain C
// functions, since Python calls them before it registers ops. Neither creates a context.

#include <cuda_runtime_api.h>

#define BLOCKYARD_EXPORT extern "C" __attribute__((visibility("default")))

// 0 without a driver.
BLOCKYARD_EXPORT int blockyard_driver_version() {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

BLOCKYARD_EXPORT int blockyard_runtime_version() {
    int version = 0;
    return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}
