//! The prefix cache on a model with recurrent layers: what is read again, and that no answer
//! depends on it. The comments name public reports of what other engines got wrong.

use kozue_engine::cache_folder::FolderOptions;
use kozue_engine::sampling::Sampling;
use kozue_engine::scheduler::{CacheSize, Progress, Scheduler, SchedulerOptions, Ticket};
use kozue_engine::speculation::{DraftKind, SpeculationOptions};
use kozue_engine::tokenizer::Control;
use kozue_engine::{Loaded, Request};
use kozue_kernels::{Cpu, KvType};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

fn reference(folder: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/reference")
        .join(folder)
}

/// Gated DeltaNet and attention layers, with a head that predicts further tokens; for a longer
/// context than the tiny checkpoint was made for.
fn target() -> PathBuf {
    static TARGET: LazyLock<PathBuf> = LazyLock::new(|| {
        let from = reference("tiny/qwen3_5-multimodal");
        let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("prefix_cache");
        std::fs::create_dir_all(&to).unwrap();
        for file in std::fs::read_dir(&from).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
        let config = std::fs::read_to_string(from.join("config.json")).unwrap();
        let key = "\"max_position_embeddings\": ";
        let longer = config.replace(&format!("{key}1024"), &format!("{key}8192"));
        assert_ne!(longer, config);
        std::fs::write(to.join("config.json"), longer).unwrap();
        to
    });
    TARGET.clone()
}

fn load(path: &Path, kind: DraftKind, drafter: Option<PathBuf>) -> Arc<Loaded> {
    load_kept(path, kind, drafter, KvType::F16)
}

fn load_kept(path: &Path, kind: DraftKind, drafter: Option<PathBuf>, kv: KvType) -> Arc<Loaded> {
    let mut loaded = Loaded::open(path, Cpu::new(Some(1)), kv).unwrap();
    let options = SpeculationOptions {
        kind: Some(kind),
        path: drafter,
        budget: Some(6),
        ..SpeculationOptions::default()
    };
    loaded.speculate(path, &options).unwrap();
    assert_eq!(loaded.draft_kind(), kind);
    Arc::new(loaded)
}

/// The target with each way to draft that needs no other files, plain decoding first.
fn ways() -> [Arc<Loaded>; 4] {
    let path = target();
    [
        load(&path, DraftKind::None, None),
        load(&path, DraftKind::Lookup, None),
        load(&path, DraftKind::Mtp, None),
        load(&path, DraftKind::Model, Some(path.clone())),
    ]
}

fn start(loaded: &Arc<Loaded>, cache: CacheSize, folder: Option<&Path>) -> Scheduler {
    let folder = folder.map(|path| FolderOptions {
        path: path.to_path_buf(),
        bytes: 1 << 30,
        identity: loaded.state_identity(&target()).unwrap(),
    });
    let options = SchedulerOptions {
        cache,
        folder,
        ..SchedulerOptions::default()
    };
    Scheduler::start(Arc::clone(loaded), options).unwrap()
}

const ROOM: CacheSize = CacheSize::Bytes(1 << 30);

fn request(prompt: &[u32], max_tokens: usize, seed: u64) -> Request {
    Request {
        prompt: prompt.to_vec(),
        sampling: Sampling {
            temperature: 0.8,
            seed,
            ..Sampling::greedy()
        },
        max_tokens: Some(max_tokens),
        stop: Vec::new(),
        grammar: None,
        logprobs: None,
        ignore_eos: true,
        trace: false,
    }
}

/// What came back for a prompt.
#[derive(Clone, Debug, PartialEq)]
struct Said {
    cached: usize,
    tokens: Vec<u32>,
    text: String,
}

fn submit(scheduler: &Scheduler, request: Request) -> (Ticket, Receiver<Progress>) {
    let (sender, heard) = channel();
    let listener = Box::new(move |progress| sender.send(progress).is_ok());
    (scheduler.submit(request, listener).unwrap(), heard)
}

fn said(heard: &Receiver<Progress>) -> Said {
    let mut said = Said {
        cached: usize::MAX,
        tokens: Vec::new(),
        text: String::new(),
    };
    loop {
        match heard.recv_timeout(Duration::from_secs(120)).unwrap() {
            Progress::Started { cached_tokens } => said.cached = cached_tokens,
            Progress::Token(token) => said.tokens.push(token.token),
            Progress::Text(text) => said.text += &text,
            Progress::Round(_) => {}
            Progress::Finished(_) => return said,
            Progress::Failed(error) => panic!("{error}"),
        }
    }
}

