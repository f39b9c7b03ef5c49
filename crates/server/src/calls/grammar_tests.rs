//! A model that follows the grammar writes calls that the parser reads.

use super::grammar::rules;
use super::{CallFormat, CallParser, Piece};
use crate::tools::{Tool, ToolChoice};
use kozue_engine::grammar::{Grammar, Thought, Vocabulary};
use kozue_engine::tokenizer::{Control, Tokenizer};
use serde_json::{Value as Json, json};
use std::sync::{Arc, LazyLock};

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/reference/tiny/qwen3_5/tokenizer.json"
    );
    let json = std::fs::read_to_string(path).unwrap();
    let source = kozue_checkpoint::description::TokenizerSource::Json(json);
    Tokenizer::new(&source).unwrap()
});

static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
    let end = TOKENIZER.id("<|im_end|>").unwrap();
    Vocabulary::new(&TOKENIZER, &[end], TOKENIZER.vocab_size()).unwrap()
});

fn tools(strict: bool) -> Vec<Tool> {
    let tool = |name: &str, parameters: Json| Tool {
        name: name.to_string(),
        description: None,
        parameters,
        strict,
    };
    vec![
        tool(
            "weather",
            json!({"type": "object", "additionalProperties": false, "required": ["city"],
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"},
                "unit": {"enum": ["c", "f"]}}}),
        ),
        tool("time", json!({"type": "object", "properties": {}})),
    ]
}

/// Whether an answer is allowed as a whole.
fn allowed(rules: &str, text: &str) -> bool {
    let mut grammar = Grammar::lark(&VOCABULARY, rules, Thought::None).unwrap();
    let tokens = TOKENIZER.encode(text, Control::Text).unwrap();
    let end = TOKENIZER.id("<|im_end|>").unwrap();
    tokens.iter().all(|token| grammar.accept(*token).unwrap()) && grammar.allows(end).unwrap()
}

fn calls(format: CallFormat, text: &str) -> Vec<(String, String)> {
    let mut parser = CallParser::new(format, &tools(true));
    let mut pieces = Vec::new();
    parser.push(text, &mut pieces);
    parser.finish(false, &mut pieces);
    let mut calls: Vec<(String, String)> = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Call { name } => calls.push((name, String::new())),
            Piece::Arguments(text) => calls.last_mut().unwrap().1.push_str(&text),
            _ => {}
        }
    }
    calls
}

const JSON: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Kyoto\"}}\n</tool_call>";
const XML: &str = "<tool_call>\n<function=weather>\n<parameter=city>\nKyoto\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=unit>\nf\n</parameter>\n</function>\n</tool_call>";
const BARE: &str = "{\"name\": \"weather\", \"parameters\": {\"city\": \"Kyoto\"}}";
const LIST: &str = "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Kyoto\"}}]";
const NAMED: &str = "[TOOL_CALLS]weather[ARGS]{\"city\": \"Kyoto\"}";

#[test]
fn a_call_that_must_come_comes() {
    for (format, text, wrong) in [
        (CallFormat::Json, JSON, "Kyoto"),
        (CallFormat::Xml, XML, "Kyoto"),
        (CallFormat::Bare, BARE, "Kyoto"),
        (CallFormat::MistralList, LIST, "Kyoto"),
        (CallFormat::MistralArguments, NAMED, "Kyoto"),
    ] {
        let rules = rules(format, &tools(true), &ToolChoice::Required, false, None).unwrap();
        assert!(allowed(&rules, text), "{format:?}");
        assert!(!allowed(&rules, wrong), "{format:?}");
        assert!(!allowed(&rules, ""), "{format:?}");
        assert!(!allowed(&rules, &text.replace("weather", "whether")));
        assert!(!allowed(&rules, &text.replace("city", "town")));
        let called = calls(format, text);
        assert_eq!(called[0].0, "weather");
        let arguments: Json = serde_json::from_str(&called[0].1).unwrap();
        assert_eq!(arguments["city"], "Kyoto");
    }
}

#[test]
fn xml_values_have_their_types() {
    let rules = rules(
        CallFormat::Xml,
        &tools(true),
        &ToolChoice::Required,
        false,
        None,
    )
    .unwrap();
    for (from, to, fine) in [
        ("\n3\n", "\n-12\n", true),
        ("\n3\n", "\nsoon\n", false),
        ("\nf\n", "\nk\n", false),
        ("Kyoto", "a </b> \n\n c", true),
        ("<parameter=days>\n3\n</parameter>\n", "", true),
        ("<parameter=city>\nKyoto\n</parameter>\n", "", false),
    ] {
        assert_eq!(allowed(&rules, &XML.replace(from, to)), fine, "{to:?}");
    }
}

