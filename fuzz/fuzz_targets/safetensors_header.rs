//! Any bytes as a safetensors file, and as the shard index of a folder.
//!
//! Opens them by path, as users do, because a header must also agree with the length of its file. The files are in memory.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use rustix::fs::{MemfdFlags, memfd_create};
use std::cell::LazyCell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use tpde::{Checkpoint, Error, SafetensorsCheckpoint};

thread_local! {
    static MEMORY: LazyCell<(File, PathBuf)> = LazyCell::new(|| {
        let file = File::from(memfd_create("safetensors", MemfdFlags::CLOEXEC).expect("a file in memory"));
        let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        (file, path)
    });
    static FOLDER: LazyCell<TempDir> = LazyCell::new(|| {
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.expect("a folder");
        for (name, tensor) in [("a.safetensors", "w"), ("b.safetensors", "v")] {
            let file = with_length(format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}}}"#).as_bytes(), 2);
            std::fs::write(folder.path().join(name), file).expect("a written shard");
        }
        folder
    });
}

fuzz_target!(|data: &[u8]| -> Corpus {
    let Some((&kind, rest)) = data.split_first() else { return Corpus::Reject };
    match kind % 8 {
        0 => open(rest),
        1 => open_folder(rest),
        // Puts the correct header length in front of `json`, so that the JSON is parsed, and appends `size` bytes of data.
        _ => match rest.split_first_chunk() {
            Some((size, json)) => open(&with_length(json, u16::from_le_bytes(*size).into())),
            None => return Corpus::Reject,
        },
    }
    Corpus::Keep
});

fn with_length(json: &[u8], data: usize) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json);
    file.resize(file.len() + data, 7);
    file
}

fn open(bytes: &[u8]) {
    MEMORY.with(|memory| {
        let (file, path) = &**memory;
        file.set_len(bytes.len() as u64).and_then(|()| file.write_all_at(bytes, 0)).expect("a written file");
        check(SafetensorsCheckpoint::open(path), bytes.len() as u64);
    });
}

fn open_folder(index: &[u8]) {
    FOLDER.with(|folder| {
        let path = folder.path();
        std::fs::write(path.join("model.safetensors.index.json"), index).expect("a written shard index");
        check(SafetensorsCheckpoint::open(path), u64::MAX);
    });
}

fn check(opened: Result<SafetensorsCheckpoint, Error>, size: u64) {
    let checkpoint = match opened {
        Ok(checkpoint) => checkpoint,
        // A shard index may name files that do not exist.
        Err(error) => return assert!(matches!(error, Error::BadCheckpoint { .. } | Error::Io { .. }), "{error}"),
    };
    assert!(checkpoint.tensors().is_sorted_by(|a, b| a.name < b.name));
    let mut total = 0;
    for (place, info) in checkpoint.tensors().iter().enumerate() {
        assert_eq!(checkpoint.find(&info.name), Some(place));
        let mut bytes = vec![0; info.bytes() as usize];
        checkpoint.read(place, 0, &mut bytes).expect("the bytes that the header describes");
        total += info.bytes();
    }
    assert!(total < size);
}
