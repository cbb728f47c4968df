//! Cases that integration tests cannot reach: named and unnamed staged files, locks that are never released, and files that appear
//! during a commit.

use super::*;
use std::fs;
use std::io::{Seek, SeekFrom};
use tempfile::TempDir;

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A staged file, with a temporary name or without a name.
fn staged(folder: &Path, named: bool) -> StagedFile {
    let (staged, file) = if named { StagedFile::create_named(folder, 0o666) } else { StagedFile::create(folder, 0o666) }.unwrap();
    (&*file).write_all(b"new").unwrap();
    staged
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn kind<T: std::fmt::Debug>(outcome: Result<T>) -> io::ErrorKind {
    match outcome {
        Err(Error::Io { source, .. }) => source.kind(),
        outcome => panic!("{outcome:?}"),
    }
}

#[test]
fn a_file_that_appears_during_a_commit_is_not_overwritten() {
    for named in [false, true] {
        let folder = folder();
        let path = folder.path().join("out");
        let new = staged(folder.path(), named);
        fs::write(&path, "theirs").unwrap();
        assert_eq!(new.publish(&path, false).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"theirs");
        assert_eq!(names(folder.path()), ["out"]);
        staged(folder.path(), named).publish(&path, true).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["out"]);
    }
}

#[test]
fn a_file_that_the_system_refuses_to_name_is_copied() {
    use rustix::fs::{CWD, Mode, OFlags};
    let folder = folder();
    let path = folder.path().join("out");
    let unlinkable = |content: &str, mode: u32| {
        // The system refuses to name a file that was created with `O_EXCL`.
        let flags = OFlags::TMPFILE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(CWD, folder.path(), flags, Mode::from_raw_mode(mode)).unwrap());
        (&file).write_all(content.as_bytes()).unwrap();
        StagedFile::Unnamed(Arc::new(file))
    };
    for (content, mode, replace) in [("first", 0o640, false), ("second", 0o604, true)] {
        unlinkable(content, mode).publish(&path, replace).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), content);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, mode);
        assert_eq!(names(folder.path()), ["out"]);
    }
    assert_eq!(unlinkable("third", 0o600).publish(&path, false).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs::read_to_string(&path).unwrap(), "second");
    assert_eq!(names(folder.path()), ["out"]);
}

#[test]
fn a_failure_behind_a_barrier_leaves_the_folder_as_it_was_unless_files_were_to_be_replaced() {
    let added = ["a", "b", "index"];
    for replace in [false, true] {
        for fails in 0..added.len() {
            let folder = folder();
            fs::write(folder.path().join("theirs"), "theirs").unwrap();
            let publication = Publication::folder(folder.path(), Barrier { name: "index".into(), content: b"barrier" }, replace);
            let Destination::Folder(barrier) = &publication.destination else { panic!("the folder exists") };
            let output = |(i, name): (usize, &&str)| {
                let (staged, _) = StagedFile::create_named(folder.path(), 0o666).unwrap();
                if let (StagedFile::Named(temporary), true) = (&staged, i == fails) {
                    fs::remove_file(temporary.path()).unwrap(); // so that it cannot be renamed
                }
                Output { staged, path: folder.path().join(name), mode: None }
            };
            let files = added.iter().enumerate().map(output).collect();
            let open = Folder::open(folder.path()).unwrap();
            assert_eq!(kind(publication.commit_folder(&open, barrier, files, &[])), io::ErrorKind::NotFound);
            if replace {
                assert_eq!(fs::read(folder.path().join("index")).unwrap(), b"barrier", "readers refuse what is half replaced");
            } else {
                assert_eq!(names(folder.path()), ["theirs"], "{} fails", added[fails]);
            }
        }
    }
}

#[test]
fn a_folder_that_appears_during_a_commit_is_not_replaced() {
    let folder = folder();
    let path = folder.path().join("out");
    let mut publication = Publication::folder(&path, Barrier { name: "index".into(), content: b"" }, true);
    publication.add(&path.join("a")).unwrap();
    fs::create_dir(&path).unwrap(); // empty: a plain rename would replace it
    assert_eq!(kind(publication.commit(&|_| {})), io::ErrorKind::AlreadyExists);
    assert_eq!(names(folder.path()), ["out"]);
    assert!(names(&path).is_empty());
}

