//! A warp: 32 threads in lockstep, and what they can tell each other without memory.
//!
//! A value that each thread has is an array of 32. On the device [`per_lane`] is straight code, and the others are the
//! instructions `vote`, `popc` and `shfl`.

/// Threads of a warp.
pub const WARP: usize = 32;

/// A value that each thread of a warp has.
pub type PerLane<T> = [T; WARP];

/// What each thread computes.
pub fn per_lane<T>(of: impl FnMut(usize) -> T) -> PerLane<T> {
    std::array::from_fn(of)
}

/// The threads for which `holds`, as a mask.
pub fn ballot(holds: &PerLane<bool>) -> u32 {
    holds.iter().enumerate().fold(0, |mask, (lane, &holds)| mask | u32::from(holds) << lane)
}

/// The threads before `lane`, as a mask.
pub fn before(lane: usize) -> u32 {
    (1 << lane) - 1
}

/// What thread `from[lane] mod 32` has.
pub fn shfl<T: Copy>(value: &PerLane<T>, from: &PerLane<usize>) -> PerLane<T> {
    per_lane(|lane| value[from[lane] % WARP])
}

/// What the thread `by` threads before has; the thread's own value where there is none.
fn shfl_up(value: &PerLane<u32>, by: usize) -> PerLane<u32> {
    per_lane(|lane| value[if lane >= by { lane - by } else { lane }])
}

/// The sum of the values up to and including each thread's: five shuffles.
pub fn inclusive_scan(mut value: PerLane<u32>) -> PerLane<u32> {
    for by in [1, 2, 4, 8, 16] {
        let other = shfl_up(&value, by);
        value = per_lane(|lane| if lane >= by { value[lane] + other[lane] } else { value[lane] });
    }
    value
}

/// What `combine` makes of the values of all threads, in every thread: five shuffles.
pub fn reduce<T: Copy>(mut value: PerLane<T>, combine: impl Fn(T, T) -> T) -> T {
    for by in [16, 8, 4, 2, 1] {
        let other = shfl(&value, &per_lane(|lane| lane ^ by));
        value = per_lane(|lane| combine(value[lane], other[lane]));
    }
    value[0]
}
