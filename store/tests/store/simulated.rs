//! Writers, readers and collections at the same time, in a simulated object store with a simulated clock. A seed decides which client goes
//! on after each request, which of them are suspended, and when the clock jumps. So the same seed gives the same run.

use crate::checkpoints::{Random, tree};
use crate::{Place, SEGMENT, never_whole};
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::*;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use tpde_store::{FoldOptions, GetOptions as Get, PutOptions as Put, Store, Version, internals};

const GRACE: i64 = 10_000;
const CLIENTS: usize = 5;
const BRANCHES: [&str; 2] = ["a", "b"];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Client {
    /// Computes.
    Running,
    /// Waits for its next request, not before this step.
    Waiting(u64),
    Done,
}

/// A request that is carried out after its sender has given it up, or once more.
#[derive(Clone)]
enum Late {
    Delete(Path),
    Put(Path, Vec<u8>, bool),
}

#[derive(Debug, Clone)]
struct Object {
    bytes: Vec<u8>,
    modified: i64,
    tag: u64,
}

#[derive(Default)]
struct World {
    objects: BTreeMap<Path, Object>,
    late: Vec<Late>,
    now: i64,
    steps: u64,
    clients: Vec<Client>,
    dead: Vec<bool>,
    /// Ends all faults: what is left is carried out.
    is_calm: bool,
    random: u64,
    log: Option<Vec<String>>,
}

impl World {
    fn below(&mut self, n: u64) -> u64 {
        let mut random = Random(self.random);
        let drawn = random.below(n);
        self.random = random.0;
        drawn
    }

    fn write(&mut self, path: &Path, bytes: Vec<u8>, is_create: bool) -> Result<()> {
        if is_create && self.objects.contains_key(path) {
            return Err(Error::AlreadyExists { path: path.to_string(), source: "it exists".into() });
        }
        self.objects.insert(path.clone(), Object { bytes, modified: self.now, tag: self.steps });
        Ok(())
    }

    fn carry_out(&mut self, late: Late) {
        match late {
            Late::Delete(path) => drop(self.objects.remove(&path)),
            Late::Put(path, bytes, is_create) => drop(self.write(&path, bytes, is_create)),
        }
    }

    /// Lets one client go on, if all wait.
    fn schedule(&mut self) {
        if self.clients.contains(&Client::Running) || self.clients.iter().all(|client| *client == Client::Done) {
            return;
        }
        self.steps += 1;
        self.now += self.below(40) as i64;
        if !self.is_calm {
            if self.below(300) == 0 {
                self.now += GRACE / 2 + self.below(2 * GRACE as u64) as i64;
            }
            if self.below(2000) == 0 {
                self.now -= self.below(2 * GRACE as u64) as i64;
            }
            if !self.late.is_empty() && self.below(40) == 0 {
                let at = self.below(self.late.len() as u64) as usize;
                let late = self.late.swap_remove(at);
                self.carry_out(late);
            }
        }
        let ready = |steps: u64| move |client: &Client| matches!(client, Client::Waiting(until) if *until <= steps);
        while !self.clients.iter().any(ready(self.steps)) {
            self.steps += 1;
        }
        let count = self.clients.iter().filter(|client| ready(self.steps)(client)).count() as u64;
        let chosen = self.below(count) as usize;
        let steps = self.steps;
        let at = (0..self.clients.len()).filter(|at| ready(steps)(&self.clients[*at])).nth(chosen).unwrap();
        self.clients[at] = Client::Running;
    }
}

/// What becomes of a request.
#[derive(PartialEq)]
enum Fate {
    Done,
    /// It is carried out, and its client is gone.
    Lost,
    /// It is not carried out, and its client is gone.
    Dead,
    /// Its client is gone. It is carried out later.
    Late,
    /// It is carried out, and later once more.
    Twice,
}

struct Shared {
    world: Mutex<World>,
    turn: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }
}

/// The object store, as a client sees it.
struct Seen {
    shared: Arc<Shared>,
    client: usize,
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seen")
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seen")
    }
}

fn gone() -> Error {
    Error::PermissionDenied { path: "any".into(), source: "the client is gone".into() }
}

