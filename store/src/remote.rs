//! Requests to the object store, with repetitions. The only module that knows tokio and `object_store`.

use crate::error::{Error, Result};
use futures_util::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;
use tokio::runtime::Runtime;
use tpde::Watch;

/// Number of requests after which an error is final.
const ATTEMPTS: u32 = 4;
/// Wait before the first repetition. Each further wait is twice as long.
const BACKOFF: Duration = Duration::from_millis(50);
/// Number of concurrent requests.
pub(crate) const IN_FLIGHT: usize = 8;

/// Interval at which a call that waits for a request asks its watcher whether to go on.
const LOOK: Duration = Duration::from_millis(50);

/// A watcher that requests can hold.
pub(crate) type SharedWatch = Arc<dyn Watch + Send + Sync>;

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
}

impl Drop for Shared {
    fn drop(&mut self) {
        // A plain drop waits, and panics on a thread of another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Name, size and time of an object.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub name: String,
    pub bytes: u64,
    /// Milliseconds since 1970, by the store's clock.
    pub modified: i64,
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
        let store = LocalFileSystem::new_with_prefix(folder).map_err(|e| failed(e.into()))?.with_fsync(true);
        Self::new(Arc::new(store), ObjectPath::default(), location)
    }

    pub fn new(store: Arc<dyn ObjectStore>, prefix: ObjectPath, location: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).thread_name("tpde-store").enable_all().build();
        let runtime = Some(runtime.map_err(|e| Error::io("start", Path::new("the threads of the store"), e))?);
        Ok(Self { shared: Arc::new(Shared { store, prefix, location: location.to_owned(), runtime }), watch: None })
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
        self.start(async move {
            let read = || async {
                let options = GetOptions { range: range.clone().map(GetRange::Bounded), ..GetOptions::default() };
                let got = match store.get_opts(&path, options).await {
                    Err(object_store::Error::NotFound { .. }) => return Ok(None),
                    other => other?,
                };
                let size = got.range.end - got.range.start;
                if size > limit {
                    let source = format!("expected at most {limit} bytes, found {size}").into();
                    return Err(object_store::Error::Generic { store: "tpde-store", source });
                }
                got.bytes().await.map(|bytes| Some(bytes.to_vec()))
            };
            repeated("read", &name, read).await
        })
    }

    /// All objects below a prefix, in ascending order of name.
    pub fn list(&self, below: &str) -> Result<Vec<Entry>> {
        let (store, path, prefix) = (self.shared.store.clone(), self.path(below), self.shared.prefix.clone());
        let below = below.to_owned();
        let listed = self.start(async move {
            let found = repeated("list", &below, || store.list(Some(&path)).try_collect::<Vec<_>>()).await?;
            let name = |path: &ObjectPath| {
                let parts: Vec<_> = path.prefix_match(&prefix)?.map(|part| part.as_ref().to_owned()).collect();
                Some(parts.join("/"))
            };
            let entry = |meta: &object_store::ObjectMeta| {
                Some(Entry { name: name(&meta.location)?, bytes: meta.size, modified: meta.last_modified.timestamp_millis() })
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
