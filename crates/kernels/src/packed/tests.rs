use super::*;
use proptest::prelude::*;

/// Any small matrix: spec, codes, scales, zero points, minima.
pub(crate) fn any_codes()
-> impl Strategy<Value = (PackedSpec, Vec<u8>, Vec<f16>, Vec<u8>, Vec<f16>)> {
    let zero = prop_oneof![
        Just(ZeroKind::Symmetric),
        Just(ZeroKind::Point),
        Just(ZeroKind::Min)
    ];
    (
        1usize..150,
        1usize..300,
        prop_oneof![Just(4u8), Just(8)],
        5u32..8,
        zero,
    )
        .prop_flat_map(|(n, k, bits, log_group, zero)| {
            let spec = PackedSpec {
                n,
                k,
                bits,
                group: 1 << log_group,
                zero,
            };
            let top = ((1u16 << bits) - 1) as u8;
            let groups = n * spec.groups();
            (
                Just(spec),
                proptest::collection::vec(0..=top, n * k),
                proptest::collection::vec((-2f32..2.0).prop_map(f16::from_f32), groups),
                proptest::collection::vec(0..=top, groups),
                proptest::collection::vec((-2f32..2.0).prop_map(f16::from_f32), groups),
            )
        })
}

pub(crate) fn zeros<'a>(spec: &PackedSpec, points: &'a [u8], mins: &'a [f16]) -> Zeros<'a> {
    match spec.zero {
        ZeroKind::Symmetric => Zeros::Symmetric,
        ZeroKind::Point => Zeros::Point(points),
        ZeroKind::Min => Zeros::Min(mins),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn packing_round_trips((spec, codes, scales, points, mins) in any_codes()) {
        let bytes = pack(&spec, &codes, &scales, zeros(&spec, &points, &mins)).unwrap();
        prop_assert_eq!(bytes.len(), spec.bytes());
        let matrix = PackedMatrix::new(spec, None, bytes).unwrap();
        let groups = spec.groups();
        let mut row = vec![0.0; spec.k];
        for r in 0..spec.n {
            matrix.row_into(r, &mut row);
            for i in 0..spec.k {
                let at = r * groups + i / spec.group;
                let code = codes[r * spec.k + i];
                prop_assert_eq!(matrix.code(r, i), code);
                let scale = scales[at].to_f64();
                let want = match spec.zero {
                    ZeroKind::Symmetric => {
                        scale * (f64::from(code) - f64::from(1 << (spec.bits - 1)))
                    }
                    ZeroKind::Point => scale * (f64::from(code) - f64::from(points[at])),
                    ZeroKind::Min => scale * f64::from(code) + mins[at].to_f64(),
                };
                prop_assert!((f64::from(row[i]) - want).abs() <= 1e-6 * want.abs());
            }
            for g in 0..groups {
                prop_assert_eq!(matrix.scale(r, g), scales[r * groups + g]);
            }
        }
    }

    #[test]
    fn slices_of_rows_add_up((spec, codes, scales, points, mins) in any_codes()) {
        let all = zeros(&spec, &points, &mins);
        let whole = pack(&spec, &codes, &scales, all).unwrap();
        let groups = spec.groups();
        let mut parts = Vec::new();
        for first in (0..spec.n).step_by(64) {
            let n = (spec.n - first).min(64);
            let rows = first * groups..(first + n) * groups;
            let part = pack(
                &PackedSpec { n, ..spec },
                &codes[first * spec.k..(first + n) * spec.k],
                &scales[rows.clone()],
                zeros(&spec, &points[rows.clone()], &mins[rows]),
            );
            parts.extend_from_slice(&part.unwrap());
        }
        prop_assert_eq!(&*whole, &*parts);
    }
}

#[test]
fn bad_input_is_refused() {
    let spec = PackedSpec {
        n: 2,
        k: 32,
        bits: 4,
        group: 32,
        zero: ZeroKind::Symmetric,
    };
    let scales = [f16::ONE; 2];
    let error = |spec: &PackedSpec, codes: &[u8], zeros| {
        pack(spec, codes, &scales, zeros).err().unwrap().to_string()
    };
    assert_eq!(
        error(&spec, &[0; 63], Zeros::Symmetric),
        "packing 2 x 32 takes 64 codes, not 63"
    );
    let mut codes = [0; 64];
    codes[40] = 16;
    assert_eq!(
        error(&spec, &codes, Zeros::Symmetric),
        "code 40 is 16, 4 bits hold 0 to 15"
    );
    assert!(error(&spec, &[0; 64], Zeros::Point(&[0; 2])).contains("Point"));
    for bad in [
        PackedSpec { bits: 5, ..spec },
        PackedSpec { group: 48, ..spec },
        PackedSpec { n: 0, ..spec },
        PackedSpec {
            k: usize::MAX,
            ..spec
        },
    ] {
        assert!(PackedMatrix::new(bad, None, vec![0u8; 10]).is_err());
    }
    assert!(PackedMatrix::new(spec, None, vec![0u8; spec.bytes() - 1]).is_err());
    let rotation = Rotation::from_seed(64, 0).unwrap();
    assert!(PackedMatrix::new(spec, Some(rotation), vec![0u8; spec.bytes()]).is_err());
}
