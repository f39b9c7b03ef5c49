//! The grammar of an answer that calls tools, in llguidance's variant of Lark.

use super::CallFormat;
use crate::tools::{Tool, ToolChoice};
use kozue_engine::grammar::bounded_space;
use serde_json::{Value as Json, json};
use std::fmt::Write;

/// Most calls of one answer that must call: a model that is held to calls might never end them.
const MOST_CALLS: usize = 8;

/// The rules for an answer, or `None` where tools ask for none: there are none, or the model may
/// call or not, none is strict and any text will do. `single` allows one call only. An answer
/// without a call is any text, or JSON of `schema`.
pub fn rules(
    format: CallFormat,
    tools: &[Tool],
    choice: &ToolChoice,
    single: bool,
    schema: Option<&Json>,
) -> Option<String> {
    let allowed: Vec<&Tool> = match choice {
        _ if tools.is_empty() => return None,
        ToolChoice::None => return None,
        ToolChoice::Auto if schema.is_none() && !tools.iter().any(|tool| tool.strict) => {
            return None;
        }
        ToolChoice::Auto | ToolChoice::Required => tools.iter().collect(),
        ToolChoice::Function(name) => tools.iter().filter(|tool| tool.name == *name).collect(),
    };
    let must = *choice != ToolChoice::Auto;
    if format == CallFormat::Bare
        && !must
        && let Some(schema) = schema
    {
        return Some(bare_or_answer(&allowed, schema));
    }
    // One function that was named is called once, as OpenAI does.
    let single = single || matches!(choice, ToolChoice::Function(_));
    let mut rules = String::new();
    let (first, next) = match format {
        CallFormat::Bare => ("call", "\"; \" call"),
        CallFormat::Json | CallFormat::Xml => ("\"<tool_call>\" call", "\"\\n<tool_call>\" call"),
        CallFormat::MistralList => ("call", "\", \" call"),
        CallFormat::MistralArguments => ("\"[TOOL_CALLS]\" call", "\"[TOOL_CALLS]\" call"),
    };
    let mut calls = match single {
        true => first.to_string(),
        false => format!("{first} ({next}){{0,{}}}", MOST_CALLS - 1),
    };
    if format == CallFormat::MistralList {
        let _ = writeln!(rules, "list: \" \"? \"[\" {calls} \"]\"");
        calls = "\"[TOOL_CALLS]\" list".to_string();
    }
    let start = match (format, must, single) {
        _ if must => format!("LEAD? {calls}"),
        _ if schema.is_some() => format!("LEAD? ({calls} | answer)"),
        (CallFormat::Bare, ..) => format!("LEAD? ({calls} | PLAIN)"),
        (CallFormat::MistralList, ..) => "tail | head list".to_string(),
        (_, _, true) => "tail | head call".to_string(),
        (_, _, false) => "(head call)* tail".to_string(),
    };
    let _ = writeln!(rules, "start: {start}");
    rules.push_str("LEAD: /\\n{1,2}/\nTEXT: /(.|\\n)*/\ntail: TEXT\n");
    rules.push_str("PLAIN: /[^{\\n](.|\\n)*/\n");
    let mark = match format {
        CallFormat::MistralList | CallFormat::MistralArguments => "[TOOL_CALLS]",
        _ => "<tool_call>",
    };
    let _ = writeln!(rules, "head[lazy]: TEXT \"{mark}\"");
    rules.push_str("value[lazy]: TEXT \"\\n</parameter>\\n\"\n");
    if let Some(schema) = schema {
        let _ = writeln!(rules, "answer: %json {}", bounded_space(schema));
    }
    let names: Vec<String> = (0..allowed.len()).map(|n| format!("call{n}")).collect();
    let _ = writeln!(rules, "call: {}", names.join(" | "));
    for (name, tool) in names.iter().zip(allowed) {
        match format {
            CallFormat::Json => json_call(name, tool, must, "arguments", true, &mut rules),
            CallFormat::Bare => json_call(name, tool, must, "parameters", false, &mut rules),
            CallFormat::MistralList => json_call(name, tool, must, "arguments", false, &mut rules),
            CallFormat::MistralArguments => named_call(name, tool, must, &mut rules),
            CallFormat::Xml => xml_call(name, tool, must, &mut rules),
        }
    }
    Some(rules)
}

