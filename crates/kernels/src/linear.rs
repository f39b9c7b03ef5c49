//! Linear layers: one input, one or more matrices whose outputs stand side by side.
//!
//! The product with a packed matrix is the same bits on every instruction set and for every number
//! of rows. The input is rotated if the matrix says so and quantised by row and group (see
//! `input`). Then for each row and output, group by group in order,
//!
//! ```text
//! d   = sum(code_w * code_x) - zero * sum(code_x)      exact, in i32
//! acc = fma(f32(d), scale_x * scale_w, acc)
//! acc = fma(min, scale_x * f32(sum(code_x)), acc)      matrices of minima only; zero is 0
//! ```
//!
//! and the bias is added last. Dense matrices: see `dense`.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
mod input;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod vnni;

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

use input::{Input, SLAB, Slab};

pub(crate) use input::factors;
pub use input::linear_bytes;

use crate::cpu::Cpu;
use crate::error::Error;
use crate::gram::Gram;
use crate::hadamard::Rotation;
use crate::isa::Isa;
use crate::matrix::Matrix;
use crate::packed::{BLOCK, PackedMatrix, TILE, ZeroKind};

/// Rows taken at a time: bounds the memory of the quantised input and keeps it in the cache.
const ROWS: usize = 512;
/// Tiles that meet each slab of rows in turn: their codes and the slab's stay in the second cache.
const TILES: usize = 4;
/// Inputs of the tiles that a share has at least, as long as every thread has a share: some
/// microseconds.
const LEAST: usize = 2048;
/// From this number of rows on, AMX is used; below, VNNI is as fast.
const AMX_ROWS: usize = 5;
/// A smaller group has too few products for each float step to gain from AMX.
const AMX_GROUP: usize = 64;

/// A linear layer.
#[derive(Clone)]
pub struct Linear {
    parts: Vec<Part>,
    /// The distinct forms of the input that the packed parts need.
    views: Vec<View>,
    bias: Option<Vec<f32>>,
    inputs: usize,
    outputs: usize,
    watch: Option<Arc<Gram>>,
}

#[derive(Clone)]
struct Part {
    matrix: Matrix,
    /// Its first output.
    first: usize,
    /// Its form of the input, for packed parts.
    view: usize,
}

#[derive(Clone)]
struct View {
    rotation: Option<Rotation>,
    group: usize,
    /// Whether AMX needs offsets for any matrix.
    offsets: bool,
}

impl View {
    fn new(matrix: &PackedMatrix) -> Self {
        Self {
            rotation: matrix.rotation().cloned(),
            group: matrix.spec().group,
            offsets: false,
        }
    }

    fn fits(&self, matrix: &PackedMatrix) -> bool {
        self.group == matrix.spec().group && self.rotation.as_ref() == matrix.rotation()
    }

    fn add(&mut self, matrix: &PackedMatrix) {
        let spec = matrix.spec();
        self.offsets |= spec.bits == 8 && spec.zero == ZeroKind::Symmetric;
    }

    /// The rows of `x` in this form.
    fn input<'a>(&self, cpu: &'a Cpu, x: &[f32], k: usize) -> Input<'a> {
        let offsets = self.offsets && uses_amx(cpu.isa(), x.len() / k, self.group);
        Input::new(cpu, x, k, self.rotation.as_ref(), self.group, offsets)
    }
}

impl Linear {
    /// A layer of the given matrices, which share the input, with a bias over all outputs.
    ///
    /// # Errors
    /// If there is no matrix, the matrices differ in their inputs, or the bias has another length.
    pub fn new(parts: Vec<Matrix>, bias: Option<Vec<f32>>) -> Result<Self, Error> {
        let Some(inputs) = parts.first().map(Matrix::k) else {
            return Err(Error::new("a linear layer needs at least one matrix"));
        };
        let (mut views, mut outputs) = (Vec::new(), 0);
        let mut placed = Vec::with_capacity(parts.len());
        for matrix in parts {
            if matrix.k() != inputs {
                return Err(Error::new(format!(
                    "a linear layer joins matrices of {inputs} and {} inputs",
                    matrix.k()
                )));
            }
            let mut view = 0;
            if let Matrix::Packed(packed) = &matrix {
                view = views
                    .iter()
                    .position(|v: &View| v.fits(packed))
                    .unwrap_or(views.len());
                if view == views.len() {
                    views.push(View::new(packed));
                }
                views[view].add(packed);
            }
            let first = outputs;
            outputs += matrix.n();
            placed.push(Part {
                matrix,
                first,
                view,
            });
        }
        if let Some(bias) = &bias
            && bias.len() != outputs
        {
            return Err(Error::new(format!(
                "a bias of {} values does not fit {outputs} outputs",
                bias.len()
            )));
        }
        Ok(Self {
            parts: placed,
            views,
            bias,
            inputs,
            outputs,
            watch: None,
        })
    }

