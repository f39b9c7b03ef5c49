use super::*;
use proptest::prelude::*;
use serde_json::{Value as Json, json};

fn tools() -> Vec<Tool> {
    let tool = |name: &str, parameters: Json| Tool {
        name: name.to_string(),
        description: None,
        parameters,
        strict: false,
    };
    vec![
        tool(
            "weather",
            json!({"type": "object", "properties": {
                "city": {"type": "string"}, "days": {"type": "integer"},
                "units": {"enum": ["c", "f"]}, "detail": {"type": ["object", "null"]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "fast": {"type": "boolean"},
            }}),
        ),
        tool("time", json!({"type": "object", "properties": {}})),
    ]
}

/// Neighbouring texts joined, so that only what matters is left.
fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (out.last_mut(), piece) {
            (Some(Piece::Text(text)), Piece::Text(more)) => text.push_str(&more),
            (Some(Piece::Arguments(text)), Piece::Arguments(more)) => text.push_str(&more),
            (_, piece) => out.push(piece),
        }
    }
    out
}

fn parse(format: CallFormat, pieces: &[&str]) -> Vec<Piece> {
    ended(format, pieces, false)
}

fn ended(format: CallFormat, pieces: &[&str], cut: bool) -> Vec<Piece> {
    let mut parser = CallParser::new(format, &tools());
    let mut out = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut out);
    }
    parser.finish(cut, &mut out);
    joined(out)
}

/// Parses a text whole, by characters and cut at every place: always the same. Calls leaked as
/// markup or were made up where marks were cut: waybarrios/vllm-mlx#107, #55, 1CatAI/1Cat-vLLM#552.
fn every_way(format: CallFormat, text: &str) -> Vec<Piece> {
    let whole = parse(format, &[text]);
    let letters: Vec<String> = text.chars().map(String::from).collect();
    let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
    assert_eq!(parse(format, &letters), whole, "{text:?} by characters");
    for (cut, _) in text.char_indices() {
        let (first, second) = text.split_at(cut);
        assert_eq!(
            parse(format, &[first, second]),
            whole,
            "{first:?} {second:?}"
        );
    }
    whole
}

fn say(text: &str) -> Piece {
    Piece::Text(text.to_string())
}

fn call(name: &str, arguments: &str) -> [Piece; 3] {
    [
        Piece::Call {
            name: name.to_string(),
        },
        Piece::Arguments(arguments.to_string()),
        Piece::CallEnd,
    ]
}

