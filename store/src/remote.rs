//! Requests to the object store, with repetitions. The only module that knows tokio and `object_store`.

use crate::error::{Error, Result};
use crate::folder::{Folder, Vanished};
use futures_util::TryStreamExt;
use object_store::path::Path as ObjectPath;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::runtime::Runtime;
use tpde::Watch;

/// Number of requests after which an error is final.
const ATTEMPTS: u32 = 4;
/// Wait before the first repetition. Each further wait is twice as long.
const BACKOFF: Duration = Duration::from_millis(50);
/// Number of concurrent requests.
pub(crate) const IN_FLIGHT: usize = 8;

/// Maximum size of the objects that are kept in memory.
const KNOWN_BYTES: usize = 16 << 20;

/// Interval at which a call that waits for a request asks its watcher whether to go on.
const LOOK: Duration = Duration::from_millis(50);

/// A watcher that requests can hold.
pub(crate) type SharedWatch = Arc<dyn Watch + Send + Sync>;

/// Writes that are repeated in the background until this is dropped.
pub(crate) struct Repeating(tokio::task::AbortHandle);

impl Drop for Repeating {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An object store, and a prefix in it.
#[derive(Clone)]
pub struct Remote {
    shared: Arc<Shared>,
    /// Can end calls that wait for a request.
    watch: Option<SharedWatch>,
}

struct Shared {
    store: Arc<dyn ObjectStore>,
    prefix: ObjectPath,
    location: String,
    /// Taken when the last handle is dropped.
    runtime: Option<Runtime>,
    /// Whether requests run on the caller's thread, one after the other: for simulations.
    is_sequential: bool,
    /// Whether this process has seen that the object store creates an object only if it does not exist.
    is_probed: AtomicBool,
    known: Arc<Mutex<Known>>,
}

/// Objects that were read, as long as a list shows that they are unchanged.
#[derive(Default)]
struct Known {
    objects: HashMap<String, (Stamp, Arc<[u8]>)>,
    /// Size of all objects. Above [`KNOWN_BYTES`], all are forgotten.
    bytes: usize,
}

/// What a list says of an object: size, time, and the store's tag. It differs if the object was written again.
type Stamp = (u64, i64, Option<String>);

impl Known {
    fn find(&self, name: &str, stamp: &Stamp) -> Option<Arc<[u8]>> {
        self.objects.get(name).filter(|(known, _)| known == stamp).map(|(_, bytes)| bytes.clone())
    }

