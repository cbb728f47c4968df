//! An object store in memory with faults: requests that fail, answers that get lost, lists that lag behind.

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::*;
use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    None,
    /// From this request on, nothing reaches the store.
    DeadFrom(u64),
    /// This request is executed, and its answer gets lost. Nothing after it reaches the store.
    LostAt(u64),
    /// Every third request fails, before or after it is executed, but only one of each object.
    Flaky,
    /// This request takes more than a second.
    SlowAt(u64),
}

pub struct Faulty {
    pub inner: Arc<InMemory>,
    pub fault: Fault,
    pub requests: AtomicU64,
    pub bytes_read: AtomicU64,
    /// Of [`bytes_read`](Self#structfield.bytes_read) and of the requests, those of objects that digests name.
    pub object_bytes: AtomicU64,
    pub objects_read: AtomicU64,
    /// Objects of which a request failed, if they are [`Fault::Flaky`].
    pub failed: Mutex<HashSet<Path>>,
    /// Number of manifests that lists lack: the newest ones.
    pub hidden: u64,
    /// Seconds by which all objects, but not the clock, are older than they are.
    pub aged: AtomicI64,
    /// Whether leases are as old as they are.
    pub has_young_leases: AtomicBool,
    /// Runs before the next manifest of a version is created.
    pub before_manifest: Mutex<Option<Hook>>,
    /// Runs before the request of this number.
    pub before_request: Mutex<Option<(u64, Hook)>>,
    /// Whether an object that is to be created is overwritten, as by a server that ignores `If-None-Match`.
    pub is_overwriting: AtomicBool,
}

/// What a test does at a certain request.
pub type Hook = Box<dyn FnOnce() + Send>;

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl Faulty {
    pub fn new(inner: &Arc<InMemory>, fault: Fault) -> Arc<Self> {
        Self::with(inner, fault, 0, 0)
    }

    pub fn with(inner: &Arc<InMemory>, fault: Fault, hidden: u64, aged: i64) -> Arc<Self> {
        let (requests, bytes_read, object_bytes, objects_read) = Default::default();
        let (has_young_leases, before_manifest, before_request, is_overwriting, failed) = Default::default();
        Arc::new(Self {
            inner: inner.clone(),
            fault,
            requests,
            bytes_read,
            object_bytes,
            objects_read,
            failed,
            hidden,
            aged: aged.into(),
            has_young_leases,
            before_manifest,
            before_request,
            is_overwriting,
        })
    }

    /// Counts a request. Returns its number.
    fn count(&self) -> u64 {
        let number = self.requests.fetch_add(1, SeqCst);
        let hook = self.before_request.lock().unwrap().take_if(|(at, _)| *at == number);
        if let Some((_, hook)) = hook {
            hook();
        }
        number
    }

    /// Errors before and after a request.
    async fn request(&self, location: &Path) -> (Result<()>, Result<()>) {
        let number = self.count();
        let dead = || Err(Error::PermissionDenied { path: "any".into(), source: "the process is dead".into() });
        let flaky = || Err(Error::Generic { store: "Faulty", source: "503 Slow Down".into() });
        match self.fault {
            Fault::DeadFrom(first) if number >= first => (dead(), Ok(())),
            Fault::LostAt(lost) if number > lost => (dead(), Ok(())),
            Fault::LostAt(lost) if number == lost => (Ok(()), dead()),
            Fault::SlowAt(slow) if number == slow => {
                tokio::time::sleep(Duration::from_millis(1100)).await;
                (Ok(()), Ok(()))
            }
            Fault::Flaky if number % 3 == 2 && self.failed.lock().unwrap().insert(location.clone()) => {
                if number % 6 == 2 {
                    return (flaky(), Ok(()));
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
                (Ok(()), flaky())
            }
            _ => (Ok(()), Ok(())),
        }
    }
}

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, location: &Path, payload: PutPayload, mut options: PutOptions) -> Result<PutResult> {
        if location.as_ref().contains("/branches/") && location.as_ref().ends_with(".json") {
            let hook = self.before_manifest.lock().unwrap().take();
            if let Some(hook) = hook {
                hook();
            }
        }
        if self.is_overwriting.load(SeqCst) {
            options.mode = PutMode::Overwrite;
        }
        let (before, after) = self.request(location).await;
        before?;
        let result = self.inner.put_opts(location, payload, options).await;
        after?;
        result
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        panic!("no object is uploaded in parts")
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (before, after) = self.request(location).await;
        before?;
        let result = self.inner.get_opts(location, options).await;
        after?;
        if let Ok(result) = &result {
            let bytes = result.range.end - result.range.start;
            if !location.as_ref().ends_with("/store.json") {
                self.bytes_read.fetch_add(bytes, SeqCst);
            }
            if location.as_ref().contains("/objects/") {
                self.object_bytes.fetch_add(bytes, SeqCst);
                self.objects_read.fetch_add(1, SeqCst);
            }
        }
        result
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let number = self.count();
        if matches!(self.fault, Fault::DeadFrom(first) | Fault::LostAt(first) if number >= first) {
            let dead = || Error::PermissionDenied { path: "any".into(), source: "the process is dead".into() };
            return locations.map(move |_| Err(dead())).boxed();
        }
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let number = self.count();
        if matches!(self.fault, Fault::DeadFrom(first) | Fault::LostAt(first) if number >= first) {
            let dead = Error::PermissionDenied { path: "any".into(), source: "the process is dead".into() };
            return futures_util::stream::iter([Err(dead)]).boxed();
        }
        let (aged, hidden, has_young_leases) = (self.aged.load(SeqCst), self.hidden as usize, self.has_young_leases.load(SeqCst));
        let listed = self.inner.list(prefix);
        let aged = listed.map(move |meta| {
            let mut meta = meta?;
            let is_young = meta.location.as_ref().contains("/leases/") && has_young_leases;
            if !meta.location.as_ref().contains("/clock/") && !is_young {
                meta.last_modified -= Duration::from_secs(aged as u64);
            }
            Ok(meta)
        });
        if hidden == 0 {
            return aged.boxed();
        }
        let stale = async move {
            let mut all: Vec<Result<ObjectMeta>> = aged.collect().await;
            all.sort_by_key(|meta| meta.as_ref().map(|meta| meta.location.to_string()).unwrap_or_default());
            let is_manifest = |meta: &Result<ObjectMeta>| matches!(meta, Ok(meta) if meta.location.as_ref().contains("/branches/"));
            let manifests = all.iter().filter(|meta| is_manifest(meta)).count();
            let mut seen = 0;
            all.retain(|meta| {
                seen += usize::from(is_manifest(meta));
                !is_manifest(meta) || seen + hidden <= manifests
            });
            futures_util::stream::iter(all)
        };
        futures_util::stream::once(stale).flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        panic!("no object is copied")
    }
}
