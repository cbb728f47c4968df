//! Bytes at offsets: memory, files read by ranges, and, where asked for, mapped files.

use crate::error::{Error, Result};
use std::fs::File;
use std::path::{Path, PathBuf};

/// A run of bytes that can be read anywhere, by many threads at once.
pub trait Source: Sync {
    /// How many bytes there are.
    fn size(&self) -> u64;

    /// Fills `out` from `offset` on.
    ///
    /// # Errors
    /// [`Error::Io`] if the bytes are not there (any more), [`Error::Misuse`] for memory that is too short.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// `size` bytes from `offset` on: in place where the source can, else through `scratch`.
    ///
    /// # Errors
    /// As for [`Source::read`].
    fn bytes<'a>(&'a self, offset: u64, size: usize, scratch: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        if scratch.len() < size {
            scratch.resize(size, 0);
        }
        let out = &mut scratch[..size];
        self.read(offset, out)?;
        Ok(out)
    }
}

fn slice(bytes: &[u8], offset: u64, size: usize) -> Result<&[u8]> {
    let range = usize::try_from(offset).ok().and_then(|start| Some(start..start.checked_add(size)?));
    range
        .and_then(|range| bytes.get(range))
        .ok_or_else(|| Error::Misuse(format!("{size} bytes from {offset} on do not lie in {} bytes", bytes.len())))
}

macro_rules! in_memory {
    ($($type:ty),+) => {$(
        impl Source for $type {
            fn size(&self) -> u64 {
                self.len() as u64
            }
            fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
                out.copy_from_slice(slice(self, offset, out.len())?);
                Ok(())
            }
            fn bytes<'a>(&'a self, offset: u64, size: usize, _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
                slice(self, offset, size)
            }
        }
    )+};
}

in_memory!(&[u8], Vec<u8>);

/// A regular file, read by ranges at positions.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    path: PathBuf,
    size: u64,
}

impl FileSource {
    /// Opens a regular file, through links.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened; a folder, a device or a pipe is refused without waiting for it.
    pub fn open(path: &Path) -> Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        // Opening a pipe would wait for a writer.
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file = File::options().read(true).custom_flags(nonblocking).open(path).map_err(|e| Error::io("open", path, e))?;
        let metadata = file.metadata().map_err(|e| Error::io("open", path, e))?;
        if !metadata.is_file() {
            let reason = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is not a regular file");
            return Err(Error::io("open", path, reason));
        }
        Ok(Self { file, path: path.to_owned(), size: metadata.len() })
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file in memory of our own.
    ///
    /// # Errors
    /// [`Error::Limit`] if it is larger than `limit`, [`Error::Io`] if reading fails or finds another size.
    pub fn read_all(&self, what: &'static str, limit: u64) -> Result<Buffer> {
        use std::os::unix::fs::FileExt;
        if self.size > limit {
            return Err(Error::Limit { what, limit, found: self.size });
        }
        let error = |e| Error::io("read", &self.path, e);
        let mut buffer = Buffer::zeroed(self.size as usize).map_err(error)?;
        self.read(0, buffer.as_mut())?;
        if self.file.read_at(&mut [0], self.size).map_err(error)? > 0 {
            return Err(error(std::io::Error::other("it grew while it was read")));
        }
        Ok(buffer)
    }
}

/// Bytes in memory of our own, which nobody else can change.
#[derive(Debug)]
pub struct Buffer(Memory);

#[derive(Debug)]
enum Memory {
    Heap(Vec<u8>),
    /// Fresh memory in large pages: a million records in small ones take as long to be given as to be checked.
    #[cfg(all(feature = "mmap", target_os = "linux"))]
    LargePages(memmap2::MmapMut),
}

impl Buffer {
    fn zeroed(size: usize) -> std::io::Result<Self> {
        #[cfg(all(feature = "mmap", target_os = "linux"))]
        if size >= 4 << 20 {
            let map = memmap2::MmapMut::map_anon(size)?;
            // A hint: without large pages the memory is the same, only slower to get.
            let _ = map.advise(memmap2::Advice::HugePage);
            return Ok(Self(Memory::LargePages(map)));
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(size).map_err(|_| std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
        bytes.resize(size, 0);
        Ok(bytes.into())
    }

    fn as_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Memory::Heap(bytes) => bytes,
            #[cfg(all(feature = "mmap", target_os = "linux"))]
            Memory::LargePages(map) => map,
        }
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Memory::Heap(bytes))
    }
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Memory::Heap(bytes) => bytes,
            #[cfg(all(feature = "mmap", target_os = "linux"))]
            Memory::LargePages(map) => map,
        }
    }
}

impl Source for FileSource {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        use std::os::unix::fs::FileExt;
        self.file.read_exact_at(out, offset).map_err(|e| Error::io("read", &self.path, e))
    }
}

/// A mapped file. Faster than [`FileSource`] for scattered reads of cached files, but a file that is cut short while it is
/// mapped ends the process with SIGBUS: only for files that nothing else writes.
#[cfg(feature = "mmap")]
#[derive(Debug)]
pub struct MappedSource(memmap2::Mmap);

#[cfg(feature = "mmap")]
impl MappedSource {
    /// Maps a regular file.
    ///
    /// # Safety
    /// No process may change or shorten the file while it is mapped.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened or mapped.
    pub unsafe fn open(path: &Path) -> Result<Self> {
        let source = FileSource::open(path)?;
        // SAFETY: the caller promises that the file does not change.
        let map = unsafe { memmap2::Mmap::map(&source.file) };
        map.map(Self).map_err(|e| Error::io("map", path, e))
    }
}

#[cfg(feature = "mmap")]
impl Source for MappedSource {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(slice(&self.0, offset, out.len())?);
        Ok(())
    }

    fn bytes<'a>(&'a self, offset: u64, size: usize, _: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        slice(&self.0, offset, size)
    }
}
