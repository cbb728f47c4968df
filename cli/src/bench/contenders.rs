//! The contenders: the library, and plain zstd of what differs.

use rayon::prelude::*;
use std::io;
use std::sync::{Mutex, PoisonError};
use tpde::{Apply, BaseKind, Checkpoint, Encode, EncodeOptions, MemoryCheckpoint, Pair, Result, ValidatedIndex};
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CCtx, CParameter, DCtx, DParameter, get_error_name};

/// Compresses a target and rebuilds it. Contexts and large buffers are kept between calls.
pub trait Contender {
    fn name(&self) -> String;
    /// Size of the encoded target in bytes.
    fn stored_bytes(&self) -> u64;
    /// Encodes the target. Returns `false` if the contender does not support this setting of `digests`.
    fn encode(&mut self, digests: bool) -> anyhow::Result<bool>;
    /// Rebuilds the target's tensors in the order of their names.
    fn decode(&mut self, digests: bool, outputs: &mut [Vec<u8>]) -> anyhow::Result<()>;
}

/// The library.
pub struct Ours<'a> {
    base: &'a MemoryCheckpoint<'a>,
    target: &'a MemoryCheckpoint<'a>,
    options: EncodeOptions,
    pair: Pair<Vec<u8>>,
    /// The blob of the last encoding. The next encoding reuses its memory.
    blob: Vec<u8>,
}

impl<'a> Ours<'a> {
    pub fn new(base: &'a MemoryCheckpoint<'a>, target: &'a MemoryCheckpoint<'a>, options: EncodeOptions) -> Result<Self> {
        let (pair, _) = Encode::new(target).base(base).options(options.clone()).to_memory()?;
        Ok(Self { base, target, options, pair, blob: Vec::new() })
    }

    pub fn pair(&self) -> &Pair<Vec<u8>> {
        &self.pair
    }
}

impl Contender for Ours<'_> {
    fn name(&self) -> String {
        match (self.options.codec, self.options.layout) {
            (codec, Some(layout)) => format!("tpde, {} {layout}", codec.name()),
            (codec, None) => format!("tpde, {}", codec.name()),
        }
    }

    fn stored_bytes(&self) -> u64 {
        self.pair.index().size() + self.pair.index().blob_size()
    }

    /// A pair always has digests, so the setting without digests is not supported.
    fn encode(&mut self, digests: bool) -> anyhow::Result<bool> {
        if digests {
            let blob = std::mem::take(&mut self.blob);
            let encode = Encode::new(self.target).base(self.base).options(self.options.clone());
            self.blob = encode.to_memory_in(blob)?.0.into_parts().1;
        }
        Ok(digests)
    }

    fn decode(&mut self, digests: bool, outputs: &mut [Vec<u8>]) -> anyhow::Result<()> {
        let mut outputs: Vec<_> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
        Apply::new(&self.pair).base(self.base).digests(digests).to_buffers(&mut outputs)?;
        Ok(())
    }
}

/// How a peer uses the base of a tensor.
#[derive(Clone, Copy, PartialEq)]
pub enum Form {
    /// The frame has the XOR of base and target.
    Xor,
    /// The frame has the byte planes of the XOR.
    Planes,
    /// The frame has the target, and refers to the base as what came before, as `zstd --patch-from` does with whole files.
    Patch,
}

/// One zstd frame per tensor.
pub struct Peer<'a> {
    form: Form,
    level: i32,
    tensors: Vec<Tensor<'a>>,
    workers: Mutex<Vec<Worker>>,
}

struct Tensor<'a> {
    /// Base bytes. For XOR as long as the target, and zeros where the base has no bytes.
    base: Vec<u8>,
    has_base: bool,
    target: &'a [u8],
    lane_bytes: usize,
    frame: Vec<u8>,
}

/// Contexts and buffers of one thread.
struct Worker {
    compressor: Compressor<'static>,
    decompressor: Decompressor<'static>,
    xor: Vec<u8>,
}

