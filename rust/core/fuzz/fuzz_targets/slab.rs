//! Forged slabs, as in `rust/store/tests/forged.rs`, with bytes that libFuzzer chooses: `make fuzz`. No input may make
//! the store allocate more memory at once than a small store needs.
#![no_main]

#[path = "../../../store/tests/forged.rs"]
mod forged;
mod mutator;

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use std::alloc::{GlobalAlloc, Layout, System};

/// Maximum bytes of one allocation. The largest one of a store of this size is a scanned page.
const MAX_BYTES: usize = 1 << 16;

struct Bounded;

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MAX_BYTES {
            eprintln!("an allocation of {} bytes", layout.size());
            std::process::abort();
        }
        // SAFETY: the caller promises it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller promises it.
        unsafe { System.dealloc(memory, layout) };
    }
}

#[global_allocator]
static MEMORY: Bounded = Bounded;

fuzz_target!(|data: &[u8]| match data {
    [0, bytes @ ..] => forged::run_block(bytes),
    [_, bytes @ ..] => forged::run(bytes),
    [] => {}
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    mutator::mutate(data, size, max_size, seed)
});