#[test]
fn files_published_before_one_that_appears_meanwhile_are_taken_back() {
    let folder = folder();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
    let mut publication = Publication::files(&first, false);
    publication.add(&first).unwrap();
    publication.add(&second).unwrap();
    let files = std::mem::take(&mut publication.files);
    fs::write(&second, "theirs").unwrap();
    assert_eq!(kind(publication.commit_files(&Folder::open(folder.path()).unwrap(), files)), io::ErrorKind::AlreadyExists);
    assert_eq!(names(folder.path()), ["second"]);
    assert_eq!(fs::read(&second).unwrap(), b"theirs");
}

#[test]
fn a_file_that_replaces_another_has_its_mode_and_is_hidden_before() {
    let folder = folder();
    let path = folder.path().join("out");
    let of = |file: &File| file.metadata().unwrap().permissions().mode() & 0o7777;
    for mode in [0o600, 0o640, 0o444, 0o777] {
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let mut publication = Publication::files(&path, true);
        let file = publication.add(&path).unwrap();
        assert_eq!(of(&file), 0o600);
        publication.commit(&|_| {}).unwrap();
        assert_eq!(of(&File::open(&path).unwrap()), mode);
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_barrier_gives_way_to_the_file_of_its_name_wherever_that_was_added() {
    let barrier = || Barrier { name: "b".into(), content: b"barrier" };
    for (replace, added) in [(true, ["b", "a", "c"]), (true, ["a", "b", "c"]), (false, ["a", "c", "b"]), (false, ["a", "c", "d"])] {
        let folder = folder();
        fs::write(folder.path().join("theirs"), "theirs").unwrap();
        if replace {
            added.iter().for_each(|name| fs::write(folder.path().join(name), "old").unwrap());
        }
        let mut publication = Publication::folder(folder.path(), barrier(), replace);
        for name in added {
            let file = publication.add(&folder.path().join(name)).unwrap();
            (&*file).write_all(name.as_bytes()).unwrap();
        }
        publication.commit(&|_| {}).unwrap();
        let mut expected = [&added[..], &["theirs"]].concat();
        expected.sort();
        assert_eq!(names(folder.path()), expected);
        expected.iter().for_each(|name| assert_eq!(fs::read(folder.path().join(name)).unwrap(), name.as_bytes()));
    }
}

#[test]
fn few_of_many_files_are_open_at_a_time() {
    let folder = folder();
    let out = folder.path().join("out");
    let mut publication = Publication::folder(&out, Barrier { name: "index".into(), content: b"" }, false);
    let count = 5 * OpenFiles::MAX;
    let path = |i: usize| out.join(i.to_string());
    (0..count).for_each(|i| _ = publication.add(&path(i)).unwrap());
    for round in 0..3_u8 {
        for i in 0..count {
            (&*publication.file(i).unwrap()).seek(SeekFrom::End(0)).unwrap();
            (&*publication.file(i).unwrap()).write_all(&[round, i as u8]).unwrap();
        }
        let named = names(folder.path()).len();
        assert_eq!(named, count - if named == count { 0 } else { OpenFiles::MAX });
        let open = Path::new("/proc/self/fd").read_dir().unwrap().flatten();
        let here = open.filter(|open| open.path().read_link().is_ok_and(|path| path.starts_with(folder.path())));
        assert!(here.count() <= 2 * OpenFiles::MAX);
    }
    publication.commit(&|_| {}).unwrap();
    for i in 0..count {
        assert_eq!(fs::read(path(i)).unwrap(), [0, i as u8, 1, i as u8, 2, i as u8]);
    }
    assert_eq!(names(folder.path()), ["out"]);
}

#[test]
fn temporary_names_fit_beside_the_longest_name() {
    for named in [false, true] {
        let folder = folder();
        let path = folder.path().join("n".repeat(255));
        staged(folder.path(), named).publish(&path, false).unwrap();
        staged(folder.path(), named).publish(&path, true).unwrap();
        assert_eq!(names(folder.path()).len(), 1);
        let path = folder.path().join("f".repeat(255));
        let mut publication = Publication::folder(&path, Barrier { name: "index".into(), content: b"" }, true);
        publication.add(&path.join("a")).unwrap();
        publication.commit(&|_| {}).unwrap();
        assert_eq!(names(&path), ["a"]);
    }
}

#[test]
fn staged_files_are_gone_when_they_are_not_published() {
    for named in [false, true] {
        let folder = folder();
        let staged = staged(folder.path(), named);
        assert_eq!(names(folder.path()).len(), usize::from(named));
        drop(staged);
        assert!(names(folder.path()).is_empty());
    }
}

#[test]
fn a_lock_that_is_never_released_ends_writers_and_readers_with_an_error() {
    let folder = folder();
    let path = folder.path().join("out");
    let lock = File::open(folder.path()).unwrap();
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();

    let commit = |lock_timeout, progress: Progress<'_>| {
        let mut publication = Publication { lock_timeout, ..Publication::files(&path, false) };
        publication.add(&path).unwrap();
        publication.commit(progress)
    };
    let error = commit(Duration::from_millis(20), &|_| {}).unwrap_err();
    assert!(error.to_string().contains(&folder.path().display().to_string()), "{error}");
    assert_eq!(kind(Err::<(), _>(error)), io::ErrorKind::TimedOut);
    assert_eq!(kind(lock::between_within(&path, Duration::from_millis(20), &|_| {}, || Ok(()))), io::ErrorKind::TimedOut);

    /// Returns `Error::Cancelled` after some calls, when the commit waits for the lock.
    struct Cancel(std::sync::atomic::AtomicI32);
    impl crate::Watch for Cancel {
        fn done(&self, _: u64) -> Result<()> {
            let calls_left = self.0.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
            if calls_left > 0 { Ok(()) } else { Err(Error::Cancelled) }
        }
    }
    // A commit makes one call before it syncs the file and one after.
    assert!(matches!(commit(LOCK_TIMEOUT, &Cancel(2.into())), Err(Error::Cancelled)));
    assert!(matches!(between_publications(&path, &Cancel(0.into()), || Ok(())), Err(Error::Cancelled)));
    assert!(names(folder.path()).is_empty());

    rustix::fs::flock(&lock, FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&lock, FlockOperation::LockShared).unwrap();
    lock::between_within(&path, Duration::ZERO, &|_| {}, || Ok(())).unwrap();
    assert_eq!(kind(commit(Duration::ZERO, &|_| {})), io::ErrorKind::TimedOut);
    rustix::fs::flock(&lock, FlockOperation::Unlock).unwrap();
    commit(Duration::ZERO, &|_| {}).unwrap();
    assert_eq!(names(folder.path()), ["out"]);
}

#[test]
fn work_that_the_disk_has_no_room_for_is_refused() {
    let folder = folder();
    let publication = Publication::files(&folder.path().join("out"), false);
    publication.check_space(0).unwrap();
    assert_eq!(kind(publication.check_space(u64::MAX)), io::ErrorKind::StorageFull);
}

#[test]
fn what_a_link_leads_to_is_looked_at() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, at(name)).unwrap();
    fs::write(at("file"), "x").unwrap();
    fs::set_permissions(at("file"), Permissions::from_mode(0o604)).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let open = File::open(at("file")).unwrap();
    use std::os::fd::AsRawFd;
    link("file", "to-file");
    link("to-file", "to-link");
    link("fifo", "to-fifo");
    link("to-fifo", "to-link-to-fifo");
    link("nothing", "to-nothing");
    link("loop", "loop");
    link(&format!("/proc/self/fd/{}", open.as_raw_fd()), "to-open-file");
    link("to-open-file", "to-link-to-open-file");
    let free = |name: &str, replace| output::check_free(&at(name), replace);
    assert_eq!(free("absent", false).unwrap(), None);
    for name in ["file", "to-file", "to-link"] {
        assert_eq!(free(name, true).unwrap(), Some(0o604), "{name}");
        assert_eq!(kind(free(name, false)), io::ErrorKind::AlreadyExists, "{name}");
    }
    for name in ["fifo", "to-fifo", "to-link-to-fifo", "to-nothing", "to-open-file", "to-link-to-open-file"] {
        let error = free(name, true).unwrap_err();
        assert!(error.to_string().contains("not a regular file"), "{name}: {error}");
        assert_eq!(kind(Err::<(), _>(error)), io::ErrorKind::InvalidInput, "{name}");
    }
    free("loop", true).unwrap_err();
    assert_eq!(kind(free(".", true)), io::ErrorKind::IsADirectory);
    free(&"n".repeat(256), false).unwrap_err();
}

