//! A local folder as an object store: the regular files below it. Links and special files are no objects, and nothing is read, written
//! or removed behind them.

use crate::names::{self, BRANCHES, LEASES, SHORTCUTS, STORE};
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use std::fmt;
use std::fs::{FileType, Metadata};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A folder has no `store.json` any more: the store was moved away, or its file system was unmounted.
#[derive(Debug)]
pub(crate) struct MissingStore(pub String);

impl std::error::Error for MissingStore {}

impl fmt::Display for MissingStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} has no {STORE}", self.0)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Folder {
    root: Arc<Path>,
    inner: Arc<LocalFileSystem>,
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Folder {
    pub fn new(root: &Path) -> Result<Self> {
        let inner = Arc::new(LocalFileSystem::new_with_prefix(root)?.with_fsync(true));
        Ok(Self { root: root.canonicalize().map_err(|e| failed(root, e))?.into(), inner })
    }

    /// Refuses a folder that is no store, so that nothing is written to what is left where a store was.
    fn check(&self) -> Result<()> {
        match self.find(&ObjectPath::from(STORE))? {
            Some(_) => Ok(()),
            None => Err(Error::NotSupported { source: MissingStore(self.root.display().to_string()).into() }),
        }
    }

    /// The file of an object.
    ///
    /// # Errors
    /// [`Error::NotSupported`] if it is no regular file, or in folders that are links: what is behind links is not the store's.
    fn find(&self, location: &ObjectPath) -> Result<Option<Metadata>> {
        let mut path = self.root.to_path_buf();
        let mut found = None;
        for part in location.parts() {
            if let Some(before) = found.as_ref().filter(|before: &&Metadata| !before.is_dir()) {
                return Err(unexpected(&path, before.file_type()));
            }
            path.push(part.as_ref());
            found = match path.symlink_metadata() {
                Ok(found) => Some(found),
                Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(None),
                Err(e) => return Err(failed(&path, e)),
            };
        }
        match found {
            Some(found) if !found.is_file() => Err(unexpected(&path, found.file_type())),
            found => Ok(found),
        }
    }

    fn found(&self, location: &ObjectPath) -> Result<Metadata> {
        match self.find(location)? {
            Some(found) => Ok(found),
            None => {
                if location.as_ref() != STORE {
                    self.check()?;
                }
                Err(gone(location))
            }
        }
    }

    /// Refuses an object that would be written behind a link.
    fn check_parents(&self, location: &ObjectPath) -> Result<()> {
        let mut path = self.root.to_path_buf();
        let parts: Vec<_> = location.parts().collect();
        for part in &parts[..parts.len().saturating_sub(1)] {
            path.push(part.as_ref());
            match path.symlink_metadata() {
                Ok(found) if found.is_dir() => {}
                Ok(found) => return Err(unexpected(&path, found.file_type())),
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(e) => return Err(failed(&path, e)),
            }
        }
        Ok(())
    }

    /// The regular files below a folder. If a list without some of them would be dangerous, anything else is refused that has the name
    /// of an object or a folder of the store.
    fn walk(&self, prefix: Option<&ObjectPath>, after: Option<&ObjectPath>) -> Result<Vec<ObjectMeta>> {
        self.check()?;
        let prefix = prefix.cloned().unwrap_or_default();
        let is_strict = prefix.parts().next().is_some_and(|part| [BRANCHES, SHORTCUTS, LEASES].contains(&part.as_ref()));
        let (mut found, mut open) = (Vec::new(), Vec::new());
        let mut path = self.root.to_path_buf();
        for part in prefix.parts() {
            path.push(part.as_ref());
            match path.symlink_metadata() {
                Ok(found) if found.is_dir() => {}
                Ok(found) => return Err(unexpected(&path, found.file_type())),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    self.check()?;
                    return Ok(found);
                }
                Err(e) => return Err(failed(&path, e)),
            }
        }
        open.push((path, prefix));
        while let Some((path, below)) = open.pop() {
            let entries = match path.read_dir() {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(failed(&path, e)),
            };
            for entry in entries {
                let entry = entry.map_err(|e| failed(&path, e))?;
                // What has another name is not the store's; nor are files that are being written.
                let Ok(name) = entry.file_name().into_string() else { continue };
                let Some(location) =
                    ObjectPath::parse(&name).ok().filter(|_| !name.contains('#')).map(|_| below.clone().join(name))
                else {
                    continue;
                };
                let kind = entry.file_type().map_err(|e| failed(&entry.path(), e))?;
                let (is_object, is_folder) = (names::is_of_store(location.as_ref()), names::is_folder(location.as_ref()));
                if is_strict && (is_object && !kind.is_file() || is_folder && !kind.is_dir()) {
                    return Err(unexpected(&entry.path(), kind));
                }
                if kind.is_dir() {
                    open.push((entry.path(), location));
                } else if kind.is_file() {
                    let is_listed = after.is_none_or(|after| location > *after);
                    match entry.metadata() {
                        Ok(of_file) if is_listed => found.push(meta(location, &of_file)?),
                        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(&entry.path(), e)),
                        _ => {}
                    }
                }
            }
        }
        self.check()?;
        Ok(found)
    }

    fn listed(&self, prefix: Option<&ObjectPath>, after: Option<&ObjectPath>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (folder, prefix, after) = (self.clone(), prefix.cloned(), after.cloned());
        let walk = move || folder.walk(prefix.as_ref(), after.as_ref());
        let listed = async move {
            // Threads for folders are no threads of a runtime, and may block.
            let walked = match tokio::runtime::Handle::try_current() {
                Ok(_) => tokio::task::spawn_blocking(walk).await.unwrap_or_else(|source| Err(Error::JoinError { source })),
                Err(_) => walk(),
            };
            stream::iter(walked.map_or_else(|error| vec![Err(error)], |found| found.into_iter().map(Ok).collect()))
        };
        stream::once(listed).flatten().boxed()
    }
}

