//! Counts what is allocated, so that an input that asks for too much is a finding and not a slow run.
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// What a run may allocate beyond its input: two chunks of the largest size and a schema's tree.
const CONSTANT: usize = 192 << 20;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with a count.
pub struct Counting;

fn add(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed).wrapping_add(bytes);
    PEAK.fetch_max(live, Relaxed);
}

// SAFETY: every call is the system allocator's with the same arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(p, layout) }
    }
}

/// Runs `f` on an input and panics if it held more than the input's size and a constant.
pub fn watch(data: &[u8], f: fn(&[u8])) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    f(data);
    let took = PEAK.load(Relaxed).saturating_sub(before);
    assert!(took <= data.len() + CONSTANT, "{took} bytes allocated for an input of {}", data.len());
}
