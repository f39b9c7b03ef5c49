//! Times of the parts of a round of drafting beside the target's pass:
//! `cargo bench -p kozue-model --bench drafters -- TARGET DFLASH WEAVER`. THREADS says on how many.
//!
//! A round is: a verification of 16 rows, its commit, the features of the accepted tokens observed,
//! a block drafted, its logits, and a tree of 15 expanded nodes, a few in each call.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::time::Instant;

use kozue_checkpoint::{Checkpoint, Drafter, Network};
use kozue_kernels::{Cpu, KvType, gathered, linear};
use kozue_model::{DFlash, Model, Outputs, Rows, Segment, State, Tree, WeaveNode, Weaver};

const CONTEXT: usize = 200;
const ROWS: usize = 16;
const ACCEPTED: usize = 5;
/// Nodes of each call that expands a tree.
const CALLS: [usize; 5] = [1, 2, 4, 4, 4];
const ROUNDS: usize = 60;

fn main() {
    // cargo adds --bench.
    let paths: Vec<PathBuf> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .map(PathBuf::from)
        .collect();
    let [target, dflash, weaver] = &paths[..] else {
        println!("give the directories of a target, its DFlash drafter and its Weaver");
        return;
    };
    let threads = std::env::var("THREADS").ok().and_then(|n| n.parse().ok());
    Bench::open(&Cpu::new(threads), target, dflash, weaver).run();
}

/// Milliseconds of each part: the median, and the fastest tenth for a machine that is not idle.
#[derive(Default)]
struct Parts {
    names: Vec<&'static str>,
    times: Vec<Vec<f64>>,
}

impl Parts {
    fn time<T>(&mut self, name: &'static str, f: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = f();
        let took = start.elapsed().as_secs_f64() * 1e3;
        let at = self.names.iter().position(|n| *n == name);
        let at = at.unwrap_or_else(|| {
            self.names.push(name);
            self.times.push(Vec::new());
            self.names.len() - 1
        });
        self.times[at].push(took);
        result
    }

    fn print(mut self) {
        let mut share = (0.0, 0.0);
        for (name, times) in self.names.iter().zip(&mut self.times) {
            times.sort_by(f64::total_cmp);
            let (median, fast) = (times[times.len() / 2], times[times.len() / 10]);
            println!("{name}: {median:.3} ms, {fast:.3} ms");
            if name.starts_with("draft") || name.starts_with("weave") {
                // A part that comes several times in a round counts as often.
                let calls = (times.len() / ROUNDS) as f64;
                share.0 += calls * median;
                share.1 += calls * fast;
            }
        }
        println!(
            "draft and weave in a round: {:.3} ms, {:.3} ms",
            share.0, share.1
        );
    }
}

struct Bench<'a> {
    cpu: &'a Cpu,
    target: Model,
    dflash: DFlash,
    weaver: Weaver,
}

impl<'a> Bench<'a> {
    fn open(cpu: &'a Cpu, target: &Path, dflash: &Path, weaver: &Path) -> Self {
        let target = Model::load(&Checkpoint::open(target).unwrap(), KvType::F16).unwrap();
        Self {
            cpu,
            dflash: DFlash::load(&Drafter::open(dflash, Network::DFlash).unwrap(), &target)
                .unwrap(),
            weaver: Weaver::load(&Drafter::open(weaver, Network::Weaver).unwrap(), &target)
                .unwrap(),
            target,
        }
    }

    fn run(&self) {
        let (cpu, target, dflash, weaver) = (self.cpu, &self.target, &self.dflash, &self.weaver);
        let vocab = target.config().vocab_size;
        let hidden = target.config().hidden_size;
        let token = |i: usize| (i * 7919 % vocab) as u32;
        let prompt: Vec<u32> = (0..CONTEXT).map(token).collect();
        let mut state = target.new_state();
        let mut draft_state = dflash.new_state();
        let (features, _) = self.pass(&mut state, Rows::Chain(&prompt));
        dflash.observe(cpu, &mut draft_state, &features);

        let mut tree = Tree::new(token(1));
        for node in 1..ROWS {
            // Two branches in three nodes: a path and its rivals.
            tree.push(node / 3 * 2, token(node + 1)).unwrap();
        }
        let path = (0..ROWS).map(|node| tree.path(node)).max_by_key(Vec::len);
        let path: Vec<usize> = path.unwrap().into_iter().take(ACCEPTED).collect();
        let head = target.head().matrices().next().unwrap();
        let mut logits = vec![0.0; (dflash.block() - 1) * vocab];
        let mut parts = Parts::default();
        let mut weave = None;
        for round in 0..ROUNDS {
            let root = token(round);
            let one = parts.time("plain pass of 1 row", || {
                self.pass(&mut state.clone(), Rows::Chain(&[root]))
            });
            drop(one);
            let width = dflash.taps().len() * hidden;
            let (features, last) = parts.time("pass of 16 rows", || {
                self.pass(&mut state, Rows::Tree(&tree))
            });
            parts.time("commit", || state.commit(cpu, &path).unwrap());
            parts.time("draft: observe", || {
                dflash.observe(cpu, &mut draft_state, &features[..path.len() * width]);
            });
            let rows = parts.time("draft: block", || {
                dflash
                    .draft(cpu, target, &mut draft_state, root, usize::MAX)
                    .unwrap()
            });
            parts.time("draft: head", || {
                linear(cpu, target.head(), &rows, &mut logits);
            });
            let weave = weave.get_or_insert_with(|| weaver.begin(cpu, &last[..hidden], &rows));
            parts.time("weave: restart", || {
                weaver.restart(cpu, weave, &last[..hidden], &rows);
            });
            let mut expanded = 0;
            for count in CALLS {
                let nodes: Vec<WeaveNode> = (expanded..expanded + count)
                    .map(|node| WeaveNode {
                        token: token(node),
                        ancestors: (0..expanded as u32).step_by(2).collect(),
                    })
                    .collect();
                expanded += count;
                let queries = parts.time(
                    match count {
                        1 => "weave: expand 1",
                        2 => "weave: expand 2",
                        _ => "weave: expand 4",
                    },
                    || weaver.expand(cpu, target, weave, &nodes).unwrap(),
                );
                let shortlist: Vec<u32> = (0..weaver.candidates()).map(token).collect();
                let mut products = vec![0.0; weaver.candidates()];
                for query in queries.chunks_exact(hidden) {
                    parts.time("weave: score a node", || {
                        gathered(cpu, head, query, &shortlist, &mut products);
                    });
                }
            }
        }
        parts.print();
    }

    /// Features and final hidden states of a pass.
    fn pass(&self, state: &mut State, rows: Rows<'_>) -> (Vec<f32>, Vec<f32>) {
        let segment = Segment {
            state,
            logit_rows: rows.tokens().len().min(ROWS),
            snapshots: &[],
            rows,
        };
        let wanted = Outputs {
            taps: self.dflash.taps(),
            hidden: true,
        };
        let output = self.target.pass(self.cpu, &mut [segment], wanted).unwrap();
        (output.features.to_vec(), output.hidden.to_vec())
    }
}
