//! Small checkpoints, made from a seed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Numbers that look random (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// The lanes of three BF16 tensors.
#[derive(Clone)]
pub struct Weights(Vec<Vec<u16>>);

pub const NAMES: [&str; 3] = ["a.weight", "b.weight", "c.weight"];
const LANES: [usize; 3] = [64 * 96, 32 * 8, 128 * 128];

impl Weights {
    pub fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let lane = |random: &mut Random| (0x3c00 + random.below(0x300)) as u16 | ((random.below(2) as u16) << 15);
        Self(LANES.map(|lanes| (0..lanes).map(|_| lane(&mut random)).collect()).into())
    }

    /// Changes one lane in a hundred by one unit in the last place.
    pub fn step(&mut self, seed: u64) {
        let mut random = Random(seed);
        for lanes in &mut self.0 {
            for _ in 0..lanes.len() / 100 {
                let at = random.below(lanes.len() as u64) as usize;
                lanes[at] = lanes[at].wrapping_add(1);
            }
        }
    }

    fn file(&self, tensors: std::ops::Range<usize>) -> Vec<u8> {
        let mut offset = 0;
        let entries: Vec<_> = tensors
            .clone()
            .map(|i| {
                let (begin, end) = (offset, offset + 2 * self.0[i].len());
                offset = end;
                format!(r#""{}":{{"dtype":"BF16","shape":[{}],"data_offsets":[{begin},{end}]}}"#, NAMES[i], self.0[i].len())
            })
            .collect();
        let header = format!("{{{}}}", entries.join(","));
        let lanes = self.0[tensors].iter().flatten().flat_map(|lane| lane.to_le_bytes());
        (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).chain(lanes).collect()
    }

    /// Writes one file.
    pub fn write(&self, path: &Path) -> PathBuf {
        fs::write(path, self.file(0..3)).unwrap();
        path.to_owned()
    }

    /// The bytes of the tensors, by name.
    pub fn tensors(&self) -> BTreeMap<String, Vec<u8>> {
        let bytes = |lanes: &Vec<u16>| lanes.iter().flat_map(|lane| lane.to_le_bytes()).collect();
        NAMES.iter().zip(&self.0).map(|(name, lanes)| (name.to_string(), bytes(lanes))).collect()
    }

    /// The bytes of [`Weights::write`].
    pub fn bytes(&self) -> Vec<u8> {
        self.file(0..3)
    }

    /// Writes a folder with two shards, a configuration and a tokenizer.
    pub fn write_folder(&self, path: &Path, config: &str) {
        fs::create_dir_all(path.join("1_Pooling")).unwrap();
        fs::write(path.join("model-00001-of-00002.safetensors"), self.file(0..2)).unwrap();
        fs::write(path.join("model-00002-of-00002.safetensors"), self.file(2..3)).unwrap();
        let map = (0..3).map(|i| format!(r#""{}": "model-0000{}-of-00002.safetensors""#, NAMES[i], i / 2 + 1)).collect::<Vec<_>>();
        let index = format!("{{\"metadata\": {{\"total_size\": 1}}, \"weight_map\": {{{}}}}}\n", map.join(", "));
        fs::write(path.join("model.safetensors.index.json"), index).unwrap();
        fs::write(path.join("config.json"), config).unwrap();
        fs::write(path.join("tokenizer.json"), "tokens ".repeat(2000)).unwrap();
        fs::write(path.join("empty.txt"), "").unwrap();
        fs::write(path.join("1_Pooling/config.json"), "{\"pooling\": true}").unwrap();
    }
}

/// All files below a folder, with their content.
pub fn tree(path: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    let mut open = vec![path.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path_of = entry.unwrap().path();
            match path_of.is_dir() {
                true => open.push(path_of),
                false => files.push((path_of.strip_prefix(path).unwrap().display().to_string(), fs::read(&path_of).unwrap())),
            }
        }
    }
    files.sort();
    files
}