fn ask(scheduler: &Scheduler, request: Request) -> Said {
    let (_ticket, heard) = submit(scheduler, request);
    said(&heard)
}

fn cold(loaded: &Arc<Loaded>, request: Request) -> Said {
    ask(&start(loaded, CacheSize::Off, None), request)
}

fn text(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens)
        .map(|n| 1 + (seed * 31 + n * (7 + seed)) % 290)
        .collect()
}

/// How many tokens two texts begin with in common.
fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

/// A turn of a chat.
#[derive(Clone, Debug, PartialEq)]
struct Turn {
    prompt: Vec<u32>,
    /// Tokens of the prompt after the longest beginning that it shares with a text that was read
    /// before: an earlier prompt with its answer, less the answer's last token, which was drawn
    /// and not read.
    new: usize,
    said: Said,
}

/// A chat of thirty turns. Its template opens an empty thought before each answer, and `drops` it
/// when the answer has become history, or does not.
fn chat(scheduler: &Scheduler, loaded: &Loaded, drops: bool) -> Vec<Turn> {
    let encode = |text: &str| loaded.tokenizer.encode(text, Control::Recognised).unwrap();
    let mut history = encode("<|im_start|>system\nYou are terse and polite.<|im_end|>\n");
    let mut read: Vec<Vec<u32>> = Vec::new();
    let mut turns = Vec::new();
    for turn in 0..30 {
        history.extend(encode(&format!(
            "<|im_start|>user\nq{turn}<|im_end|>\n<|im_start|>assistant\n"
        )));
        let mut prompt = history.clone();
        prompt.extend(encode("<think>\n\n</think>\n\n"));
        let said = ask(scheduler, request(&prompt, 7, turn));
        let shared = read.iter().map(|text| common(text, &prompt)).max();
        let new = prompt.len() - shared.unwrap_or(0);
        let mut whole = prompt.clone();
        whole.extend(&said.tokens);
        history = if drops { history } else { prompt.clone() };
        history.extend(&said.tokens);
        history.extend(encode("<|im_end|>\n"));
        whole.pop();
        read.push(whole);
        turns.push(Turn { prompt, new, said });
    }
    turns
}

/// ggml-org/llama.cpp#20225, #20153, #22746, #24714: prompts of hybrid models were read in full
/// on every turn. youssofal/MTPLX#121: no hit where the template rewrites earlier turns.
/// vllm-project/vllm#38898: no hits with drafts. youssofal/MTPLX#246: turning drafts off turned
/// the cache off.
#[test]
fn thirty_turns_read_only_what_is_new() {
    for drops in [true, false] {
        let mut plain: Option<Vec<Turn>> = None;
        for loaded in ways() {
            let off = chat(&start(&loaded, CacheSize::Off, None), &loaded, drops);
            let on = chat(&start(&loaded, ROOM, None), &loaded, drops);
            for (n, (turn, cold)) in on.iter().zip(&off).enumerate() {
                assert_eq!(turn.said.tokens, cold.said.tokens);
                assert_eq!(turn.said.text, cold.said.text);
                assert_eq!(cold.said.cached, 0);
                let known = turn.prompt.len() - turn.new;
                assert_eq!(turn.said.cached, known, "turn {n}, drops: {drops}");
            }
            // New is one turn of thirty.
            let last = &on[29];
            assert!(last.new * 20 < last.prompt.len(), "{} new", last.new);
            // Drafts change neither texts nor hits.
            assert_eq!(plain.get_or_insert(on.clone()), &on);
        }
    }
}

/// The same with a drafter that reads the target's features, in the pass of every snapshot.
#[test]
fn networks_that_draft_go_on_from_snapshots() {
    let path = reference("tiny/qwen3_5");
    let drafters = tempfile::tempdir().unwrap();
    for (from, to) in [("dflash-qwen3_5", "dflash"), ("weaver-rotary", "weaver")] {
        let to = drafters.path().join(to);
        std::fs::create_dir(&to).unwrap();
        for file in ["config.json", "model.safetensors"] {
            let from = reference("drafters").join(from).join(file);
            std::fs::copy(from, to.join(file)).unwrap();
        }
    }
    let plain = load(&path, DraftKind::None, None);
    let expected = chat(&start(&plain, ROOM, None), &plain, true);
    for kind in [DraftKind::Dflash, DraftKind::Weaver] {
        let loaded = load(&path, kind, Some(drafters.path().to_path_buf()));
        assert_eq!(chat(&start(&loaded, ROOM, None), &loaded, true), expected);
    }
}

