//! Times of the kernels of the layers: `cargo bench -p kozue-kernels --bench layers [FILTER]`.
//!
//! Attention is counted as 4 flop for each query head, position and width;
//! Gated DeltaNet as 8 flop for each token and entry of the state, whichever form computes it.
//! THREADS and ISA choose what to run on. On one thread, times are the thread's own processor time,
//! so that a busy machine can still be measured.

use std::sync::OnceLock;
use std::time::Instant;

use kozue_kernels::*;

/// Seconds so far, on the clock that suits the number of threads.
fn now() -> f64 {
    static START: OnceLock<Instant> = OnceLock::new();
    #[cfg(target_os = "linux")]
    if threads() == Some(1) {
        let mut t = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the call writes one timespec.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
        return t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9;
    }
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

fn threads() -> Option<usize> {
    std::env::var("THREADS").ok().and_then(|n| n.parse().ok())
}

/// Seconds of a call.
#[derive(Clone, Copy)]
struct Time {
    median: f64,
    best: f64,
}

/// Times a call for at least a fifth of a second.
fn time(mut f: impl FnMut()) -> Time {
    f();
    let start = Instant::now();
    let mut times = vec![];
    while times.len() < 5 || (start.elapsed().as_secs_f64() < 0.2 && times.len() < 1000) {
        let start = now();
        f();
        times.push(now() - start);
    }
    times.sort_by(f64::total_cmp);
    Time {
        median: times[times.len() / 2],
        best: times[0],
    }
}

/// One line: median and best time of all rows, best time of a row, and rates at the best time.
fn report(name: &str, m: usize, t: Time, rates: &[(f64, &str)]) {
    print!(
        "{name}: median {:.1} us, best {:.1} us, {:.2} us/row",
        t.median * 1e6,
        t.best * 1e6,
        t.best * 1e6 / m as f64
    );
    for (amount, unit) in rates {
        print!(", {:.1} {unit}", amount / t.best / 1e9);
    }
    println!();
}

fn values(n: usize) -> Vec<f32> {
    let mut x = 1u32;
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn attention_times(cpu: &Cpu, filter: &str) {
    // Heads and kv heads of Qwen3.5-0.8B, Qwen2.5-0.5B and Qwen3-0.6B.
    for (heads, kv_heads, dim) in [(8, 2, 256), (14, 2, 64), (16, 8, 128)] {
        for context in [64, 512, 2048, 8192] {
            let (at, kv_at) = (Heads::packed(heads, dim), Heads::packed(kv_heads, dim));
            let kv = values(context * kv_at.row);
            let mut cache = KvCache::new(kv_heads, dim, KvType::F16);
            cache.write_rows(cpu, 0, (&kv, kv_at), (&kv, kv_at));
            for m in [1, 16, 512] {
                let name = format!("attention {heads}/{kv_heads}x{dim} context {context} rows {m}");
                if m > context || !name.contains(filter) {
                    continue;
                }
                let q = values(m * at.row);
                let mut out = vec![0.0; q.len()];
                let visible: Vec<Visible> = (0..m)
                    .map(|row| Visible {
                        prefix: context - m + row + 1,
                        ..Visible::default()
                    })
                    .collect();
                let seen: usize = visible.iter().map(|seen| seen.prefix).sum();
                let t = time(|| attention(cpu, &cache, (&q, at), &visible, 0.1, &mut out));
                let flop = 4.0 * (seen * heads * dim) as f64;
                report(&name, m, t, &[(flop, "GFLOP/s")]);
            }
        }
    }
}

/// The Qwen3.5-0.8B shape: 18 layers of 16 heads of 128 x 128.
fn delta_times(cpu: &Cpu, filter: &str) {
    const LAYERS: usize = 18;
    let shape = DeltaShape {
        key_heads: 16,
        value_heads: 16,
        key_dim: 128,
        value_dim: 128,
    };
    let mut states = vec![DeltaState::new(shape); LAYERS];
    let bytes: usize = states.iter().map(DeltaState::bytes).sum();
    for m in [1, 2, 4, 8, 16, 64, 512] {
        let mut mixed = values(m * shape.mixed());
        let [q, k] = shape.query_and_key_heads();
        l2_norm_heads(cpu, &mut mixed, q, 1e-6, 0.088);
        l2_norm_heads(cpu, &mut mixed, k, 1e-6, 1.0);
        let (alpha, beta) = (vec![0.97; m * 16], vec![0.4; m * 16]);
        let rows = DeltaRows {
            mixed: &mixed,
            alpha: &alpha,
            beta: &beta,
        };
        let mut out = vec![0.0; m * shape.values()];
        let mut updates = out.clone();
        let report = |name: &str, t: Time, flop: f64, passes: f64| {
            let name = format!("delta {name} rows {m}, {LAYERS} layers");
            let flop = flop * m as f64 * (bytes / 4) as f64;
            let state = passes * bytes as f64;
            report(&name, m, t, &[(flop, "GFLOP/s"), (state, "GB/s of state")]);
        };
        let chosen = |name: &str| format!("delta {name} rows {m}").contains(filter);
        if chosen("chain") {
            let t = time(|| {
                for state in &mut states {
                    delta_chain(cpu, state, rows, &mut out);
                }
            });
            report("chain", t, 8.0, 2.0);
            let t = time(|| {
                for state in &mut states {
                    delta_solve_chain(cpu, state, rows, &mut out);
                }
            });
            report("chain by solve", t, 8.0, 2.0);
        }
        if m > 64 {
            continue;
        }
        let narrow = |i: i32| if i % 4 == 3 { i - 2 } else { i - 1 };
        let trees: [(&str, Vec<i32>); 3] = [
            ("chain as tree", (-1..m as i32 - 1).collect()),
            ("narrow tree", (0..m as i32).map(narrow).collect()),
            (
                "binary tree",
                (0..m as i32).map(|i| (i + 1) / 2 - 1).collect(),
            ),
        ];
        for (name, parents) in trees {
            if !chosen(name) {
                continue;
            }
            let t = time(|| {
                for state in &states {
                    delta_tree(cpu, state, rows, &parents, &mut out, &mut updates);
                }
            });
            report(name, t, 8.0, 1.0);
            let t = time(|| {
                for state in &states {
                    delta_solve_tree(cpu, state, rows, &parents, &mut out, &mut updates);
                }
            });
            report(&format!("{name} by solve"), t, 8.0, 1.0);
        }
        if chosen("advance") {
            let path: Vec<usize> = (0..m).collect();
            let t = time(|| {
                for state in &mut states {
                    delta_advance(cpu, state, rows, &updates, &path);
                }
            });
            report("advance", t, 3.0, 2.0);
        }
    }
}

/// Element-wise kernels, on the rows of a Qwen3.5-0.8B.
fn row_times(cpu: &Cpu, filter: &str) {
    for m in [1, 16, 512] {
        let report = |name: &str, t: Time| report(&format!("{name} rows {m}"), m, t, &[]);
        let chosen = |name: &str| format!("{name} rows {m}").contains(filter);
        if chosen("rms_norm") {
            let (x, weight) = (values(m * 1024), values(1024));
            let mut out = vec![0.0; x.len()];
            let t = time(|| rms_norm(cpu, &x, &weight, 1e-6, &mut out));
            report("rms_norm 1024", t);
        }
        if chosen("l2_norm") {
            let (mut x, at) = (values(m * 2048), Heads::packed(16, 128));
            let t = time(|| l2_norm_heads(cpu, &mut x, at, 1e-6, 1.0));
            report("l2_norm 16x128", t);
        }
        if chosen("gated_norm") {
            let (mut x, at) = (values(m * 2048), Heads::packed(16, 128));
            // Gates near 1, so that repeated calls do not shrink the values into denormals.
            let (z, weight) = (vec![1.3; x.len()], vec![1.0; 128]);
            let t = time(|| gated_norm(cpu, &mut x, at, &z, at, &weight, 1e-6));
            report("gated_norm 16x128", t);
        }
        if chosen("silu_mul") {
            let x = values(m * 2 * 3584);
            let mut out = vec![0.0; m * 3584];
            let t = time(|| silu_mul(cpu, &x, 3584, &mut out));
            report("silu_mul 3584", t);
        }
        if chosen("conv") {
            let conv = Conv::new(&values(6144 * 4), 6144, 4);
            let (state, x) = (conv.state(), values(m * 6144));
            let parents: Vec<i32> = (-1..m as i32 - 1).collect();
            let mut out = vec![0.0; x.len()];
            let at = Heads::packed(1, 6144);
            let t = time(|| conv.silu(cpu, &state, &x, at, &parents, &mut out, None));
            report("conv 6144", t);
        }
        if chosen("rope") {
            let frequencies = (0..32).map(|i| 1e7f64.powf(-i as f64 / 32.0)).collect();
            let rope = Rope::new(frequencies, 4096);
            let mut x = values(m * 8 * 256);
            let positions: Vec<u32> = (0..m as u32).collect();
            let at = Heads::packed(8, 256);
            let t = time(|| rope.apply(cpu, &mut x, at, &positions));
            report("rope 8x64", t);
        }
        if chosen("kv write") {
            let (at, x) = (Heads::packed(2, 256), values(m * 512));
            let mut cache = KvCache::new(2, 256, KvType::F16);
            let t = time(|| cache.write_rows(cpu, 100, (&x, at), (&x, at)));
            report("kv write 2x256", t);
        }
    }
}

fn main() {
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with("--"));
    let filter = filter.unwrap_or_default();
    let isa = std::env::var("ISA").ok().and_then(|name| name.parse().ok());
    let cpu = Cpu::with_isa(threads(), isa.unwrap_or(Isa::best()));
    println!("{} on {} threads", cpu.isa(), cpu.threads());
    row_times(&cpu, &filter);
    attention_times(&cpu, &filter);
    delta_times(&cpu, &filter);
}
