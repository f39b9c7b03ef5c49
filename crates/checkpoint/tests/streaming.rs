//! A conversion's memory depends on the width of a model, not on its size.
#![allow(missing_docs)]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

use kozue_checkpoint::{Options, Size, quantize};
use kozue_kernels::Cpu;
use serde_json::json;
use support::{Model, Tensor};

/// The system's allocator, with a count of the bytes in use and of the most so far.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn memory_does_not_grow_with_the_model() {
    let peak = |vocab: usize| {
        let mut model = Model::qwen2();
        model.config["vocab_size"] = json!(vocab);
        let name = "model.embed_tokens.weight";
        *model.tensor(name) = Tensor::filled(name, "BF16", &[vocab, 64]);
        let dir = model.write();
        drop(model);
        let target = dir.root.path().join("packed");
        let cpu = Cpu::new(Some(1));
        let options = Options {
            size: Size::M,
            head: None,
            group: 64,
            force: false,
        };
        let before = NOW.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        quantize(&cpu, &dir.path, &target, options, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
        PEAK.load(Ordering::Relaxed) - before
    };
    let (small, large) = (peak(2_000), peak(100_000));
    // The larger model's weights take 12.8 MB as stored and 25.6 MB as f32.
    assert!(large < 2_000_000, "{large} bytes");
    assert!(large < small + small / 10, "{small} bytes became {large}");
}
