//! Files as sources of bytes: read in ranges, and optionally mapped.

use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tpde_core::error::{Error, Result};
#[cfg(feature = "mmap")]
use tpde_core::source::slice;
use tpde_core::source::{Buffer, Source};

/// Two writes to a file within this time may leave the same time stamps. It is two ticks of the slowest common kernel timer.
const GRANULARITY: Duration = Duration::from_millis(20);

/// Identifies a file and its content. A write changes the times; a replacement changes the inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    /// Last change of the content: seconds and nanoseconds.
    modified: (i64, i64),
    /// Last change of the inode: seconds and nanoseconds.
    changed: (i64, i64),
}

impl From<&Metadata> for Stamp {
    fn from(metadata: &Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl Stamp {
    /// Time since the last change of the inode; `None` if its time stamp is in the future.
    fn age(&self) -> Option<Duration> {
        let (seconds, nanoseconds) = self.changed;
        let changed = Duration::new(u64::try_from(seconds).ok()?, u32::try_from(nanoseconds).ok()?);
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?.checked_sub(changed)
    }
}

/// A cache of open files, for checkpoints that have more files than a process may open.
#[derive(Debug, Default)]
pub(crate) struct OpenFiles(Mutex<VecDeque<(Stamp, Arc<File>)>>);

impl OpenFiles {
    /// Maximum number of open files in the cache. Each thread may hold one more.
    pub const MAX_OPEN: usize = 16;

    /// Returns the file with this path and stamp: from the cache, or newly opened.
    fn get(&self, path: &Path, stamp: &Stamp) -> Result<Arc<File>> {
        let open = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = Self::find(&mut open(), stamp) {
            return Ok(file);
        }
        let (file, metadata) = open_regular(path)?;
        if Stamp::from(&metadata) != *stamp {
            return Err(changed(path));
        }
        let file = Arc::new(file);
        let mut open = open();
        if open.len() == Self::MAX_OPEN {
            open.pop_front();
        }
        open.push_back((*stamp, file.clone()));
        Ok(file)
    }

    /// Finds an open file and marks it as the most recently used.
    fn find(open: &mut VecDeque<(Stamp, Arc<File>)>, stamp: &Stamp) -> Option<Arc<File>> {
        let at = open.iter().rposition(|(other, _)| other == stamp)?;
        let entry = open.remove(at)?;
        let file = entry.1.clone();
        open.push_back(entry);
        Some(file)
    }
}

/// Opens a regular file. Follows links.
fn open_regular(path: &Path) -> Result<(File, Metadata)> {
    use std::os::unix::fs::OpenOptionsExt;
    // Without O_NONBLOCK, opening a pipe would wait for a writer.
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(nonblocking).open(path).map_err(|e| Error::io("open", path, e))?;
    let metadata = file.metadata().map_err(|e| Error::io("open", path, e))?;
    if !metadata.is_file() {
        let reason = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is not a regular file");
        return Err(Error::io("open", path, reason));
    }
    Ok((file, metadata))
}

fn changed(path: &Path) -> Error {
    Error::Changed { what: path.display().to_string() }
}

/// A regular file, read at offsets.
#[derive(Debug)]
pub struct FileSource {
    file: Handle,
    path: PathBuf,
    stamp: Stamp,
}

#[derive(Debug)]
enum Handle {
    Open(File),
    /// Opened on demand and closed when other files of the cache are used.
    Shared(Arc<OpenFiles>),
}

impl FileSource {
    /// Opens a regular file. Follows links.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be opened or is not a regular file. The call does not block on a pipe.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, metadata) = open_regular(path)?;
        Ok(Self { file: Handle::Open(file), path: path.to_owned(), stamp: Stamp::from(&metadata) })
    }

    /// Like [`FileSource::open`], for many files that share a bounded number of descriptors. If the file is replaced before it is
    /// read, reading returns [`Error::Changed`].
    pub(crate) fn open_shared(path: &Path, files: &Arc<OpenFiles>) -> Result<Self> {
        let (_, metadata) = open_regular(path)?;
        Ok(Self { file: Handle::Shared(files.clone()), path: path.to_owned(), stamp: Stamp::from(&metadata) })
    }

    /// Waits until a change of the file would give other time stamps. From then on, [`FileSource::check_unchanged`] detects every
    /// change, except those that it names. Waits only if the file was written within the last 20 ms, and at most 20 ms.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Changed`].
    pub fn settle(&mut self) -> Result<()> {
        if let Some(remaining) = self.stamp.age().and_then(|age| GRANULARITY.checked_sub(age)) {
            std::thread::sleep(remaining);
            let metadata = self.with_file(|file| file.metadata().map_err(|e| Error::io("look at", &self.path, e)))?;
            self.stamp = Stamp::from(&metadata);
        }
        Ok(())
    }

    /// Checks that the path still leads to the opened file and that the file has not changed. Compares device, inode, size, and
    /// the times of the last changes of content and inode.
    ///
    /// A change that leaves all of these equal is not detected. Two causes are possible: a file system with time stamps coarser
    /// than 20 ms, or a writer that has mapped the file and whose pages are not yet written back.
    ///
    /// # Errors
    /// [`Error::Changed`] if they differ or the path no longer exists; [`Error::Io`].
    pub fn check_unchanged(&self) -> Result<()> {
        // An equal stamp includes device and inode, so the path leads to the opened file. The descriptor need not be checked.
        match std::fs::metadata(&self.path) {
            Ok(metadata) if Stamp::from(&metadata) == self.stamp => Ok(()),
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("look at", &self.path, e)),
            _ => Err(changed(&self.path)),
        }
    }

