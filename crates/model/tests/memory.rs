//! Memory that is used is the memory that is told.

mod tiny;

use kozue_checkpoint::description::Mixer;
use kozue_kernels::{Cpu, KvCache, KvType};
use kozue_model::{Outputs, Rows, Segment, Working, pass_bytes};
use tiny::{Tiny, all};

/// After a pass the processor holds what the pass worked in.
#[test]
fn a_pass_works_in_what_is_told() {
    for name in all() {
        for kv in [KvType::F16, KvType::Int8] {
            for (before, rows, threads) in [(0, 300, 1), (700, 40, 1), (700, 40, 3)] {
                let tiny = Tiny::open_kept(&name, kv);
                let config = tiny.model.config();
                let cpu = Cpu::new(Some(threads));
                let tokens: Vec<u32> = (0..(before + rows) as u32).map(|i| i * 7 % 60).collect();
                let mut state = tiny.model.new_state();
                let (early, late) = tokens.split_at(before);
                tiny.model.advance(&cpu, &mut state, early, 0).unwrap();
                let cpu = Cpu::new(Some(threads));
                let segment = Segment {
                    state: &mut state,
                    rows: Rows::Chain(late),
                    logit_rows: 1,
                    snapshots: &[],
                };
                let wanted = Outputs {
                    taps: &[0, 1],
                    hidden: false,
                };
                drop(tiny.model.pass(&cpu, &mut [segment], wanted).unwrap());
                let told = pass_bytes(
                    config,
                    kv,
                    Working {
                        rows,
                        logit_rows: 1,
                        taps: 2,
                        positions: before + rows,
                        threads,
                    },
                ) as usize;
                // Keys and values that a window leaves behind when the pass ends.
                let (heads, width) = (config.attention.kv_heads, config.attention.head_dim);
                let behind = KvCache::bytes_of(heads, width, kv, rows, None) as usize;
                let told = told - config.count(Mixer::Sliding) * behind;
                let held = cpu.spare_bytes();
                // Threads that come late find nothing left to do, and take nothing.
                let most = if threads == 1 {
                    held * 3 / 2
                } else {
                    usize::MAX
                };
                assert!(
                    (held * 3 / 4..most).contains(&told),
                    "{name} {kv:?}, {rows} rows after {before}: {told} told, {held} held"
                );
            }
        }
    }
}
