//! Which tokens a grammar allows, on the vocabulary of a tiny checkpoint.

mod support;

use kozue_engine::Error;
use kozue_engine::grammar::{Grammar, Thought, Vocabulary};
use kozue_engine::tokenizer::{Control, Tokenizer};
use serde_json::{Value as Json, json};
use std::sync::{Arc, LazyLock};
use support::tokenizer;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(tokenizer);

/// `<|im_end|>` and `<|endoftext|>`; the model has more logits than the tokenizer has tokens.
static ENDS: LazyLock<[u32; 2]> =
    LazyLock::new(|| ["<|im_end|>", "<|endoftext|>"].map(|text| TOKENIZER.id(text).unwrap()));

static VOCABULARY: LazyLock<Arc<Vocabulary>> =
    LazyLock::new(|| Vocabulary::new(&TOKENIZER, &*ENDS, 352).unwrap());

fn id(text: &str) -> u32 {
    TOKENIZER.id(text).unwrap()
}

/// Follows a text as far as the grammar goes; the rest is what it refused.
fn refused<'a>(grammar: &mut Grammar, text: &'a str) -> &'a str {
    let tokens = TOKENIZER.encode(text, Control::Text).unwrap();
    let mut done = 0;
    for token in tokens {
        if !grammar.accept(token).unwrap() {
            return &text[done..];
        }
        done += TOKENIZER.token_bytes(token).unwrap().len();
    }
    ""
}

fn may_end(grammar: &mut Grammar) -> bool {
    let [a, b] = ENDS.map(|end| grammar.allows(end).unwrap());
    assert_eq!(a, b, "all end tokens alike");
    a
}

fn schema(schema: Json) -> Grammar {
    Grammar::json_schema(&VOCABULARY, &schema, Thought::None).unwrap()
}

fn person() -> Grammar {
    schema(json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age"],
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    }))
}

#[test]
fn json_follows_its_schema() {
    for text in [
        r#"{"name": "A \" é", "age": 12}"#,
        "{\"name\":\"\",\"age\":-1}",
        "{\n    \"name\": \"a\",\n    \"age\": 3\n}",
    ] {
        let mut grammar = person();
        assert!(!may_end(&mut grammar));
        assert_eq!(refused(&mut grammar, text), "", "{text}");
        assert!(may_end(&mut grammar), "{text}");
    }
    for (text, rest) in [
        ("[1]", "[1]"),
        ("{\"age\": 1}", "age\": 1}"),
        ("{\"name\": 3}", "3}"),
        ("{\"name\": \"a\", \"age\": 1.5}", ".5}"),
        ("{\"name\": \"a\"}", "}"),
    ] {
        let mut grammar = person();
        let got = refused(&mut grammar, text);
        // A token may straddle the place.
        assert!(
            !got.is_empty() && rest.len() >= got.len().saturating_sub(3),
            "{text}: {got}"
        );
        assert!(!may_end(&mut grammar), "{text}");
    }
}

#[test]
fn nothing_but_an_end_follows_a_whole_text() {
    let mut grammar = schema(json!({"const": "a"}));
    assert_eq!(refused(&mut grammar, "\"a\""), "");
    assert!(grammar.finished());
    let mask = grammar.mask().unwrap();
    let allowed: u32 = mask.iter().map(|word| word.count_ones()).sum();
    assert_eq!(allowed, 2);
    assert!(may_end(&mut grammar));
    assert!(grammar.accept(ENDS[1]).unwrap());
}

/// vllm-project/vllm#55313: 250,000 spaces for an answer.
#[test]
fn white_space_is_bounded() {
    let mut grammar = person();
    assert_eq!(refused(&mut grammar, "{\n"), "");
    let spaces = " ".repeat(100);
    let rest = refused(&mut grammar, &spaces);
    assert!((60..100).contains(&rest.len()), "{}", rest.len());
}

#[test]
fn ids_without_a_token_are_never_allowed() {
    let mut grammar = Grammar::regex(&VOCABULARY, "(.|\n)*", Thought::None).unwrap();
    for token in TOKENIZER.vocab_size() as u32..352 + 64 {
        assert!(!grammar.accept(token).unwrap(), "{token}");
    }
    assert!(!grammar.allows(id("<|im_start|>")).unwrap());
    assert!(grammar.allows(id("a")).unwrap());
}

#[test]
fn a_thought_comes_first() {
    let text = "{} not json \n";
    let object = |thought| Grammar::json_object(&VOCABULARY, thought).unwrap();
    let mut open = object(Thought::Open);
    assert_eq!(refused(&mut open, text), "");
    assert!(!may_end(&mut open));
    assert!(open.allows(id("<|im_start|>")).unwrap());
    assert!(open.accept(id("</think>")).unwrap());
    assert_eq!(refused(&mut open, "\n\n{\"a\": [1]}"), "");
    assert!(may_end(&mut open));

    let mut possible = object(Thought::Possible);
    let mut without = possible.clone();
    assert!(possible.accept(id("<think>")).unwrap());
    assert_eq!(refused(&mut possible, text), "");
    assert!(possible.accept(id("</think>")).unwrap());
    assert_eq!(refused(&mut possible, "x"), "x");
    assert_eq!(refused(&mut without, "{"), "");
    assert!(!without.allows(id("<think>")).unwrap());

    assert_eq!(refused(&mut object(Thought::None), "\n{}"), "\n{}");
}