    fn add(&mut self, name: String, stamp: Stamp, bytes: Arc<[u8]>) {
        if self.bytes + bytes.len() > KNOWN_BYTES {
            *self = Self::default();
        }
        self.bytes += bytes.len();
        if let Some((_, before)) = self.objects.insert(name, (stamp, bytes)) {
            self.bytes -= before.len();
        }
    }
}

fn locked(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Shared {
    fn drop(&mut self) {
        // A plain drop waits, and panics on a thread of another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// An object, as a list shows it.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub name: String,
    pub bytes: u64,
    /// Milliseconds since 1970, by the store's clock.
    pub modified: i64,
    stamp: Stamp,
}

/// A request that runs in the background.
pub(crate) struct Pending<T> {
    result: mpsc::Receiver<T>,
    watch: Option<SharedWatch>,
}

impl<T> Pending<T> {
    /// Waits for the result. If the watcher ends the call first, the request goes on in the background.
    pub fn wait(self) -> Result<T> {
        loop {
            match (self.result.recv_timeout(LOOK), &self.watch) {
                (Ok(result), _) => return Ok(result),
                (Err(RecvTimeoutError::Timeout), None) => {}
                (Err(RecvTimeoutError::Timeout), Some(watch)) => watch.done(0)?,
                (Err(RecvTimeoutError::Disconnected), _) => {
                    return Err(Error::Request {
                        action: "finish",
                        object: "a request".into(),
                        source: "its task ended without a result".into(),
                    });
                }
            }
        }
    }
}

impl Remote {
    /// Opens a location: a folder, or a URL such as `s3://BUCKET/PREFIX`. `create` makes a folder that does not exist.
    pub fn open(location: &str, create: bool) -> Result<Self> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| Error::Request {
            action: "open",
            object: location.to_owned(),
            source,
        };
        if location.contains("://") && !location.starts_with("file://") {
            let url = url::Url::parse(location).map_err(|e| failed(e.into()))?;
            // Only the clouds' own variables: without a prefix, `TOKEN` would be a setting too.
            let is_cloud = |key: &str| ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|prefix| key.starts_with(prefix));
            let variables =
                std::env::vars_os().filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)));
            let variables = variables.filter(|(key, _)| is_cloud(key));
            let (store, prefix) = object_store::parse_url_opts(&url, variables).map_err(|e| failed(e.into()))?;
            return Self::new(store.into(), prefix, location);
        }
        let folder = Path::new(location.strip_prefix("file://").unwrap_or(location));
        if create {
            std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
        }
        if !folder.is_dir() {
            return Err(Error::NotAStore { location: location.to_owned() });
        }
        let store = Folder::new(folder).map_err(|e| failed(e.into()))?;
        Self::new(Arc::new(store), ObjectPath::default(), location)
    }

    pub fn new(store: Arc<dyn ObjectStore>, prefix: ObjectPath, location: &str) -> Result<Self> {
        Self::with(store, prefix, location, false)
    }

    /// [`Remote::new`]. If `is_sequential`, requests run on the caller's thread, one after the other, and nothing in the background.
    pub fn with(store: Arc<dyn ObjectStore>, prefix: ObjectPath, location: &str, is_sequential: bool) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).thread_name("tpde-store").enable_all().build();
        let runtime = Some(runtime.map_err(|e| Error::io("start", Path::new("the threads of the store"), e))?);
        Ok(Self {
            shared: Arc::new(Shared {
                store,
                prefix,
                location: location.to_owned(),
                runtime,
                is_sequential,
                is_probed: AtomicBool::new(false),
                known: Arc::default(),
            }),
            watch: None,
        })
    }

    /// The same object store. `watch` can end calls that wait for a request.
    pub fn watched(&self, watch: SharedWatch) -> Self {
        Self { shared: self.shared.clone(), watch: Some(watch) }
    }

    pub fn location(&self) -> &str {
        &self.shared.location
    }

    /// Starts a request. The caller's thread may belong to another runtime, so nothing here blocks on a runtime.
    fn start<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Pending<T> {
        let (sender, receiver) = mpsc::channel();
        if let Some(runtime) = &self.shared.runtime {
            if self.shared.is_sequential {
                let _ = sender.send(runtime.block_on(work));
                return Pending { result: receiver, watch: self.watch.clone() };
            }
            runtime.spawn(async move {
                let _ = sender.send(work.await);
            });
        }
        Pending { result: receiver, watch: self.watch.clone() }
    }

    fn path(&self, name: &str) -> ObjectPath {
        name.split('/').fold(self.shared.prefix.clone(), |path, part| path.join(part))
    }

    /// Writes an object whose content its name determines.
    pub fn put(&self, name: String, bytes: Vec<u8>) -> Pending<Result<()>> {
        let (store, path) = (self.shared.store.clone(), self.path(&name));
        self.start(async move {
            let payload = PutPayload::from(bytes);
            repeated("write", &name, || store.put(&path, payload.clone())).await.map(drop)
        })
    }

    /// Checks, once in a process, that the object store creates an object only if it does not exist. Two writers would otherwise
    /// overwrite each other's versions. `name` should exist, with these bytes.
    ///
    /// # Errors
    /// [`Error::NoPutIfAbsent`].
    pub fn probe(&self, name: &str, bytes: Vec<u8>) -> Result<()> {
        if !self.shared.is_probed.load(Relaxed) {
            // Twice, because it may have been removed before the first time.
            if !self.refuses_to_create(name, bytes.clone())? && !self.refuses_to_create(name, bytes)? {
                return Err(Error::NoPutIfAbsent { location: self.location().to_owned() });
            }
            self.shared.is_probed.store(true, Relaxed);
        }
        Ok(())
    }

    /// Whether the object store refuses to create an object, because it exists.
    fn refuses_to_create(&self, name: &str, bytes: Vec<u8>) -> Result<bool> {
        let (store, path, name) = (self.shared.store.clone(), self.path(name), name.to_owned());
        let refused = self.start(async move {
            let put = || store.put_opts(&path, PutPayload::from(bytes.clone()), PutMode::Create.into());
            repeated("create", &name, || async {
                match put().await {
                    Err(object_store::Error::AlreadyExists { .. }) => Ok(true),
                    other => other.map(|_| false),
                }
            })
            .await
        });
        refused.wait()?
    }

    /// Writes an empty object every `interval`. An error is no failure: the next one may succeed.
    pub fn repeat(&self, interval: Duration, name: String) -> Option<Repeating> {
        let (store, path) = (self.shared.store.clone(), self.path(&name));
        let runtime = self.shared.runtime.as_ref().filter(|_| !self.shared.is_sequential)?;
        let task = runtime.spawn(async move {
            loop {
                tokio::time::sleep(interval).await;
                if let Err(error) = store.put(&path, PutPayload::new()).await {
                    tracing::debug!(name, %error, "a lease was not renewed");
                }
            }
        });
        Some(Repeating(task.abort_handle()))
    }

    /// Creates an object unless it exists. Returns whether it was created.
    pub fn create(&self, name: &str, bytes: Vec<u8>) -> Result<bool> {
        let (store, path, name) = (self.shared.store.clone(), self.path(name), name.to_owned());
        let created = self.start(async move {
            let payload = PutPayload::from(bytes.clone());
            let put = || store.put_opts(&path, payload.clone(), PutMode::Create.into());
            let outcome = repeated("create", &name, || async {
                match put().await {
                    Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
                    other => other.map(|_| true),
                }
            });
            if outcome.await? {
                return Ok(true);
            }
            // An earlier attempt may have created the object although its answer was lost.
            let found = repeated("read", &name, || async { store.get(&path).await?.bytes().await }).await?;
            Ok(found[..] == bytes[..])
        });
        created.wait()?
    }

    /// Reads an object of at most `limit` bytes, or the range `range` of it. `None` if there is no such object.
    pub fn get(&self, name: String, range: Option<Range<u64>>, limit: u64) -> Pending<Result<Option<Vec<u8>>>> {
        let (store, path) = (self.shared.store.clone(), self.path(&name));
        self.start(async move { read(&store, &path, &name, range, limit).await })
    }

    /// Reads an object of at most `limit` bytes that a list has shown. It is read once, and again only after it was written again.
    /// `None` if there is no such object any more.
    pub fn get_listed(&self, entry: &Entry, limit: u64) -> Pending<Result<Option<Arc<[u8]>>>> {
        let (known, name, stamp) = (self.shared.known.clone(), entry.name.clone(), entry.stamp.clone());
        let (store, path) = (self.shared.store.clone(), self.path(&entry.name));
        if let Some(bytes) = locked(&known).find(&name, &stamp) {
            let (sender, result) = mpsc::channel();
            let _ = sender.send(Ok(Some(bytes)));
            return Pending { result, watch: self.watch.clone() };
        }
        self.start(async move {
            let bytes: Option<Arc<[u8]>> = read(&store, &path, &name, None, limit).await?.map(Into::into);
            if let Some(bytes) = &bytes {
                locked(&known).add(name, stamp, bytes.clone());
            }
            Ok(bytes)
        })
    }

    /// All objects below a prefix, in ascending order of name.
    pub fn list(&self, below: &str) -> Result<Vec<Entry>> {
        self.list_after(below, None)
    }

    /// The objects below a prefix whose names come after `after`, in ascending order of name.
    pub fn list_after(&self, below: &str, after: Option<&str>) -> Result<Vec<Entry>> {
        let (store, path, prefix) = (self.shared.store.clone(), self.path(below), self.shared.prefix.clone());
        let (below, after) = (below.to_owned(), after.map(|after| self.path(after)));
        let listed = self.start(async move {
            let list = || match &after {
                Some(after) => store.list_with_offset(Some(&path), after),
                None => store.list(Some(&path)),
            };
            let found = repeated("list", &below, || list().try_collect::<Vec<_>>()).await?;
            let name = |path: &ObjectPath| {
                let parts: Vec<_> = path.prefix_match(&prefix)?.map(|part| part.as_ref().to_owned()).collect();
                Some(parts.join("/"))
            };
            let entry = |meta: &object_store::ObjectMeta| {
                let (bytes, modified) = (meta.size, meta.last_modified.timestamp_millis());
                Some(Entry { name: name(&meta.location)?, bytes, modified, stamp: (bytes, modified, meta.e_tag.clone()) })
            };
            let mut entries: Vec<_> = found.iter().filter_map(entry).collect();
            entries.sort_by(|a, b| a.name.cmp(&b.name));
            Ok(entries)
        });
        listed.wait()?
    }

    /// Removes an object. One that does not exist is no error.
    pub fn delete(&self, name: &str) -> Result<()> {
        let (store, path, name) = (self.shared.store.clone(), self.path(name), name.to_owned());
        let deleted = self.start(async move {
            let delete = || async {
                match store.delete(&path).await {
                    Err(object_store::Error::NotFound { .. }) => Ok(()),
                    other => other,
                }
            };
            repeated("delete", &name, delete).await
        });
        deleted.wait()?
    }

    /// Starts requests for all items, [`IN_FLIGHT`] at a time, and passes the results on in order.
    pub fn each<I, T, R>(
        items: impl IntoIterator<Item = I>,
        start: impl Fn(&I) -> Pending<Result<T>>,
        mut done: impl FnMut(I, T) -> Result<R>,
    ) -> Result<()> {
        let mut pending: VecDeque<(I, Pending<Result<T>>)> = VecDeque::new();
        let mut items = items.into_iter();
        loop {
            while pending.len() < IN_FLIGHT {
                let Some(item) = items.next() else { break };
                let request = start(&item);
                pending.push_back((item, request));
            }
            let Some((item, request)) = pending.pop_front() else { return Ok(()) };
            done(item, request.wait()??)?;
        }
    }
}