impl Seen {
    /// Waits for the turn of this client, and then does something in the world.
    fn request<T>(&self, name: &str, done: impl FnOnce(&mut World, Fate) -> Result<T>) -> Result<T> {
        let mut world = self.shared.lock();
        if world.dead[self.client] {
            return Err(gone());
        }
        // Some requests take long: a suspended client, or a slow network.
        let until = match world.below(60) {
            0 if !world.is_calm => world.steps + world.below(400),
            _ => 0,
        };
        world.clients[self.client] = Client::Waiting(until);
        world.schedule();
        self.shared.turn.notify_all();
        world = self.shared.turn.wait_while(world, |world| world.clients[self.client] != Client::Running).unwrap();
        let fate = match world.below(400) {
            _ if world.is_calm => Fate::Done,
            0 => Fate::Lost,
            1 => Fate::Dead,
            2 => Fate::Late,
            3..=8 => Fate::Twice,
            _ => Fate::Done,
        };
        let is_gone = matches!(fate, Fate::Lost | Fate::Dead | Fate::Late);
        world.dead[self.client] = is_gone;
        if world.log.is_some() {
            let line = format!("{} {} client {} {name}{}", world.steps, world.now, self.client, if is_gone { " gone" } else { "" });
            world.log.as_mut().unwrap().push(line);
        }
        let result = done(&mut world, fate);
        if is_gone { Err(gone()) } else { result }
    }

    fn listed(&self, prefix: Option<&Path>, after: Option<&Path>) -> Result<Vec<ObjectMeta>> {
        let is_below = |path: &Path| prefix.is_none_or(|prefix| path.prefix_matches(prefix) && path != prefix);
        self.request(&format!("list {prefix:?}"), |world, _| {
            let found = world.objects.iter().filter(|(path, _)| is_below(path) && after.is_none_or(|after| *path > after));
            Ok(found.map(|(path, object)| meta(path, object)).collect())
        })
    }
}

fn meta(path: &Path, object: &Object) -> ObjectMeta {
    let (size, e_tag) = (object.bytes.len() as u64, Some(object.tag.to_string()));
    let mut meta = ObjectMeta { location: path.clone(), last_modified: Default::default(), size, e_tag, version: None };
    meta.last_modified += Duration::from_millis(object.modified as u64);
    meta
}

#[async_trait::async_trait]
impl ObjectStore for Seen {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let bytes: Vec<u8> = payload.iter().flatten().copied().collect();
        let is_create = options.mode == PutMode::Create;
        self.request(&format!("put {location}"), |world, fate| match fate {
            Fate::Dead => Ok(()),
            Fate::Late => {
                world.late.push(Late::Put(location.clone(), bytes, is_create));
                Ok(())
            }
            Fate::Done | Fate::Lost | Fate::Twice => {
                if fate == Fate::Twice {
                    world.late.push(Late::Put(location.clone(), bytes.clone(), is_create));
                }
                world.write(location, bytes, is_create)
            }
        })?;
        Ok(PutResult { e_tag: None, version: None, extensions: Default::default() })
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        panic!("no object is uploaded in parts")
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let object = self.request(&format!("get {location}"), |world, _| {
            let found = world.objects.get(location).cloned();
            found.ok_or_else(|| Error::NotFound { path: location.to_string(), source: "no such object".into() })
        })?;
        let size = object.bytes.len() as u64;
        let range = match options.range {
            Some(range) => range.as_range(size).map_err(|e| Error::Generic { store: "Seen", source: e.into() })?,
            None => 0..size,
        };
        let bytes = object.bytes[range.start as usize..range.end as usize].to_vec();
        let payload = GetResultPayload::Stream(stream::iter([Ok(bytes.into())]).boxed());
        Ok(GetResult {
            payload,
            meta: meta(location, &object),
            range,
            attributes: Attributes::default(),
            extensions: Default::default(),
        })
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let seen = Self { shared: self.shared.clone(), client: self.client };
        let delete = move |path: Result<Path>| {
            let path = path?;
            seen.request(&format!("delete {path}"), |world, fate| {
                if matches!(fate, Fate::Late | Fate::Twice) {
                    world.late.push(Late::Delete(path.clone()));
                }
                if !matches!(fate, Fate::Late | Fate::Dead) {
                    world.objects.remove(&path);
                }
                Ok(path)
            })
        };
        locations.map(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.list_of(prefix, None)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.list_of(prefix, Some(offset))
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        panic!("no list has a delimiter")
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        panic!("no object is copied")
    }
}

impl Seen {
    fn list_of(&self, prefix: Option<&Path>, after: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.listed(prefix, after) {
            Ok(found) => stream::iter(found.into_iter().map(Ok)).boxed(),
            Err(error) => stream::iter([Err(error)]).boxed(),
        }
    }
}

