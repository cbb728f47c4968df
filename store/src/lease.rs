//! Leases: a running call says what it uses and which manifest it is going to create, before it uploads anything.
//!
//! `gc` deletes nothing that leases protect. To give a call up, `gc` first takes the name of the call's manifest: of the two, one
//! creates the object, and so both know whether the call has succeeded. No clock takes part in that. The store's clock only
//! decides when `gc` gives a call up.

use crate::catalog::Catalog;
use crate::digest::UploadId;
use crate::error::{Error, Result};
use crate::manifest::{self, MAX_MANIFEST, Reference, Shortcut, VOID, Version};
use crate::names::{self, LEASES, MAX_NUMBER};
use crate::prefix::{Prefix, json};
use crate::remote::{BackgroundWrites, Entry};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// Schema of a lease.
const SCHEMA: &str = "tpde.store.lease/1";
/// Bounds of the interval between two renewals.
const INTERVAL: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(60 * 60);

/// The content of a lease.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Terms {
    schema: String,
    /// The manifest that the call is going to create; none if it only uploads.
    creates: Option<String>,
    /// Versions that the call reads, or whose objects the manifest is going to use.
    uses: Vec<Reference>,
}

impl Terms {
    fn parse(bytes: &[u8], object: &str) -> Result<Self> {
        let terms: Self = manifest::parse(bytes, object, SCHEMA)?;
        let invalid = |reason: String| Error::manifest(object, reason);
        terms.uses.iter().try_for_each(|used| used.check().map_err(|reason| invalid(format!("uses: {reason}"))))?;
        match &terms.creates {
            Some(name) if names::of_manifest(name).is_none() && names::of_shortcut(name).is_none() => {
                Err(invalid(format!("creates: expected the name of a manifest, found {name}")))
            }
            _ => Ok(terms),
        }
    }
}

/// The lease of a running call. It is renewed until it is dropped.
pub(crate) struct Lease<'a> {
    prefix: &'a Prefix,
    id: UploadId,
    begin: Instant,
    _renewal: Option<BackgroundWrites>,
}

impl<'a> Lease<'a> {
    /// Creates a lease. Then looks at the versions that it names once more: those that are live now, stay. Returns the catalog in which
    /// they were found.
    pub fn take(prefix: &'a Prefix, id: UploadId, creates: Option<String>, uses: Vec<Reference>) -> Result<(Self, Catalog<'a>)> {
        let terms = Terms { schema: SCHEMA.into(), creates, uses };
        let bytes = json(&terms)?;
        prefix.remote.put(names::lease(id), bytes.clone()).wait()??;
        let interval = (Duration::from_secs(prefix.rules.grace) / 4).clamp(*INTERVAL.start(), *INTERVAL.end());
        let renewal = prefix.remote.repeat(interval, names::renewal(id));
        let lease = Self { prefix, id, begin: Instant::now(), _renewal: renewal };
        let (catalog, lease) = lease.during(|_| {
            prefix.remote.probe(&names::lease(id), bytes)?;
            let mut catalog = Catalog::new(&prefix.remote);
            for used in &terms.uses {
                if catalog.find(&used.name())?.id != used.id {
                    return Err(Error::NoVersion { version: used.name() });
                }
            }
            Ok(catalog)
        })?;
        Ok((lease, catalog))
    }

    pub fn id(&self) -> UploadId {
        self.id
    }

    /// Does work that creates no manifest. If it fails, the lease is of no use any more.
    pub fn during<T>(self, work: impl FnOnce(&Self) -> Result<T>) -> Result<(T, Self)> {
        match work(&self) {
            Ok(done) => Ok((done, self)),
            Err(error) => {
                self.release();
                Err(error)
            }
        }
    }

    /// Creates the manifest of a version, whose name the lease states. If `gc` has given the call up, the name is taken.
    pub fn publish(self, version: &Version) -> Result<()> {
        let object = names::manifest(&version.branch, version.number);
        let (bytes, lease) = self.during(|_| {
            if version.number > MAX_NUMBER {
                return Err(Error::InvalidArgument(format!("a branch has at most {MAX_NUMBER} versions")));
            }
            let bytes = json(version)?;
            // This crate must be able to read what it writes.
            Version::parse(&bytes, &object, &version.branch, version.number)?;
            Ok(bytes)
        })?;
        let is_created = lease.create(&object, bytes)? && lease.is_live(version)?;
        lease.release();
        if is_created { Ok(()) } else { Err(Error::Conflict { version: version.name() }) }
    }

