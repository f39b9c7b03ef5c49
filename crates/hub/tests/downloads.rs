//! Fetching from a hub that plays tricks.

#[path = "support/both.rs"]
mod both;
mod support;

use both::{Both, choose, files, message, weights, whole};
use kozue_hub::{Event, Hub, Name, Settings};
use std::fs;
use std::time::Duration;
use support::{COMMIT, FakeHub, Fault, Published};

#[test]
fn downloads_go_on_where_they_were_cut() {
    let both = Both::new();
    both.server.fault("weights", Fault::Cut(100_000));
    both.server.fault("weights", Fault::Short(50_000));
    both.server.fault("weights", Fault::Cut(0));
    whole(&both.find("org/name").unwrap());
    let from = |n: u32| Some(format!("bytes={n}-"));
    assert_eq!(
        both.ranges(),
        [None, from(100_000), from(150_000), from(150_000)]
    );
    // In another process too.
    let both = Both::new();
    for _ in 0..5 {
        both.server.fault("weights", Fault::Cut(0));
    }
    let part = &weights()[..70_000];
    fs::create_dir_all(both.repo().join("blobs")).unwrap();
    fs::write(both.incomplete("sub/weights.bin"), part).unwrap();
    let text = message(both.find("org/name"));
    assert!(text.contains("what was fetched is kept"), "{text}");
    assert_eq!(both.ranges(), vec![from(70_000); 5]);
    both.nothing_to_load();
    whole(&both.find("org/name").unwrap());
    assert_eq!(both.ranges(), [from(70_000)]);
    assert!(!both.incomplete("sub/weights.bin").exists());
}

#[test]
fn what_was_left_behind_may_be_wrong() {
    for part in [b"other".to_vec(), vec![7; 300_000], vec![7; 300_001]] {
        let both = Both::new();
        fs::create_dir_all(both.repo().join("blobs")).unwrap();
        fs::write(both.incomplete("sub/weights.bin"), part).unwrap();
        whole(&both.find("org/name").unwrap());
    }
    // A server that knows no parts sends all.
    let both = Both::new();
    both.server.fault("weights", Fault::Cut(1000));
    both.server.fault("weights", Fault::Whole);
    whole(&both.find("org/name").unwrap());
    // One that refuses the part is asked for all.
    let both = Both::new();
    both.server.fault("weights", Fault::Cut(1000));
    both.server
        .fault("weights", Fault::Status(416, String::new()));
    whole(&both.find("org/name").unwrap());
    assert_eq!(both.ranges(), [None, Some("bytes=1000-".into()), None]);
}

#[test]
fn wrong_lengths_are_told() {
    for (fault, found) in [
        (Fault::Length(300_001), "300001 bytes"),
        (Fault::Length(5), "5 bytes"),
        (Fault::Longer, "300004 bytes"),
    ] {
        let both = Both::new();
        both.server.fault("weights", fault);
        let text = message(both.find("org/name"));
        assert!(text.contains("org/name/sub/weights.bin has"), "{text}");
        assert!(
            text.contains(found) && text.contains("says 300000"),
            "{text}"
        );
        both.nothing_to_load();
        whole(&both.find("org/name").unwrap());
    }
}

#[test]
fn a_wrong_byte_is_found() {
    let both = Both::new();
    both.server.fault("weights", Fault::Flip(200_000));
    let text = message(both.find("org/name"));
    assert!(
        text.contains("org/name/sub/weights.bin was damaged"),
        "{text}"
    );
    assert!(!both.incomplete("sub/weights.bin").exists());
    both.nothing_to_load();
    both.server.fault("config.json", Fault::Flip(0));
    assert!(message(both.find("org/name")).contains("config.json was damaged"));
    both.nothing_to_load();
    whole(&both.find("org/name").unwrap());
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let both = Both::new();
    let elsewhere = FakeHub::start(files());
    let target = format!("{}/cdn/sub/weights.bin?signed=1", elsewhere.address);
    both.server
        .fault("weights", Fault::Redirect(target.clone()));
    // The other host's address has no query in its list of files.
    elsewhere.fault("cdn", Fault::Length(300_000));
    both.server
        .fault("config.json", Fault::Redirect("/cdn/config.json".into()));
    let hub = Hub::new(Settings {
        token: Some("hf_secret".into()),
        ..both.settings()
    });
    let name = Name::parse("org/name").unwrap();
    let text = message(hub.find(&name, &choose, &mut |_| ()));
    assert!(text.contains("was damaged"), "{text}");
    both.server.fault(
        "weights",
        Fault::Redirect(format!("{}/cdn/sub/weights.bin", elsewhere.address)),
    );
    whole(&hub.find(&name, &choose, &mut |_| ()).unwrap());
    let seen = both.server.seen();
    assert!(
        seen.iter().any(|seen| seen.path == "/cdn/config.json"),
        "{seen:?}"
    );
    for seen in seen {
        assert_eq!(seen.token.as_deref(), Some("Bearer hf_secret"), "{seen:?}");
    }
    let seen = elsewhere.seen();
    assert_eq!(seen.len(), 2);
    assert!(seen.iter().all(|seen| seen.token.is_none()), "{seen:?}");
    // Round and round.
    let both = Both::new();
    for _ in 0..20 {
        both.server.fault(
            "weights",
            Fault::Redirect("/org/name/resolve/x/sub/weights.bin".into()),
        );
    }
    assert!(message(both.find("org/name")).contains("on and on"));
}

