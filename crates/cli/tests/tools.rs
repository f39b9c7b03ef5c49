//! inspect, quantize, bench and help.

mod support;

use support::{fails, json, run, stderr, stdout, tiny};

#[test]
fn inspect_shows_shapes_and_memory() {
    let model = tiny("qwen3_5");
    let output = run(&[
        "inspect",
        model.to_str().unwrap(),
        "--json",
        "--tensors",
        "--ctx",
        "100",
    ]);
    let shown = json(&output);
    assert_eq!(shown["architecture"], "Qwen3.5");
    assert_eq!(shown["vocab_size"], 320);
    assert_eq!(shown["memory"][0]["context"], 100);
    let tensors = shown["tensors"].as_array().unwrap();
    let sum: u64 = tensors
        .iter()
        .filter(|tensor| tensor["used"] == true)
        .map(|tensor| tensor["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(shown["weight_bytes"], sum);
    // 24 layers' worth of keys and values would not fit any number: no wrap-around, but a remark.
    let most = usize::MAX.to_string();
    let args = ["inspect", model.to_str().unwrap(), "--ctx", &most];
    let far = run(&args);
    assert!(
        stdout(&far).contains("more than the model was made for"),
        "{}",
        stdout(&far)
    );
    let far = json(&run(&[&args[..], &["--json"]].concat()));
    assert_eq!(far["memory"][0]["total_bytes"], u64::MAX);
    let text = run(&["inspect", model.to_str().unwrap()]);
    assert!(stdout(&text).contains("bits per weight"));
}

#[test]
fn inspect_tells_drafters_from_models_and_shows_a_models_own() {
    let folder = tempfile::tempdir().unwrap();
    let drafters = tiny("../drafters");
    let dflash = drafters.join("dflash-qwen3_5");
    let shown = json(&run(&["inspect", dflash.to_str().unwrap(), "--json"]));
    assert_eq!(shown["drafter"], "dflash");
    assert!(shown["weight_bytes"].as_u64().unwrap() > 0);
    let weaver = drafters.join("weaver-rotary");
    let text = run(&["inspect", weaver.to_str().unwrap()]);
    assert!(stdout(&text).starts_with("drafter              Weaver, "));

    let copy = |from: &std::path::Path, to: std::path::PathBuf| {
        std::fs::create_dir_all(&to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    };
    copy(&tiny("qwen3_5"), folder.path().to_path_buf());
    copy(&dflash, folder.path().join("dflash"));
    let shown = json(&run(&[
        "inspect",
        folder.path().to_str().unwrap(),
        "--json",
    ]));
    assert_eq!(shown["architecture"], "Qwen3.5");
    assert_eq!(shown["drafters"].as_array().unwrap().len(), 1);
    let memory = &shown["memory"][0];
    let of = |name: &str| memory[name].as_u64().unwrap();
    let weights = shown["weight_memory_bytes"].as_u64().unwrap();
    let parts = ["sequence_bytes", "drafter_bytes", "pass_bytes"].map(of);
    assert_eq!(weights + parts.iter().sum::<u64>(), of("total_bytes"));
    let drafter = shown["drafters"][0]["weight_bytes"].as_u64().unwrap();
    // Its keys and values, as many tokens as the model's, and what the model's layers hand it.
    assert!(of("drafter_bytes") > drafter, "{memory}");
}

#[test]
fn eval_tells_perplexity_and_the_distance_from_a_reference() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    std::fs::write(&text, "def add(a, b):\n    return a + b\n".repeat(20)).unwrap();
    let text = text.to_str().unwrap();
    let model = tiny("qwen3");
    let model = model.to_str().unwrap();
    let reference = model;
    let eval = |model: &str| {
        let args = [
            "--text",
            text,
            "--against",
            reference,
            "--ctx",
            "64",
            "--json",
        ];
        json(&run(&[&["eval", model][..], &args].concat()))
    };
    let same = eval(model);
    assert_eq!(same["against"]["change"]["value"], 0.0);
    assert_eq!(same["against"]["same_top"]["value"], 1.0);
    assert!(same["windows"].as_u64().unwrap() > 2);
    let kl = ["M", "L"].map(|size| {
        let target = folder.path().join(size);
        let target = target.to_str().unwrap();
        let quantize = ["quantize", model, target, "--size", size, "--group", "32"];
        assert!(run(&quantize).status.success());
        let other = eval(target);
        assert_eq!(other["against"]["perplexity"], same["perplexity"]);
        other["against"]["kl"]["value"].as_f64().unwrap()
    });
    assert!(kl[1] > 1e-7 && kl[1] < kl[0] / 10.0, "{kl:?}");

    let args = ["eval", model, "--text", text, "--json", "--against", model];
    let kept = |kv, other| {
        json(&run(
            &[&args[..], &["--kv", kv, "--against-kv", other]].concat()
        ))
    };
    let rounded = kept("int8", "f32");
    assert_eq!(
        rounded["against"]["perplexity"],
        kept("f32", "f16")["perplexity"]
    );
    let loss = rounded["against"]["kl"]["value"].as_f64().unwrap();
    let half = kept("f16", "f32")["against"]["kl"]["value"]
        .as_f64()
        .unwrap();
    assert!(loss > 4.0 * half && loss < 1e-2, "{loss} {half}");
    let shown = run(&[&args[..4], &["--against", model, "--against-kv", "int8"]].concat());
    assert!(
        stdout(&shown).contains("qwen3 --kv int8\n"),
        "{}",
        stdout(&shown)
    );
    for (wrong, word) in [
        (["--against-kv", "f16"], "--against <MODEL>"),
        (["--ctx", "1"], "at least 2"),
    ] {
        let refused = run(&[&args[..4], &wrong].concat());
        assert_eq!(refused.status.code(), Some(2));
        assert!(stderr(&refused).contains(word), "{}", stderr(&refused));
    }

    let foreign = tiny("llama");
    let args = [
        "eval",
        model,
        "--text",
        text,
        "--against",
        foreign.to_str().unwrap(),
    ];
    fails(&run(&args), 1, &["llama has another vocabulary"]);
    let args = ["eval", model, "--text", "/no/such/text"];
    fails(&run(&args), 1, &["/no/such/text"]);
}

#[test]
fn a_quantised_model_runs_and_inspects() {
    let folder = tempfile::tempdir().unwrap();
    for (size, bits) in [("M", 4.0..12.0), ("l", 8.0..16.0)] {
        let target = folder.path().join(size);
        let target = target.to_str().unwrap();
        let model = tiny("qwen3");
        let output = run(&[
            "quantize",
            model.to_str().unwrap(),
            target,
            "--size",
            size,
            "--group",
            "32",
        ]);
        assert!(output.status.success(), "{}", stderr(&output));
        let report = stdout(&output);
        assert!(
            report.contains("model.layers.0.mlp.down_proj.weight"),
            "{report}"
        );
        assert!(report.contains("bits per weight"), "{report}");
        let shown = json(&run(&["inspect", target, "--json"]));
        let found = shown["bits_per_weight"].as_f64().unwrap();
        assert!(bits.contains(&found), "{found}");
        let answer = json(&run(&[
            "run",
            target,
            "hello",
            "--json",
            "-n",
            "5",
            "-t",
            "0",
            "--ignore-eos",
        ]));
        assert_eq!(answer["token_ids"].as_array().unwrap().len(), 5);
        // It is there now, so it is not made again by accident.
        let again = run(&["quantize", model.to_str().unwrap(), target, "--size", size]);
        fails(&again, 1, &[target]);
    }
}

/// A model whose conversion takes a while: the tiny one with a larger vocabulary.
#[cfg(unix)]
fn large(folder: &std::path::Path) -> std::path::PathBuf {
    use serde_json::Value;
    const TOKENS: usize = 200_000;
    let model = folder.join("large");
    std::fs::create_dir(&model).unwrap();
    let source = tiny("llama");
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(name), model.join(name)).unwrap();
    }
    let config = std::fs::read(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["vocab_size"] = TOKENS.into();
    std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    let file = std::fs::read(source.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let (mut data, mut entries) = (Vec::<u8>::new(), serde_json::Map::new());
    for (name, entry) in header.as_object().unwrap() {
        if name == "__metadata__" {
            continue;
        }
        let at =
            |index: usize| 8 + length + entry["data_offsets"][index].as_u64().unwrap() as usize;
        let stored = &file[at(0)..at(1)];
        let mut entry = entry.clone();
        let start = data.len();
        let whole = if name.contains("embed_tokens") || name.contains("lm_head") {
            let width = entry["shape"][1].as_u64().unwrap() as usize;
            entry["shape"][0] = TOKENS.into();
            TOKENS * width * 4
        } else {
            stored.len()
        };
        data.extend(stored.iter().cycle().take(whole));
        entry["data_offsets"] = serde_json::json!([start, data.len()]);
        entries.insert(name.clone(), entry);
    }
    let header = Value::Object(entries).to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(data);
    std::fs::write(model.join("model.safetensors"), out).unwrap();
    model
}

#[cfg(unix)]
#[test]
fn a_conversion_that_is_told_to_end_leaves_nothing_behind() {
    use std::process::{Command, Stdio};
    let folder = tempfile::tempdir().unwrap();
    let model = large(folder.path());
    let left = || {
        let names = std::fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<String> = names
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with(".out."))
            .collect();
        names.sort();
        names
    };
    let end_once = |signal: &str| {
        let mut child = support::kozue(folder.path())
            .args(["quantize", model.to_str().unwrap(), "out", "--size", "M"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while left().is_empty() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let id = child.id().to_string();
        Command::new("kill").args([signal, &id]).status().unwrap();
        child.wait().unwrap().code()
    };
    // On a busy machine a conversion may be done before its signal comes.
    let end_by = |signal: &str| loop {
        let code = end_once(signal);
        if code != Some(0) {
            return code;
        }
        std::fs::remove_dir_all(folder.path().join("out")).unwrap();
    };
    // Who starts the tests in the background of a script has them ignore SIGINT, and what they
    // start inherits that.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0);
    for (signal, number, code) in [("-INT", 2, 130), ("-TERM", 15, 143), ("-HUP", 1, 129)] {
        if ignored & (1 << (number - 1)) != 0 {
            continue;
        }
        assert_eq!(end_by(signal), Some(code), "{signal}");
        assert_eq!(left(), [""; 0], "{signal}");
    }
    // Nothing can be done about this one; the next conversion tidies up.
    assert_eq!(end_by("-KILL"), None);
    assert_eq!(left(), [".out.0.tmp"]);
    let tiny = tiny("llama");
    let args = ["quantize", tiny.to_str().unwrap(), "out", "--size", "M"];
    let output = support::kozue(folder.path()).args(args).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(left(), [""; 0]);
}

#[test]
fn bench_measures_what_it_is_asked_for() {
    let model = tiny("qwen3_5");
    let model = model.to_str().unwrap();
    let few = [
        "--prefill",
        "8",
        "--depth",
        "4",
        "--rows",
        "1,3",
        "--repeat",
        "1",
        "--json",
    ];
    let shown = json(&run(&[&["bench", model], &few[..]].concat()));
    assert_eq!(shown["rows"][1]["rows"], 3);
    assert_eq!(shown["rows"][0]["ratio"], 1.0);
    assert_eq!(shown["prefill"][0]["tokens"], 8);
    assert_eq!(shown["decode"][0]["depth"], 4);
    for name in [
        "read_bandwidth_bytes_per_s",
        "integer_peak_macs_per_s",
        "bytes_per_pass",
    ] {
        assert!(shown[name].as_f64().unwrap() > 0.0, "{name}");
    }
    fails(
        &run(&["bench", model, "--prefill", "99999"]),
        2,
        &["99999", "1024"],
    );
}

#[test]
fn help_and_version() {
    for args in [
        &["--help"][..],
        &["help"],
        &["run", "--help"],
        &["--version"],
    ] {
        let output = run(args);
        assert!(
            output.status.success() && stdout(&output).contains("kozue"),
            "{args:?}"
        );
    }
}