    fn with_file<R>(&self, work: impl FnOnce(&File) -> Result<R>) -> Result<R> {
        match &self.file {
            Handle::Open(file) => work(file),
            Handle::Shared(files) => work(&*files.get(&self.path, &self.stamp)?),
        }
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the whole file into memory.
    ///
    /// # Errors
    /// [`Error::Limit`] if the file is larger than `limit` bytes; [`Error::Io`] if reading fails or the size has changed.
    pub fn read_all(&self, what: &'static str, limit: u64) -> Result<Buffer> {
        use std::os::unix::fs::FileExt;
        let size = self.size();
        Error::check_limit(what, limit, size)?;
        let error = |e| Error::io("read", &self.path, e);
        let mut buffer = ZeroedMemory::new(size as usize).map_err(error)?;
        self.read(0, buffer.as_mut())?;
        if self.with_file(|file| file.read_at(&mut [0], size).map_err(error))? > 0 {
            return Err(error(std::io::Error::other("it grew while it was being read")));
        }
        Ok(buffer.into())
    }
}

/// Zeroed memory. An error if there is not so much.
pub(crate) fn zeroed(size: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let size = usize::try_from(size).ok().filter(|&size| bytes.try_reserve_exact(size).is_ok());
    bytes.resize(size.ok_or(std::io::ErrorKind::OutOfMemory)?, 0);
    Ok(bytes)
}

/// Zeroed memory for the bytes of a file.
enum ZeroedMemory {
    Heap(Vec<u8>),
    /// Anonymous memory in large pages. With small pages, allocating memory for a million records takes as long as validating them.
    #[cfg(all(feature = "mmap", target_os = "linux"))]
    LargePages(memmap2::MmapMut),
}

impl ZeroedMemory {
    fn new(size: usize) -> std::io::Result<Self> {
        #[cfg(all(feature = "mmap", target_os = "linux"))]
        if size >= 4 << 20 {
            let map = memmap2::MmapMut::map_anon(size)?;
            // This is only a hint, so failure is ignored: small pages only make allocation slower.
            let _ = map.advise(memmap2::Advice::HugePage);
            return Ok(Self::LargePages(map));
        }
        zeroed(size as u64).map(Self::Heap)
    }

    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(bytes) => bytes,
            #[cfg(all(feature = "mmap", target_os = "linux"))]
            Self::LargePages(map) => map,
        }
    }
}

impl From<ZeroedMemory> for Buffer {
    fn from(memory: ZeroedMemory) -> Self {
        match memory {
            ZeroedMemory::Heap(bytes) => bytes.into(),
            // SAFETY: only this process has the memory, and nothing can write to it once it is in the buffer.
            #[cfg(all(feature = "mmap", target_os = "linux"))]
            ZeroedMemory::LargePages(map) => unsafe { Buffer::new(map) },
        }
    }
}

impl Source for FileSource {
    fn size(&self) -> u64 {
        self.stamp.size
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        use std::os::unix::fs::FileExt;
        self.with_file(|file| {
            file.read_exact_at(out, offset).map_err(|e| match e.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    let size = self.size();
                    let reason =
                        format!("it ends before byte {}; when it was opened it had {size} bytes", offset + out.len() as u64);
                    Error::io("read", &self.path, std::io::Error::new(e.kind(), reason))
                }
                _ => Error::io("read", &self.path, e),
            })
        })
    }
}

