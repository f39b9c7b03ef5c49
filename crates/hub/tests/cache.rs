//! What lies in the cache, and what is asked of the hub because of it.

#[path = "support/both.rs"]
mod both;
mod support;

use both::{Both, choose, files, message, weights, whole};
use kozue_hub::{Hub, Name, Settings};
use std::fs;
use std::path::Path;
use support::COMMIT;

const OTHER: &str = "89abcdef0123456789abcdef0123456789abcdef";

#[test]
fn a_model_is_laid_out_as_other_programs_do() {
    let both = Both::new();
    let found = both.find("org/name").unwrap();
    whole(&found);
    assert_eq!(found.path, both.repo().join("snapshots").join(COMMIT));
    assert_eq!((found.files, found.fetched), (3, 300_002));
    assert_eq!(
        fs::read_to_string(both.repo().join("refs/main")).unwrap(),
        COMMIT
    );
    let link = fs::read_link(found.path.join("sub/weights.bin")).unwrap();
    let sum = both.blob("sub/weights.bin");
    let sum = sum.file_name().unwrap();
    assert_eq!(link, Path::new("../../../blobs").join(sum));
    assert_eq!(sum.len(), 64);
    let link = fs::read_link(found.path.join("config.json")).unwrap();
    // What git calls a file with "{}".
    assert_eq!(
        link,
        Path::new("../../blobs/9e26dfeeb6e641a33dae4961196235bdb965b21b")
    );
    assert!(!found.path.join("README.md").exists());
    // The second time nobody is asked.
    assert_eq!(both.server.seen().len(), 3);
    let again = both.find("org/name").unwrap();
    assert_eq!((again.path, again.fetched), (found.path, 0));
    assert_eq!(both.server.seen(), []);
}

#[test]
fn pull_finds_damage_on_this_side() {
    let both = Both::new();
    both.find("org/name").unwrap();
    let mut damaged = weights();
    damaged[5] ^= 1;
    fs::write(both.blob("sub/weights.bin"), damaged).unwrap();
    let found = both.pull("org/name").unwrap();
    whole(&found);
    assert_eq!(found.fetched, 300_000);
    assert_eq!(both.pull("org/name").unwrap().fetched, 0);
    // A file of another length is found without that.
    fs::write(both.blob("sub/weights.bin"), "short").unwrap();
    whole(&both.find("org/name").unwrap());
}

#[test]
fn what_is_not_whole_is_fetched_before_it_is_loaded() {
    let both = Both::new();
    let found = both.find("org/name").unwrap();
    fs::remove_file(found.path.join("sub/weights.bin")).unwrap();
    both.server.seen();
    let again = both.find("org/name").unwrap();
    whole(&again);
    // Its contents were there: only the list was asked for.
    assert_eq!(both.server.seen().len(), 1);
    // Another program may have fetched a part, and nothing tells that it is one.
    fs::remove_dir_all(both.repo().join("trees")).unwrap();
    fs::remove_file(found.path.join("empty")).unwrap();
    whole(&both.find("org/name").unwrap());
}

#[test]
fn revisions_are_branches_tags_and_commits() {
    let both = Both::new();
    both.server.revision("v1.0", OTHER);
    both.server.revision("refs/pr/1", OTHER);
    assert_eq!(both.find("org/name@v1.0").unwrap().commit, OTHER);
    assert_eq!(both.find("org/name@refs/pr/1").unwrap().commit, OTHER);
    assert_eq!(
        both.find(&format!("org/name@{COMMIT}")).unwrap().commit,
        COMMIT
    );
    let refs = both.repo().join("refs");
    assert_eq!(fs::read_to_string(refs.join("v1.0")).unwrap(), OTHER);
    assert_eq!(fs::read_to_string(refs.join("refs/pr/1")).unwrap(), OTHER);
    assert!(!refs.join(COMMIT).exists() && !refs.join("main").exists());
    assert!(message(both.find("org/name@v2")).contains("v2"));
    // A branch stays where it is until it is pulled.
    assert_eq!(both.find("org/name").unwrap().commit, COMMIT);
    both.server.revision("main", OTHER);
    assert_eq!(both.find("org/name").unwrap().commit, COMMIT);
    assert_eq!(both.pull("org/name").unwrap().commit, OTHER);
    assert_eq!(both.find("org/name").unwrap().commit, OTHER);
}

