//! Benchmarks of calls that a user waits for, on generated data: opening a large index, verifying, encoding and applying.
//! `tpde bench` measures real checkpoints and compares with XOR and zstd.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use tpde::{Apply, BaseKind, Codec, Dtype, Encode, EncodeOptions, Limits, MemoryCheckpoint, TensorInfo, ValidatedIndex};
use tpde_core::codec::{ChunkDecoder, ChunkEncoder, Coding, DecodeCost, Encoded, EncodedChunk, TableSet};
use tpde_core::sums::chunk_sum;
use tpde_core::writer::{PairBuilder, TensorSpec};

const LANES: usize = 16 << 20;

/// Base and target lanes in BF16. One lane in `rarity` differs by a few units in the last place.
fn lanes(rarity: u64) -> (Vec<u8>, Vec<u8>) {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 16
    };
    let mut base = Vec::with_capacity(2 * LANES);
    let mut target = Vec::with_capacity(2 * LANES);
    for _ in 0..LANES {
        let lane = 0x3C00 + (random() % 0x300) as u16;
        let step = if random() % rarity == 0 { 1 + (random() % 7) as u16 } else { 0 };
        base.extend(lane.to_le_bytes());
        target.extend((lane + step).to_le_bytes());
    }
    (base, target)
}

/// An index of a million chunks with payloads.
fn large_index() -> Vec<u8> {
    let mut builder = PairBuilder::new(std::io::sink(), "nowhere".into(), Default::default()).unwrap();
    let lanes = 4096u64;
    let (chunks, tensors) = (1_000_000, 100);
    let payload = [5, 0, 0, 0, 1, 0];
    for i in 0..tensors {
        builder.begin_tensor(&TensorSpec {
            name: format!("tensor.{i:03}"),
            base_name: None,
            dtype: Dtype::Bf16,
            shape: vec![chunks / tensors, lanes],
            part: None,
            base_kind: BaseKind::Same,
            base_param: 0,
            derived: None,
            codec: Codec::Raw,
            tables: None,
            chunk_lanes_log2: 12,
        });
        for chunk in 0..chunks / tensors {
            builder.chunk(&payload, Encoded { uncompressed_size: 6, num_deltas: 1 }, chunk, chunk + 1).unwrap();
        }
        builder.end_tensor(Some(blake3::hash(b"base")), blake3::hash(b"target"));
    }
    builder.finish().unwrap().index.as_bytes().to_vec()
}

fn open(c: &mut Criterion) {
    let index = large_index();
    let path = std::env::temp_dir().join(format!("tpde-bench-{}.tpde-index", std::process::id()));
    std::fs::write(&path, &index).unwrap();
    let mut group = c.benchmark_group("index of a million records");
    group.sample_size(20);
    group.bench_function("parse and validate", |b| {
        b.iter_batched(|| index.clone(), |bytes| ValidatedIndex::parse(bytes, &Limits::default()).unwrap(), BatchSize::PerIteration)
    });
    group.bench_function("read, parse and validate", |b| {
        b.iter(|| {
            let source = tpde::FileSource::open(&path).unwrap();
            ValidatedIndex::parse(source.read_all("size of the index", 1 << 30).unwrap(), &Limits::default()).unwrap()
        })
    });
    group.finish();
    std::fs::remove_file(path).unwrap();
}

fn pair(c: &mut Criterion) {
    for (name, rarity) in [("1 % changed", 100), ("40 % changed", 5)] {
        let (base, target) = lanes(rarity);
        let info = || TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![LANES as u64] };
        let base = MemoryCheckpoint::new([(info(), &base[..])]).unwrap();
        let target = MemoryCheckpoint::new([(info(), &target[..])]).unwrap();
        let (pair, _) = Encode::new(&target).base(&base).to_memory().unwrap();
        let mut group = c.benchmark_group(name);
        group.sample_size(10);
        group.throughput(Throughput::Bytes(2 * LANES as u64));
        group.bench_function("encode", |b| b.iter(|| Encode::new(&target).base(&base).to_memory().unwrap()));
        let mut out = vec![1; 2 * LANES];
        group.bench_function("apply", |b| b.iter(|| Apply::new(&pair).base(&base).to_buffers(&mut [&mut out]).unwrap()));
        group.bench_function("apply without digests", |b| {
            b.iter(|| Apply::new(&pair).base(&base).digests(false).to_buffers(&mut [&mut out]).unwrap())
        });
        group.throughput(Throughput::Bytes(pair.index().blob_size()));
        group.bench_function("verify", |b| b.iter(|| pair.verify().unwrap()));
        group.finish();
    }
}

fn parts(c: &mut Criterion) {
    let (base, target) = lanes(100);
    let (base, target) = (&base[..2 << 20], &target[..2 << 20]);
    let mut group = c.benchmark_group("chunk of 2 MiB");
    group.throughput(Throughput::Bytes(base.len() as u64));
    group.bench_function("chunk sum", |b| b.iter(|| chunk_sum(black_box(base))));
    let tables = tables_of(base, target);
    let mut encoder = ChunkEncoder::new().unwrap();
    let mut decoder = ChunkDecoder::new();
    let base_sum = chunk_sum(base);
    for &codec in Codec::ALL {
        let coding = match codec {
            Codec::Raw => Coding::Raw,
            Codec::Zstd => Coding::Zstd(None),
            _ => Coding::Conditioned { tables: Some(&tables), low_bits: 0, decode_cost: DecodeCost::default() },
        };
        let mut payload = Vec::new();
        let encoded = encoder.encode(coding, Dtype::Bf16, base, target, &mut payload).unwrap();
        let tables = Some(&tables);
        let chunk = EncodedChunk { codec, dtype: Dtype::Bf16, tables, encoded, payload: &payload, base_sum };
        let mut again = Vec::new();
        group.bench_function(format!("encode {codec}"), |b| {
            b.iter(|| {
                again.clear();
                encoder.encode(coding, Dtype::Bf16, black_box(base), target, &mut again).unwrap()
            })
        });
        let mut lanes = base.to_vec();
        group.bench_function(format!("copy base and decode {codec}"), |b| {
            b.iter(|| {
                lanes.copy_from_slice(black_box(base));
                decoder.decode(&chunk, &mut lanes, &mut |_, _| Ok(())).unwrap()
            })
        });
    }
    group.finish();
}

/// The table set that an encoder makes for these lanes.
fn tables_of(base: &[u8], target: &[u8]) -> TableSet {
    let info = TensorInfo { name: "w".into(), dtype: Dtype::Bf16, shape: vec![base.len() as u64 / 2] };
    let base = MemoryCheckpoint::new([(info.clone(), base)]).unwrap();
    let target = MemoryCheckpoint::new([(info, target)]).unwrap();
    let options = EncodeOptions::default().codec(Codec::Conditioned);
    let (pair, _) = Encode::new(&target).base(&base).options(options).to_memory().unwrap();
    pair.index().table_sets()[0].clone()
}

criterion_group!(benches, open, pair, parts);
criterion_main!(benches);