/// Reads an object of at most `limit` bytes, or a range of it. `None` if there is no such object.
async fn read(
    store: &Arc<dyn ObjectStore>,
    path: &ObjectPath,
    name: &str,
    range: Option<Range<u64>>,
    limit: u64,
) -> Result<Option<Vec<u8>>> {
    let read = || async {
        let options = GetOptions { range: range.clone().map(GetRange::Bounded), ..GetOptions::default() };
        let got = match store.get_opts(path, options).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(Ok(None)),
            // A range behind the end of an object is an error of the request, but the fault is in the object.
            Err(error) => {
                let Some(range) = &range else { return Err(error) };
                let is_short = store.head(path).await.is_ok_and(|object| object.size < range.end);
                return if is_short { Ok(Ok(Some(Vec::new()))) } else { Err(error) };
            }
            Ok(got) => got,
        };
        let size = got.range.end - got.range.start;
        if size > limit {
            return Ok(Err(Error::manifest(name, format_args!("expected at most {limit} bytes, found {size}"))));
        }
        got.bytes().await.map(|bytes| Ok(Some(bytes.to_vec())))
    };
    repeated("read", name, read).await?
}

/// Whether a repetition cannot succeed.
fn is_final(error: &object_store::Error) -> bool {
    use object_store::Error as E;
    matches!(
        error,
        E::NotFound { .. }
            | E::AlreadyExists { .. }
            | E::InvalidPath { .. }
            | E::NotSupported { .. }
            | E::NotImplemented { .. }
            | E::PermissionDenied { .. }
            | E::Unauthenticated { .. }
            | E::UnknownConfigurationKey { .. }
    )
}

async fn repeated<T, F: Future<Output = object_store::Result<T>>>(
    action: &'static str,
    object: &str,
    request: impl Fn() -> F,
) -> Result<T> {
    let mut wait = BACKOFF;
    for attempt in 1.. {
        match request().await {
            Ok(value) => return Ok(value),
            Err(object_store::Error::NotSupported { source }) if source.is::<Vanished>() => {
                return Err(Error::NotAStore {
                    location: source.downcast::<Vanished>().map_or_else(|e| e.to_string(), |found| found.0),
                });
            }
            Err(error) if attempt == ATTEMPTS || is_final(&error) => {
                return Err(Error::Request { action, object: object.to_owned(), source: error.into() });
            }
            Err(error) => {
                tracing::debug!(action, object, attempt, %error, "repeating a request");
                tokio::time::sleep(wait).await;
                wait *= 2;
            }
        }
    }
    unreachable!("the last attempt returns")
}