/// ggml-org/llama.cpp#21831: after a reuse that failed, the second turn knew nothing of the
/// first. vllm-project/vllm#53912, #43559: states written over rejected drafts were kept and
/// shared. noonghunna/club-3090#710: so were those of chained tool calls, until a restart.
/// raullenchai/Rapid-MLX#2586: a restored cache could not go back over rejected drafts.
#[test]
fn what_came_before_changes_no_answer() {
    for loaded in ways() {
        let cached = start(&loaded, ROOM, None);
        let first = text(1, 60);
        let mut prompts = Vec::new();
        for round in 0..4 {
            // Another text with the same beginning, which no snapshot serves in full.
            let mut other = first[..50].to_vec();
            other.extend(text(5 + round, 9));
            // And the first one with more after it, as a chain of calls has it.
            let mut longer = first.clone();
            (0..=round).for_each(|n| longer.extend(text(20 + n, 8)));
            prompts.extend([first.clone(), other, longer]);
        }
        for (n, prompt) in prompts.iter().enumerate() {
            let asked = request(prompt, 25, n as u64);
            let expected = cold(&loaded, asked.clone());
            let said = ask(&cached, asked);
            assert_eq!(said.tokens, expected.tokens, "prompt {n}");
            assert!(n < 2 || said.cached > 0, "prompt {n}");
        }
    }
}

/// ggml-org/llama.cpp#20428: prompts of fewer than 68 tokens left no checkpoint.
/// waybarrios/vllm-mlx#145, ml-explore/mlx-lm#1081: a prompt of which everything is cached was a
/// crash.
#[test]
fn the_same_prompt_again_costs_one_token() {
    for loaded in ways() {
        let cached = start(&loaded, ROOM, None);
        for tokens in [1, 2, 20, 67, 600] {
            let asked = request(&text(tokens, tokens), 9, 3);
            let expected = ask(&cached, asked.clone());
            for _ in 0..2 {
                let again = ask(&cached, asked.clone());
                assert_eq!(again.cached, tokens as usize - 1);
                assert_eq!(again.tokens, expected.tokens);
            }
        }
    }
}

/// ggml-org/llama.cpp#18497: a block put into the midst of a text cannot be reused behind it.
#[test]
fn behind_a_block_in_the_midst_everything_is_read() {
    let [loaded, ..] = ways();
    let cached = start(&loaded, ROOM, None);
    let (start_of, end) = (text(1, 40), text(2, 40));
    let with = |block: &[u32]| [&start_of[..], block, &end].concat();
    let blocks = [vec![], text(9, 12), text(11, 20), text(13, 5)];
    let hits: Vec<usize> = blocks
        .iter()
        .map(|block| {
            let asked = request(&with(block), 9, 1);
            let said = ask(&cached, asked.clone());
            assert_eq!(said.tokens, cold(&loaded, asked).tokens);
            said.cached
        })
        .collect();
    // The second parts from the first where no snapshot is; it leaves one there.
    assert_eq!(hits, [0, 0, 40, 40]);
}

/// jjang-ai/vmlx#198: what the cache gave out was written to later; beyond 2048 tokens recurrent
/// states were dropped. ggml-org/llama.cpp#21099: all checkpoints of a long prompt were invalid.
#[test]
fn snapshots_of_long_prompts_stay_as_they_are() {
    let loaded = load(&target(), DraftKind::Lookup, None);
    let cached = start(&loaded, ROOM, None);
    let long = text(3, 2600);
    let longer = |n: u32| {
        let mut prompt = long.clone();
        prompt.extend(text(40 + n, 6));
        request(&prompt, 12, u64::from(n))
    };
    let expected: Vec<Said> = (0..3).map(|n| cold(&loaded, longer(n))).collect();
    let first = ask(&cached, request(&long, 4, 0));
    assert_eq!(first.cached, 0);
    // Twice, so that the second finds what the first left of what it was given; together, so that
    // they write at the same time.
    for _ in 0..2 {
        let asked: Vec<_> = (0..3).map(|n| submit(&cached, longer(n))).collect();
        for ((_ticket, heard), expected) in asked.iter().zip(&expected) {
            let said = said(heard);
            assert_eq!(said.tokens, expected.tokens);
            assert!(said.cached >= 2599, "{}", said.cached);
        }
    }
    // Cut anywhere, the next stride below serves.
    for (tokens, stride) in [(2100, 2048), (1500, 1024), (700, 512)] {
        let mut prompt = long[..tokens].to_vec();
        prompt.push(299);
        let asked = request(&prompt, 6, 1);
        let said = ask(&cached, asked.clone());
        assert_eq!(said.tokens, cold(&loaded, asked).tokens);
        assert_eq!(said.cached, stride);
    }
}