/// Writes a checkpoint that is a function of `seed`: tensors that are near those of other seeds, and two files beside them. One of these
/// is in all checkpoints.
fn write_checkpoint(folder: &std::path::Path, seed: u64) {
    fs::create_dir_all(folder).unwrap();
    let mut lanes: Vec<u16> = (0..256).map(|lane| 0x3c00 + lane % 7).collect();
    let mut random = Random(seed);
    for _ in 0..8 {
        let at = random.below(256) as usize;
        lanes[at] = lanes[at].wrapping_add(random.below(4) as u16);
    }
    let header = r#"{"w":{"dtype":"BF16","shape":[256],"data_offsets":[0,512]}}"#;
    let bytes = (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes());
    let bytes: Vec<u8> = bytes.chain(lanes.iter().flat_map(|lane| lane.to_le_bytes())).collect();
    fs::write(folder.join("model.safetensors"), bytes).unwrap();
    fs::write(folder.join("config.json"), format!("{{\"seed\": {}}}", seed % 3)).unwrap();
    fs::write(folder.join("tokenizer.json"), "tokens").unwrap();
}

/// What a client was told.
#[derive(Default)]
struct Told {
    /// Versions that were stored, and the seeds of their checkpoints.
    stored: Vec<(Version, u64)>,
    counts: BTreeMap<&'static str, u64>,
}

/// One client: does what its random numbers say.
fn client(shared: &Arc<Shared>, number: usize, seed: u64, actions: u64) -> Told {
    internals::seed_ids((seed << 8 | number as u64) << 24);
    let mut random = Random(seed ^ ((number as u64 + 1) << 40));
    let (place, mut told) = (Place::new(), Told::default());
    let mut store = None;
    for action in 0..actions {
        shared.lock().dead[number] = false;
        let seen = || Arc::new(Seen { shared: shared.clone(), client: number });
        if store.is_none() {
            store = internals::open_sequential(seen(), SEGMENT).ok();
        }
        let Some(opened) = &store else { continue };
        let (name, is_done) = act(opened, number, &mut random, &place, action, &mut told);
        *told.counts.entry(name).or_default() += 1;
        *told.counts.entry(if is_done { "done" } else { "refused" }).or_default() += 1;
        if shared.lock().dead[number] {
            store = None;
        }
    }
    let mut world = shared.lock();
    world.clients[number] = Client::Done;
    world.schedule();
    shared.turn.notify_all();
    told
}

fn act(store: &Store, number: usize, random: &mut Random, place: &Place, action: u64, told: &mut Told) -> (&'static str, bool) {
    let branch = BRANCHES[random.below(2) as usize];
    let out = place.at("out");
    match if number == 0 { 7 + random.below(6) } else { random.below(12) } {
        0..=5 => {
            let seed = random.below(1 << 30);
            write_checkpoint(&place.at("in"), seed);
            let parent = store.version(branch).ok();
            let mut options = Put::default().branch(branch).metadata([("seed", seed.to_string())]);
            // Often the caller has the parent, so it is not read.
            if let Some(parent) = parent.filter(|_| random.below(2) == 0) {
                write_checkpoint(&place.at("have"), parent.metadata.get("seed").map_or(0, |seed| seed.parse().unwrap()));
                options = options.have(parent.name(), place.at("have"));
            }
            let stored = store.put(place.at("in"), &options);
            let is_done = stored.is_ok();
            told.stored.extend(stored.ok().map(|version| (version, seed)));
            ("put", is_done)
        }
        6 => {
            let (from, to) = (store.newest(branch, 4), store.version(branch));
            let folded = match (from, to) {
                (Ok(from), Ok(to)) => store.fold(&from[from.len() - 1].name(), &to.name(), &FoldOptions::default()).is_ok(),
                _ => false,
            };
            ("fold", folded)
        }
        7 => ("prune", store.prune(branch, 2 + random.below(3), &FoldOptions::default()).is_ok()),
        8 if random.below(6) == 0 => ("delete", store.delete_branch(branch).is_ok()),
        8 if random.below(3) == 0 => {
            let made = store.version(branch).and_then(|from| {
                let seed = from.metadata.get("seed").map_or(0, |seed| seed.parse().unwrap());
                Ok((store.create_branch(&format!("c{number}-{action}"), &from.name())?, seed))
            });
            let is_done = made.is_ok();
            told.stored.extend(made.ok());
            ("branch", is_done)
        }
        9 => {
            let Ok(version) = store.version(branch) else { return ("get", false) };
            let got = store.get(&version.name(), &out, &Get::default());
            if got.is_ok() {
                assert!(is_content(&out, &version.metadata), "{} differs", version.name());
                fs::remove_dir_all(&out).unwrap();
            }
            ("get", got.is_ok())
        }
        _ => ("gc", store.gc().is_ok()),
    }
}

fn is_content(out: &std::path::Path, metadata: &BTreeMap<String, String>) -> bool {
    let expected = Place::new();
    let Some(seed) = metadata.get("seed") else { return true };
    write_checkpoint(&expected.at("expected"), seed.parse().unwrap());
    tree(out) == tree(&expected.at("expected"))
}

