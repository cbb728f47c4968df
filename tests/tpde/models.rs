//! Made-up models with the tensors of Llama, Mixtral and gpt-oss: ranks with fused parameters change them in place, and trainers
//! that hold other shards encode what the ranks need.

use crate::common::slices::{GAP, Held, info, memory, whole};
use crate::common::{Tensor as Data, tensor, tuned};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use tpde::{
    Apply, Checkpoint, Codec, CodecChoice, Encode, EncodeOptions, Error, InPlace, Merge, Pair, Rectangle, SafetensorsCheckpoint,
    Slice, SliceCheckpoint, SliceMut, Split, Verify,
};

type InMemory = Pair<Vec<u8>>;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Family {
    Llama,
    /// Each expert's matrices are tensors of their own.
    Mixtral,
    /// The experts of a layer are one tensor, in blocks of 32 values of 4 bits with a scale. Gate and up are rows that alternate,
    /// or tensors of their own.
    GptOss {
        is_interleaved: bool,
    },
}

#[derive(Debug, Clone, Copy)]
struct Model {
    family: Family,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Width of the feed-forward layers.
    inner: usize,
    experts: usize,
    vocab: usize,
    /// The ranks' parameters have rows for this many tokens.
    padded_vocab: usize,
}

/// A slice in the memory of a parameter.
struct Placement {
    tensor: String,
    part: Rectangle,
    /// Bytes after each row but the last.
    gap: usize,
    /// Bytes after the last row.
    after: usize,
}

/// The bytes of each slice of a parameter in its memory, and the pitch.
type Ranges = Vec<(Range<usize>, Option<u64>)>;

/// A parameter of a rank: one or more slices in one block of memory.
type Parameter = Vec<Placement>;

impl Model {
    fn tensors(&self) -> Vec<Data> {
        let Model { hidden, heads, kv_heads, head_dim, inner, experts, vocab, .. } = *self;
        let mut tensors = Vec::new();
        let mut add = |name: String, dtype, shape: &[usize]| {
            let seed = 1 + tensors.len() as u64;
            tensors.push(tensor(&name, dtype, shape, seed));
        };
        add("lm_head.weight".into(), "BF16", &[vocab, hidden]);
        add("model.embed_tokens.weight".into(), "BF16", &[vocab, hidden]);
        for layer in ["model.layers.0", "model.layers.1"] {
            let attention = format!("{layer}.self_attn");
            for (name, rows) in [("q", heads), ("k", kv_heads), ("v", kv_heads)] {
                add(format!("{attention}.{name}_proj.weight"), "BF16", &[rows * head_dim, hidden]);
                if let Family::GptOss { .. } = self.family {
                    add(format!("{attention}.{name}_proj.bias"), "BF16", &[rows * head_dim]);
                }
            }
            add(format!("{attention}.o_proj.weight"), "BF16", &[hidden, heads * head_dim]);
            add(format!("{layer}.input_layernorm.weight"), "BF16", &[hidden]);
            match self.family {
                Family::Llama => {
                    add(format!("{layer}.mlp.gate_proj.weight"), "BF16", &[inner, hidden]);
                    add(format!("{layer}.mlp.up_proj.weight"), "BF16", &[inner, hidden]);
                    add(format!("{layer}.mlp.down_proj.weight"), "BF16", &[hidden, inner]);
                }
                Family::Mixtral => {
                    let moe = format!("{layer}.block_sparse_moe");
                    add(format!("{moe}.gate.weight"), "BF16", &[experts, hidden]);
                    for expert in 0..experts {
                        add(format!("{moe}.experts.{expert}.w1.weight"), "BF16", &[inner, hidden]);
                        add(format!("{moe}.experts.{expert}.w2.weight"), "BF16", &[hidden, inner]);
                        add(format!("{moe}.experts.{expert}.w3.weight"), "BF16", &[inner, hidden]);
                    }
                }
                Family::GptOss { is_interleaved } => {
                    add(format!("{attention}.sinks"), "BF16", &[heads]);
                    add(format!("{layer}.mlp.router.weight"), "BF16", &[experts, hidden]);
                    let moe = format!("{layer}.mlp.experts");
                    let rows = if is_interleaved { 2 * inner } else { inner };
                    for name in gate_and_up(is_interleaved) {
                        add(format!("{moe}.{name}_proj_bias"), "BF16", &[experts, rows]);
                        add(format!("{moe}.{name}_proj_blocks"), "U8", &[experts, rows, hidden / 32, 16]);
                        add(format!("{moe}.{name}_proj_scales"), "U8", &[experts, rows, hidden / 32]);
                    }
                    add(format!("{moe}.down_proj_bias"), "BF16", &[experts, hidden]);
                    add(format!("{moe}.down_proj_blocks"), "U8", &[experts, hidden, inner / 32, 16]);
                    add(format!("{moe}.down_proj_scales"), "U8", &[experts, hidden, inner / 32]);
                }
            }
        }
        add("model.norm.weight".into(), "F32", &[hidden]);
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        tensors
    }