/// youssofal/MTPLX#86: a prompt that missed the cache wedged all requests. jundot/omlx#3702: one
/// that joined late took the speculative path for its prompt.
#[test]
fn misses_that_join_late_are_answered_beside_hits() {
    for loaded in ways() {
        let cached = start(&loaded, ROOM, None);
        ask(&cached, request(&text(1, 100), 5, 0));
        let mut requests: Vec<Request> =
            (0..4).map(|n| request(&text(1, 101 + n), 60, 1)).collect();
        requests.push(request(&text(8, 900), 5, 2));
        requests.push(request(&text(9, 30), 60, 3));
        let asked: Vec<_> = requests
            .iter()
            .map(|r| submit(&cached, r.clone()))
            .collect();
        for ((_ticket, heard), request) in asked.iter().zip(&requests) {
            let expected = cold(&loaded, request.clone());
            assert_eq!(said(heard).tokens, expected.tokens);
        }
    }
}

/// ml-explore/mlx-lm#1390, #1392, #1395, #1409: prompt caches grew beyond their limits.
/// ollama/ollama#16698: and slowed everything down.
#[test]
fn a_small_cache_serves_what_fits() {
    let [loaded, ..] = ways();
    let off = chat(&start(&loaded, CacheSize::Off, None), &loaded, true);
    for bytes in [0, 1 << 10, 1 << 18, 1 << 20] {
        let on = chat(
            &start(&loaded, CacheSize::Bytes(bytes), None),
            &loaded,
            true,
        );
        for (turn, cold) in on.iter().zip(&off) {
            assert_eq!(turn.said.tokens, cold.said.tokens);
        }
        let hits = on.iter().filter(|turn| turn.said.cached > 0).count();
        assert_eq!(hits > 0, bytes >= 1 << 18, "{hits} with {bytes} bytes");
    }
}

#[test]
fn a_folder_serves_after_a_restart_and_changes_no_answer() {
    for loaded in ways() {
        let folder = tempfile::tempdir().unwrap();
        let before = chat(&start(&loaded, ROOM, Some(folder.path())), &loaded, true);
        for n in [29, 12, 29] {
            let Turn { prompt, said, .. } = &before[n];
            let asked = request(prompt, 7, n as u64);
            let again = ask(&start(&loaded, ROOM, Some(folder.path())), asked);
            assert_eq!(again.tokens, said.tokens);
            assert!(again.cached * 2 > prompt.len(), "{} cached", again.cached);
        }
        let plain = load(&target(), DraftKind::None, None);
        let prompt = text(4, 300);
        let asked = request(&prompt, 20, 5);
        let said = ask(&start(&loaded, ROOM, Some(folder.path())), asked.clone());
        assert_eq!(said.cached, 0);
        // Files do not depend on what drafts.
        let again = ask(&start(&plain, ROOM, Some(folder.path())), asked);
        assert_eq!(again.cached, 299);
        assert_eq!(again.tokens, said.tokens);
    }
}

#[test]
fn keys_and_values_in_eight_bits_are_cached_and_never_taken_for_others() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = text(4, 300);
    for kv in [KvType::Int8, KvType::F16] {
        let loaded = load_kept(&target(), DraftKind::Lookup, None, kv);
        let asked = request(&prompt, 20, 5);
        let expected = cold(&loaded, asked.clone());
        for cached in [0, 299] {
            let said = ask(&start(&loaded, ROOM, Some(folder.path())), asked.clone());
            assert_eq!(said.cached, cached, "{kv:?}");
            assert_eq!(said.tokens, expected.tokens, "{kv:?}");
        }
    }
}
