//! Cost of 1 to 512 rows through packed layers that no cache holds, beside the read bandwidth and
//! the integer peak of the same run.
//!
//! ```text
//! cargo bench -p kozue-kernels --bench linear -- [isa=NAME] [threads=N] [bits=4,8] [group=64]
//!     [rows=1,2,4,8,16,32,512] [shape=4096x12288] [gb=1.2] [rounds=9] [pages=small] [stat=min]
//! ```
//!
//! A shape is inputs x outputs. Rounds go through all row counts in turn, and the median is shown, or
//! the least with stat=min, for machines that are never idle.
//! The last column is the share of the processors that other programs used: above a few percent
//! the figures of that line mean little.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use half::f16;
use kozue_kernels::measure::{integer_peak, read_bandwidth};
use kozue_kernels::{
    AlignedBytes, Cpu, Isa, Linear, PackedMatrix, PackedSpec, SharedBytes, ZeroKind, Zeros, linear,
    pack,
};

fn option<'a>(args: &'a [String], name: &str) -> Option<&'a str> {
    args.iter()
        .find_map(|arg| arg.strip_prefix(name)?.strip_prefix('='))
}

fn numbers(args: &[String], name: &str, default: &str) -> Vec<usize> {
    option(args, name)
        .unwrap_or(default)
        .split(',')
        .map(|n| {
            n.parse()
                .unwrap_or_else(|_| panic!("{name}: \"{n}\" is no number"))
        })
        .collect()
}

/// Seconds that all programs, and this one alone, have used the processors.
fn processor_time() -> Option<(f64, f64)> {
    let ticks = |fields: &[&str]| -> f64 {
        fields
            .iter()
            .filter_map(|f| f.parse::<f64>().ok())
            .sum::<f64>()
            / 100.0
    };
    let all = std::fs::read_to_string("/proc/stat").ok()?;
    let all: Vec<&str> = all.lines().next()?.split_whitespace().collect();
    let own = std::fs::read_to_string("/proc/self/stat").ok()?;
    let own: Vec<&str> = own.rsplit(')').next()?.split_whitespace().collect();
    // user, nice, system; irq, softirq, steal - and utime, stime.
    let busy = ticks(all.get(1..4)?) + ticks(all.get(6..9)?);
    Some((busy, ticks(own.get(11..13)?)))
}

fn layers(spec: PackedSpec, bytes: f64, small_pages: bool) -> Vec<Linear> {
    let rows = PackedSpec { n: 64, ..spec };
    let count = 64 * spec.k;
    let top = ((1u32 << spec.bits) - 1) as u8;
    let codes: Vec<u8> = (0..count)
        .map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 24) as u8 & top)
        .collect();
    let scales = vec![f16::from_f32(0.01); 64 * spec.groups()];
    let zeros = vec![top / 2 + 1; 64 * spec.groups()];
    let zeros = if spec.zero == ZeroKind::Point {
        Zeros::Point(&zeros)
    } else {
        Zeros::Symmetric
    };
    let tile = pack(&rows, &codes, &scales, zeros).expect("the spec is valid");
    let distinct = ((bytes / spec.bytes() as f64).ceil() as usize).max(1);
    let total = distinct * spec.bytes();
    let fill = |buffer: &mut [u8]| {
        for chunk in buffer.chunks_mut(tile.len()) {
            chunk.copy_from_slice(&tile);
        }
    };
    let owner: Arc<dyn AsRef<[u8]> + Send + Sync> = if small_pages {
        let mut buffer = vec![0; total];
        fill(&mut buffer);
        Arc::new(buffer)
    } else {
        let mut buffer = AlignedBytes::zeroed(total);
        fill(&mut buffer);
        Arc::new(buffer)
    };
    (0..distinct)
        .map(|i| {
            let range = i * spec.bytes()..(i + 1) * spec.bytes();
            let bytes = SharedBytes::new(owner.clone(), range).expect("in range");
            let matrix = PackedMatrix::new(spec, None, bytes).expect("the length fits");
            Linear::new(vec![matrix.into()], None).expect("one matrix")
        })
        .collect()
}

