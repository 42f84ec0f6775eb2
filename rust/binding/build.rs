//! Tells the compiler whether the interpreter is free-threaded (`Py_GIL_DISABLED`).

fn main() {
    pyo3_build_config::use_pyo3_cfgs();
}
