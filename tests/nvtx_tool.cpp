// A tool that NVTX loads where NVTX_INJECTION64_PATH names it, as Nsight Systems is: it prints ranges.

#include <nvtx3/nvToolsExt.h>

#include <cstdio>

namespace {

int push(const char* name) {
    std::printf("push %s\n", name);
    return std::fflush(stdout);
}

int pop() {
    std::printf("pop\n");
    return std::fflush(stdout);
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
    NvtxFunctionTable table = nullptr;
    unsigned int size = 0;
    if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size) == 0) {
        return 0;
    }
    *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(&push);
    *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(&pop);
    return 1;
}