#[test]
fn how_many_calls() {
    let twice = format!("{JSON}\n{JSON}");
    for (choice, single, fine) in [
        (ToolChoice::Required, false, true),
        (ToolChoice::Required, true, false),
        (ToolChoice::Function("weather".into()), false, false),
        (ToolChoice::Auto, false, true),
        (ToolChoice::Auto, true, false),
    ] {
        let rules = rules(CallFormat::Json, &tools(true), &choice, single, None).unwrap();
        assert!(allowed(&rules, JSON), "{choice:?}");
        assert_eq!(allowed(&rules, &twice), fine, "{choice:?} {single}");
    }
    let rules = rules(
        CallFormat::Json,
        &tools(true),
        &ToolChoice::Function("time".into()),
        false,
        None,
    );
    assert!(!allowed(&rules.unwrap(), JSON));
}

#[test]
fn text_is_free_where_calls_are() {
    for (format, text) in [
        (CallFormat::Json, JSON),
        (CallFormat::Xml, XML),
        (CallFormat::Bare, BARE),
        (CallFormat::MistralList, LIST),
        (CallFormat::MistralArguments, NAMED),
    ] {
        let rules = rules(format, &tools(true), &ToolChoice::Auto, false, None).unwrap();
        assert!(allowed(&rules, "Just text <tool."), "{format:?}");
        assert!(allowed(&rules, text), "{format:?}");
        if format != CallFormat::Bare {
            assert!(allowed(&rules, &format!("I look.\n\n{text}")), "{format:?}");
        }
        assert!(
            !allowed(&rules, &text.replace("city", "town")),
            "{format:?}"
        );
    }
}

#[test]
fn json_or_calls() {
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    for (format, text) in [
        (CallFormat::Json, JSON),
        (CallFormat::Xml, XML),
        (CallFormat::Bare, BARE),
        (CallFormat::MistralList, LIST),
        (CallFormat::MistralArguments, NAMED),
    ] {
        let auto = &ToolChoice::Auto;
        let rules = rules(format, &tools(false), auto, false, Some(&schema)).unwrap();
        assert!(allowed(&rules, text), "{format:?}");
        assert!(allowed(&rules, "{\"a\": 1}"), "{format:?}");
        assert!(!allowed(&rules, "text"), "{format:?}");
        assert!(!allowed(&rules, "{\"a\": true}"), "{format:?}");
    }
}

#[test]
fn rules_only_where_they_are_needed() {
    let rules = |strict, choice| rules(CallFormat::Json, &tools(strict), &choice, false, None);
    assert!(rules(false, ToolChoice::Auto).is_none());
    assert!(rules(true, ToolChoice::None).is_none());
    assert!(rules(true, ToolChoice::Auto).is_some());
}

#[test]
fn a_forced_call_follows_its_schema_without_strict_too() {
    for (format, text) in [
        (CallFormat::Json, JSON),
        (CallFormat::Xml, XML),
        (CallFormat::Bare, BARE),
        (CallFormat::MistralList, LIST),
        (CallFormat::MistralArguments, NAMED),
    ] {
        for choice in [ToolChoice::Required, ToolChoice::Function("weather".into())] {
            let rules = rules(format, &tools(false), &choice, false, None).unwrap();
            assert!(allowed(&rules, text), "{format:?}");
            assert!(
                !allowed(&rules, &text.replace("city", "town")),
                "{format:?}"
            );
        }
    }
    let wrong = XML.replace("\nf\n", "\nk\n");
    let rules = |tools: &[Tool]| rules(CallFormat::Xml, tools, &ToolChoice::Required, false, None);
    assert!(!allowed(&rules(&tools(false)).unwrap(), &wrong));
    // Words of a schema that no grammar knows are passed over where nothing strict was asked for.
    let mut tools = tools(false);
    for strict in [false, true] {
        tools[0].strict = strict;
        tools[0].parameters["properties"]["days"]["multipleOf"] = json!(1);
        tools[0].parameters["properties"]["days"]["not"] = json!({"const": 7});
        let made = Grammar::lark(&VOCABULARY, &rules(&tools).unwrap(), Thought::None);
        assert_eq!(made.is_ok(), !strict);
    }
}

#[test]
fn forced_calls_come_to_an_end() {
    for (format, text, between) in [
        (CallFormat::Json, JSON, "\n"),
        (CallFormat::Xml, XML, "\n"),
        (CallFormat::Bare, BARE, "; "),
        (CallFormat::MistralArguments, NAMED, ""),
    ] {
        let rules = rules(format, &tools(false), &ToolChoice::Required, false, None).unwrap();
        assert!(allowed(&rules, &[text; 8].join(between)), "{format:?}");
        assert!(!allowed(&rules, &[text; 9].join(between)), "{format:?}");
    }
    let rules = rules(
        CallFormat::MistralList,
        &tools(false),
        &ToolChoice::Required,
        false,
        None,
    );
    let rules = rules.unwrap();
    let one = &LIST["[TOOL_CALLS] [".len()..LIST.len() - 1];
    let list = |count: usize| format!("[TOOL_CALLS][{}]", vec![one; count].join(", "));
    assert!(allowed(&rules, &list(8)));
    assert!(!allowed(&rules, &list(9)));
}