impl<'a> Peer<'a> {
    /// `index` determines the base tensor of each target tensor, so that all contenders use the same bases.
    pub fn new(
        index: &ValidatedIndex,
        base: &MemoryCheckpoint<'_>,
        target: &'a [Vec<u8>],
        form: Form,
        level: i32,
    ) -> anyhow::Result<Self> {
        let mut tensors = Vec::new();
        for (tensor, target) in index.tensors().zip(target) {
            let place = if tensor.base_kind == BaseKind::None { None } else { base.find(tensor.base_name) };
            let all = place.map_or(0, |place| base.tensors()[place].bytes() as usize);
            let (present, size) = match (form, tensor.base_kind) {
                (Form::Patch, _) => (all, all),
                (_, BaseKind::Same | BaseKind::Prefix) => (all.min(target.len()), target.len()),
                // The XOR with lanes of another dtype says nothing.
                _ => (0, target.len()),
            };
            let mut bytes = vec![0; size];
            if let Some(place) = place {
                base.read(place, 0, &mut bytes[..present])?;
            }
            let frame = vec![0xA5; zstd::zstd_safe::compress_bound(target.len())];
            tensors.push(Tensor { base: bytes, has_base: present > 0, target, lane_bytes: tensor.lane_bytes(), frame });
        }
        let largest = target.iter().map(Vec::len).max().unwrap_or(0);
        let worker = |_| {
            let (compressor, decompressor) = (Compressor::new(level)?, Decompressor::new()?);
            Ok(Worker { compressor, decompressor, xor: vec![0xA5; largest] })
        };
        let workers = (0..rayon::current_num_threads()).map(worker).collect::<std::io::Result<_>>()?;
        Ok(Self { form, level, tensors, workers: Mutex::new(workers) })
    }
}

/// Runs `work` with a worker that no other thread uses at the same time.
fn with_worker<R>(workers: &Mutex<Vec<Worker>>, work: impl FnOnce(&mut Worker) -> R) -> R {
    let lock = || workers.lock().unwrap_or_else(PoisonError::into_inner);
    // There is one worker per thread.
    let mut worker = lock().pop().expect("a free worker");
    let result = work(&mut worker);
    lock().push(worker);
    result
}

impl Contender for Peer<'_> {
    fn name(&self) -> String {
        match self.form {
            Form::Xor => format!("XOR + zstd-{}", self.level),
            Form::Planes => format!("XOR planes + zstd-{}", self.level),
            Form::Patch => format!("zstd-{} --patch-from", self.level),
        }
    }

    fn stored_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.frame.len() as u64).sum()
    }

    fn encode(&mut self, digests: bool) -> anyhow::Result<bool> {
        let (form, level, workers) = (self.form, self.level, &self.workers);
        self.tensors.par_iter_mut().try_for_each(|tensor| {
            with_worker(workers, |worker| {
                let xor = &mut worker.xor[..tensor.target.len()];
                match form {
                    Form::Xor => xor_into(&tensor.base, tensor.target, xor),
                    Form::Planes => xor_to_planes(&tensor.base, tensor.target, tensor.lane_bytes, xor),
                    Form::Patch => return tensor.patch(level),
                }
                tensor.frame.clear();
                worker.compressor.compress_to_buffer(xor, &mut tensor.frame)
            })?;
            if digests {
                tensor.hash_base();
                hash(tensor.target);
            }
            anyhow::Ok(())
        })?;
        Ok(true)
    }

    fn decode(&mut self, digests: bool, outputs: &mut [Vec<u8>]) -> anyhow::Result<()> {
        let (form, workers) = (self.form, &self.workers);
        self.tensors.par_iter().zip(outputs).try_for_each(|(tensor, output)| {
            with_worker(workers, |worker| {
                if form == Form::Patch {
                    return tensor.patched(output);
                }
                let xor = &mut worker.xor[..output.len()];
                worker.decompressor.decompress_to_buffer(&tensor.frame, xor)?;
                match form {
                    Form::Planes => planes_to_target(&tensor.base, xor, tensor.lane_bytes, output),
                    _ => xor_into(&tensor.base, xor, output),
                }
                Ok(())
            })?;
            if digests {
                tensor.hash_base();
                hash(output);
            }
            Ok(())
        })
    }
}