#[test]
fn outputs_that_are_contain_or_lie_inside_inputs_are_refused() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(at(to), at(name)).unwrap();
    fs::create_dir_all(at("models/base/inner")).unwrap();
    fs::create_dir_all(at("elsewhere")).unwrap();
    for name in ["models/base/shard", "models/lone", "models/other"] {
        fs::write(at(name), name).unwrap();
    }
    fs::hard_link(at("models/lone"), at("hard")).unwrap();
    link("models/lone", "soft");
    link("models/base", "to-base");
    link("models", "to-models");
    let check = |output: &str, input: &str| check_apart(&[at(output)], &[at(input)]);
    for (output, input) in
        [("models/other", "models/lone"), ("models/new", "models/lone"), ("elsewhere", "models/base"), ("x", "hard")]
    {
        check(output, input).unwrap_or_else(|e| panic!("{output}, {input}: {e}"));
    }
    for (output, input, how) in [
        ("models/lone", "models/lone", "is the same as"),
        ("hard", "models/lone", "is the same as"),
        ("soft", "models/lone", "is the same as"),
        ("models/lone", "soft", "is the same as"),
        ("to-base", "models/base", "is the same as"),
        ("models", "models/lone", "contains"),
        ("to-models", "models/base", "contains"),
        ("models", "soft", "contains"),
        ("models", "to-base", "contains"),
        (".", "models/base/shard", "contains"),
        ("models/base/new", "models/base", "is inside"),
        ("models/base/inner/new", "models/base", "is inside"),
        ("models/base/absent/new", "models/base", "is inside"),
        ("to-base/new", "models/base", "is inside"),
        ("models/base/new", "to-base", "is inside"),
        ("elsewhere/../models/base/new", "models/base", "is inside"),
    ] {
        let error = check(output, input).unwrap_err();
        let expected = format!("output {} {how} input {}", at(output).display(), at(input).display());
        assert!(matches!(&error, Error::InvalidArgument(reason) if *reason == expected), "{error}, not {expected}");
    }
}