/// A bare call and an answer begin alike, so that one schema has to tell them apart.
fn bare_or_answer(tools: &[&Tool], answer: &Json) -> String {
    let calls = tools.iter().map(|tool| {
        json!({
            "type": "object", "additionalProperties": false, "required": ["name", "parameters"],
            "properties": {"name": {"const": tool.name}, "parameters": schema(tool, false)},
        })
    });
    let kinds: Vec<Json> = calls.chain([answer.clone()]).collect();
    let any = bounded_space(&json!({"anyOf": kinds}));
    format!("start: LEAD? any\nLEAD: /\\n{{1,2}}/\nany: %json {any}\n")
}

/// What is neither strict nor a call that `must` come is any object.
fn schema(tool: &Tool, must: bool) -> Json {
    match tool.strict || must {
        true => tool.parameters.clone(),
        false => json!({"type": "object"}),
    }
}

/// A schema for the grammar. One that is not strict is followed as far as the parser knows it:
/// clients write words into it that say nothing of JSON's form.
fn ruled(schema: &Json, tool: &Tool) -> Json {
    let mut schema = bounded_space(schema);
    if !tool.strict
        && let Some(options) = schema.get_mut("x-guidance")
    {
        options["lenient"] = true.into();
    }
    schema
}

fn json_call(rule: &str, tool: &Tool, must: bool, key: &str, marked: bool, rules: &mut String) {
    let open = literal(&format!("{{\"name\": \"{}\", \"{key}\": ", tool.name));
    let schema = ruled(&schema(tool, must), tool);
    let _ = match marked {
        true => writeln!(
            rules,
            "{rule}: \"\\n\" {open} {rule}_arguments \"}}\\n</tool_call>\""
        ),
        false => writeln!(rules, "{rule}: {open} {rule}_arguments \"}}\""),
    };
    let _ = writeln!(rules, "{rule}_arguments: %json {schema}");
}

fn named_call(rule: &str, tool: &Tool, must: bool, rules: &mut String) {
    let open = literal(&format!("{}[ARGS]", tool.name));
    let schema = ruled(&schema(tool, must), tool);
    let _ = writeln!(rules, "{rule}: {open} {rule}_arguments");
    let _ = writeln!(rules, "{rule}_arguments: %json {schema}");
}

fn xml_call(rule: &str, tool: &Tool, must: bool, rules: &mut String) {
    let open = literal(&format!("\n<function={}>\n", tool.name));
    let properties = tool.parameters["properties"].as_object();
    let required = |key: &str| {
        let list = tool.parameters["required"].as_array();
        list.is_some_and(|list| list.iter().any(|name| name == key))
    };
    let mut parameters = String::new();
    let mut definitions = String::new();
    for (n, (key, schema)) in properties.into_iter().flatten().enumerate() {
        let parameter = format!("{rule}_{n}");
        let optional = if required(key) { "" } else { "?" };
        let _ = write!(parameters, " {parameter}{optional}");
        let open = literal(&format!("<parameter={key}>\n"));
        let value = xml_value(schema, tool, must, &parameter, &mut definitions);
        let _ = writeln!(definitions, "{parameter}: {open} {value}");
    }
    let _ = writeln!(
        rules,
        "{rule}: {open}{parameters} \"</function>\\n</tool_call>\""
    );
    rules.push_str(&definitions);
}

/// A value and what closes it.
fn xml_value(
    schema: &Json,
    tool: &Tool,
    must: bool,
    rule: &str,
    definitions: &mut String,
) -> String {
    let close = literal("\n</parameter>\n");
    let exact = tool.strict || must;
    let values = match (&schema["enum"], schema.get("const")) {
        (Json::Array(values), _) => Some(values.clone()),
        (_, only) => only.map(|only| vec![only.clone()]),
    };
    if let Some(values) = values.filter(|_| exact) {
        let texts = values.iter().map(|value| match value {
            Json::String(text) => literal(text),
            other => literal(&other.to_string()),
        });
        return format!("({}) {close}", texts.collect::<Vec<_>>().join(" | "));
    }
    if super::xml::accepts_text(schema) {
        return "value".to_string();
    }
    let mut schema = match exact {
        true => schema.clone(),
        false => match schema.get("type") {
            Some(kind) => json!({"type": kind}),
            None => json!({}),
        },
    };
    // References lead into the whole schema.
    for name in ["$defs", "definitions"] {
        if let Some(shared) = tool.parameters.get(name) {
            schema[name] = shared.clone();
        }
    }
    let _ = writeln!(definitions, "{rule}_value: %json {}", ruled(&schema, tool));
    format!("{rule}_value {close}")
}

fn literal(text: &str) -> String {
    Json::from(text).to_string()
}