    /// The layer, with every row that it is applied to added to `watch`, if there is one.
    ///
    /// # Panics
    /// If it has another number of inputs.
    pub fn watched(mut self, watch: Option<Arc<Gram>>) -> Self {
        if let Some(gram) = &watch {
            assert_eq!(gram.k(), self.inputs, "inputs to watch");
        }
        self.watch = watch;
        self
    }

    /// Length of an input row.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Length of an output row.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// The matrices, in the order of their outputs.
    pub fn matrices(&self) -> impl ExactSizeIterator<Item = &Matrix> {
        self.parts.iter().map(|part| &part.matrix)
    }

    /// The bias over all outputs.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// Bytes of the weights, all of which one call reads.
    pub fn bytes(&self) -> usize {
        self.matrices().map(|matrix| matrix.bytes().len()).sum()
    }
}

/// Applies the layer to the rows of `x` (m x inputs), writing `out` (m x outputs).
///
/// # Panics
/// If the lengths are not those of one number of rows.
pub fn linear(cpu: &Cpu, layer: &Linear, x: &[f32], out: &mut [f32]) {
    let m = x.len() / layer.inputs;
    assert!(
        x.len() == m * layer.inputs && out.len() == m * layer.outputs,
        "linear {} -> {}: {} inputs, {} outputs",
        layer.inputs,
        layer.outputs,
        x.len(),
        out.len()
    );
    if let Some(gram) = &layer.watch {
        gram.add(cpu, x);
    }
    let parts = x
        .chunks(ROWS * layer.inputs)
        .zip(out.chunks_mut(ROWS * layer.outputs));
    for (x, out) in parts {
        some_rows(cpu, layer, x, out);
    }
}

fn some_rows(cpu: &Cpu, layer: &Linear, x: &[f32], out: &mut [f32]) {
    let inputs: Vec<Input<'_>> = layer
        .views
        .iter()
        .map(|view| view.input(cpu, x, layer.inputs))
        .collect();
    let out = Rows {
        ptr: out.as_mut_ptr(),
        stride: layer.outputs,
    };
    let isa = cpu.isa();
    let tiles = |part: &Part| match &part.matrix {
        Matrix::Packed(matrix) => matrix.spec().tiles(),
        Matrix::Dense(_) => 0,
    };
    let dense_tasks = |part: &Part| match &part.matrix {
        Matrix::Packed(_) => 0,
        Matrix::Dense(matrix) => matrix.tasks(matrix.n()),
    };
    let shares = Shares {
        total: layer.parts.iter().map(tiles).sum(),
        threads: cpu.threads(),
        least: LEAST.div_ceil(layer.inputs),
    };
    let dense: usize = layer.parts.iter().map(dense_tasks).sum();
    cpu.run(dense + shares.count(), &|task| {
        if task < dense {
            dense_part(isa, layer, x, task, &out);
            return;
        }
        let mut rest = shares.share(task - dense);
        for part in &layer.parts {
            let count = tiles(part);
            if let Matrix::Packed(matrix) = &part.matrix {
                let mine = rest.start.min(count)..rest.end.min(count);
                let input = &inputs[part.view];
                let each = if input.slabs().nth(1).is_some() {
                    TILES
                } else {
                    count
                };
                for some in mine.clone().step_by(each) {
                    let some = some..(some + each).min(mine.end);
                    for (row, slab) in input.slabs() {
                        packed_part(isa, layer, part, matrix, some.clone(), row, &slab, &out);
                    }
                }
            }
            rest = rest.start.saturating_sub(count)..rest.end.saturating_sub(count);
        }
    });
}