#[test]
fn clones_go_their_own_ways() {
    let mut first = person();
    assert_eq!(refused(&mut first, "{\"name\": \""), "");
    let mut second = first.clone();
    let before = first.mask().unwrap().to_vec();
    assert_eq!(refused(&mut second, "x\", \"age\": 1"), "");
    assert_eq!(first.mask().unwrap(), before);
    assert_ne!(second.mask().unwrap(), before);
    assert_eq!(refused(&mut first, "y\", "), "");
    assert!(may_end(&mut second) != may_end(&mut first) || !may_end(&mut second));
    assert_eq!(refused(&mut second, "}"), "");
    assert!(may_end(&mut second) && !may_end(&mut first));
}

#[test]
fn a_refused_token_changes_nothing() {
    let mut grammar = person();
    assert_eq!(refused(&mut grammar, "{"), "");
    let before = grammar.mask().unwrap().to_vec();
    assert!(!grammar.accept(id("}")).unwrap());
    assert!(!grammar.accept(ENDS[0]).unwrap());
    assert_eq!(grammar.mask().unwrap(), before);
}

#[test]
fn paths_are_legal_as_far_as_they_go() {
    let legal = |grammar: &mut Grammar, text: &str| {
        let tokens = TOKENIZER.encode(text, Control::Recognised).unwrap();
        let legal = grammar.legal(&tokens).unwrap();
        // As accepting one by one has it.
        let mut walker = grammar.clone();
        let walked = tokens
            .iter()
            .take_while(|token| walker.accept(**token).unwrap())
            .count();
        assert_eq!(legal, walked, "{text}");
        legal == tokens.len()
    };
    for thought in [Thought::None, Thought::Possible, Thought::Open] {
        let mut grammar = Grammar::json_object(&VOCABULARY, thought).unwrap();
        for (text, fine) in [
            ("{\"a\": 1}<|im_end|>", thought != Thought::Open),
            ("x }</think>\n\n{\"a\": 1}", thought == Thought::Open),
            (
                "<think>x }</think>{}<|endoftext|>",
                thought != Thought::None,
            ),
            ("x}</think>[1]", false),
            ("{\"a\" 1}", thought == Thought::Open),
            ("", true),
        ] {
            assert_eq!(legal(&mut grammar, text), fine, "{thought:?} {text}");
        }
    }
}

#[test]
fn forced_text_is_known() {
    let mut grammar = Grammar::regex(&VOCABULARY, "abc(d|e)fé", Thought::None).unwrap();
    assert_eq!(grammar.forced_text(), "abc");
    assert_eq!(refused(&mut grammar, "ab"), "");
    assert_eq!(grammar.forced_text(), "c");
    assert_eq!(refused(&mut grammar, "c"), "");
    assert_eq!(grammar.forced_text(), "");
    assert_eq!(refused(&mut grammar, "d"), "");
    assert_eq!(grammar.forced_text(), "fé");
    let mut thinking = Grammar::regex(&VOCABULARY, "abc", Thought::Open).unwrap();
    assert_eq!(thinking.forced_text(), "");
}

#[test]
fn lark_rules_find_calls_in_text() {
    let rules = "start: (head call)* tail\nTEXT: /(.|\\n)*/\ntail: TEXT\nhead[lazy]: TEXT \"<tool_call>\"\ncall: \"\\n\" %json {\"const\": 1} \"</tool_call>\"\n";
    let mut grammar = Grammar::lark(&VOCABULARY, rules, Thought::None).unwrap();
    assert_eq!(refused(&mut grammar, "some <tool text <tool_call>\n1"), "");
    assert!(!may_end(&mut grammar));
    assert_eq!(refused(&mut grammar, "2"), "2");
    assert_eq!(refused(&mut grammar, "</tool_call> more"), "");
    assert!(may_end(&mut grammar));
}

#[test]
fn what_cannot_be_used_is_one_line() {
    let vocabulary = &*VOCABULARY;
    for result in [
        Grammar::json_schema(vocabulary, &json!(3), Thought::None),
        Grammar::json_schema(vocabulary, &json!({"type": "thing"}), Thought::None),
        Grammar::json_schema(vocabulary, &json!({"$ref": "http://x/y"}), Thought::None),
        Grammar::json_schema(vocabulary, &json!({"$ref": "#"}), Thought::Possible),
        Grammar::json_schema(
            vocabulary,
            &json!({"$ref": "file:///etc/passwd"}),
            Thought::None,
        ),
        Grammar::json_schema(
            vocabulary,
            &json!({"type": "string", "pattern": "("}),
            Thought::Open,
        ),
        Grammar::regex(vocabulary, "(", Thought::None),
        Grammar::lark(vocabulary, "start: nothing", Thought::None),
    ] {
        let Err(error) = result else {
            panic!("accepted");
        };
        assert!(matches!(error, Error::Grammar(_)));
        assert!(!error.to_string().contains('\n'), "{error}");
    }
    assert!(Vocabulary::new(&TOKENIZER, &[], 352).is_err());
    assert!(Vocabulary::new(&TOKENIZER, &[9999], 352).is_err());
}
