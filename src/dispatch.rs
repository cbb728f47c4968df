//! One place where wider vector instructions are turned on.

/// Runs `f` compiled for the widest vector instructions of this processor that the crate knows. `f` and what it calls must be
/// `#[inline(always)]` to profit; the result is the same on every processor.
#[inline]
pub(crate) fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512cd,avx2,bmi1,bmi2,popcnt,lzcnt")]
        unsafe fn v4<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        #[target_feature(enable = "avx2,bmi1,bmi2,popcnt,lzcnt")]
        unsafe fn v3<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt")
            && is_x86_feature_detected!("lzcnt")
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512cd")
            {
                // SAFETY: every feature that v4 enables was detected just above.
                return unsafe { v4(f) };
            }
            // SAFETY: every feature that v3 enables was detected just above.
            return unsafe { v3(f) };
        }
    }
    f()
}
