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
    let text = run(&["inspect", model.to_str().unwrap()]);
    assert!(stdout(&text).contains("bits per weight"));
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
