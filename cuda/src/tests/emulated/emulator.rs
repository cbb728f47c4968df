//! Case files, and the program that runs kernels on them (`kernels/emulator`).

use super::super::cases::Case;
use crate::abi::{self, DeviceTensor, FLAG_NO_CRC, NO_TABLES, TensorForm};
use crate::index::tables_of;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use tpde_core::codec::Codec;
use tpde_core::error::Rule;
use tpde_core::format::{ChunkMetadata, ChunkSums};
use zerocopy::IntoBytes;

/// A chunk, its expected target, and the correct status words.
pub struct Chunk {
    pub case: Case,
    /// Index of the first lane of the chunk in its tensor.
    pub first_lane: u64,
    /// Number of lanes of a full chunk.
    pub chunk_lanes: u64,
    pub expected: Result<Vec<u8>, Rule>,
    pub right: fn(Option<Rule>, Option<Rule>) -> bool,
    /// What the base lanes are formed from.
    pub source: Option<Source>,
}

/// A derived base: the whole base tensor and the whole tensor of scales.
#[derive(Clone)]
pub struct Source {
    pub form: TensorForm,
    pub base: Vec<u8>,
    pub scales: Vec<u8>,
}

impl Chunk {
    /// Returns a chunk that is a whole tensor.
    pub fn alone(case: Case, expected: Result<Vec<u8>, Rule>, right: fn(Option<Rule>, Option<Rule>) -> bool) -> Self {
        let chunk_lanes = case.lanes.next_power_of_two().max(4096) as u64;
        Self { case, first_lane: 0, chunk_lanes, expected, right, source: None }
    }
}

/// A range of memory to be hashed.
#[derive(Clone)]
pub struct Hashed {
    pub bytes: Vec<u8>,
    /// Size of a row in bytes, 0 without gaps.
    pub row: usize,
    /// Bytes between two rows.
    pub gap: usize,
    /// Offset from a multiple of 64 bytes.
    pub shift: usize,
}

/// Cases for the emulator, in the format of `kernels/emulator/README.md`.
#[derive(Default)]
pub struct Cases {
    bytes: Vec<u8>,
    pub count: usize,
}

impl Cases {
    fn number(&mut self, number: usize) {
        self.bytes.extend(u32::try_from(number).unwrap().to_le_bytes());
    }

    fn list<T: IntoBytes + zerocopy::Immutable>(&mut self, list: &[T]) {
        self.number(list.len());
        self.bytes.extend(list.as_bytes());
    }

