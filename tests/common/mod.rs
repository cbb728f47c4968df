//! Small synthetic checkpoints for tests. They are written as safetensors by hand, so that the code under test does not write its
//! own input.

#[allow(dead_code, reason = "not all tests forge")]
pub mod forge;
#[allow(dead_code, reason = "not all tests make up inputs")]
pub mod inputs;
#[allow(dead_code, reason = "not all tests look at the vectors")]
pub mod manifest;
#[allow(dead_code, reason = "not all tests hold slices")]
pub mod slices;
#[allow(dead_code, reason = "not all tests look at the vectors")]
pub mod versions;

use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

/// The root of the repository, for the tests of all its packages.
#[allow(dead_code, reason = "not all tests read files of the repository")]
pub fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().find(|folder| folder.join("testdata").is_dir()).unwrap()
}

/// A tensor to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A pseudo-random generator with the same sequence on every machine.
pub struct Xorshift(pub u64);

impl Xorshift {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Size in bytes of an element, for the dtypes used in tests.
pub fn width(dtype: &str) -> usize {
    match dtype {
        "U8" | "F8_E4M3" => 1,
        "BF16" | "F16" => 2,
        "F32" | "U32" => 4,
        "F64" | "I64" => 8,
        _ => panic!("no width for {dtype}"),
    }
}

/// A tensor of random bits.
pub fn tensor(name: &str, dtype: &'static str, shape: &[usize], seed: u64) -> Tensor {
    let mut random = Xorshift(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let size = shape.iter().product::<usize>() * width(dtype);
    let bytes = (0..size).map(|_| (random.next() >> 32) as u8).collect();
    Tensor { name: name.into(), dtype, shape: shape.into(), bytes }
}

/// The same tensor with the lowest bit of one lane in `every` flipped.
pub fn tuned(tensor: &Tensor, every: usize) -> Tensor {
    let mut tuned = tensor.clone();
    tuned.bytes.iter_mut().step_by(width(tensor.dtype) * every).for_each(|byte| *byte ^= 1);
    tuned
}

/// The same tensor under another name.
#[allow(dead_code, reason = "not all tests rename tensors")]
pub fn named(tensor: &Tensor, name: &str) -> Tensor {
    Tensor { name: name.into(), ..tensor.clone() }
}

/// A safetensors file of these tensors in this order, with metadata and unusual spacing in its header.
pub fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt", "made by": "a test"}));
    let mut data: Vec<u8> = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend(&tensor.bytes);
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()]});
        header.insert(tensor.name.clone(), entry);
    }
    let mut json = serde_json::to_vec_pretty(&Value::Object(header)).unwrap();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend(json);
    file.extend(data);
    file
}

/// The same file with a header so long that a pair takes it from a base that has the same one.
#[allow(dead_code, reason = "not all tests need it")]
pub fn with_long_header(mut file: Vec<u8>) -> Vec<u8> {
    let size = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    file.splice(8 + size..8 + size, [b' '; 8192]);
    file[..8].copy_from_slice(&(size as u64 + 8192).to_le_bytes());
    file
}

/// Writes these tensors as a safetensors file.
pub fn write_file(path: &Path, tensors: &[Tensor]) {
    fs::write(path, safetensors(tensors)).unwrap();
}

/// Writes a folder of shards with a shard index, and files that are not part of the checkpoint.
pub fn write_folder(path: &Path, shards: &[&[Tensor]]) {
    fs::create_dir(path).unwrap();
    let mut map = Map::new();
    for (i, tensors) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        write_file(&path.join(&name), tensors);
        map.extend(tensors.iter().map(|tensor| (tensor.name.clone(), Value::from(name.as_str()))));
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(path.join("model.safetensors.index.json"), serde_json::to_vec_pretty(&index).unwrap()).unwrap();
    fs::write(path.join("config.json"), "{}").unwrap();
    fs::write(path.join("tokenizer.json"), "{}").unwrap();
}
