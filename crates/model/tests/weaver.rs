//! Both generations of Weaver against their formulas in f64 (tests/reference/make_drafters.py),
//! and what their bits may depend on.

mod drafted;
mod tiny;

use drafted::{Drafted, assert_close, bits, logits};
use kozue_kernels::{Cpu, Isa, KvType, gathered};
use kozue_model::{Model, WeaveNode, Weaver};

const NAMES: [&str; 2] = ["weaver-learned", "weaver-rotary"];

struct Case {
    drafted: Drafted,
    target: Model,
    weaver: Weaver,
    nodes: Vec<WeaveNode>,
}

impl Case {
    fn open(name: &str) -> Self {
        let drafted = Drafted::open(name);
        let target = Drafted::open(&drafted.get::<String>("drafter")).target(KvType::F32);
        let parents: Vec<i32> = drafted.get("parents");
        let tokens: Vec<u32> = drafted.get("tokens");
        let mut nodes: Vec<WeaveNode> = Vec::new();
        for (&token, &parent) in tokens.iter().zip(&parents) {
            let mut ancestors = Vec::new();
            if let Ok(parent) = usize::try_from(parent) {
                ancestors.clone_from(&nodes[parent].ancestors);
                ancestors.push(parent as u32);
            }
            nodes.push(WeaveNode { token, ancestors });
        }
        Self {
            weaver: Weaver::load(&drafted.drafter(), &target).unwrap(),
            target,
            nodes,
            drafted,
        }
    }

    /// Queries of all nodes, expanded in batches of these sizes.
    fn queries(&self, cpu: &Cpu, batches: &[usize]) -> Vec<f32> {
        let (last, proposals) = (
            self.drafted.tensor("final"),
            self.drafted.tensor("proposals"),
        );
        // Memory of an earlier, longer round.
        let mut weave = self.weaver.begin(cpu, &proposals[..last.len()], &proposals);
        self.weaver
            .expand(cpu, &self.target, &mut weave, &self.nodes)
            .unwrap();
        self.weaver.restart(cpu, &mut weave, &last, &proposals);
        let mut queries = Vec::new();
        let mut nodes = &self.nodes[..];
        for &batch in batches {
            let (now, later) = nodes.split_at(batch);
            nodes = later;
            queries.extend(
                self.weaver
                    .expand(cpu, &self.target, &mut weave, now)
                    .unwrap(),
            );
        }
        assert!(nodes.is_empty());
        queries
    }
}

#[test]
fn scores_equal_the_formulas() {
    let cpu = Cpu::new(Some(2));
    for (name, depth) in NAMES.into_iter().zip([7, 5]) {
        let case = Case::open(name);
        assert_eq!((case.weaver.depth(), case.weaver.candidates()), (depth, 16));
        let queries = case.queries(&cpu, &case.drafted.get::<Vec<usize>>("batches"));
        assert_close(&queries, &case.drafted.tensor("queries"), name);

        let hidden = case.target.config().hidden_size;
        let vocab = case.target.config().vocab_size;
        let candidates: Vec<Vec<u32>> = case.drafted.get("candidates");
        let prior = logits(&cpu, &case.target, &case.drafted.tensor("proposals"));
        let head = case.target.head().matrices().next().unwrap();
        let mut scores = Vec::new();
        for (node, query) in case.nodes.iter().zip(queries.chunks_exact(hidden)) {
            let depth = node.ancestors.len();
            let ids = &candidates[depth];
            let mut products = vec![0.0; ids.len()];
            gathered(&cpu, head, query, ids, &mut products);
            for (&id, product) in ids.iter().zip(products) {
                scores.push(prior[depth * vocab + id as usize] + product);
            }
        }
        assert_close(&scores, &case.drafted.tensor("scores"), name);
    }
}

/// A node's query has the same bits whatever nodes are expanded with it.
#[test]
fn queries_do_not_depend_on_batches_threads_or_instruction_set() {
    for name in NAMES {
        let case = Case::open(name);
        let expected = bits(&case.queries(&Cpu::new(Some(1)), &[1; 10]));
        for batches in [&[1, 3, 3, 3][..], &[1, 1, 2, 3, 1, 2], &[10]] {
            for threads in [1, 2, 3] {
                for isa in Isa::available() {
                    let cpu = Cpu::with_isa(Some(threads), isa);
                    let queries = bits(&case.queries(&cpu, batches));
                    assert_eq!(queries, expected, "{name}, {batches:?}, {threads}, {isa:?}");
                }
            }
        }
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_refused() {
    let cpu = Cpu::new(Some(1));
    let case = Case::open("weaver-rotary");
    let (last, proposals) = (
        case.drafted.tensor("final"),
        case.drafted.tensor("proposals"),
    );
    let mut weave = case.weaver.begin(&cpu, &last, &proposals);
    let node = WeaveNode {
        token: 5000,
        ancestors: Vec::new(),
    };
    let error = case
        .weaver
        .expand(&cpu, &case.target, &mut weave, &[node])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "token 5000 is outside the vocabulary of 320 tokens"
    );
}