    /// The rule by which the pair of `tp` ranks is cut, but for the vocabulary.
    fn split(&self, tp: usize) -> Split {
        let rule = match self.family {
            Family::Llama => format!("llama:{tp}"),
            Family::Mixtral => format!("mixtral:{tp}"),
            Family::GptOss { .. } => [
                format!("*.down_proj_bias=0:1,*.down_proj_*=2:{tp},*.experts.*=1:{tp},*.sinks=0:{tp}"),
                format!("*.o_proj.weight=1:{tp},*.self_attn.*=0:{tp}"),
            ]
            .join(","),
        };
        rule.parse().unwrap()
    }

    /// The rows of tokens that a rank holds. Its parameter has more where the vocabulary is padded.
    fn tokens(&self, tp: usize, rank: usize) -> Range<usize> {
        let rows = self.padded_vocab / tp;
        (rows * rank).min(self.vocab)..(rows * (rank + 1)).min(self.vocab)
    }

    /// The parameters of a rank.
    fn parameters(&self, tensors: &[Data], tp: usize, rank: usize) -> Vec<Parameter> {
        let find = |name: &str| tensors.iter().find(|data| data.name == name).unwrap();
        let place = |name: &str, dim: usize, range: Range<usize>, gap: usize| {
            let mut part = whole(find(name));
            (part.origin[dim], part.extent[dim]) = (range.start as u64, range.len() as u64);
            Placement { tensor: name.into(), part, gap, after: gap }
        };
        let all = |name: &str| place(name, 0, 0..find(name).shape[0], 0);
        // What a rank holds of a dimension that is divided evenly.
        let mine = |length: usize| length / tp * rank..length / tp * (rank + 1);
        let heads = |count: usize| {
            // Ranks share a head where there are more ranks than heads.
            let first = count * rank / tp;
            first * self.head_dim..(first + (count / tp).max(1)) * self.head_dim
        };
        let mut parameters = Vec::new();
        for name in ["lm_head.weight", "model.embed_tokens.weight"] {
            let tokens = self.tokens(tp, rank);
            let padding = (self.padded_vocab / tp - tokens.len()) * self.hidden * 2;
            parameters.push(vec![Placement { after: padding, ..place(name, 0, tokens, 0) }]);
        }
        parameters.push(vec![all("model.norm.weight")]);
        for layer in ["model.layers.0", "model.layers.1"] {
            let attention = format!("{layer}.self_attn");
            let fused = |kind: &str, gap: usize| {
                let of = |name: &str, count| place(&format!("{attention}.{name}_proj.{kind}"), 0, heads(count), gap);
                vec![of("q", self.heads), of("k", self.kv_heads), of("v", self.kv_heads)]
            };
            parameters.push(fused("weight", 6));
            parameters.push(vec![place(&format!("{attention}.o_proj.weight"), 1, heads(self.heads), 10)]);
            parameters.push(vec![all(&format!("{layer}.input_layernorm.weight"))]);
            match self.family {
                Family::Llama => {
                    let of = |name: &str, dim| place(&format!("{layer}.mlp.{name}_proj.weight"), dim, mine(self.inner), 2);
                    parameters.push(vec![of("gate", 0), of("up", 0)]);
                    parameters.push(vec![of("down", 1)]);
                }
                Family::Mixtral => {
                    let moe = format!("{layer}.block_sparse_moe");
                    parameters.push(vec![all(&format!("{moe}.gate.weight"))]);
                    let of =
                        |expert, name: &str, dim| place(&format!("{moe}.experts.{expert}.{name}.weight"), dim, mine(self.inner), 4);
                    parameters.push((0..self.experts).flat_map(|expert| [of(expert, "w1", 0), of(expert, "w3", 0)]).collect());
                    parameters.push((0..self.experts).map(|expert| of(expert, "w2", 1)).collect());
                }
                Family::GptOss { is_interleaved } => {
                    parameters.push(fused("bias", 0));
                    parameters.push(vec![place(&format!("{attention}.sinks"), 0, mine(self.heads), 0)]);
                    parameters.push(vec![all(&format!("{layer}.mlp.router.weight"))]);
                    let moe = format!("{layer}.mlp.experts");
                    // The rows of each expert are padded, so each expert is a slice of its own.
                    let of = |expert: usize, name: String, dim: usize| {
                        let mut placement = place(&name, dim, mine(find(&name).shape[dim]), 0);
                        (placement.part.origin[0], placement.part.extent[0]) = (expert as u64, 1);
                        Placement { after: 24, ..placement }
                    };
                    for kind in ["bias", "blocks", "scales"] {
                        let names = gate_and_up(is_interleaved);
                        let of_expert = |expert| names.iter().map(move |name| (expert, name));
                        let fused = (0..self.experts).flat_map(of_expert);
                        parameters.push(fused.map(|(expert, name)| of(expert, format!("{moe}.{name}_proj_{kind}"), 1)).collect());
                    }
                    parameters.push(vec![all(&format!("{moe}.down_proj_bias"))]);
                    for kind in ["blocks", "scales"] {
                        parameters.push((0..self.experts).map(|expert| of(expert, format!("{moe}.down_proj_{kind}"), 2)).collect());
                    }
                }
            }
        }
        parameters
    }
}