fn meta(location: ObjectPath, found: &Metadata) -> Result<ObjectMeta> {
    let modified = found.modified().map_err(|e| failed(Path::new(location.as_ref()), e))?;
    #[cfg(unix)]
    let file = std::os::unix::fs::MetadataExt::ino(found);
    #[cfg(not(unix))]
    let file = 0;
    let e_tag = modified.duration_since(std::time::UNIX_EPOCH).ok().map(|age| format!("{file:x}-{:x}", age.as_nanos()));
    Ok(ObjectMeta { location, last_modified: modified.into(), size: found.len(), e_tag, version: None })
}

fn gone(location: &ObjectPath) -> Error {
    Error::NotFound { path: location.to_string(), source: "there is no regular file of this name".into() }
}

fn failed(path: &Path, source: io::Error) -> Error {
    let source = format!("{}: {source}", path.display()).into();
    Error::Generic { store: "LocalFileSystem", source }
}

/// Whether files can be created in a folder, but no second name of one.
fn lacks_hard_links(folder: &Path) -> bool {
    let Ok(place) = tpde::TemporaryFolder::create_in(folder) else { return false };
    let [file, link] = ["file", "link"].map(|name| place.path().join(name));
    std::fs::write(&file, "").is_ok() && std::fs::hard_link(&file, &link).is_err()
}

fn unexpected(path: &Path, found: FileType) -> Error {
    let found = match found {
        _ if found.is_symlink() => "a link",
        _ if found.is_dir() => "a folder",
        _ if found.is_file() => "a file",
        _ => "a special file",
    };
    let source = format!("expected a file or a folder of the store, found {found}: {}", path.display()).into();
    Error::NotSupported { source }
}

#[async_trait::async_trait]
impl ObjectStore for Folder {
    async fn put_opts(&self, location: &ObjectPath, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        if location.as_ref() != STORE {
            self.check()?;
        }
        self.check_parents(location)?;
        let must_be_new = options.mode == PutMode::Create;
        let outcome = self.inner.put_opts(location, payload, options).await;
        if location.as_ref() != STORE
            && let Err(vanished) = self.check()
        {
            // It may have been written to what is left where the store was.
            let _ = self.inner.delete(location).await;
            return Err(vanished);
        }
        match outcome {
            Err(Error::Generic { .. }) if must_be_new && lacks_hard_links(&self.root) => {
                let reason = "its file system has no hard links, with which a store creates a file only if it is new";
                Err(Error::NotSupported { source: format!("{}: {reason}", self.root.display()).into() })
            }
            outcome => outcome,
        }
    }

    async fn put_multipart_opts(&self, location: &ObjectPath, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        Err(Error::NotSupported { source: format!("{location}: no object is uploaded in parts").into() })
    }

    async fn get_opts(&self, location: &ObjectPath, options: GetOptions) -> Result<GetResult> {
        self.found(location)?;
        match self.inner.get_opts(location, options).await {
            // It was deleted or moved since, or the whole store was.
            Err(Error::NotFound { .. }) => Err(self.found(location).err().unwrap_or_else(|| gone(location))),
            outcome => outcome,
        }
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<ObjectPath>>) -> BoxStream<'static, Result<ObjectPath>> {
        let folder = self.clone();
        let delete = move |location: Result<ObjectPath>| {
            let folder = folder.clone();
            async move {
                let location = location?;
                folder.check()?;
                folder.found(&location)?;
                folder.inner.delete(&location).await?;
                Ok(location)
            }
        };
        locations.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&ObjectPath>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listed(prefix, None)
    }

    fn list_with_offset(&self, prefix: Option<&ObjectPath>, offset: &ObjectPath) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listed(prefix, Some(offset))
    }

    async fn list_with_delimiter(&self, prefix: Option<&ObjectPath>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &ObjectPath, to: &ObjectPath, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
