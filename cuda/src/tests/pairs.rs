//! Real checkpoints, if `TPDE_PAIRS` names a folder of pairs with their bases and targets.

use super::super::DeviceIndex;
use super::laid::{apply, routes};
use super::vectors::MODES;
use std::path::PathBuf;
use tpde::{Encode, Pair, SafetensorsCheckpoint};

#[test]
#[ignore = "needs a CUDA device"]
fn real_pairs_give_the_target_bit_for_bit() {
    let device = super::device();
    let Some(folder) = std::env::var_os("TPDE_PAIRS").map(PathBuf::from) else {
        eprintln!("SKIPPED real pairs: TPDE_PAIRS names no folder");
        return;
    };
    for (base, target) in [("base", "rl20"), ("rl20", "rl21"), ("rl20", "rl30"), ("base", "sft")] {
        let open = |name: &str| SafetensorsCheckpoint::open(folder.join(format!("{name}.safetensors"))).ok();
        let Some(base) = open(base) else { continue };
        let stem = folder.join(target);
        let pair = match (Pair::open(&stem), open(target)) {
            (Ok(pair), _) => {
                use tpde_core::source::Source;
                let mut blob = vec![0; pair.blob().size() as usize];
                pair.blob().read(0, &mut blob).unwrap();
                let index = pair.index().as_bytes().to_vec();
                Pair::new(tpde::ValidatedIndex::parse(index, &tpde::Limits::default()).unwrap(), blob).unwrap()
            }
            (_, Some(target)) => Encode::new(&target).base(&base).to_memory().unwrap().0,
            _ => continue,
        };
        let index = DeviceIndex::upload(device, pair.index()).unwrap();
        for mode in MODES {
            for (skew, &route) in routes(pair.index()).iter().enumerate() {
                let (outcome, outputs) = apply(device, &index, &pair, &base, mode, route, skew + 1);
                outcome.unwrap_or_else(|e| panic!("{target} {mode:?} {route:?}: {e}"));
                assert_eq!(outputs.len(), pair.index().tensor_count());
                for (place, bytes) in outputs {
                    let tensor = pair.index().tensor(place);
                    let found = blake3::hash(&bytes);
                    assert_eq!(found.as_bytes()[..16], tensor.digests.target_digest, "{target} {mode:?} {route:?} {}", tensor.name);
                }
            }
        }
        eprintln!("{target}: {} tensors have their digests in every mode", pair.index().tensor_count());
    }
}
