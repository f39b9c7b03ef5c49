//! How much memory this process could still get.

use std::fs::read_to_string;
use std::path::Path;

/// Bytes that the system could give without swapping: what is free or held by caches, within the
/// limits of the process's control groups and of its address space. Unknown away from Linux.
pub fn available_memory() -> Option<usize> {
    let text = read_to_string("/proc/meminfo").ok()?;
    Some(limited(kib_of(&text, "MemAvailable:")?))
}

/// As [`available_memory`], with what the system could swap out for it. More than this makes the
/// system end some process.
pub fn obtainable_memory() -> Option<usize> {
    let text = read_to_string("/proc/meminfo").ok()?;
    Some(limited(
        kib_of(&text, "MemAvailable:")? + kib_of(&text, "SwapFree:").unwrap_or(0),
    ))
}

/// What of the machine's memory the process's limits allow.
fn limited(machine: usize) -> usize {
    let limits = [group_memory(), address_space()];
    limits.into_iter().flatten().fold(machine, usize::min)
}

/// A value of a file of lines such as `MemAvailable:  123 kB`, in bytes.
fn kib_of(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What the process's control group and those around it leave (Linux's `cgroup-v2.rst`, "Memory").
/// Pages of files that were not used lately make room for others.
fn group_memory() -> Option<usize> {
    let text = read_to_string("/proc/self/cgroup").ok()?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    let group = root.join(own);
    let groups = group
        .ancestors()
        .take_while(|group| group.starts_with(root));
    groups.filter_map(left_in).min()
}

fn left_in(group: &Path) -> Option<usize> {
    let number = |name: &str| {
        let text = read_to_string(group.join(name)).ok()?;
        text.trim().parse::<usize>().ok()
    };
    // "max" is no number: no limit.
    let left = number("memory.max")?.saturating_sub(number("memory.current")?);
    let statistics = read_to_string(group.join("memory.stat")).unwrap_or_default();
    let files = statistics
        .lines()
        .find_map(|line| line.strip_prefix("inactive_file "))
        .and_then(|bytes| bytes.trim().parse::<usize>().ok());
    Some(left.saturating_add(files.unwrap_or(0)))
}

/// What `ulimit -v` leaves.
fn address_space() -> Option<usize> {
    let limits = read_to_string("/proc/self/limits").ok()?;
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: usize = line.split_whitespace().next()?.parse().ok()?;
    let used = kib_of(&read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_systems_lines() {
        let text = "MemTotal:  100 kB\nMemAvailable:      64 kB\nSwapFree:  0 kB\n";
        assert_eq!(kib_of(text, "MemAvailable:"), Some(65536));
        assert_eq!(kib_of(text, "SwapTotal:"), None);
        assert_eq!(kib_of("MemAvailable: many kB\n", "MemAvailable:"), None);
    }

    #[test]
    fn a_group_leaves_its_limit_less_what_is_in_use() {
        let group = std::env::temp_dir().join(format!("kozue-group-{}", std::process::id()));
        std::fs::create_dir_all(&group).unwrap();
        let set = |name: &str, text: &str| std::fs::write(group.join(name), text).unwrap();
        set("memory.max", "max\n");
        set("memory.current", "700\n");
        assert_eq!(left_in(&group), None);
        set("memory.max", "1000\n");
        assert_eq!(left_in(&group), Some(300));
        set("memory.stat", "anon 500\ninactive_file 200\n");
        assert_eq!(left_in(&group), Some(500));
        set("memory.current", "1200\n");
        assert_eq!(left_in(&group), Some(200));
        std::fs::remove_dir_all(&group).unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_machine_has_memory() {
        let available = available_memory().unwrap();
        assert!(available > 1 << 20, "{available}");
        assert!(obtainable_memory().unwrap() >= available / 2);
    }
}
