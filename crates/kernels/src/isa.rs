//! The instruction sets that kernels are written for, found at run time.

use std::fmt;
use std::str::FromStr;

/// An instruction set a kernel may use. Each one gives the same bits as every other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, any processor.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
    /// `Avx512Vnni` and AMX tiles of int8, which the operating system has let this process use.
    Amx,
    /// NEON, any 64-bit ARM processor.
    Neon,
    /// NEON with dot products of int8.
    NeonDot,
    /// `NeonDot` and products of int8 matrices.
    NeonI8mm,
}

/// From the plainest to the widest of each kind of processor.
const ALL: [Isa; 7] = [
    Isa::Portable,
    Isa::Avx2,
    Isa::Avx512Vnni,
    Isa::Amx,
    Isa::Neon,
    Isa::NeonDot,
    Isa::NeonI8mm,
];

impl Isa {
    /// Every instruction set this process can use, from the plainest to the widest.
    pub fn available() -> Vec<Isa> {
        ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The widest instruction set this process can use.
    pub fn best() -> Isa {
        Self::available().pop().unwrap_or(Isa::Portable)
    }

    /// Whether this process can use it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => x86::avx512_vnni(),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => x86::amx(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => true,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => arm::dot(),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => arm::i8mm(),
            _ => false,
        }
    }

    /// The name `Display` writes and `FromStr` reads.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Amx => "amx-int8",
            Isa::Neon => "neon",
            Isa::NeonDot => "neon-dotprod",
            Isa::NeonI8mm => "neon-i8mm",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        ALL.into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| {
                let known = ALL.map(Isa::name).join(", ");
                format!("no instruction set \"{name}\"; known: {known}")
            })
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::sync::OnceLock;

    pub fn avx2() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    pub fn avx512_vnni() -> bool {
        avx2()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
    }

    pub fn amx() -> bool {
        static AMX: OnceLock<bool> = OnceLock::new();
        *AMX.get_or_init(|| avx512_vnni() && has_amx_int8() && permit_tile_data())
    }

    /// CPUID leaf 7: EDX bit 24 is AMX-TILE, bit 25 AMX-INT8 (Intel SDM, volume 2, CPUID).
    fn has_amx_int8() -> bool {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        if __cpuid(0).eax < 7 {
            return false;
        }
        let edx = __cpuid_count(7, 0).edx;
        edx & (1 << 24) != 0 && edx & (1 << 25) != 0
    }

    /// Linux keeps the 8 KiB of tile data off until the process asks for it. The permission holds
    /// for the whole process, threads that exist already included.
    #[cfg(target_os = "linux")]
    fn permit_tile_data() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: the call takes two integers and only changes this process's permission.
        unsafe {
            libc::syscall(
                libc::SYS_arch_prctl,
                ARCH_REQ_XCOMP_PERM,
                XFEATURE_XTILEDATA,
            ) == 0
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn permit_tile_data() -> bool {
        false
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::is_aarch64_feature_detected;

    pub fn dot() -> bool {
        is_aarch64_feature_detected!("dotprod")
    }

    pub fn i8mm() -> bool {
        dot() && is_aarch64_feature_detected!("i8mm")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portable_is_always_there_and_names_round_trip() {
        let available = Isa::available();
        assert_eq!(available[0], Isa::Portable);
        assert_eq!(Isa::best(), *available.last().unwrap());
        for isa in ALL {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
        assert!("sse".parse::<Isa>().is_err());
        let arm = [Isa::Neon, Isa::NeonDot, Isa::NeonI8mm];
        let here = available.iter().any(|isa| arm.contains(isa));
        assert_eq!(here, cfg!(target_arch = "aarch64"));
    }
}