fn gate_and_up(is_interleaved: bool) -> &'static [&'static str] {
    if is_interleaved { &["gate_up"] } else { &["gate", "up"] }
}

/// A parameter's memory with the values of these tensors, and canaries in gaps and padding. Returns the ranges of the slices too.
fn filled(parameter: &Parameter, tensors: &[Data]) -> (Vec<u8>, Ranges) {
    let (mut bytes, mut slices) = (Vec::new(), Vec::new());
    for Placement { tensor, part, gap, after } in parameter {
        let data = tensors.iter().find(|data| data.name == *tensor).unwrap();
        let held = Held::new(data, part, *gap);
        slices.push((bytes.len()..bytes.len() + held.bytes.len(), held.pitch));
        bytes.extend(held.bytes);
        bytes.resize(bytes.len() + after, GAP);
    }
    (bytes, slices)
}

/// The slices of a parameter in its memory.
fn slices_mut<'a>(parameter: &'a Parameter, ranges: &[(Range<usize>, Option<u64>)], mut bytes: &'a mut [u8]) -> Vec<SliceMut<'a>> {
    let (mut slices, mut done) = (Vec::new(), 0);
    for (Placement { tensor, part, .. }, (range, pitch)) in parameter.iter().zip(ranges) {
        let (held, rest) = std::mem::take(&mut bytes).split_at_mut(range.end - done);
        let slice = SliceMut::new(tensor, part.clone(), &mut held[range.start - done..]);
        slices.push(pitch.iter().fold(slice, |slice, pitch| slice.pitch(*pitch)));
        (bytes, done) = (rest, range.end);
    }
    slices
}

/// Changes the parameters of a rank in place, and compares all their memory with slices of the target.
fn check_rank(pair: &InMemory, parameters: &[Parameter], base: &[Data], target: &[Data]) {
    for mode in [InPlace::AllChecked, InPlace::ChunkByChunk] {
        let mut memory: Vec<_> = parameters.iter().map(|parameter| filled(parameter, base)).collect();
        let slices =
            parameters.iter().zip(&mut memory).flat_map(|(parameter, (bytes, ranges))| slices_mut(parameter, ranges, bytes));
        let report = Apply::new(pair).in_place_slices(slices, mode).unwrap();
        assert_eq!(report.digests_checked, mode == InPlace::AllChecked);
        for (parameter, (bytes, _)) in parameters.iter().zip(&memory) {
            assert!(*bytes == filled(parameter, target).0, "{} {mode:?}", parameter[0].tensor);
        }
    }
    // Into other memory, from the rank's slices as the base.
    let old: Vec<_> = parameters.iter().map(|parameter| filled(parameter, base).0).collect();
    let mut memory: Vec<_> = parameters.iter().map(|parameter| filled(parameter, &zeros(target))).collect();
    let mut held = Vec::new();
    for ((parameter, bytes), (_, ranges)) in parameters.iter().zip(&old).zip(&memory) {
        for (Placement { tensor, part, .. }, (range, pitch)) in parameter.iter().zip(ranges) {
            let info = info(base.iter().find(|data| data.name == *tensor).unwrap());
            let slice = Slice::new(info, part.clone(), &bytes[range.clone()]);
            held.push(pitch.iter().fold(slice, |slice, pitch| slice.pitch(*pitch)));
        }
    }
    let held = SliceCheckpoint::new(held).unwrap();
    let slices = parameters.iter().zip(&mut memory).flat_map(|(parameter, (bytes, ranges))| slices_mut(parameter, ranges, bytes));
    Apply::new(pair).base(&held).to_slices(slices).unwrap();
    for (parameter, (bytes, _)) in parameters.iter().zip(&memory) {
        assert!(*bytes == filled(parameter, target).0, "{}", parameter[0].tensor);
    }
}