/// A mapped file: its bytes are borrowed where the system caches them, instead of copied. If another process shortens the file while
/// it is mapped, this process ends with SIGBUS, so use it only for files that nothing else writes.
///
/// [`Source::in_memory`] is `None`: the promise of [`MappedSource::open`] is not enforced, so what must not change between two reads
/// is copied or compared again.
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
    /// [`Error::Io`] if the file cannot be opened or mapped.
    pub unsafe fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let source = FileSource::open(path)?;
        source.with_file(|file| {
            // SAFETY: the caller guarantees that the file does not change or shrink while it is mapped (`# Safety` of `open`).
            let map = unsafe { memmap2::Mmap::map(file) };
            map.map(Self).map_err(|e| Error::io("map", path, e))
        })
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;

    fn file(content: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, content).unwrap();
        (folder, path)
    }

    #[test]
    fn a_file_that_grows_while_it_is_read_whole_is_refused() {
        let (_folder, path) = file(b"1234");
        let source = FileSource::open(&path).unwrap();
        assert_eq!(&source.read_all("size", 4).unwrap()[..], b"1234");
        File::options().append(true).open(&path).unwrap().write_all(b"5").unwrap();
        let error = source.read_all("size", 4).unwrap_err();
        assert!(matches!(&error, Error::Io { .. }) && error.to_string().contains("grew"), "{error}");
    }

    #[test]
    fn a_file_above_the_limit_is_refused_before_memory_is_allocated() {
        let (_folder, path) = file(b"12345");
        let error = FileSource::open(&path).unwrap().read_all("size", 4).unwrap_err();
        assert!(matches!(error, Error::Limit { limit: 4, found: 5, .. }), "{error}");
        // A sparse file, larger than the memory of a machine.
        File::options().write(true).open(&path).unwrap().set_len(1 << 42).unwrap();
        let error = FileSource::open(&path).unwrap().read_all("size", 1 << 30).unwrap_err();
        assert!(matches!(error, Error::Limit { .. }), "{error}");
    }

    #[cfg(feature = "mmap")]
    #[test]
    fn a_mapped_file_is_borrowed_and_may_still_change() {
        for content in [&b""[..], b"12345"] {
            let (_folder, path) = file(content);
            // SAFETY: only this test has the file, and it is unchanged while it is mapped.
            let source = unsafe { MappedSource::open(&path).unwrap() };
            let mut scratch = Vec::new();
            assert_eq!(source.bytes(0, content.len(), &mut scratch).unwrap(), content);
            assert!(scratch.is_empty() && source.size() == content.len() as u64);
            assert!(matches!(source.read(0, &mut [0; 6]), Err(Error::InvalidArgument(_))));
            // Else payloads would not be kept or compared between the passes of `InPlace::AllChecked`.
            assert!(source.in_memory().is_none());
        }
    }

    #[test]
    fn a_file_that_shrinks_is_an_error_of_the_system() {
        let (_folder, path) = file(b"12345");
        let source = FileSource::open(&path).unwrap();
        fs::write(&path, b"12").unwrap();
        let error = source.read(0, &mut [0; 5]).unwrap_err();
        assert!(matches!(&error, Error::Io { .. }) && error.to_string().contains("it had 5 bytes"), "{error}");
    }

    #[test]
    fn every_change_is_noticed() {
        type Change = fn(&Path);
        let changes: [(&str, Change); 5] = [
            ("written", |path| fs::write(path, b"54321").unwrap()),
            ("cut", |path| fs::write(path, b"1").unwrap()),
            ("mode", |path| fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap()),
            ("replaced", |path| {
                fs::write(path.with_extension("new"), b"12345").unwrap();
                fs::rename(path.with_extension("new"), path).unwrap();
            }),
            ("removed", |path| fs::remove_file(path).unwrap()),
        ];
        for (what, change) in changes {
            let (_folder, path) = file(b"12345");
            let mut source = FileSource::open(&path).unwrap();
            // The file has just been written, so this waits.
            source.settle().unwrap();
            source.check_unchanged().unwrap();
            change(&path);
            assert!(matches!(source.check_unchanged(), Err(Error::Changed { .. })), "{what}");
        }
    }

    #[test]
    fn files_that_share_descriptors_are_read_like_others_and_notice_a_replacement() {
        let folder = tempfile::tempdir().unwrap();
        let files = Arc::new(OpenFiles::default());
        let path = |i: usize| folder.path().join(i.to_string());
        let count = 3 * OpenFiles::MAX_OPEN;
        let sources: Vec<_> = (0..count)
            .map(|i| {
                fs::write(path(i), i.to_le_bytes()).unwrap();
                FileSource::open_shared(&path(i), &files).unwrap()
            })
            .collect();
        for i in (0..count).chain((0..count).rev()) {
            let mut read = [0; 8];
            sources[i].read(0, &mut read).unwrap();
            assert_eq!(usize::from_le_bytes(read), i);
            assert!(files.0.lock().unwrap().len() <= OpenFiles::MAX_OPEN);
        }
        let last = count - 1; // no longer in the cache
        fs::write(path(count), last.to_le_bytes()).unwrap();
        fs::rename(path(count), path(last)).unwrap();
        assert!(matches!(sources[last].read(0, &mut [0; 8]), Err(Error::Changed { .. })));
    }
}
