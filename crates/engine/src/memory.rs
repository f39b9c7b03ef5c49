//! Memory of this process.

/// Resident bytes, mapped weights that were touched included; `None` where the system does not
/// tell.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    resident_in(&status)
}

fn resident_in(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_line() {
        let status = "Name:\tkozue\nVmHWM:\t  200 kB\nVmRSS:\t    1234 kB\nThreads:\t2\n";
        assert_eq!(resident_in(status), Some(1234 * 1024));
        assert_eq!(resident_in("Name:\tkozue\n"), None);
        assert_eq!(resident_in("VmRSS:\tmany kB\n"), None);
    }
}
