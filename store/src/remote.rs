//! Requests to the object store, with repetitions. The only module that knows tokio and `object_store`.

use crate::error::{Error, Result};
use crate::folder::{Folder, MissingStore};
use crate::manifest::Segment;
use crate::names;
use crate::threads::Threads;
use futures_util::{FutureExt, TryStreamExt};
use object_store::path::Path as ObjectPath;
use object_store::{GetOptions, GetRange, GetResult, GetResultPayload, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
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

/// Number of threads for requests to object stores.
const RUNTIME_THREADS: usize = 2;

/// Maximum size of the objects that are kept in memory.
const KNOWN_BYTES: usize = 16 << 20;

/// Interval at which a call that waits for a request asks its watcher whether to go on.
const LOOK: Duration = Duration::from_millis(50);

/// A watcher that requests can hold.
pub(crate) type SharedWatch = Arc<dyn Watch + Send + Sync>;

/// Writes that are repeated in the background until this is dropped.
pub(crate) enum BackgroundWrites {
    Task(tokio::task::AbortHandle),
    /// The thread ends when this is dropped.
    Thread(#[expect(dead_code, reason = "dropped")] mpsc::Sender<()>),
}

impl Drop for BackgroundWrites {
    fn drop(&mut self) {
        if let Self::Task(task) = self {
            task.abort();
        }
    }
}

/// An object store, and a prefix in it.
#[derive(Clone)]
pub struct Remote {
    shared: Arc<RemoteInner>,
    /// Can end calls that wait for a request.
    watch: Option<SharedWatch>,
    /// Requests for segments at the same time.
    in_flight: usize,
}

struct RemoteInner {
    store: Arc<dyn ObjectStore>,
    prefix: ObjectPath,
    location: String,
    /// The folder, if the store is one.
    folder: Option<PathBuf>,
    executor: Executor,
    /// Whether requests run on the caller's thread, one after the other: for simulations.
    is_sequential: bool,
    /// Whether this process has seen that the object store creates an object only if it does not exist.
    is_probed: AtomicBool,
    known: Arc<Mutex<ObjectCache>>,
}

/// Objects that were read, as long as a list shows that they are unchanged.
#[derive(Default)]
struct ObjectCache {
    objects: HashMap<String, (Stamp, Arc<[u8]>)>,
    /// Size of all objects. Above [`KNOWN_BYTES`], all are forgotten.
    bytes: usize,
}

/// What a list says of an object: size, time, and the store's tag. It differs if the object was written again.
type Stamp = (u64, i64, Option<String>);

impl ObjectCache {
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

fn locked(known: &Mutex<ObjectCache>) -> MutexGuard<'_, ObjectCache> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What runs requests.
enum Executor {
    /// For object stores, whose clients need one. Taken on drop.
    Runtime(Option<Runtime>),
    /// For folders. Their requests block, and never wait for another task.
    Threads(Threads),
}

impl Executor {
    fn runtime() -> Result<Self> {
        let failed = |e| Error::io("start", Path::new("the threads of the store"), e);
        // tokio panics if the system refuses a thread.
        let probe = |_| std::thread::Builder::new().spawn(std::thread::park);
        let probes: Vec<_> = (0..=RUNTIME_THREADS).map(probe).collect();
        let ended: Vec<_> = probes.into_iter().map(|probe| probe.map(|thread| thread.thread().unpark())).collect();
        ended.into_iter().collect::<io::Result<()>>().map_err(failed)?;
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(RUNTIME_THREADS).thread_name("tpde-store").enable_all().build();
        Ok(Self::Runtime(Some(runtime.map_err(failed)?)))
    }

    fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static, done: impl FnOnce(T) + Send + 'static) {
        match self {
            Self::Runtime(runtime) => {
                if let Some(runtime) = runtime {
                    runtime.spawn(async move { done(work.await) });
                }
            }
            Self::Threads(threads) => threads.start(move || _ = work.now_or_never().map(done)),
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // A plain drop waits, and panics on a thread of another runtime.
        if let Self::Runtime(runtime) = self
            && let Some(runtime) = runtime.take()
        {
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
pub(crate) struct PendingRequest<T> {
    result: mpsc::Receiver<T>,
    watch: Option<SharedWatch>,
}

impl<T> PendingRequest<T> {
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
            check_feature(&url)?;
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
        let folder = folder.canonicalize().map_err(|e| Error::io("open", folder, e))?;
        Self::build(Arc::new(store), ObjectPath::default(), location, Some(folder), false)
    }

    pub fn new(store: Arc<dyn ObjectStore>, prefix: ObjectPath, location: &str) -> Result<Self> {
        Self::with(store, prefix, location, false)
    }

    /// [`Remote::new`]. If `is_sequential`, requests run on the caller's thread, one after the other, and nothing in the background.
    pub fn with(store: Arc<dyn ObjectStore>, prefix: ObjectPath, location: &str, is_sequential: bool) -> Result<Self> {
        Self::build(store, prefix, location, None, is_sequential)
    }

    fn build(
        store: Arc<dyn ObjectStore>,
        prefix: ObjectPath,
        location: &str,
        folder: Option<PathBuf>,
        is_sequential: bool,
    ) -> Result<Self> {
        let executor = if folder.is_some() { Executor::Threads(Threads::new(IN_FLIGHT)) } else { Executor::runtime()? };
        Ok(Self {
            shared: Arc::new(RemoteInner {
                store,
                prefix,
                location: location.to_owned(),
                folder,
                executor,
                is_sequential,
                is_probed: AtomicBool::new(false),
                known: Arc::default(),
            }),
            watch: None,
            in_flight: IN_FLIGHT,
        })
    }

    /// The same object store. `watch` can end calls that wait for a request.
    pub fn watched(&self, watch: SharedWatch) -> Self {
        Self { shared: self.shared.clone(), watch: Some(watch), in_flight: self.in_flight }
    }

    /// The same object store, with at most `count` requests for segments at the same time.
    pub fn with_in_flight(&self, count: usize) -> Self {
        Self { shared: self.shared.clone(), watch: self.watch.clone(), in_flight: count.clamp(1, IN_FLIGHT) }
    }

    /// Requests for segments at the same time.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The folder of the store, if it is one.
    pub fn folder(&self) -> Option<&Path> {
        self.shared.folder.as_deref()
    }

    pub fn location(&self) -> &str {
        &self.shared.location
    }

    /// Starts a request. The caller's thread may belong to another runtime, so nothing here blocks on a runtime.
    fn start<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> PendingRequest<T> {
        let (sender, receiver) = mpsc::channel();
        if let (true, Executor::Runtime(Some(runtime))) = (self.shared.is_sequential, &self.shared.executor) {
            let _ = sender.send(runtime.block_on(work));
        } else {
            self.shared.executor.run(work, move |result| _ = sender.send(result));
        }
        PendingRequest { result: receiver, watch: self.watch.clone() }
    }

    fn path(&self, name: &str) -> ObjectPath {
        name.split('/').fold(self.shared.prefix.clone(), |path, part| path.join(part))
    }

    /// Writes an object whose content its name determines.
    pub fn put(&self, name: String, bytes: Vec<u8>) -> PendingRequest<Result<()>> {
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
    pub fn repeat(&self, interval: Duration, name: String) -> Option<BackgroundWrites> {
        let (store, path) = (self.shared.store.clone(), self.path(&name));
        let runtime = match &self.shared.executor {
            _ if self.shared.is_sequential => return None,
            Executor::Runtime(runtime) => runtime.as_ref()?,
            Executor::Threads(_) => {
                let (sender, over) = mpsc::channel::<()>();
                let run = move || {
                    while over.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                        if let Some(Err(error)) = store.put(&path, PutPayload::new()).now_or_never() {
                            tracing::debug!(name, %error, "a lease was not renewed");
                        }
                    }
                };
                let thread = std::thread::Builder::new().name("tpde-lease".into()).spawn(run);
                return thread.is_ok().then_some(BackgroundWrites::Thread(sender));
            }
        };
        let task = runtime.spawn(async move {
            loop {
                tokio::time::sleep(interval).await;
                if let Err(error) = store.put(&path, PutPayload::new()).await {
                    tracing::debug!(name, %error, "a lease was not renewed");
                }
            }
        });
        Some(BackgroundWrites::Task(task.abort_handle()))
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

    /// Reads an object of at most `limit` bytes. `None` if there is no such object.
    pub fn get(&self, name: String, limit: u64) -> PendingRequest<Result<Option<Vec<u8>>>> {
        let (store, path) = (self.shared.store.clone(), self.path(&name));
        self.start(async move { read(&store, &path, &name, limit).await })
    }

    /// Reads a segment, or the range `range` of it, after comparing its size. The inner error is [`Error::Damaged`].
    pub fn get_segment(&self, segment: &Segment, range: Option<Range<u64>>) -> PendingRequest<Result<Result<Vec<u8>>>> {
        let (name, segment) = (segment.object(), *segment);
        let (store, path) = (self.shared.store.clone(), self.path(&name));
        self.start(async move {
            let read = || async {
                let options = GetOptions { range: range.clone().map(GetRange::Bounded), ..GetOptions::default() };
                let size = match store.get_opts(&path, options).await {
                    Ok(got) if got.meta.size == segment.bytes => return bytes_of(got).await.map(Ok),
                    Ok(got) => got.meta.size,
                    Err(object_store::Error::NotFound { .. }) => return Ok(Err("no such object".to_owned())),
                    // A range behind the end of an object is an error of the request, but the fault is in the object.
                    Err(error) => match store.head(&path).await {
                        Ok(object) if object.size != segment.bytes => object.size,
                        _ => return Err(error),
                    },
                };
                Ok(Err(format!("{size} bytes")))
            };
            let expected = format!("{} bytes that hash to its name", segment.bytes);
            let found = repeated("read", &name, read).await?;
            Ok(found.map_err(|found| Error::Damaged { object: name, expected, found }))
        })
    }

    /// Reads an object of at most `limit` bytes that a list has shown. It is read once, and again only after it was written again.
    /// `None` if there is no such object any more.
    pub fn get_listed(&self, entry: &Entry, limit: u64) -> PendingRequest<Result<Option<Arc<[u8]>>>> {
        let (known, name, stamp) = (self.shared.known.clone(), entry.name.clone(), entry.stamp.clone());
        let (store, path) = (self.shared.store.clone(), self.path(&entry.name));
        if let Some(bytes) = locked(&known).find(&name, &stamp) {
            let (sender, result) = mpsc::channel();
            let _ = sender.send(Ok(Some(bytes)));
            return PendingRequest { result, watch: self.watch.clone() };
        }
        self.start(async move {
            let bytes: Option<Arc<[u8]>> = read(&store, &path, &name, limit).await?.map(Into::into);
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

    /// Removes the files that writes to a folder have left when their process was ended, and that are not newer than `oldest`, in
    /// milliseconds since 1970. Each has the name of an object, `#` and a number. Lists do not have them. Returns number and bytes.
    pub fn remove_remains(&self, oldest: i64) -> Result<(u64, u64)> {
        let (mut removed, mut bytes) = (0, 0);
        let mut open: Vec<PathBuf> = Vec::new();
        open.extend(self.folder().map(Path::to_owned));
        while let Some(folder) = open.pop() {
            // What cannot be listed is not the store's, or an error of the lists.
            for entry in folder.read_dir().into_iter().flatten().flatten() {
                let (path, Ok(metadata)) = (entry.path(), entry.metadata()) else { continue };
                if metadata.is_dir() {
                    open.push(path);
                    continue;
                }
                let name = self.folder().and_then(|root| path.strip_prefix(root).ok()?.to_str()?.rsplit_once('#'));
                let is_remains = |(object, number): (&str, &str)| names::is_of_store(object) && number.parse::<u64>().is_ok();
                let modified = metadata.mtime().saturating_mul(1000) + metadata.mtime_nsec() / 1_000_000;
                if metadata.is_file() && name.is_some_and(is_remains) && modified <= oldest {
                    std::fs::remove_file(&path).map_err(|e| Error::io("remove", &path, e))?;
                    removed += 1;
                    bytes += metadata.len();
                }
            }
        }
        Ok((removed, bytes))
    }

    /// Starts requests for all items, [`Remote::in_flight`] at a time, and passes the results on in order.
    pub fn each<I, T, R>(
        &self,
        items: impl IntoIterator<Item = I>,
        start: impl Fn(&I) -> PendingRequest<Result<T>>,
        mut done: impl FnMut(I, T) -> Result<R>,
    ) -> Result<()> {
        let mut pending: VecDeque<(I, PendingRequest<Result<T>>)> = VecDeque::new();
        let mut items = items.into_iter();
        loop {
            while pending.len() < self.in_flight {
                let Some(item) = items.next() else { break };
                let request = start(&item);
                pending.push_back((item, request));
            }
            let Some((item, request)) = pending.pop_front() else { return Ok(()) };
            done(item, request.wait()??)?;
        }
    }
}

/// Does work that waits for requests, on [`IN_FLIGHT`] threads. Threads that the system refuses are done without.
pub(crate) fn concurrently<I: Send, T: Send>(
    items: impl IntoIterator<Item = I, IntoIter: Send>,
    work: impl Fn(I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (items, done) = (Mutex::new(items.into_iter()), Mutex::new(Vec::new()));
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || {
        while let Some(item) = next() {
            let outcome = work(item);
            let is_error = outcome.is_err();
            done.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
            if is_error {
                while next().is_some() {}
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..IN_FLIGHT {
            let _ = std::thread::Builder::new().spawn_scoped(scope, run);
        }
        run();
    });
    done.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().collect()
}

/// Checks that this crate was built with the feature that a URL needs.
fn check_feature(url: &url::Url) -> Result<()> {
    let host = url.host_str().unwrap_or_default();
    let feature = match url.scheme() {
        "s3" | "s3a" => "aws",
        "gs" => "gcp",
        "az" | "adl" | "azure" | "abfs" | "abfss" => "azure",
        "https" if host.ends_with(".amazonaws.com") || host.ends_with(".r2.cloudflarestorage.com") => "aws",
        "https" if host.ends_with(".windows.net") || host.ends_with(".azure.com") => "azure",
        "memory" => return Ok(()),
        scheme => {
            let reason = format!("{scheme}:// is no location of a store: expected a folder, s3://, gs:// or az://");
            return Err(Error::InvalidArgument(reason));
        }
    };
    let is_there = match feature {
        "aws" => cfg!(feature = "aws"),
        "gcp" => cfg!(feature = "gcp"),
        _ => cfg!(feature = "azure"),
    };
    if is_there {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "{}:// needs the feature {feature}, which this build lacks: in a clone, cargo install --locked --path cli --features {feature}, \
         or for Python pip install ./python --config-settings build-args=\"--features {feature}\"",
        url.scheme()
    )))
}

/// Reads an object of at most `limit` bytes. `None` if there is no such object.
async fn read(store: &Arc<dyn ObjectStore>, path: &ObjectPath, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
    let read = || async {
        let got = match store.get(path).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(Ok(None)),
            got => got?,
        };
        let size = got.meta.size;
        if size > limit {
            return Ok(Err(Error::manifest(name, format_args!("expected at most {limit} bytes, found {size}"))));
        }
        bytes_of(got).await.map(|bytes| Ok(Some(bytes)))
    };
    repeated("read", name, read).await?
}

/// The bytes of an answer.
async fn bytes_of(got: GetResult) -> object_store::Result<Vec<u8>> {
    let failed = |source: io::Error| object_store::Error::Generic { store: "tpde-store", source: source.into() };
    let (start, size) = (got.range.start, got.range.end - got.range.start);
    let mut bytes = Vec::new();
    let reserved = usize::try_from(size).is_ok_and(|size| bytes.try_reserve_exact(size).is_ok());
    if !reserved {
        return Err(failed(io::ErrorKind::OutOfMemory.into()));
    }
    match got.payload {
        GetResultPayload::File(mut file, _) => {
            file.seek(SeekFrom::Start(start)).and_then(|_| file.take(size).read_to_end(&mut bytes)).map_err(failed)?;
        }
        GetResultPayload::Stream(mut stream) => {
            while let Some(part) = stream.try_next().await?
                && (bytes.len() + part.len()) as u64 <= size
            {
                bytes.extend_from_slice(&part);
            }
        }
    }
    if bytes.len() as u64 != size {
        return Err(failed(io::Error::other(format!("expected {size} bytes, found {}", bytes.len()))));
    }
    Ok(bytes)
}

/// The error of memory that the system refuses.
pub(crate) fn no_memory(what: &str) -> Error {
    Error::io("allocate memory for", Path::new(what), io::ErrorKind::OutOfMemory.into())
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

async fn pause(wait: Duration) {
    if tokio::runtime::Handle::try_current().is_ok() {
        tokio::time::sleep(wait).await;
    } else {
        std::thread::sleep(wait);
    }
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
            Err(object_store::Error::NotSupported { source }) if source.is::<MissingStore>() => {
                return Err(Error::NotAStore {
                    location: source.downcast::<MissingStore>().map_or_else(|e| e.to_string(), |found| found.0),
                });
            }
            Err(error) if attempt == ATTEMPTS || is_final(&error) => {
                return Err(Error::Request { action, object: object.to_owned(), source: error.into() });
            }
            Err(error) => {
                tracing::debug!(action, object, attempt, %error, "repeating a request");
                pause(wait).await;
                wait *= 2;
            }
        }
    }
    unreachable!("the last attempt returns")
}