    /// Adds a launch of all these chunks. `expanded`: chunks of codec `zstd` have been expanded.
    pub fn add(&mut self, name: &str, expanded: bool, chunks: &[Chunk]) {
        let sets: Vec<_> = chunks.iter().filter_map(|chunk| chunk.case.set.clone()).collect();
        let (starts, words) = tables_of(&sets).unwrap();
        let mut starts = starts.into_iter();
        self.list(name.as_bytes());
        self.number(if expanded { FLAG_NO_CRC as usize } else { 0 });
        self.list(&words);
        self.number(chunks.len());
        for Chunk { case, first_lane, chunk_lanes, expected, right, source } in chunks {
            let width = case.dtype.lane_bytes();
            let tensor = DeviceTensor {
                lanes: first_lane + case.lanes as u64,
                base_lanes: first_lane + (case.base.len() / width) as u64,
                tables: case.set.as_ref().map_or(NO_TABLES, |_| starts.next().unwrap()),
                dtype: case.dtype.code(),
                codec: if expanded { Codec::Raw } else { case.codec }.code(),
                lane_log2: width.ilog2() as u8,
                chunk_lanes_log2: chunk_lanes.ilog2() as u8,
                ..DeviceTensor::default()
            };
            let record = ChunkMetadata {
                blob_offset: 0.into(),
                compressed_size: (case.payload.len() as u32).into(),
                uncompressed_size: case.uncompressed_size.into(),
                num_deltas: case.num_deltas.into(),
                crc32: case.crc32.into(),
                output_offset: (*first_lane).into(),
            };
            let sums = ChunkSums { base_sum: case.base_sum.into(), target_sum: case.target_sum.into() };
            let mut payload = case.payload.clone();
            payload.resize(payload.len().next_multiple_of(16), case.padding);
            let broken = expected.as_ref().err().copied();
            let statuses =
                (0..32).filter(|&status| right(broken, abi::rule(status)) && (status == 0 || abi::rule(status).is_some()));
            self.bytes.extend_from_slice(tensor.as_bytes());
            self.bytes.extend_from_slice(record.as_bytes());
            self.bytes.extend_from_slice(sums.as_bytes());
            self.number(statuses.map(|status| 1 << status).sum());
            self.list(&payload);
            let digest = blake3::hash(&case.payload);
            self.list(if case.payload.is_empty() { &[] } else { &digest.as_bytes()[..16] });
            self.list(&case.base);
            self.list(expected.as_deref().unwrap_or(&[]));
            let none = Source { form: TensorForm::default(), base: Vec::new(), scales: Vec::new() };
            let Source { form, base, scales } = source.as_ref().unwrap_or(&none);
            self.bytes.extend_from_slice(form.as_bytes());
            self.list(base);
            self.list(scales);
        }
        self.number(0);
        self.count += 1;
    }

    /// Adds launches that hash ranges of memory.
    pub fn add_ranges(&mut self, name: &str, ranges: &[Hashed]) {
        self.list(name.as_bytes());
        self.number(0);
        self.list::<u32>(&[]);
        self.number(0);
        self.number(ranges.len());
        for Hashed { bytes, row, gap, shift } in ranges {
            self.list(bytes);
            self.list(blake3::hash(bytes).as_bytes());
            [row, gap, shift].into_iter().for_each(|&number| self.number(number));
        }
        self.count += 1;
    }

    /// Runs the kernels on all cases, and prints the result to stderr.
    pub fn run(&self, name: &str, arguments: &[&str]) {
        let file = self.save(name);
        self.run_saved(&file, "memory", arguments);
    }

    /// Runs the kernels on all cases with race detection.
    pub fn find_races(&self, name: &str, arguments: &[&str]) {
        let file = self.save(name);
        self.run_saved(&file, "races", arguments);
    }

    fn save(&self, name: &str) -> PathBuf {
        let folder = folder();
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join(name).with_extension("cases");
        std::fs::write(&file, &self.bytes).unwrap();
        file
    }

    fn run_saved(&self, file: &Path, program: &str, arguments: &[&str]) {
        if std::env::var_os("TPDE_EMULATE").is_some_and(|only| only == "write") {
            return;
        }
        let name = file.file_stem().unwrap().display();
        build(program);
        let program = folder().join(program);
        // The thread sanitizer does not support address space layout with much randomisation.
        let fixed = Command::new("setarch").args(["-R", "true"]).output().is_ok_and(|output| output.status.success());
        let before: &[&str] = if fixed { &["setarch", "-R"] } else { &["env"] };
        let output = Command::new(before[0]).args(&before[1..]).arg(program).args(arguments).arg(file).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let told = text(&output.stdout);
        assert!(output.status.success(), "{}{told}one of them again: kernels/emulator/run NAME", text(&output.stderr));
        eprint!("{name}: {} cases, {told}", self.count);
    }
}

/// Returns the folder of programs and cases, in cargo's target folder.
pub fn folder() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().join("emulator")
}

/// Builds a program if its sources have changed. Tests that need it are ignored without a C++ compiler.
pub fn build(program: &str) {
    // Tests run in parallel, but only one of them may build.
    static BUILDING: Mutex<()> = Mutex::new(());
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/emulator/build");
    let output = Command::new(script).arg(folder()).arg(program).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
