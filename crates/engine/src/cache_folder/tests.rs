use super::*;
use std::fs::File;
use std::time::Duration;

type Folder = CacheFolder<Vec<u8>>;

fn open(path: &Path, bytes: u64, identity: u64) -> Folder {
    let options = FolderOptions {
        path: path.to_path_buf(),
        bytes,
        identity,
    };
    Folder::open(options, |state, to| to.write_all(state))
}

fn text(first: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|n| first + n).collect()
}

/// Keeps a snapshot of these tokens and ends, so that it is written.
fn keep(path: &Path, bytes: u64, tokens: &[u32], state: &[u8]) {
    open(path, bytes, 7).keep(tokens, &Arc::new(state.to_vec()));
}

fn found(folder: &mut Folder, prompt: &[u32], held: usize) -> Option<(usize, Vec<u8>)> {
    folder.longest(prompt, held, |bytes| Ok(bytes.to_vec()))
}

fn names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn what_is_kept_outlives_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = &dir.path().join("new/folder");
    keep(path, 1 << 20, &text(0, 100), b"state");
    keep(path, 1 << 20, &text(0, 200), b"longer");
    let mut folder = open(path, 1 << 20, 7);
    let prompt = text(0, 300);
    assert_eq!(
        found(&mut folder, &prompt, 0),
        Some((200, b"longer".to_vec()))
    );
    assert_eq!(
        found(&mut folder, &prompt[..200], 0),
        Some((100, b"state".to_vec()))
    );
    assert_eq!(found(&mut folder, &prompt[..100], 0), None);
    assert_eq!(found(&mut folder, &text(1, 300), 0), None);
    // Only where it saves enough.
    assert_eq!(found(&mut folder, &prompt, 136).map(|f| f.0), Some(200));
    assert_eq!(found(&mut folder, &prompt, 137), None);
    // Neither served to another model nor taken from it.
    assert_eq!(found(&mut open(path, 1 << 20, 8), &prompt, 0), None);
    assert_eq!(names(path).len(), 2);
    // Too short to be worth a file; nearly as long as one that is there.
    keep(path, 1 << 20, &text(9, 63), b"short");
    keep(path, 1 << 20, &text(0, 263), b"near");
    assert_eq!(names(path).len(), 2);
    keep(path, 1 << 20, &text(0, 264), b"far");
    assert_eq!(names(path).len(), 3);
}

#[test]
fn what_is_damaged_is_dropped_and_never_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    let tokens = text(5, 80);
    keep(path, 1 << 20, &tokens, b"the state of a model");
    let name = names(path).remove(0);
    let good = fs::read(path.join(&name)).unwrap();
    let prompt = text(5, 81);
    let mut bad = vec![Vec::new(), b"x".to_vec()];
    bad.extend([1, 8, 9, 100, good.len() - 30].map(|cut| good[..good.len() - cut].to_vec()));
    for place in [
        0,
        8,
        12,
        16,
        24,
        200,
        24 + 320,
        good.len() - 9,
        good.len() - 1,
    ] {
        let mut flipped = good.clone();
        flipped[place] ^= 4;
        bad.push(flipped);
    }
    bad.push([&good[..], b"more"].concat());
    for bytes in bad {
        fs::write(path.join(&name), &bytes).unwrap();
        let mut folder = open(path, 1 << 20, 7);
        assert_eq!(found(&mut folder, &prompt, 0), None);
        assert_eq!(names(path), [""; 0], "{} bytes", bytes.len());
        // Nothing of it is left in the index either.
        fs::write(path.join(&name), &good).unwrap();
        assert_eq!(found(&mut folder, &prompt, 0), None);
    }
    // Whole, but of other tokens, another model or another length than the name says.
    let own = Name::parse(&name).unwrap();
    let other = text(6, 80);
    for (wrong, prompt) in [
        (Name::new(7, &other), text(6, 81)),
        (Name::new(7, &tokens[..70]), prompt.clone()),
    ] {
        fs::remove_file(path.join(&name)).unwrap();
        fs::write(path.join(wrong.file()), &good).unwrap();
        assert_eq!(found(&mut open(path, 1 << 20, 7), &prompt, 0), None);
        assert_eq!(names(path), [""; 0]);
        fs::write(path.join(&name), &good).unwrap();
    }
    fs::rename(
        path.join(&name),
        path.join(Name { identity: 9, ..own }.file()),
    )
    .unwrap();
    assert_eq!(found(&mut open(path, 1 << 20, 9), &prompt, 0), None);
    // Whole, but the model does not take it.
    fs::write(path.join(&name), &good).unwrap();
    let refuse = |_: &[u8]| -> Result<(), Error> { Err(Error::Model("no".into())) };
    let mut folder = open(path, 1 << 20, 7);
    assert!(folder.longest(&prompt, 0, refuse).is_none());
    assert_eq!(names(path), [""; 0]);
}

