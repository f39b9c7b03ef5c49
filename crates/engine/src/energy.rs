//! Energy from the processor's own counters (Linux, RAPL through /sys/class/powercap).
//!
//! Where the counters are missing or not readable for this user there is no figure: none is
//! estimated.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const POWERCAP: &str = "/sys/class/powercap";

/// The counters run over after some minutes at full power; reading them this often loses
/// nothing and costs little.
const INTERVAL: Duration = Duration::from_secs(1);

/// Adds up the energy used since it was made.
#[derive(Debug)]
pub struct EnergyMeter {
    domains: Vec<Domain>,
    used_uj: u64,
    last_read: Instant,
}

#[derive(Debug)]
struct Domain {
    counter: PathBuf,
    /// The counter's highest value; after it comes 0.
    range_uj: u64,
    last_uj: u64,
}

impl EnergyMeter {
    /// `None` where this machine shows no readable counter.
    pub fn start() -> Option<EnergyMeter> {
        EnergyMeter::from_folder(Path::new(POWERCAP))
    }

    fn from_folder(folder: &Path) -> Option<EnergyMeter> {
        let mut domains = Vec::new();
        for entry in std::fs::read_dir(folder).ok()?.flatten() {
            let folder = entry.path();
            if !counted(&folder) {
                continue;
            }
            let counter = folder.join("energy_uj");
            // One package that cannot be read would make the sum too small: no figure then.
            let last_uj = read(&counter)?;
            let range_uj = read(&folder.join("max_energy_range_uj"))?;
            domains.push(Domain {
                counter,
                range_uj,
                last_uj,
            });
        }
        if domains.is_empty() {
            return None;
        }
        Some(EnergyMeter {
            domains,
            used_uj: 0,
            last_read: Instant::now(),
        })
    }

    /// To be called now and then, so that no counter runs over twice unseen.
    pub fn poll(&mut self) {
        if self.last_read.elapsed() >= INTERVAL {
            self.read();
        }
    }

    /// Joules since the start; `None` once a counter could not be read any more.
    pub fn joules(&mut self) -> Option<f64> {
        self.read();
        (!self.domains.is_empty()).then_some(self.used_uj as f64 * 1e-6)
    }

    fn read(&mut self) {
        self.last_read = Instant::now();
        for domain in &mut self.domains {
            let Some(now_uj) = read(&domain.counter) else {
                self.domains.clear();
                return;
            };
            self.used_uj += elapsed(domain.last_uj, now_uj, domain.range_uj);
            domain.last_uj = now_uj;
        }
    }
}

/// Whether a powercap folder is a whole package, or memory beside it. Parts of a package (its
/// cores) are in its sum already; "psys" counts the packages a second time; the "mmio" folders
/// show the same counters again.
fn counted(folder: &Path) -> bool {
    let is_rapl = folder
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with("intel-rapl:"));
    let name = std::fs::read_to_string(folder.join("name")).unwrap_or_default();
    is_rapl && (name.starts_with("package") || name.trim() == "dram")
}

fn elapsed(before: u64, now: u64, range: u64) -> u64 {
    if now >= before {
        now - before
    } else {
        range.saturating_sub(before).saturating_add(now)
    }
}

fn read(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn domain(folder: &Path, entry: &str, name: &str, energy: u64) {
        let folder = folder.join(entry);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("name"), format!("{name}\n")).unwrap();
        fs::write(folder.join("energy_uj"), format!("{energy}\n")).unwrap();
        fs::write(folder.join("max_energy_range_uj"), "10000000\n").unwrap();
    }

    #[test]
    fn packages_and_memory_are_added_and_parts_are_not() {
        let folder = tempfile::tempdir().unwrap();
        domain(folder.path(), "intel-rapl:0", "package-0", 1_000_000);
        domain(folder.path(), "intel-rapl:0:0", "core", 500_000);
        domain(folder.path(), "intel-rapl:0:1", "dram", 100_000);
        domain(folder.path(), "intel-rapl:1", "psys", 9_000_000);
        domain(folder.path(), "intel-rapl-mmio:0", "package-0", 1_000_000);
        let mut meter = EnergyMeter::from_folder(folder.path()).unwrap();
        assert_eq!(meter.joules(), Some(0.0));
        domain(folder.path(), "intel-rapl:0", "package-0", 3_000_000);
        domain(folder.path(), "intel-rapl:0:0", "core", 2_000_000);
        domain(folder.path(), "intel-rapl:0:1", "dram", 600_000);
        domain(folder.path(), "intel-rapl:1", "psys", 9_900_000);
        domain(folder.path(), "intel-rapl-mmio:0", "package-0", 3_000_000);
        assert_eq!(meter.joules(), Some(2.5));
    }

    #[test]
    fn a_counter_that_ran_over_goes_on_from_zero() {
        let folder = tempfile::tempdir().unwrap();
        domain(folder.path(), "intel-rapl:0", "package-0", 9_000_000);
        let mut meter = EnergyMeter::from_folder(folder.path()).unwrap();
        domain(folder.path(), "intel-rapl:0", "package-0", 2_000_000);
        assert_eq!(meter.joules(), Some(3.0));
        domain(folder.path(), "intel-rapl:0", "package-0", 2_500_000);
        assert_eq!(meter.joules(), Some(3.5));
    }

    #[test]
    fn no_figure_without_every_counter() {
        let folder = tempfile::tempdir().unwrap();
        assert!(EnergyMeter::from_folder(&folder.path().join("missing")).is_none());
        assert!(EnergyMeter::from_folder(folder.path()).is_none());
        domain(folder.path(), "intel-rapl:0", "package-0", 1);
        domain(folder.path(), "intel-rapl:1", "package-1", 1);
        let mut meter = EnergyMeter::from_folder(folder.path()).unwrap();
        fs::remove_file(folder.path().join("intel-rapl:1/energy_uj")).unwrap();
        assert_eq!(meter.joules(), None);
        assert_eq!(meter.joules(), None);
        assert!(EnergyMeter::from_folder(folder.path()).is_none());
    }
}