/// As the program zstd does: the window has room for base and target, and matches may be at long distances.
impl Tensor<'_> {
    fn patch(&mut self, level: i32) -> io::Result<usize> {
        let window = (self.base.len() + self.target.len()).max(1).ilog2() + 1;
        let mut context = CCtx::create();
        let parameters = [
            CParameter::CompressionLevel(level),
            CParameter::WindowLog(window.clamp(10, WINDOW_LOG_MAX)),
            CParameter::EnableLongDistanceMatching(true),
        ];
        for parameter in parameters {
            context.set_parameter(parameter).map_err(zstd_error)?;
        }
        context.ref_prefix(&self.base).map_err(zstd_error)?;
        self.frame.clear();
        context.compress2(&mut self.frame, self.target).map_err(zstd_error)
    }

    fn patched(&self, output: &mut [u8]) -> io::Result<()> {
        let mut context = DCtx::create();
        context.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).map_err(zstd_error)?;
        context.ref_prefix(&self.base).map_err(zstd_error)?;
        context.decompress(output, &self.frame).map(drop).map_err(zstd_error)
    }
}

/// The largest window of zstd on a system of 64 bits.
const WINDOW_LOG_MAX: u32 = 31;

fn zstd_error(code: usize) -> io::Error {
    io::Error::other(get_error_name(code))
}

impl Tensor<'_> {
    fn hash_base(&self) {
        if self.has_base {
            hash(&self.base);
        }
    }
}

fn hash(bytes: &[u8]) {
    let mut hasher = blake3::Hasher::new();
    if rayon::current_num_threads() > 1 {
        hasher.update_rayon(bytes)
    } else {
        hasher.update(bytes)
    };
    std::hint::black_box(hasher.finalize());
}

fn xor_into(a: &[u8], b: &[u8], out: &mut [u8]) {
    out.iter_mut().zip(a).zip(b).for_each(|((out, a), b)| *out = a ^ b);
}

/// Number of lanes processed at once. A block fits in the L1 cache.
const BLOCK: usize = 4096;

fn xor_to_planes(base: &[u8], target: &[u8], lane_bytes: usize, planes: &mut [u8]) {
    fn split<const W: usize>(base: &[u8], target: &[u8], planes: &mut [u8]) {
        let (base, target) = (base.as_chunks::<W>().0, target.as_chunks::<W>().0);
        let lanes = target.len();
        for (block, (base, target)) in base.chunks(BLOCK).zip(target.chunks(BLOCK)).enumerate() {
            for byte in 0..W {
                let plane = &mut planes[byte * lanes + block * BLOCK..][..target.len()];
                plane.iter_mut().zip(base).zip(target).for_each(|((out, base), target)| *out = base[byte] ^ target[byte]);
            }
        }
    }
    match lane_bytes {
        2 => split::<2>(base, target, planes),
        4 => split::<4>(base, target, planes),
        8 => split::<8>(base, target, planes),
        _ => xor_into(base, target, planes),
    }
}

fn planes_to_target(base: &[u8], planes: &[u8], lane_bytes: usize, target: &mut [u8]) {
    fn join<const W: usize>(base: &[u8], planes: &[u8], target: &mut [u8]) {
        let (base, target) = (base.as_chunks::<W>().0, target.as_chunks_mut::<W>().0);
        let lanes = target.len();
        let rows: [&[u8]; W] = std::array::from_fn(|byte| &planes[byte * lanes..][..lanes]);
        for (i, (target, base)) in target.iter_mut().zip(base).enumerate() {
            *target = std::array::from_fn(|byte| base[byte] ^ rows[byte][i]);
        }
    }
    match lane_bytes {
        2 => join::<2>(base, planes, target),
        4 => join::<4>(base, planes, target),
        8 => join::<8>(base, planes, target),
        _ => xor_into(base, planes, target),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_go_there_and_back() {
        for lane_bytes in [1, 2, 4, 8] {
            let base: Vec<u8> = (0..8 * BLOCK as u32 + 24).map(|i| (i * 7 % 251) as u8).collect();
            let target: Vec<u8> = base.iter().rev().copied().collect();
            let (mut planes, mut back) = (vec![0; base.len()], vec![0; base.len()]);
            xor_to_planes(&base, &target, lane_bytes, &mut planes);
            assert_eq!(planes[1], base[lane_bytes] ^ target[lane_bytes]);
            planes_to_target(&base, &planes, lane_bytes, &mut back);
            assert_eq!(back, target);
        }
    }
}
