//! The vectors of each version of the format. A frozen version is an archive, which is unpacked once, into cargo's target folder. A
//! version under construction is a folder. `testdata/versions.py` does the same and uses the same unpacked folders.

use sha2::{Digest, Sha256};
use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::{fs, iter};

const ENDING: &str = ".tar.zst";

/// The folder with the vectors of all versions, found at run time for tests that were built elsewhere.
pub fn testdata() -> PathBuf {
    let roots = iter::once(Path::new(".")).chain(Path::new(env!("CARGO_MANIFEST_DIR")).ancestors());
    roots.map(|root| root.join("testdata")).find(|folder| folder.is_dir()).expect("a folder testdata").canonicalize().unwrap()
}

/// The versions that have vectors, as `v1`.
pub fn names() -> Vec<String> {
    let entries = fs::read_dir(testdata()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names = entries.map(|name| name.strip_suffix(ENDING).map(str::to_owned).unwrap_or(name));
    let is_version = |name: &String| name.strip_prefix('v').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let mut names: Vec<_> = names.filter(is_version).collect();
    names.sort();
    names.dedup();
    names
}

/// The archive of a version, which exists if the version is frozen.
pub fn archive(name: &str) -> PathBuf {
    testdata().join(name.to_owned() + ENDING)
}

/// The folder with the files of a version.
pub fn folder(name: &str) -> PathBuf {
    let archive = archive(name);
    if !archive.exists() {
        return testdata().join(name);
    }
    // Cargo marks its target folder with this file.
    let program = std::env::current_exe().unwrap();
    let target = program.ancestors().find(|folder| folder.join("CACHEDIR.TAG").exists()).map(Path::to_owned);
    let target = target.unwrap_or_else(|| testdata().with_file_name("target"));
    unpacked(&fs::read(&archive).unwrap(), name, &target.join("vectors")).unwrap_or_else(|e| panic!("{}: {e}", archive.display()))
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Unpacks an archive into a folder named after its digest, if there is none yet.
pub fn unpacked(archive: &[u8], name: &str, target: &Path) -> Result<PathBuf> {
    let digest = sha256(archive);
    let place = target.join(&digest);
    if !place.exists() {
        let right = "section 15 of spec/tpde-format.md has the right SHA-256";
        let damaged = |e| Error::other(format!("damaged, {e}. {right}, that of these bytes is {digest}"));
        let tar = zstd::decode_all(archive).map_err(damaged)?;
        fs::create_dir_all(target)?;
        let temporary = tempfile::tempdir_in(target)?;
        let whole = temporary.path().join("whole");
        tar::Archive::new(&*tar).unpack(&whole).map_err(damaged)?;
        // Another process may have been faster. It has unpacked the same bytes.
        fs::rename(&whole, &place).or_else(|e| if place.exists() { Ok(()) } else { Err(e) })?;
    }
    Ok(place.join(name))
}