#[test]
fn what_was_not_used_for_longest_makes_room() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    // Each file has 432 bytes: 24, 100 tokens, the hash.
    let room = 3 * 432;
    let long_ago = |name: &str, seconds: u64| {
        let file = File::open(path.join(name)).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        file.set_modified(time).unwrap();
    };
    for first in [1, 2, 3] {
        keep(path, room, &text(first, 100), b"");
        let name = Name::new(7, &text(first, 100)).file();
        long_ago(&name, u64::from(first));
    }
    // The oldest is used.
    assert!(found(&mut open(path, room, 7), &text(1, 101), 0).is_some());
    // One of an old version, used before all of them.
    fs::write(path.join("a.kozcache0"), [0; 100]).unwrap();
    long_ago("a.kozcache0", 0);
    // Files of other programs are no business of ours.
    fs::write(path.join("notes.txt"), [0; 5000]).unwrap();
    keep(path, room, &text(4, 100), b"");
    let mut folder = open(path, room, 7);
    let there = [1, 2, 3, 4].map(|first| found(&mut folder, &text(first, 101), 0).is_some());
    assert_eq!(there, [true, false, true, true]);
    assert_eq!(names(path).len(), 4);
    assert!(path.join("notes.txt").exists());
    // What is larger than all of the room is not kept, and nothing goes for it.
    keep(path, room, &text(5, 100), &[0; 2000]);
    assert_eq!(names(path).len(), 4);
}

#[test]
fn two_at_one_folder_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    keep(path, 1 << 20, &text(1, 100), b"one");
    let mut first = open(path, 1 << 20, 7);
    let mut second = open(path, 500, 7);
    // The second needs room; the first does not know of it.
    second.keep(&text(2, 100), &Arc::new(b"two".to_vec()));
    drop(second);
    assert_eq!(names(path).len(), 1);
    assert_eq!(found(&mut first, &text(1, 101), 0), None);
    first.keep(&text(2, 100), &Arc::new(b"two".to_vec()));
    drop(first);
    assert_eq!(
        found(&mut open(path, 500, 7), &text(2, 101), 0),
        Some((100, b"two".to_vec()))
    );
}

#[test]
fn what_killed_writers_left_is_removed_and_what_others_write_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    fs::write(path.join(".99-0.kozcache-tmp"), b"half").unwrap();
    let writing = Unfinished::write(path, 7, &[1, 2], |to| to.write_all(b"state")).unwrap();
    drop(open(path, 1 << 20, 7));
    assert_eq!(names(path).len(), 1);
    assert!(!path.join(".99-0.kozcache-tmp").exists());
    writing.finish(path, &Name::new(7, &[1, 2])).unwrap();
    let abandoned = Unfinished::write(path, 7, &[3], |_| Ok(())).unwrap();
    drop(abandoned);
    assert_eq!(names(path), [Name::new(7, &[1, 2]).file()]);
}

#[test]
fn a_folder_that_cannot_be_used_turns_itself_off() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let mut folder = open(&file, 1 << 20, 7);
    folder.keep(&text(1, 100), &Arc::new(Vec::new()));
    assert_eq!(found(&mut folder, &text(1, 101), 0), None);
    // A full disk: nothing is left of the attempt, and none follows.
    let path = dir.path().join("full");
    let options = FolderOptions {
        path: path.clone(),
        bytes: 1 << 20,
        identity: 7,
    };
    let full = |state: &Vec<u8>, to: &mut dyn Write| match &state[..] {
        b"fails" => Err(io::ErrorKind::StorageFull.into()),
        state => to.write_all(state),
    };
    let mut folder = Folder::open(options, full);
    folder.keep(&text(1, 100), &Arc::new(b"fine".to_vec()));
    folder.keep(&text(2, 100), &Arc::new(b"fails".to_vec()));
    folder.keep(&text(3, 100), &Arc::new(b"fine".to_vec()));
    drop(folder);
    assert_eq!(names(&path).len(), 1);
    let mut folder = open(&path, 1 << 20, 7);
    assert!(found(&mut folder, &text(1, 101), 0).is_some());
    // Gone while it is in use.
    fs::remove_dir_all(&path).unwrap();
    folder.keep(&text(4, 100), &Arc::new(Vec::new()));
    assert_eq!(found(&mut folder, &text(4, 101), 0), None);
    drop(folder);
    assert!(!path.exists());
}