#[test]
fn temporary_folders_of_dead_processes_are_removed_and_others_stay() {
    let place = folder();
    let at = |name: &str| place.path().join(name);
    let live = TemporaryFolder::create_in(place.path()).unwrap();
    fs::write(live.path().join("a"), "x").unwrap();
    for name in [".tpde-dead.dir", ".tpde-other.tmp", "mine.dir"] {
        fs::create_dir_all(at(name).join("inside")).unwrap();
        fs::write(at(name).join("inside/file"), "x").unwrap();
    }
    let elsewhere = folder();
    fs::write(elsewhere.path().join("a"), "x").unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), at(".tpde-link.dir")).unwrap();
    fs::write(at(".tpde-file.dir"), "x").unwrap();
    let next = TemporaryFolder::create_in(place.path()).unwrap();
    assert!(live.path().join("a").exists() && next.path().exists() && elsewhere.path().join("a").exists());
    assert!(!at(".tpde-dead.dir").exists());
    drop((live, next));
    assert_eq!(names(place.path()), [".tpde-file.dir", ".tpde-link.dir", ".tpde-other.tmp", "mine.dir"]);
}

#[test]
fn temporary_folders_of_many_processes_do_not_remove_each_other() {
    let place = folder();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let folder = TemporaryFolder::create_in(place.path()).unwrap();
                    fs::write(folder.path().join("a"), "x").unwrap();
                    assert!(folder.path().join("a").exists());
                }
            });
        }
    });
    assert!(names(place.path()).is_empty());
}

#[test]
fn a_temporary_folder_is_removed_while_another_thread_fills_it() {
    let place = folder();
    for _ in 0..50 {
        let (temporary, stop) = (TemporaryFolder::create_in(place.path()).unwrap(), std::sync::atomic::AtomicBool::new(false));
        let path = temporary.path().to_owned();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 0.. {
                    if fs::write(path.join(i.to_string()), "x").is_err() || stop.load(std::sync::atomic::Ordering::Relaxed) {
                        return;
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(2));
            drop(temporary);
            assert!(!path.exists());
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
    assert!(names(place.path()).is_empty());
}

#[test]
fn what_is_moved_out_of_a_temporary_folder_replaces_nothing() {
    let place = folder();
    let to = place.path().join("out");
    let temporary = TemporaryFolder::create_in(place.path()).unwrap();
    fs::create_dir(temporary.path().join("built")).unwrap();
    fs::create_dir(&to).unwrap(); // empty: a plain rename would replace it
    assert_eq!(kind(temporary.publish("built", &to)), io::ErrorKind::AlreadyExists);
    fs::remove_dir(&to).unwrap();
    temporary.publish("built", &to).unwrap();
    drop(temporary);
    assert_eq!(names(place.path()), ["out"]);
}
