//! Times of passes over chains and trees of some rows, and of the commits of the trees:
//! `cargo bench -p kozue-model --bench passes -- MODEL [ROWS,...]`.
//!
//! THREADS says on how many threads. Rounds go through all row counts in turn; the median and, for
//! a machine that is not idle, the fastest tenth are shown.
#![allow(missing_docs)]

use std::path::Path;
use std::time::Instant;

use kozue_checkpoint::Checkpoint;
use kozue_kernels::{Cpu, KvType};
use kozue_model::{Model, Outputs, Rows, Segment, State, Tree};

const CONTEXT: usize = 64;
const ROUNDS: usize = 60;
/// Nodes of a tree that are accepted, at most.
const ACCEPTED: usize = 5;

fn main() {
    // cargo adds --bench.
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with("--"))
        .collect();
    let Some(path) = args.first() else {
        println!("give the directory of a model");
        return;
    };
    let rows = args.get(1).map_or("1,4,5,8,16,32", String::as_str);
    let rows: Vec<usize> = rows.split(',').map(|n| n.parse().unwrap()).collect();
    let threads = std::env::var("THREADS").ok().and_then(|n| n.parse().ok());
    let cpu = Cpu::new(threads);
    let model = Model::load(&Checkpoint::open(Path::new(path)).unwrap(), KvType::F16).unwrap();
    run(&cpu, &model, &rows);
}

/// Two branches in three nodes: a path and its rivals.
fn tree(rows: usize, token: impl Fn(usize) -> u32) -> Tree {
    let mut tree = Tree::new(token(0));
    for node in 1..rows {
        tree.push(node / 3 * 2, token(node)).unwrap();
    }
    tree
}

fn run(cpu: &Cpu, model: &Model, rows: &[usize]) {
    let token = |i: usize| (i * 7919 % model.config().vocab_size) as u32;
    let prompt: Vec<u32> = (0..CONTEXT).map(token).collect();
    let mut start = model.new_state();
    pass(cpu, model, &mut start, Rows::Chain(&prompt), 1);
    // [chain, tree, commit] of every number of rows.
    let mut times = vec![[(); 3].map(|()| Vec::new()); rows.len()];
    // One state for all trees, as in use: what a commit needs lies in memory that is used again.
    let mut state = start.clone();
    for _ in 0..ROUNDS {
        for (&rows, times) in rows.iter().zip(&mut times) {
            let tokens: Vec<u32> = (0..rows).map(token).collect();
            let mut chain = start.clone();
            let before = Instant::now();
            pass(cpu, model, &mut chain, Rows::Chain(&tokens), rows);
            times[0].push(before.elapsed().as_secs_f64());

            let tree = tree(rows, token);
            let before = Instant::now();
            pass(cpu, model, &mut state, Rows::Tree(&tree), rows);
            times[1].push(before.elapsed().as_secs_f64());
            let deepest = (0..rows).max_by_key(|&node| tree.depths()[node]);
            let mut path = tree.path(deepest.unwrap_or(0));
            path.truncate(ACCEPTED);
            let before = Instant::now();
            state.commit(cpu, &path).unwrap();
            times[2].push(before.elapsed().as_secs_f64());
        }
    }
    println!("{} on {} threads, ms", cpu.isa(), cpu.threads());
    println!("rows      chain               tree             commit");
    for (rows, times) in rows.iter().zip(&mut times) {
        print!("{rows:4}");
        for times in times {
            times.sort_by(f64::total_cmp);
            let (median, fast) = (times[times.len() / 2], times[times.len() / 10]);
            print!("  {:8.3} {:8.3}", median * 1e3, fast * 1e3);
        }
        println!();
    }
}

fn pass(cpu: &Cpu, model: &Model, state: &mut State, rows: Rows<'_>, logit_rows: usize) {
    let segment = Segment {
        state,
        rows,
        logit_rows,
        snapshots: &[],
    };
    model.pass(cpu, &mut [segment], Outputs::default()).unwrap();
}