#[test]
fn json_calls() {
    let json = |text: &str| every_way(CallFormat::Json, text);
    assert_eq!(
        json(
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"K}y\\\"oto\"}}\n</tool_call>"
        ),
        call("weather", "{\"city\": \"K}y\\\"oto\"}")
    );
    // Text before, between and after; two calls; the closing and opening marks touch.
    assert_eq!(
        json(
            "I look.\n\n<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call><tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": [1, {\"a\": 2}]}}\n</tool_call>\n\nDone. "
        ),
        [
            &[say("I look.")][..],
            &call("time", "{}"),
            &call("weather", "{\"days\": [1, {\"a\": 2}]}"),
            &[say("Done. ")]
        ]
        .concat()
    );
    // Arguments before the name, as a string, as null, missing.
    for (text, arguments) in [
        (
            "{\"arguments\": {\"city\": \"a\"}, \"name\": \"time\"}",
            "{\"city\": \"a\"}",
        ),
        (
            "{\"name\": \"time\", \"arguments\": \"{\\\"a\\\": 1}\"}",
            "{\"a\": 1}",
        ),
        ("{\"name\": \"time\", \"arguments\": null}", "{}"),
        ("{\"name\": \"time\"}", "{}"),
        (
            "{\"name\": \"time\", \"parameters\": {\"a\":1}, \"id\": 3}",
            "{\"a\":1}",
        ),
    ] {
        let text = format!("<tool_call>{text}</tool_call>");
        assert_eq!(json(&text), call("time", arguments), "{text}");
    }
}

#[test]
fn json_calls_without_marks() {
    let json = |text: &str| every_way(CallFormat::Json, text);
    assert_eq!(
        json("\n{\"name\": \"weather\", \"arguments\": {\"city\": \"a\"}}\n"),
        call("weather", "{\"city\": \"a\"}")
    );
    assert_eq!(
        json("{\"name\": \"time\", \"arguments\": {}}</tool_call> ok"),
        [&call("time", "{}")[..], &[say("ok")]].concat()
    );
}

#[test]
fn what_is_no_call_stays_text() {
    for text in [
        "{\"name\": \"time\"}",
        " {\"name\": \"unknown\", \"arguments\": {}}",
        "{\"a\": [1]} <tool_call>",
        "{\"name\": \"ti",
        "Look: {\"name\": \"time\", \"arguments\": {}}",
        "plain < text <tool",
        "a <tool_call>b</tool_call> c",
        "<tool_call>{\"nam\": 1}</tool_call>",
        "<tool_call>{1: 2}</tool_call> <tool_call>",
        "<tool_call>{\"name\": 3, \"arguments\": {}}</tool_call>",
        "  \n spaces  ",
        "x\n<tool_call>{\"name\": \"ti",
    ] {
        assert_eq!(every_way(CallFormat::Json, text), [say(text)], "{text:?}");
    }
    for text in [
        "<function",
        "a <function=b",
        "x <tool_call>\n<function=",
        "a < b",
    ] {
        assert_eq!(every_way(CallFormat::Xml, text), [say(text)], "{text:?}");
    }
    for text in [
        "{\"a\": 1}",
        " {\"name\": \"unknown\", \"parameters\": {}}",
        "hello {\"name\": \"time\", \"parameters\": {}}",
        "{",
        " ",
    ] {
        assert_eq!(every_way(CallFormat::Bare, text), [say(text)], "{text:?}");
    }
}

#[test]
fn a_good_call_after_a_bad_one() {
    assert_eq!(
        every_way(
            CallFormat::Json,
            "<tool_call>oops\n<tool_call>{\"name\": \"time\"}</tool_call>"
        ),
        [&[say("<tool_call>oops")][..], &call("time", "{}")].concat()
    );
}

#[test]
fn a_cut_call_has_no_end() {
    let begun = |name: &str, arguments: &str| call(name, arguments)[..2].to_vec();
    assert_eq!(
        every_way(
            CallFormat::Json,
            "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Ky"
        ),
        begun("weather", "{\"city\": \"Ky")
    );
    assert_eq!(
        every_way(
            CallFormat::Xml,
            "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nKy"
        ),
        begun("weather", "{\"days\":3")
    );
}

/// Wherever an answer is cut, no markup is handed out as text, the text before stays, and a call
/// is whole only where its arguments are.
#[test]
fn an_answer_cut_anywhere_leaks_nothing() {
    let json = "I look.\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"a\", \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";
    let xml = "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\na\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>";
    let marks = json.replace("I look.\n\n", "");
    let naked = "{\"name\": \"weather\", \"arguments\": {\"city\": \"a\", \"days\": 2}}";
    let bare = "{\"name\": \"weather\", \"parameters\": {\"city\": \"a\", \"days\": 2}}; {\"name\": \"time\", \"parameters\": {}}";
    let list = "I look.\n\n[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"a\", \"days\": 2}}, {\"name\": \"time\", \"arguments\": {}}]";
    let named = "I look.\n\n[TOOL_CALLS]weather[CALL_ID]1[ARGS]{\"city\": \"a\", \"days\": 2}[TOOL_CALLS]time[ARGS]{}";
    let weather = serde_json::json!({"city": "a", "days": 2});
    for (format, text, said) in [
        (CallFormat::Json, json, "I look."),
        (CallFormat::Json, &marks, ""),
        (CallFormat::Json, naked, ""),
        (CallFormat::Xml, xml, "I look."),
        (CallFormat::Bare, bare, ""),
        (CallFormat::MistralList, list, "I look."),
        (CallFormat::MistralArguments, named, "I look."),
    ] {
        for cut in 0..=text.len() {
            let mut open = false;
            let mut calls: Vec<String> = Vec::new();
            for piece in ended(format, &[&text[..cut]], true) {
                match piece {
                    Piece::Text(shown) => assert!(said.starts_with(shown.trim_end()), "{shown:?}"),
                    Piece::Call { .. } => {
                        open = true;
                        calls.push(String::new());
                    }
                    Piece::Arguments(more) => calls.last_mut().unwrap().push_str(&more),
                    Piece::CallEnd => open = false,
                    Piece::Reasoning(_) => unreachable!(),
                }
            }
            let whole = calls.len() - usize::from(open);
            for (arguments, expected) in calls[..whole]
                .iter()
                .zip([&weather, &serde_json::json!({})])
            {
                let arguments: serde_json::Value = serde_json::from_str(arguments).unwrap();
                assert_eq!(arguments, *expected, "{format:?} {:?}", &text[..cut]);
            }
            if cut == text.len() {
                assert_eq!(whole, if text == naked { 1 } else { 2 });
            }
        }
    }
    // What only begins like JSON is an answer that was cut.
    for (format, text) in [
        (CallFormat::Json, "{\"names\": [\"a\", "),
        (CallFormat::Json, "{\"name\": \"Ann\", \"age\": 3"),
        (CallFormat::Bare, "{\"name\": \"Ann\", \"age\": 3"),
        (CallFormat::Xml, "a <table> b"),
    ] {
        assert_eq!(ended(format, &[text], true), [say(text)]);
    }
}

/// Arguments are JSON for clients, whatever the model writes: QwenLM/Qwen3.8#125,
/// continuedev/continue#11453.
#[test]
fn xml_calls() {
    let xml = |text: &str| every_way(CallFormat::Xml, text);
    let parameters = "<parameter=city>\n\n\"Ky\"oto</b>\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=units>\nc\n</parameter>\n<parameter=detail>\n{\"a\": [1]}\n</parameter>\n<parameter=note>\n5\n</parameter>\n<parameter=fast>\nTrue\n</parameter>\n<parameter=other>\n7\n</parameter>\n";
    let arguments = r#"{"city":"\n\"Ky\"oto</b>\n","days":3,"units":"c","detail":{"a":[1]},"note":"5","fast":true,"other":"7"}"#;
    assert_eq!(
        xml(&format!(
            "Hm.\n<tool_call>\n<function=weather>\n{parameters}</function>\n</tool_call>"
        )),
        [&[say("Hm.")][..], &call("weather", arguments)].concat()
    );
    // Without the outer marks, without parameters, two in one mark, JSON inside.
    for text in [
        "<function=time>\n</function>",
        "<tool_call>\n<function=time></tool_call>\n",
        "<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>",
    ] {
        assert_eq!(xml(text), call("time", "{}"), "{text:?}");
    }
    assert_eq!(
        xml(
            "<tool_call><function=time></function><function=weather><parameter=days>x</parameter></function></tool_call>"
        ),
        [call("time", "{}"), call("weather", "{\"days\":\"x\"}")].concat()
    );
}

#[test]
fn bare_calls() {
    let bare = |text: &str| every_way(CallFormat::Bare, text);
    assert_eq!(
        bare(" {\"name\": \"weather\", \"parameters\": {\"city\": \"a\"}}"),
        call("weather", "{\"city\": \"a\"}")
    );
    assert_eq!(
        bare(
            "{\"name\": \"time\", \"parameters\": {}}; {\"name\": \"time\", \"parameters\": {\"a\": 1}}\n"
        ),
        [call("time", "{}"), call("time", "{\"a\": 1}")].concat()
    );
}

#[test]
fn mistral_calls() {
    for format in [CallFormat::MistralList, CallFormat::MistralArguments] {
        let mistral = |text: &str| every_way(format, text);
        for text in [
            "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"]\"}, \"id\": \"abcdefghi\"}, {\"name\": \"time\", \"arguments\": {}}]",
            "[TOOL_CALLS][{\"name\":\"weather\",\"arguments\":{\"city\": \"]\"}},{\"name\":\"time\"}] \n",
            "[TOOL_CALLS]weather[ARGS]{\"city\": \"]\"}[TOOL_CALLS]time[ARGS]{}",
            "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"]\"} [TOOL_CALLS] time[CALL_ID]1[ARGS] {}\n",
        ] {
            let both = [call("weather", "{\"city\": \"]\"}"), call("time", "{}")];
            assert_eq!(mistral(text), both.concat(), "{text}");
        }
        // Text before and after; a call without arguments; a list that breaks off.
        assert_eq!(
            mistral("I look.\n[TOOL_CALLS]time[ARGS]{}\n\nDone. "),
            [&[say("I look.")][..], &call("time", "{}"), &[say("Done. ")]].concat()
        );
        assert_eq!(
            mistral("[TOOL_CALLS]time[ARGS] now"),
            [&call("time", "{}")[..], &[say("now")]].concat()
        );
        assert_eq!(
            mistral("[TOOL_CALLS][{\"name\": \"time\"}; oops"),
            [&call("time", "{}")[..], &[say("; oops")]].concat()
        );
        for text in [
            "[TOOL_CALLS",
            "a [TOOL_CALLS]",
            "[TOOL_CALLS] []",
            "[TOOL_CALLS] [1]",
            " [TOOL_CALLS] [{\"nam\": 1}] x",
            "x [TOOL_CALLS] [{\"name\": \"ti",
            "[TOOL_CALLS]no call",
            "[TOOL_CALLS]time[ARG]{}",
            "[TOOL_CALLS]time[CALL_ID]a b[ARGS]{}",
            "[TOOL_CALLS][ARGS]{}",
            "[TOOL_CALLS]time[CALL_ID]a[AR",
            "  \n spaces  ",
        ] {
            assert_eq!(mistral(text), [say(text)], "{text:?}");
        }
    }
}