    /// Whether a version that was created is a version of its branch. It is not if its name was taken long ago, and that manifest
    /// was pruned or deleted, and removed.
    fn is_live(&self, version: &Version) -> Result<bool> {
        let remote = &self.prefix.remote;
        let is_after = |found: (&str, u64)| found.1 > version.number;
        let before = names::before(&version.branch, version.number);
        let listed = remote.list_after(&names::branch(&version.branch), Some(&before))?;
        let is_suspect = listed.iter().any(|entry| {
            names::of_mark(&entry.name).is_some_and(|found| found.1 == version.number)
                || names::of_deletion(&entry.name).is_some_and(is_after)
        });
        Ok(!is_suspect || Catalog::new(remote).branch(&version.branch)?.is_live(version.number))
    }

    /// Creates the manifest of a shortcut, as [`Lease::publish`]. If there is one already, that one is as good.
    pub fn publish_shortcut(self, shortcut: &Shortcut) -> Result<()> {
        let object = shortcut.object();
        let (bytes, lease) = self.during(|_| {
            let bytes = json(shortcut)?;
            Shortcut::parse(&bytes, &object)?;
            Ok(bytes)
        })?;
        lease.create(&object, bytes)?;
        lease.release();
        Ok(())
    }

    /// Creates the manifest that the lease states, unless its name is taken. Returns whether it was created. If the answer is lost, the
    /// lease stays.
    ///
    /// # Errors
    /// [`Error::TooSlow`] if `gc` has taken the name.
    fn create(&self, object: &str, bytes: Vec<u8>) -> Result<bool> {
        let remote = &self.prefix.remote;
        self.prefix.check()?;
        if remote.create(object, bytes)? {
            return Ok(true);
        }
        if remote.get(object.to_owned(), MAX_MANIFEST).wait()??.is_some_and(|found| found == VOID) {
            return Err(Error::TooSlow { seconds: self.begin.elapsed().as_secs(), grace: self.prefix.rules.grace });
        }
        Ok(false)
    }

    /// Ends the lease of a call that creates nothing from now on. If that fails, `gc` ends it.
    pub fn release(self) {
        for name in [names::lease(self.id), names::renewal(self.id)] {
            if let Err(error) = self.prefix.remote.delete(&name) {
                tracing::debug!(name, %error, "a lease was left behind");
            }
        }
    }
}

/// What the leases of running calls name.
#[derive(Default)]
pub(crate) struct RunningCalls {
    /// The calls, whose objects no manifest names yet.
    pub calls: HashSet<UploadId>,
    /// The manifests that the calls are going to create.
    pub creates: HashSet<String>,
    /// The versions that they use.
    pub uses: Vec<Reference>,
}

/// Gives up the calls whose leases were renewed at `oldest` or before: none of them can create its manifest any more. Returns what the
/// others name. A manifest whose call has no lease now, exists now or never.
///
/// # Errors
/// The errors of requests; those of a lease that cannot be read, until it is old.
pub(crate) fn settle(prefix: &Prefix, oldest: i64) -> Result<RunningCalls> {
    let remote = &prefix.remote;
    let listed = remote.list(LEASES)?;
    let renewed: BTreeMap<UploadId, &Entry> =
        listed.iter().filter_map(|entry| Some((names::of_renewal(&entry.name)?, entry))).collect();
    let leases: BTreeSet<UploadId> = listed.iter().filter_map(|entry| names::of_lease(&entry.name)).collect();
    let mut running = RunningCalls::default();
    for entry in &listed {
        let Some(id) = names::of_lease(&entry.name) else { continue };
        let is_old = entry.modified <= oldest && renewed.get(&id).is_none_or(|renewed| renewed.modified <= oldest);
        // A call that has ended since the list was made has removed its lease.
        let Some(bytes) = remote.get(entry.name.clone(), MAX_MANIFEST).wait()?? else { continue };
        match (Terms::parse(&bytes, &entry.name), is_old) {
            (Ok(terms), false) => {
                running.calls.insert(id);
                running.creates.extend(terms.creates);
                running.uses.extend(terms.uses);
            }
            (Ok(terms), true) => {
                if let Some(object) = &terms.creates {
                    remote.create(object, VOID.to_vec())?;
                }
                remote.delete(&entry.name)?;
                remote.delete(&names::renewal(id))?;
            }
            // No writer has made it.
            (Err(Error::Manifest { .. }), true) => remote.delete(&entry.name)?,
            (Err(error), _) => return Err(error),
        }
    }
    for (_, entry) in renewed.iter().filter(|(id, entry)| entry.modified <= oldest && !leases.contains(id)) {
        remote.delete(&entry.name)?;
    }
    Ok(running)
}
