//! Dequantising and repacking against values from the `gguf` Python package.

use half::f16;
use kozue_kernels::PackedMatrix;
use proptest::prelude::*;

use super::blocks::GROUP;
use super::dequantise::dequantise;
use super::format::Format;
use super::order::Order;
use super::regroup::{Loss, form};
use super::repack::{Stored, repack};

/// Blocks of every type and their values, from tests/gguf_blocks.py.
const REFERENCE: &str = include_str!("../../tests/gguf_blocks.txt");

const QUANTISED: [Format; 8] = [
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q8_0,
    Format::Q4K,
    Format::Q5K,
    Format::Q6K,
];

fn hex(text: &str) -> Vec<u8> {
    let digit = |c: u8| (c as char).to_digit(16).unwrap() as u8;
    text.as_bytes()
        .chunks(2)
        .map(|pair| digit(pair[0]) << 4 | digit(pair[1]))
        .collect()
}

fn reference(format: Format) -> (Vec<u8>, Vec<f32>) {
    let line = REFERENCE
        .lines()
        .find(|line| line.split(' ').next() == Some(format.name()));
    let mut parts = line
        .unwrap_or_else(|| panic!("no {format:?}"))
        .split(' ')
        .skip(1)
        .map(hex);
    let (bytes, values) = (parts.next().unwrap(), parts.next().unwrap());
    (
        bytes,
        values
            .as_chunks()
            .0
            .iter()
            .map(|&b| f32::from_le_bytes(b))
            .collect(),
    )
}

/// Values as the kernels read them.
fn rows(matrix: &PackedMatrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.n() * matrix.k()];
    for (row, values) in values.chunks_mut(matrix.k()).enumerate() {
        matrix.row_into(row, values);
    }
    values
}

fn in_place(format: Format, bytes: &[u8]) -> Stored<'_> {
    Stored {
        format,
        bytes,
        first: 0,
        rows: Order::Same,
        groups: Order::Same,
    }
}

#[test]
fn values_are_those_of_the_gguf_package() {
    for format in QUANTISED.into_iter().chain([Format::F16, Format::Bf16]) {
        let (bytes, expected) = reference(format);
        let mut values = vec![0.0; expected.len()];
        dequantise(format, &bytes, &mut values).unwrap();
        for (index, (value, expected)) in values.iter().zip(&expected).enumerate() {
            assert_eq!(value, expected, "{} at {index}", format.name());
        }
    }
}

#[test]
fn repacking_loses_nothing_or_what_it_states() {
    for format in QUANTISED {
        let (bytes, expected) = reference(format);
        let form = form(format).unwrap();
        let (matrix, loss) = repack(&in_place(format, &bytes), form, 1, 512).unwrap();
        let values = rows(&matrix);
        if !form.lossy {
            assert_eq!(values, expected, "{}", format.name());
            assert_eq!(loss, Loss::default());
            continue;
        }
        let sum = |terms: &mut dyn Iterator<Item = f64>| terms.sum::<f64>();
        let pairs = || values.iter().zip(&expected);
        let error = sum(&mut pairs().map(|(a, b)| f64::from(a - b).powi(2)));
        let norm = sum(&mut pairs().map(|(_, b)| f64::from(*b).powi(2)));
        assert!(
            (loss.norm / norm - 1.0).abs() < 1e-5,
            "{}: norm {norm}, {loss:?}",
            format.name()
        );
        assert!(
            (loss.error / error - 1.0).abs() < 1e-2,
            "{}: {error}, {loss:?}",
            format.name()
        );
        // Random scales within a block are a harder case than a model's.
        let bound = if format == Format::Q6K { 1e-2 } else { 5e-4 };
        assert!(
            loss.relative() < bound,
            "{}: {:e}",
            format.name(),
            loss.relative()
        );
    }
}

#[test]
fn q6k_with_equal_scales_loses_only_the_scale_s_rounding() {
    let (mut bytes, _) = reference(Format::Q6K);
    for block in bytes.chunks_mut(210) {
        block[192..208].fill(37);
        block[208..].copy_from_slice(&f16::from_f32(0.013).to_le_bytes());
    }
    let form = form(Format::Q6K).unwrap();
    let (_, loss) = repack(&in_place(Format::Q6K, &bytes), form, 1, 512).unwrap();
    assert!(loss.relative() < 5e-4, "{:e}", loss.relative());
}