#[test]
fn offline_what_is_there_is_used() {
    let both = Both::new();
    let offline = Hub::new(Settings {
        offline: true,
        ..both.settings()
    });
    let name = Name::parse("org/name").unwrap();
    let find = || offline.find(&name, &choose, &mut |_| ());
    let text = message(find());
    assert!(
        text.contains("org/name is not whole") && text.contains("HF_HUB_OFFLINE"),
        "{text}"
    );
    assert!(message(offline.pull(&name, &choose, &mut |_| ())).contains("HF_HUB_OFFLINE"));
    assert_eq!(both.server.seen(), []);
    let found = both.find("org/name").unwrap();
    both.server.seen();
    whole(&find().unwrap());
    // Fetched by another program: what is there counts.
    let kept = both.repo().join("trees");
    fs::rename(&kept, both.repo().join("aside")).unwrap();
    whole(&find().unwrap());
    let unreachable = Hub::new(Settings {
        endpoint: "http://127.0.0.1:1".into(),
        ..both.settings()
    });
    whole(&unreachable.find(&name, &choose, &mut |_| ()).unwrap());
    fs::rename(both.repo().join("aside"), &kept).unwrap();
    fs::remove_file(found.path.join("config.json")).unwrap();
    assert!(message(find()).contains("not whole"));
    assert_eq!(both.server.seen(), []);
}

#[test]
fn models_are_listed_and_removed() {
    let both = Both::new();
    assert!(both.hub().cached().unwrap().is_empty());
    both.find("org/name").unwrap();
    both.server.revision("v1", OTHER);
    let mut newer = files();
    newer[3].bytes = b"{\"new\": 1}".to_vec();
    both.server.publish(newer);
    both.find("org/name@v1").unwrap();
    // A data set is no model.
    fs::create_dir_all(both.folder.path().join("hub/datasets--a--b/snapshots")).unwrap();
    let hub = both.hub();
    let cached = hub.cached().unwrap();
    let listed: Vec<_> = cached
        .iter()
        .map(|c| (c.repo.as_str(), c.commit.as_str(), c.revisions.join(",")))
        .collect();
    assert_eq!(
        listed,
        [
            ("org/name", COMMIT, "main".into()),
            ("org/name", OTHER, "v1".into())
        ]
    );
    let names: Vec<&str> = cached[0].files.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["config.json", "empty", "sub/weights.bin"]);
    assert_eq!(cached[0].files[2].size, 300_000);
    // The weights belong to the other commit too.
    let removal = hub.removal(&Name::parse("org/name@v1").unwrap()).unwrap();
    assert_eq!((removal.files, removal.bytes), (3, 10));
    hub.remove(&removal).unwrap();
    whole(&both.find("org/name").unwrap());
    assert!(!both.repo().join("refs/v1").exists());
    assert!(!both.repo().join("snapshots").join(OTHER).exists());
    // One file, and then the rest.
    let removal = hub
        .removal(&Name::parse("org/name:sub/weights.bin").unwrap())
        .unwrap();
    assert_eq!((removal.files, removal.bytes), (1, 300_000));
    hub.remove(&removal).unwrap();
    assert!(!both.blob("sub/weights.bin").exists());
    let removal = hub.removal(&Name::parse("org/name").unwrap()).unwrap();
    assert_eq!(removal.files, 2);
    hub.remove(&removal).unwrap();
    assert!(!both.repo().exists());
    for name in ["org/name", "org/name@v1", "org/name:x"] {
        let error = hub
            .removal(&Name::parse(name).unwrap())
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("not in the cache"), "{error}");
    }
}