/// Compares what is left with what clients were told.
fn check(shared: &Arc<Shared>, told: &[Told]) {
    {
        let mut world = shared.lock();
        world.is_calm = true;
        let late = std::mem::take(&mut world.late);
        late.into_iter().for_each(|late| world.carry_out(late));
        world.clients = vec![Client::Running];
        world.dead = vec![false];
    }
    let place = Place::new();
    let store = internals::open_sequential(Arc::new(Seen { shared: shared.clone(), client: 0 }), SEGMENT).unwrap();
    for _ in 0..2 {
        shared.lock().now += 3 * GRACE;
        store.gc().unwrap();
    }
    for version in store.branches().unwrap().iter().flat_map(|head| store.log(&head.branch).unwrap()) {
        let out = place.at("out");
        let got = store.get(&version.name(), &out, &Get::default());
        assert!(got.is_ok(), "{} can be named, and not read: {}", version.name(), got.unwrap_err());
        assert!(is_content(&out, &version.metadata), "{} differs", version.name());
        fs::remove_dir_all(&out).unwrap();
    }
    for (version, seed) in told.iter().flat_map(|told| &told.stored) {
        match store.version(&version.name()) {
            Ok(found) => {
                assert_eq!(found.id, version.id, "another {}", version.name());
                assert!(found.metadata.get("seed").is_none_or(|found| *found == seed.to_string()));
            }
            Err(tpde_store::Error::Pruned { .. }) => {}
            Err(error) => {
                let is_deletion = |path: &Path, object: &Object| {
                    let name = path.as_ref().strip_prefix(&format!("a/prefix/branches/{}/", version.branch));
                    let number = name.and_then(|name| name.strip_suffix(".json")?.parse::<u64>().ok());
                    number.is_some_and(|number| number > version.number)
                        && String::from_utf8_lossy(&object.bytes).contains("\"content\": \"deleted\"")
                };
                let world = shared.lock();
                let is_deleted = world.objects.iter().any(|(path, object)| is_deletion(path, object));
                assert!(is_deleted, "{} was stored and is gone: {error}", version.name());
            }
        }
    }
}

/// One run. Returns the number of requests, and what was done.
fn run(seed: u64, actions: u64) -> (u64, BTreeMap<&'static str, u64>) {
    let mut random = Random(seed);
    let shared = Arc::new(Shared { world: Mutex::default(), turn: Condvar::new() });
    {
        let mut world = shared.lock();
        world.is_calm = true;
        world.now = 1_000_000_000_000;
        world.random = random.next();
        world.clients = vec![Client::Running];
        world.dead = vec![false; CLIENTS];
        world.log = std::env::var_os("TPDE_SIMULATION_LOG").map(|_| Vec::new());
    }
    internals::seed_ids((seed << 8 | 0xff) << 24);
    let grace = Duration::from_millis(GRACE as u64);
    internals::init_sequential(Arc::new(Seen { shared: shared.clone(), client: 0 }), &never_whole().grace(grace), SEGMENT).unwrap();
    {
        let mut world = shared.lock();
        world.is_calm = false;
        world.clients = vec![Client::Running; CLIENTS];
    }
    let told: Vec<Told> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|number| (number, shared.clone())).collect();
        let clients: Vec<_> =
            clients.into_iter().map(|(number, shared)| scope.spawn(move || client(&shared, number, seed, actions))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(&shared, &told)));
    let world = shared.world.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Err(panic) = checked {
        for line in world.log.iter().flatten() {
            eprintln!("{line}");
        }
        eprintln!("seed {seed}");
        std::panic::resume_unwind(panic);
    }
    let mut counts = BTreeMap::new();
    for (name, count) in told.iter().flat_map(|told| &told.counts) {
        *counts.entry(*name).or_default() += count;
    }
    (world.steps, counts)
}

#[test]
fn no_stored_version_is_lost_by_suspensions_clock_jumps_or_late_requests() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("TPDE_SIMULATION_SEED").unwrap_or(0);
    let count = number("TPDE_SIMULATION_RUNS").unwrap_or(4);
    let (mut steps, mut counts) = (0, BTreeMap::new());
    for seed in first..first + count {
        let (taken, of_run) = run(seed, 14);
        steps += taken;
        for (name, count) in of_run {
            *counts.entry(name).or_insert(0u64) += count;
        }
    }
    println!("{count} runs, {steps} requests: {counts:?}");
    assert!(count < 4 || ["put", "gc", "prune", "fold", "done"].iter().all(|name| counts[name] > 0), "{counts:?}");
}
