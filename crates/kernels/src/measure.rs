//! What the machine can do: read bandwidth and integer peak, to set measured speeds beside.

use std::hint::black_box;
use std::time::Instant;

use crate::bytes::AlignedBytes;
use crate::cpu::Cpu;
use crate::isa::Isa;
use crate::memory::available_memory;

const BUFFER: usize = 2 << 30;
const PIECE: usize = 1 << 20;
const PASSES: usize = 7;

/// Bytes a second that all threads together read from memory: the median of several passes over a
/// buffer of 2 GiB, or of a quarter of the free memory if that is less.
pub fn read_bandwidth(cpu: &Cpu) -> f64 {
    let bytes = available_memory()
        .map_or(BUFFER, |free| (free / 4).min(BUFFER))
        .max(PIECE);
    let pieces = bytes / PIECE;
    let mut buffer = AlignedBytes::zeroed(pieces * PIECE);
    // Every page needs memory of its own: unwritten ones could share one page of zeros.
    for page in buffer.chunks_mut(4096) {
        page[0] = 1;
    }
    let isa = cpu.isa();
    let pass = || {
        let start = Instant::now();
        cpu.run(pieces, &|i| {
            black_box(sum(isa, &buffer[i * PIECE..(i + 1) * PIECE]));
        });
        start.elapsed().as_secs_f64()
    };
    (pieces * PIECE) as f64 / median(PASSES, pass)
}

/// Multiply-accumulates of bytes a second that all threads together reach in registers, with the
/// widest instructions of the `Cpu`'s instruction set.
pub fn integer_peak(cpu: &Cpu) -> f64 {
    let isa = cpu.isa();
    let threads = cpu.threads();
    let pass = || {
        let start = Instant::now();
        cpu.run(threads, &|_| {
            black_box(multiply(isa));
        });
        start.elapsed().as_secs_f64()
    };
    pass();
    threads as f64 * MACS as f64 / median(PASSES, pass)
}

fn median(passes: usize, mut pass: impl FnMut() -> f64) -> f64 {
    let mut seconds: Vec<f64> = (0..passes).map(|_| pass()).collect();
    seconds.sort_by(f64::total_cmp);
    seconds[passes / 2]
}

fn sum(isa: Isa, bytes: &[u8]) -> u64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Cpu` holds only an instruction set that this machine has.
        Isa::Avx512Vnni | Isa::Amx => unsafe { x86::sum_avx512(bytes) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { x86::sum_avx2(bytes) },
        _ => sum_any(bytes),
    }
}

#[inline(always)]
fn sum_any(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 32];
    for chunk in bytes.as_chunks::<256>().0 {
        for (sum, word) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// Multiply-accumulates of one call of `multiply`.
const MACS: usize = 1 << 31;

fn multiply(isa: Isa) -> i32 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Cpu` holds only an instruction set that this machine has.
        Isa::Amx => unsafe {
            crate::linear::amx_peak(MACS);
            0
        },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512Vnni => unsafe { x86::multiply_vnni() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { x86::multiply_avx2() },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Isa::Neon | Isa::NeonDot | Isa::NeonI8mm => unsafe { crate::linear::neon_peak(isa, MACS) },
        _ => multiply_any(),
    }
}

/// 128 lanes of i32 += i16 * i16.
fn multiply_any() -> i32 {
    let mut sums = [0i32; 128];
    let (a, b) = (black_box([3i16; 128]), black_box([5i16; 128]));
    for i in 0..MACS / 128 {
        for ((sum, a), b) in sums.iter_mut().zip(&a).zip(&b) {
            *sum = sum.wrapping_add(i32::from(*a) * i32::from(b.wrapping_add(i as i16)));
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    /// As the kernels do, this fetches a page ahead.
    const AHEAD: usize = 4096;

    #[target_feature(enable = "avx512f")]
    pub fn sum_avx512(bytes: &[u8]) -> u64 {
        sum_ahead(bytes)
    }

    #[target_feature(enable = "avx2")]
    pub fn sum_avx2(bytes: &[u8]) -> u64 {
        sum_ahead(bytes)
    }

    #[inline(always)]
    fn sum_ahead(bytes: &[u8]) -> u64 {
        let mut total = 0u64;
        for part in bytes.chunks(1024) {
            for line in (0..1024).step_by(64) {
                let ahead = part.as_ptr().wrapping_add(AHEAD + line);
                // SAFETY: a prefetch may go anywhere.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
            }
            total = total.wrapping_add(sum_any(part));
        }
        total
    }

    /// 16 chains of vpdpbusd: 64 multiply-accumulates each.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn multiply_vnni() -> i32 {
        let (a, b) = (
            black_box(_mm512_set1_epi8(3)),
            black_box(_mm512_set1_epi8(5)),
        );
        let mut sums = [_mm512_setzero_si512(); 16];
        for _ in 0..MACS / (16 * 64) {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
            // Keeps the chains from being folded into a product.
            sums = keep(sums);
        }
        sums.into_iter()
            .map(|sum| _mm512_reduce_add_epi32(sum))
            .fold(0, i32::wrapping_add)
    }

    /// Tells the compiler that the registers may have changed, without a trip through memory.
    #[target_feature(enable = "avx512f")]
    fn keep(mut sums: [__m512i; 16]) -> [__m512i; 16] {
        for sum in &mut sums {
            // SAFETY: no instruction is executed.
            unsafe { std::arch::asm!("/* {0} */", inout(zmm_reg) * sum, options(nomem, nostack)) };
        }
        sums
    }

    /// Eight chains of vpmaddubsw, vpmaddwd, vpaddd: 32 multiply-accumulates each.
    #[target_feature(enable = "avx2")]
    pub fn multiply_avx2() -> i32 {
        let (mut a, b) = (
            black_box(_mm256_set1_epi8(3)),
            black_box(_mm256_set1_epi8(5)),
        );
        let ones = _mm256_set1_epi16(1);
        let mut sums = [_mm256_setzero_si256(); 8];
        for _ in 0..MACS / (8 * 32) {
            for sum in &mut sums {
                // SAFETY: no instruction is executed; the compiler must assume another value.
                unsafe { std::arch::asm!("/* {0} */", inout(ymm_reg) a, options(nomem, nostack)) };
                let pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones);
                *sum = _mm256_add_epi32(*sum, pairs);
            }
        }
        sums.into_iter().fold(0, |total, sum| {
            // SAFETY: both types are 32 bytes for which every bit pattern is valid.
            let lanes: [i32; 8] = unsafe { std::mem::transmute(sum) };
            lanes.into_iter().fold(total, i32::wrapping_add)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_agree_on_every_instruction_set() {
        let bytes: Vec<u8> = (0..4096).map(|i| (i * 7 % 251) as u8).collect();
        for isa in Isa::available() {
            assert_eq!(sum(isa, &bytes), sum(Isa::Portable, &bytes));
        }
    }
}