fn typical(values: &mut [f64], least: bool) -> f64 {
    values.sort_by(f64::total_cmp);
    values[if least { 0 } else { values.len() / 2 }]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let isa = option(&args, "isa").map_or_else(Isa::best, |name| name.parse().expect("isa"));
    let threads = option(&args, "threads").map(|n| n.parse().expect("threads"));
    let cpu = Cpu::with_isa(threads, isa);
    let rounds = numbers(&args, "rounds", "9")[0];
    let rows = numbers(&args, "rows", "1,2,4,8,16,32,512");
    let gigabytes: f64 = option(&args, "gb").unwrap_or("1.2").parse().expect("gb");
    let small_pages = option(&args, "pages") == Some("small");
    let least = option(&args, "stat") == Some("min");
    println!("{} on {} threads", cpu.isa(), cpu.threads());
    let peak = integer_peak(&cpu) / 1e9;
    println!("integer peak {peak:.0} GMAC/s");
    for shape in option(&args, "shape")
        .unwrap_or("4096x12288,1024x3584,896x4864")
        .split(',')
    {
        let (k, n) = shape.split_once('x').expect("a shape is inputs x outputs");
        let (k, n) = (k.parse().expect("inputs"), n.parse().expect("outputs"));
        for &bits in &numbers(&args, "bits", "4,8") {
            for &group in &numbers(&args, "group", "64") {
                let zero = if bits == 4 {
                    ZeroKind::Point
                } else {
                    ZeroKind::Symmetric
                };
                let spec = PackedSpec {
                    n,
                    k,
                    bits: bits as u8,
                    group,
                    zero,
                };
                let layers = layers(spec, gigabytes * 1e9, small_pages);
                run(&cpu, spec, &layers, &rows, rounds, (peak, least));
            }
        }
    }
}

fn run(
    cpu: &Cpu,
    spec: PackedSpec,
    layers: &[Linear],
    rows: &[usize],
    rounds: usize,
    (peak, least): (f64, bool),
) {
    let PackedSpec {
        n, k, bits, group, ..
    } = spec;
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get()) as f64;
    let read = read_bandwidth(cpu) / 1e9;
    println!("\nint{bits} group {group}, {k} -> {n}, read {read:.1} GB/s before");
    println!("rows   ms/layer  x 1 row    GB/s  of read  GMAC/s  of peak  others");
    let mut times = vec![Vec::new(); rows.len()];
    let mut others = vec![Vec::new(); rows.len()];
    for _ in 0..rounds {
        for (i, &m) in rows.iter().enumerate() {
            let x: Vec<f32> = (0..m * k).map(|i| (i % 251) as f32 - 125.0).collect();
            let mut out = vec![0.0; m * n];
            // Many rows take few layers for a clear reading.
            let some = (layers.len() * 16 / m.max(16)).max(2).min(layers.len());
            let before = processor_time();
            let start = Instant::now();
            for layer in &layers[..some] {
                linear(cpu, layer, black_box(&x), &mut out);
            }
            let elapsed = start.elapsed().as_secs_f64();
            times[i].push(elapsed / some as f64);
            if let (Some(a), Some(b)) = (before, processor_time()) {
                others[i].push(((b.0 - a.0) - (b.1 - a.1)) / (elapsed * cores));
            }
        }
    }
    let read_after = read_bandwidth(cpu) / 1e9;
    let one = typical(&mut times[0], least);
    for (i, &m) in rows.iter().enumerate() {
        let seconds = typical(&mut times[i], least);
        let rate = spec.bytes() as f64 / seconds / 1e9;
        let macs = (m * n * k) as f64 / seconds / 1e9;
        println!(
            "{m:4} {:10.4} {:8.2} {rate:7.1} {:7.0}% {macs:7.0} {:7.0}% {:6.0}%",
            seconds * 1e3,
            seconds / one,
            rate / read.max(read_after) * 100.0,
            macs / peak * 100.0,
            others[i].iter().sum::<f64>() / others[i].len().max(1) as f64 * 100.0,
        );
    }
    println!("read {read_after:.1} GB/s after; shares are of the larger");
}