#[test]
fn zeros_stay_zeros() {
    for format in QUANTISED {
        let bytes = vec![0; format.row_bytes(512)];
        let (matrix, loss) =
            repack(&in_place(format, &bytes), form(format).unwrap(), 1, 512).unwrap();
        assert_eq!(rows(&matrix), vec![0.0; 512], "{}", format.name());
        assert_eq!(loss.error, 0.0);
    }
}

#[test]
fn a_scale_that_is_no_number_is_an_error() {
    for format in QUANTISED {
        for bad in [f16::INFINITY, f16::NAN, f16::NEG_INFINITY] {
            let (mut bytes, _) = reference(format);
            let at = if format == Format::Q6K { 208 } else { 0 };
            bytes[at..at + 2].copy_from_slice(&bad.to_le_bytes());
            let result = repack(&in_place(format, &bytes), form(format).unwrap(), 1, 512);
            let text = result.err().unwrap_or_else(|| panic!("{format:?}"));
            assert_eq!(
                text,
                "a block's scale is not a finite number; the file is damaged"
            );
            assert!(dequantise(format, &bytes, &mut [0.0; 512]).is_err());
        }
    }
    // A product that f16 cannot hold.
    let (mut bytes, _) = reference(Format::Q4K);
    bytes[0..2].copy_from_slice(&f16::MAX.to_le_bytes());
    assert!(
        repack(
            &in_place(Format::Q4K, &bytes),
            form(Format::Q4K).unwrap(),
            1,
            512
        )
        .is_err()
    );
}

/// Random blocks with finite scales.
fn blocks(format: Format, values: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    let mut bytes: Vec<u8> = (0..format.row_bytes(values)).map(|_| next()).collect();
    let places: &[usize] = match format {
        Format::Q4_0 | Format::Q5_0 | Format::Q8_0 => &[0],
        Format::Q6K => &[208],
        _ => &[0, 2],
    };
    for block in bytes.chunks_mut(format.block_bytes()) {
        for &at in places {
            // Exponents of 2^-8 to 2^-1.
            block[at + 1] = (block[at + 1] & 0x9f) | 0x20;
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Every row and group comes from where the order says, whatever the number of stripes and
    /// threads.
    #[test]
    fn repacked_rows_follow_the_order(
        which in 0usize..8,
        seed in any::<u64>(),
        heads in 1usize..4,
        per_key in 1usize..4,
        runs in 1usize..3,
        turned in any::<bool>(),
    ) {
        let format = QUANTISED[which];
        // Columns: value heads of `runs` groups; as many key heads as make whole blocks.
        let groups = Order::ValueHeads { first: 0, key_heads: 8, per_key, width: runs };
        let k = 8 * per_key * runs * GROUP;
        let n = heads * 60;
        let rows_order = if turned { Order::Pairs { width: 60 } } else { Order::Same };
        let (first, all) = (3, n + 5);
        let bytes = blocks(format, all * k, seed);
        let stored = Stored { format, bytes: &bytes, first, rows: rows_order, groups };
        let (matrix, loss) = repack(&stored, form(format).unwrap(), n, k).unwrap();
        prop_assert!(loss.relative() < 2e-2);

        let mut values = vec![0.0; all * k];
        dequantise(format, &bytes, &mut values).unwrap();
        let mut row = vec![0.0; k];
        let columns = Order::ValueHeads { first: 0, key_heads: 8, per_key, width: runs * GROUP };
        for index in 0..n {
            matrix.row_into(index, &mut row);
            let from = &values[(first + rows_order.stored(index)) * k..][..k];
            let most = from.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            for (column, value) in row.iter().enumerate() {
                let expected = from[columns.stored(column)];
                let bound = if form(format).unwrap().lossy { 2e-2 * most } else { 0.0 };
                prop_assert!((value - expected).abs() <= bound, "{value} {expected} {format:?}");
            }
        }
    }
}