fn zeros(tensors: &[Data]) -> Vec<Data> {
    tensors.iter().map(|data| Data { bytes: vec![0; data.bytes.len()], ..data.clone() }).collect()
}

fn models() -> [Model; 5] {
    let llama = Model {
        family: Family::Llama,
        hidden: 24,
        heads: 8,
        kv_heads: 8,
        head_dim: 4,
        inner: 48,
        experts: 0,
        vocab: 64,
        padded_vocab: 64,
    };
    let gpt_oss = |is_interleaved| Model {
        family: Family::GptOss { is_interleaved },
        hidden: 64,
        kv_heads: 2,
        head_dim: 8,
        inner: 256,
        experts: 2,
        ..llama
    };
    [
        llama,
        // Ranks share heads, and the last ranks have few tokens or none.
        Model { kv_heads: 2, vocab: 50, ..llama },
        Model { family: Family::Mixtral, hidden: 20, kv_heads: 4, inner: 40, experts: 3, vocab: 33, padded_vocab: 40, ..llama },
        gpt_oss(true),
        gpt_oss(false),
    ]
}

#[test]
fn ranks_change_their_fused_parameters_in_place() {
    for model in models() {
        let base = model.tensors();
        let target: Vec<_> = base.iter().map(|data| tuned(data, 5)).collect();
        for tp in [1, 2, 4, 8] {
            let mut options = EncodeOptions::default().codec(CodecChoice::Device).chunk_lanes(4096).split(model.split(tp));
            for name in ["lm_head.weight", "model.embed_tokens.weight"] {
                let rows = (0..tp).map(|rank| model.tokens(tp, rank)).filter(|rows| !rows.is_empty());
                let part = |rows: Range<usize>| Rectangle::new([rows.start as u64, 0], [rows.len() as u64, model.hidden as u64]);
                options = options.cuts([(name, rows.map(part).collect())]);
            }
            let pair = Encode::new(&memory(&target)).base(&memory(&base)).options(options).to_memory().unwrap().0;
            for rank in 0..tp {
                check_rank(&pair, &model.parameters(&base, tp, rank), &base, &target);
            }
        }
        // A pair that is not cut is refused, and nothing is written.
        let pair = Encode::new(&memory(&target)).base(&memory(&base)).to_memory().unwrap().0;
        for parameter in model.parameters(&base, 2, 1).iter().filter(|parameter| parameter[0].tensor.contains("o_proj")) {
            let (mut bytes, ranges) = filled(parameter, &base);
            let refused = Apply::new(&pair).in_place_slices(slices_mut(parameter, &ranges, &mut bytes), InPlace::ChunkByChunk);
            assert!(matches!(refused, Err(Error::NotHeld { .. })), "{refused:?}");
            assert!(bytes == filled(parameter, &base).0);
        }
    }
}

/// A safetensors file as trainers write it.
fn saved(tensors: &[Data]) -> Vec<u8> {
    fn view(data: &Data) -> safetensors::tensor::TensorView<'_> {
        let dtype = match data.dtype {
            "BF16" => safetensors::Dtype::BF16,
            "F32" => safetensors::Dtype::F32,
            _ => safetensors::Dtype::U8,
        };
        safetensors::tensor::TensorView::new(dtype, data.shape.clone(), &data.bytes).unwrap()
    }
    safetensors::serialize(tensors.iter().map(|data| (&data.name, view(data))), None).unwrap()
}

