//! Layout of device memory with several parts.

/// Alignment of the parts, in bytes.
pub(crate) const MEMORY_ALIGN: u64 = 256;

/// Assigns offsets to consecutive parts, each a multiple of [`MEMORY_ALIGN`].
#[derive(Debug, Default)]
pub(crate) struct MemoryLayout {
    end: u64,
}

impl MemoryLayout {
    /// Adds a part of `bytes` bytes, and returns its offset.
    pub fn add(&mut self, bytes: u64) -> u64 {
        let start = self.end;
        self.end = (start + bytes).next_multiple_of(MEMORY_ALIGN);
        start
    }

    /// Adds parts of these sizes.
    pub fn add_all<const N: usize>(&mut self, sizes: [u64; N]) -> [u64; N] {
        sizes.map(|bytes| self.add(bytes))
    }

    /// Returns the size of all parts so far in bytes, including padding.
    pub fn bytes(&self) -> u64 {
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_aligned_and_do_not_overlap() {
        let mut layout = MemoryLayout::default();
        assert_eq!(layout.add_all([1, 0, 256, 257]), [0, 256, 256, 512]);
        assert_eq!(layout.bytes(), 1024);
        assert_eq!((layout.add(0), layout.bytes()), (1024, 1024));
    }
}