#[test]
fn refusals_say_what_to_do() {
    let gated = "X-Error-Code: GatedRepo\r\n".to_owned();
    for (fault, words) in [
        (Fault::Status(401, String::new()), ["401", "set HF_TOKEN"]),
        (
            Fault::Status(401, gated.clone()),
            ["terms at http", "HF_TOKEN"],
        ),
        (Fault::Status(403, gated), ["/org/name", "accept its terms"]),
        (Fault::Status(404, String::new()), ["404", "check the name"]),
        (
            Fault::Status(429, "Retry-After: 3600\r\n".into()),
            ["429", "3600 s"],
        ),
        (Fault::Status(418, String::new()), ["418", "org/name"]),
        (Fault::Answer("<html>".into()), ["no JSON", "is http://127"]),
        (Fault::Redirect("ftp://x/".into()), ["ftp://x/", "followed"]),
    ] {
        let both = Both::new();
        both.server.fault("api", fault);
        let text = message(both.find("org/name"));
        for word in words {
            assert!(text.contains(word), "{word:?} is not in {text:?}");
        }
        assert_eq!(both.server.seen().len(), 1);
    }
    let both = Both::new();
    let hub = Hub::new(Settings {
        token: Some("hf_secret".into()),
        ..both.settings()
    });
    both.server.fault("api", Fault::Status(401, String::new()));
    let text = message(hub.find(&Name::parse("org/name").unwrap(), &choose, &mut |_| ()));
    assert!(
        text.contains("does not accept the token") && !text.contains("secret"),
        "{text}"
    );
    assert!(message(both.find("org/other")).contains("org/other"));
    let hub = Hub::new(Settings {
        // A port where nobody listens.
        endpoint: "http://127.0.0.1:1".into(),
        ..both.settings()
    });
    let text = message(hub.find(&Name::parse("org/name").unwrap(), &choose, &mut |_| ()));
    assert!(text.contains("cannot be reached"), "{text}");
}

#[test]
fn busy_hubs_are_asked_again() {
    let both = Both::new();
    both.server
        .fault("api", Fault::Status(429, "Retry-After: 0\r\n".into()));
    both.server.fault("api", Fault::Status(503, String::new()));
    both.server
        .fault("weights", Fault::Status(500, String::new()));
    both.server
        .fault("weights", Fault::Status(429, String::new()));
    let mut again = 0;
    let name = Name::parse("org/name").unwrap();
    let found = both.hub().find(&name, &choose, &mut |event| {
        again += usize::from(matches!(event, Event::Again { .. }));
    });
    whole(&found.unwrap());
    assert_eq!(again, 4);
    let both = Both::new();
    for _ in 0..5 {
        both.server.fault("api", Fault::Status(502, String::new()));
    }
    assert!(message(both.find("org/name")).contains("502"));
    assert_eq!(both.server.seen().len(), 5);
}

#[test]
fn two_at_once_fetch_once() {
    let both = Both::new();
    both.server
        .fault("weights", Fault::Slow(Duration::from_millis(300)));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| whole(&both.find("org/name").unwrap()));
        }
    });
    assert_eq!(both.ranges(), [None]);
    // As another program locks it.
    let both = Both::new();
    let locks = both.folder.path().join("hub/.locks/models--org--name");
    fs::create_dir_all(&locks).unwrap();
    let blob = both.blob("sub/weights.bin");
    let path = locks.join(format!("{}.lock", blob.file_name().unwrap().display()));
    let lock = fs::File::create(path).unwrap();
    lock.lock().unwrap();
    let error = || {
        let removal = both.hub().removal(&Name::parse("org/name").unwrap());
        both.hub()
            .remove(&removal.unwrap())
            .unwrap_err()
            .to_string()
    };
    let mut waited = Vec::new();
    let name = Name::parse("org/name").unwrap();
    let found = both.hub().find(&name, &choose, &mut |event| {
        if let Event::Waiting { file } = event {
            assert!(error().contains("being fetched by another process"));
            waited.push(file.to_owned());
            fs::write(&blob, weights()).unwrap();
            lock.unlock().unwrap();
        }
    });
    whole(&found.unwrap());
    assert_eq!(waited, ["sub/weights.bin"]);
    assert_eq!(both.ranges(), []);
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    for path in [
        "../../../evil",
        "/tmp/evil",
        "a\\..\\evil",
        "sub/../../evil",
    ] {
        let both = Both::new();
        both.server
            .publish(vec![Published::new(path, "evil", false)]);
        let text = message(both.find("org/name"));
        assert!(text.contains("nothing was fetched"), "{text}");
        assert!(!both.folder.path().join("hub").exists());
    }
}

#[test]
fn a_full_disk_is_told() {
    let both = Both::new();
    let large = format!(
        r#"{{"sha": "{COMMIT}", "siblings": [{{"rfilename": "config.json", "size": {}, "blobId": "{COMMIT}"}}]}}"#,
        1u64 << 60
    );
    both.server.fault("api", Fault::Answer(large));
    let text = message(both.find("org/name"));
    assert!(
        text.contains("are free in") && text.contains("HF_HUB_CACHE"),
        "{text}"
    );
    both.nothing_to_load();
    #[cfg(target_os = "linux")]
    {
        let both = Both::new();
        fs::create_dir_all(both.repo().join("blobs")).unwrap();
        std::os::unix::fs::symlink("/dev/full", both.incomplete("sub/weights.bin")).unwrap();
        let text = message(both.find("org/name"));
        assert!(text.contains("the disk is full: make room"), "{text}");
        both.nothing_to_load();
    }
}
