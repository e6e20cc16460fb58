/// The instructions a [`Quantizer`](crate::Quantizer) is compiled for; all of them give the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// What every processor of the target has.
    Portable,
    /// AVX2. Only [`Isa::best`] and [`Isa::avx2`] make one, after they have asked the processor.
    #[cfg(target_arch = "x86_64")]
    Avx2(Detected),
}

/// Proof that the processor was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Detected(());

impl Isa {
    /// The fastest that this processor has.
    pub fn best() -> Isa {
        Isa::avx2().unwrap_or(Isa::Portable)
    }

    /// AVX2, if this processor has it.
    pub fn avx2() -> Option<Isa> {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            return Some(Isa::Avx2(Detected(())));
        }
        None
    }
}

/// Defines `$name(isa, ...)`, which calls `$body(...)` compiled for that instruction set.
macro_rules! dispatched {
    ($(#[$meta:meta])* fn $name:ident $(<$c:ident: $bound:path>)? ($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$meta])*
        #[inline(never)]
        pub(crate) fn $name$(<$c: $bound>)?(isa: $crate::isa::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2$(<$c: $bound>)?($($arg: $ty),*) {
                $body$(::<$c>)?($($arg),*)
            }
            match isa {
                $crate::isa::Isa::Portable => $body$(::<$c>)?($($arg),*),
                // SAFETY: an Avx2 value exists only where the processor was found to have it.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::Avx2(_) => unsafe { avx2$(::<$c>)?($($arg),*) },
            }
        }
    };
}
pub(crate) use dispatched;