/// One task of the dense parts' tasks, which are numbered one part after the other.
fn dense_part(isa: Isa, layer: &Linear, x: &[f32], mut task: usize, out: &Rows) {
    for part in &layer.parts {
        let Matrix::Dense(matrix) = &part.matrix else {
            continue;
        };
        let tasks = matrix.tasks(matrix.n());
        if task >= tasks {
            task -= tasks;
            continue;
        }
        matrix.task(isa, x, matrix.n(), task, &|i| i, &|row, i, sum| {
            let output = part.first + i;
            let sum = layer.bias.as_ref().map_or(sum, |bias| sum + bias[output]);
            // SAFETY: row < m, the output is the layer's, and no other task writes it.
            unsafe { out.put(row, output, sum) };
        });
        return;
    }
}

/// Tiles shared out among threads in rounds: in each, every thread's share is half of an even one of
/// what is left, until that is less than a share is worth. So memory is read in long runs at first,
/// and the last shares are small enough to even out.
struct Shares {
    total: usize,
    threads: usize,
    /// Tiles below which a share costs more than it evens out.
    least: usize,
}

impl Shares {
    /// The size of a share when `start` tiles were given out.
    fn size(&self, start: usize) -> usize {
        let left = self.total - start;
        let half = left / (2 * self.threads);
        if half >= self.least {
            half
        } else {
            left.div_ceil(self.threads)
        }
    }

    /// The number of shares.
    fn count(&self) -> usize {
        let (mut start, mut count) = (0, 0);
        while start < self.total {
            let size = self.size(start);
            let round = self.threads.min((self.total - start).div_ceil(size));
            start += round * size;
            count += round;
        }
        count
    }

    /// The tiles of a share.
    fn share(&self, mut share: usize) -> Range<usize> {
        let mut start = 0;
        loop {
            let size = self.size(start);
            if share < self.threads {
                start += share * size;
                return start..(start + size).min(self.total);
            }
            share -= self.threads;
            start += self.threads * size;
        }
    }
}

/// The outputs of some tiles for one slab, whose first row is `row`.
#[expect(clippy::too_many_arguments, reason = "the body of the loops above")]
fn packed_part(
    isa: Isa,
    layer: &Linear,
    part: &Part,
    matrix: &PackedMatrix,
    tiles: Range<usize>,
    row: usize,
    slab: &Slab<'_>,
    out: &Rows,
) {
    let place = |tile: usize, i: usize| {
        let first = part.first + tile * TILE;
        let count = TILE.min(matrix.n() - tile * TILE);
        Place {
            // SAFETY: the row is one of m, the outputs are the layer's, and no other task writes
            // these.
            out: unsafe { out.part(row + i, first, count) },
            bias: layer.bias.as_ref().map(|bias| &bias[first..][..count]),
        }
    };
    #[cfg(target_arch = "x86_64")]
    if uses_amx(isa, slab.m, matrix.spec().group) {
        // SAFETY: a `Cpu` holds only an instruction set that this machine has, and the slab comes
        // from a view of the matrix for as many rows or more.
        unsafe { amx::tiles(matrix, tiles, slab, &place) }
        return;
    }
    let mut sums = MaybeUninit::uninit();
    let sums = zeroed(&mut sums, slab.m);
    for tile in tiles {
        packed_tile(isa, matrix, tile, 0..TILE / BLOCK, slab, sums);
        for (i, sums) in sums.chunks_exact(TILE).enumerate().take(slab.m) {
            let Place { out, bias } = place(tile, i);
            out.copy_from_slice(&sums[..out.len()]);
            if let Some(bias) = bias {
                for (out, bias) in out.iter_mut().zip(bias) {
                    *out += bias;
                }
            }
        }
    }
}

/// Where sums of one row and tile go.
struct Place<'a> {
    /// As many outputs as the tile has.
    out: &'a mut [f32],
    /// What to add to them.
    bias: Option<&'a [f32]>,
}

/// Whether `m` rows are multiplied by matrices of this group with AMX.
fn uses_amx(isa: Isa, m: usize, group: usize) -> bool {
    isa == Isa::Amx && m >= AMX_ROWS && group >= AMX_GROUP
}

