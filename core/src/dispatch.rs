//! Selection of vector instructions at run time.

/// Runs `f`, compiled for the widest vector instructions that the processor supports and this module lists. `f` and the functions
/// it calls must be `#[inline(always)]` to benefit. The result does not depend on the processor.
#[inline]
pub fn run_vectorized<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    let f = match v4(f).or_else(v3) {
        Ok(result) => return result,
        Err(f) => f,
    };
    f()
}

/// [`run_vectorized`] of an expression. Mutation tests do not look into macros, so arithmetic is in functions.
macro_rules! vectorized {
    ($body:expr) => {
        $crate::dispatch::run_vectorized(
            #[inline(always)]
            || $body,
        )
    };
}
pub(crate) use vectorized;

/// Whether the processor has a feature. Without feature `std`: whether the target of the build has it.
#[cfg(target_arch = "x86_64")]
macro_rules! detected {
    ($feature:tt) => {{
        #[cfg(feature = "std")]
        let has = std::arch::is_x86_feature_detected!($feature);
        #[cfg(not(feature = "std"))]
        let has = cfg!(target_feature = $feature);
        has
    }};
}
#[cfg(target_arch = "x86_64")]
pub(crate) use detected;

/// Defines a function that runs `f`, compiled with these features, if the processor has all these features. Otherwise the
/// function returns `f`. One list both enables and detects the features.
#[cfg(target_arch = "x86_64")]
macro_rules! with_features {
    ($name:ident: $($feature:tt),+) => {
        #[inline]
        fn $name<R, F: FnOnce() -> R>(f: F) -> Result<R, F> {
            $(#[target_feature(enable = $feature)])+
            unsafe fn enabled<R>(f: impl FnOnce() -> R) -> R {
                f()
            }
            if $(crate::dispatch::detected!($feature))&&+ {
                // SAFETY: every enabled feature was detected just above.
                Ok(unsafe { enabled(f) })
            } else {
                Err(f)
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
with_features!(v4: "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx2", "bmi1", "bmi2", "popcnt", "lzcnt");
#[cfg(target_arch = "x86_64")]
with_features!(v3: "avx2", "bmi1", "bmi2", "popcnt", "lzcnt");