/// Trainer ranks hold shards of rows as FSDP2 does, and encode from them what each of `tp` ranks needs. The pairs are merged and
/// applied.
fn train_and_update(model: Model, trainers: u64, tp: usize, codec: CodecChoice) {
    let base = model.tensors();
    let target: Vec<_> = base.iter().map(|data| tuned(data, 5)).collect();
    let ranks: Vec<_> = (0..tp).map(|rank| model.parameters(&base, tp, rank)).collect();
    // Several ranks may hold the same rectangle.
    let mut needed: BTreeMap<&str, Vec<&Rectangle>> = BTreeMap::new();
    for Placement { tensor, part, .. } in ranks.iter().flatten().flatten() {
        let parts = needed.entry(tensor).or_default();
        if !parts.contains(&part) {
            parts.push(part);
        }
    }
    let mut cuts = Vec::new();
    for data in &target {
        let shards: Vec<_> = (0..trainers).filter_map(|trainer| whole(data).shard(0, trainers, trainer)).collect();
        let parts = shards.iter().flat_map(|shard| needed[&*data.name].iter().filter_map(|part| shard.intersection(part)));
        cuts.push((data.name.clone(), parts.collect()));
    }
    let options = EncodeOptions::default().codec(codec).chunk_lanes(4096).cuts(cuts);
    let pairs: Vec<InMemory> = (0..trainers)
        .map(|trainer| {
            let shards = |tensors: &[Data]| -> Vec<_> {
                let shard = |data: &Data| Held::new(data, &whole(data).shard(0, trainers, trainer).unwrap(), 0);
                tensors.iter().map(|data| (info(data), shard(data))).collect()
            };
            let [target, base] = [shards(&target), shards(&base)];
            let [target, base] = [&target, &base]
                .map(|shards| SliceCheckpoint::new(shards.iter().map(|(info, held)| held.slice(info.clone()))).unwrap());
            Encode::new(&target).base(&base).options(options.clone()).to_memory().unwrap().0
        })
        .collect();
    let merged = Merge::new(&pairs).to_memory().unwrap().0;
    let (base_memory, target_memory) = (memory(&base), memory(&target));
    let whole = Encode::new(&target_memory).base(&base_memory).options(options).to_memory().unwrap().0;
    assert_eq!(merged.index().tensor_count(), whole.index().tensor_count());
    if codec != CodecChoice::Auto {
        assert!(merged.index().as_bytes() == whole.index().as_bytes() && merged.blob() == whole.blob());
    }
    for parameters in &ranks {
        check_rank(&merged, parameters, &base, &target);
    }
    Verify::new(&merged).base(&base_memory).target(&target_memory).run().unwrap();
    let place = tempfile::tempdir().unwrap();
    let (base_path, out) = (place.path().join("base"), place.path().join("out"));
    std::fs::write(&base_path, saved(&base)).unwrap();
    let base_file = SafetensorsCheckpoint::open(&base_path).unwrap();
    assert_eq!(base_file.tensors().len(), base.len());
    Apply::new(&merged).base(&base_file).to_path(&out).unwrap();
    assert!(std::fs::read(&out).unwrap() == saved(&target));
}

#[test]
fn trainers_encode_from_their_shards_what_ranks_need() {
    for (model, (trainers, tp)) in models().into_iter().zip([(3, 4), (8, 8), (7, 2), (3, 8), (5, 4)]) {
        train_and_update(model, trainers, tp, Codec::Zstd.into());
    }
}

fn any_model() -> impl Strategy<Value = (Model, usize)> {
    let family = prop::sample::select(vec![
        Family::Llama,
        Family::Mixtral,
        Family::GptOss { is_interleaved: true },
        Family::GptOss { is_interleaved: false },
    ]);
    let tp = prop::sample::select(vec![1, 2, 4, 8]);
    let kv_heads = prop::sample::select(vec![1, 2, 4, 8]);
    (family, tp, kv_heads, 1usize..3, 1usize..6, 1usize..30, 1usize..4, 1usize..5, 1usize..50).prop_map(
        |(family, tp, kv_heads, times, head_dim, hidden, inner, experts, vocab)| {
            let is_blocks = matches!(family, Family::GptOss { .. });
            let model = Model {
                family,
                hidden: if is_blocks { 32 * (1 + hidden % 2) } else { hidden },
                heads: 8 * times,
                kv_heads,
                head_dim,
                inner: if is_blocks { 32 * tp } else { inner * tp },
                experts: if is_blocks { 1 + experts % 2 } else { experts },
                vocab,
                padded_vocab: vocab.next_multiple_of(8),
            };
            (model, tp)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn trainers_of_any_number_update_ranks_of_any_model(
        (model, tp) in any_model(),
        trainers in 1u64..10,
        codec in prop::sample::select(vec![CodecChoice::Auto, Codec::Raw.into(), Codec::Zstd.into()]),
    ) {
        train_and_update(model, trainers, tp, codec);
    }
}
