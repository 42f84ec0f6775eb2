"""Which devices have a bulk engine is asked until there is an answer, over a stand-in for the runtime."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from blockyard_build.toolchain import find_cuda_home

CUDA = Path(__file__).resolve().parents[2] / "cuda"
SHIM = """
#include "has_bulk.cpp"
using namespace blockyard;
int asked = 0, entered = 0, answer = 0;
bool relaxed = false, found = false;
extern "C" cudaError_t cudaGetDevice(int* device) { *device = 3; return cudaSuccess; }
extern "C" cudaError_t cudaSetDevice(int device) { entered = device; return cudaSuccess; }
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }
extern "C" cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    const bool before = relaxed;
    relaxed = *mode == cudaStreamCaptureModeRelaxed;
    *mode = before ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}
cudaError_t blockyard::ask_bulk(bool* has) {
    ++asked;
    *has = found;
    return relaxed ? static_cast<cudaError_t>(answer) : cudaErrorStreamCaptureUnsupported;
}
extern "C" bool ask(int device, int code, bool has) {
    answer = code, found = has;
    return has_bulk(device);
}
extern "C" int questions() { return asked; }
extern "C" int current() { return relaxed ? -1 : entered; }
"""
YES, NO, OUT_OF_MEMORY = (0, True), (0, False), (2, False)


@pytest.fixture
def shim(tmp_path: Path) -> ctypes.CDLL:
    home = find_cuda_home({})
    if home is None:
        pytest.skip("no CUDA headers")
    (tmp_path / "shim.cpp").write_text(SHIM)
    includes = [f"-I{CUDA}", "-isystem", str(home / "include")]
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wl,-Bsymbolic", *includes, str(tmp_path / "shim.cpp")]
    subprocess.run([*command, "-o", str(tmp_path / "shim.so")], check=True)
    loaded = ctypes.CDLL(str(tmp_path / "shim.so"))
    loaded.ask.argtypes, loaded.ask.restype = [ctypes.c_int, ctypes.c_int, ctypes.c_bool], ctypes.c_bool
    return loaded


def test_an_answer_is_remembered_and_a_question_that_failed_is_asked_again(shim: ctypes.CDLL):
    assert [shim.ask(0, *answer) for answer in (OUT_OF_MEMORY, OUT_OF_MEMORY, YES, NO)] == [False, False, True, True]
    assert shim.questions() == 3
    assert [shim.ask(1, *answer) for answer in (NO, YES)] == [False, False]
    assert shim.questions() == 4
    # The calling thread has its device and its mode of captures again.
    assert shim.current() == 3
    assert [shim.ask(device, *YES) for device in (-1, 64)] == [False, False]
    assert shim.questions() == 4