#[test]
fn templates_tell_the_format() {
    for (template, format) in [
        (
            "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [",
            Some(CallFormat::MistralList),
        ),
        (
            "{% if tools %}{\"parameters\"}{% endif %}[TOOL_CALLS]{{ name }}[ARGS]",
            Some(CallFormat::MistralArguments),
        ),
        (
            "{% if tools %}<tool_call>\n<function=example>{% endif %}",
            Some(CallFormat::Xml),
        ),
        (
            "{% for t in tools %}<tool_call>{% endfor %}",
            Some(CallFormat::Json),
        ),
        (
            "{% for t in tools %}{\"name\": n, \"parameters\": p}{% endfor %}",
            Some(CallFormat::Bare),
        ),
        ("{{ messages }}", None),
        ("<tool_call>", None),
    ] {
        assert_eq!(CallFormat::of_template(template), format, "{template}");
    }
}

proptest! {
    /// Pieces of calls in any order, cut anywhere.
    #[test]
    fn cutting_changes_nothing(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "<function=time>", "</function>", "<parameter=city>",
            "</parameter>", "\n", " ", "{\"name\": \"time\", \"arguments\": ", "{\"a\": \"}\"}", "}", "é",
            "text", "<", "\"", "{", ";", ":", "\\", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", ",",
        ]), 0..14),
        cuts in prop::collection::vec(0usize..400, 0..6),
    ) {
        let text = parts.concat();
        let mut places: Vec<usize> = cuts
            .into_iter()
            .map(|cut| text.floor_char_boundary(cut))
            .chain([0, text.len()])
            .collect();
        places.sort_unstable();
        let pieces: Vec<&str> = places.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        for format in [
            CallFormat::Json,
            CallFormat::Xml,
            CallFormat::Bare,
            CallFormat::MistralList,
        ] {
            prop_assert_eq!(parse(format, &pieces), parse(format, &[&text]), "{:?} {:?}", format, &text);
        }
    }
}