/// The products of the rows of `x` (m x k) with the outputs `rows` of a matrix, in their order, into
/// `out` (m x rows.len()): the same bits as the full product.
///
/// # Panics
/// If the lengths do not match, or a row is beyond the matrix.
pub fn gathered(cpu: &Cpu, matrix: &Matrix, x: &[f32], rows: &[u32], out: &mut [f32]) {
    let (n, k) = (matrix.n(), matrix.k());
    let m = x.len() / k;
    assert!(
        x.len() == m * k && out.len() == m * rows.len(),
        "gathered {} of {n} x {k}: {} inputs, {} outputs",
        rows.len(),
        x.len(),
        out.len()
    );
    if let Some(row) = rows.iter().find(|&&row| row as usize >= n) {
        panic!("gathered row {row} of {n}");
    }
    if m == 0 || rows.is_empty() {
        return;
    }
    let out = Rows {
        ptr: out.as_mut_ptr(),
        stride: rows.len(),
    };
    match matrix {
        Matrix::Packed(matrix) => {
            let input = View::new(matrix).input(cpu, x, k);
            // Outputs of one block are computed together.
            let mut order: Vec<(u32, u32)> =
                rows.iter().zip(0..).map(|(&row, at)| (row, at)).collect();
            order.sort_unstable();
            let blocks: Vec<&[(u32, u32)]> = order
                .chunk_by(|a, b| a.0 / BLOCK as u32 == b.0 / BLOCK as u32)
                .collect();
            cpu.run(blocks.len(), &|number| {
                let block = blocks[number][0].0 as usize / BLOCK;
                let (tile, block) = (block / (TILE / BLOCK), block % (TILE / BLOCK));
                for (row, slab) in input.slabs() {
                    let mut sums = MaybeUninit::uninit();
                    let sums = zeroed(&mut sums, slab.m);
                    packed_tile(cpu.isa(), matrix, tile, block..block + 1, &slab, sums);
                    for i in 0..slab.m {
                        for &(output, at) in blocks[number] {
                            let sum = sums[i * TILE + output as usize % TILE];
                            // SAFETY: the row is one of m, at < rows.len(), and each place is
                            // written by one task.
                            unsafe { out.put(row + i, at as usize, sum) };
                        }
                    }
                }
            });
        }
        Matrix::Dense(matrix) => {
            matrix.product(cpu, x, rows.len(), &|i| rows[i] as usize, &|row, i, sum| {
                // SAFETY: row < m, i < rows.len(), and each is written by one task.
                unsafe { out.put(row, i, sum) };
            });
        }
    }
}

/// The sums of a slab of rows and a tile of outputs.
#[repr(align(64))]
struct Sums(#[expect(dead_code, reason = "read through a pointer")] [f32; SLAB * TILE]);

/// The sums of `m` rows and of those that fill up their block, all zero.
fn zeroed(sums: &mut MaybeUninit<Sums>, m: usize) -> &mut [f32] {
    let count = m.next_multiple_of(4) * TILE;
    let start = sums.as_mut_ptr().cast::<f32>();
    // SAFETY: the slice is a part of the buffer, and zero bytes are the float 0.
    unsafe {
        start.write_bytes(0, count);
        std::slice::from_raw_parts_mut(start, count)
    }
}

/// Rows of an output that tasks write disjoint parts of.
struct Rows {
    ptr: *mut f32,
    stride: usize,
}

// SAFETY: `put`'s callers write disjoint places.
unsafe impl Sync for Rows {}

impl Rows {
    /// # Safety
    /// The part lies in the output and no other thread uses it.
    #[expect(
        clippy::mut_from_ref,
        reason = "the parts that are handed out are disjoint"
    )]
    unsafe fn part(&self, row: usize, first: usize, count: usize) -> &mut [f32] {
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(row * self.stride + first), count) }
    }

    /// # Safety
    /// The place lies in the output and no other thread writes it.
    unsafe fn put(&self, row: usize, output: usize, value: f32) {
        // SAFETY: as the caller promises.
        unsafe { *self.ptr.add(row * self.stride + output) = value }
    }
}

/// The sums of the outputs of `blocks` of a tile, [row][64]; see `portable::tile`.
fn packed_tile(
    isa: Isa,
    matrix: &PackedMatrix,
    tile: usize,
    blocks: Range<usize>,
    input: &Slab<'_>,
    sums: &mut [f32],
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Cpu` holds only an instruction set that this machine has, and the callers'
        // sums have room for a whole slab.
        Isa::Amx | Isa::Avx512Vnni => unsafe { vnni::tile(matrix, tile, blocks, input, sums) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { avx2::tile(matrix, tile, blocks, input, sums) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Isa::Neon | Isa::NeonDot | Isa::NeonI8mm => unsafe {
            neon::tile(isa, matrix, tile, blocks, input, sums)
        },
        _ => portable::tile(matrix, tile, blocks, input, sums),
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::peak as amx_peak;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::peak as neon_peak;

#[cfg(test)]
mod tests;
