//! Rules that cut tensors into parts, by their names.

use crate::checkpoint::TensorInfo;
use std::str::FromStr;
use tpde_core::error::{Error, Escaped, Result};
use tpde_core::rectangle::{Rectangle, part_fault};

/// Names of tensors that tensor parallelism cuts by rows, and those that it cuts by columns. Names are those of Hugging Face.
/// Spaces separate names.
struct Preset {
    names: &'static str,
    rows: &'static str,
    columns: &'static str,
}

const PRESETS: &[Preset] = &[
    Preset {
        names: "llama qwen mistral gemma",
        rows: "*.q_proj.weight *.k_proj.weight *.v_proj.weight *.q_proj.bias *.k_proj.bias *.v_proj.bias *.gate_proj.weight \
               *.up_proj.weight *embed_tokens.weight lm_head.weight",
        columns: "*.o_proj.weight *.down_proj.weight",
    },
    Preset {
        names: "mixtral",
        rows: "*.q_proj.weight *.k_proj.weight *.v_proj.weight *.experts.*.w1.weight *.experts.*.w3.weight *embed_tokens.weight \
               lm_head.weight",
        columns: "*.o_proj.weight *.experts.*.w2.weight",
    },
    Preset {
        names: "deepseek",
        rows: "*.q_proj.weight *.q_b_proj.weight *.kv_b_proj.weight *.gate_proj.weight *.up_proj.weight *embed_tokens.weight \
               lm_head.weight",
        columns: "*.o_proj.weight *.down_proj.weight",
    },
];

/// Rules that cut tensors into parts. The first rule whose pattern matches the name of a tensor applies.
///
/// A rule `PATTERN=DIM:N` cuts dimension `DIM` into `N` parts as `torch.chunk` does: all parts have ⌈dim / N⌉ indexes, except the
/// last, and there may be fewer than `N`. In a pattern, `*` stands for any characters and `?` for one. A rule `PRESET:N` stands
/// for the rules of a model family with Hugging Face's names: `llama`, `qwen`, `mistral`, `gemma`, `mixtral` or `deepseek`. Rules
/// are separated by commas.
///
/// ```
/// # use tpde::{Dtype, Split, TensorInfo};
/// # fn main() -> tpde::Result<()> {
/// let split: Split = "*.experts.*=0:2,llama:4".parse()?;
/// let info = TensorInfo { name: "model.layers.0.self_attn.o_proj.weight".into(), dtype: Dtype::Bf16, shape: vec![64, 64] };
/// let parts = split.parts(&info)?;
/// assert_eq!((parts.len(), &parts[1].origin[..], &parts[1].extent[..]), (4, &[0, 16][..], &[64, 16][..]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Split(Vec<Rule>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    pattern: String,
    dim: usize,
    parts: u64,
    /// Whether a tensor without that dimension is an error.
    is_exact: bool,
}

impl Split {
    /// Whether there are no rules.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The parts of a tensor, in order. Empty if no rule matches, or if the tensor is not cut.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a rule names a dimension that the tensor lacks, or cuts bytes of a packed dtype.
    pub fn parts(&self, tensor: &TensorInfo) -> Result<Vec<Rectangle>> {
        let TensorInfo { name, dtype, shape } = tensor;
        let Some(rule) = self.0.iter().find(|rule| matches(rule.pattern.as_bytes(), name.as_bytes())) else {
            return Ok(Vec::new());
        };
        let fault = |reason: &str| {
            let (name, pattern) = (Escaped(name), Escaped(&rule.pattern));
            Error::InvalidArgument(format!(
                "tensor {name} of {shape:?} cannot be cut by {pattern}={}:{}: {reason}",
                rule.dim, rule.parts
            ))
        };
        let Some(&length) = shape.get(rule.dim) else {
            return if rule.is_exact { Err(fault("it has no such dimension")) } else { Ok(Vec::new()) };
        };
        if shape.contains(&0) || length.div_ceil(rule.parts) == length {
            return Ok(Vec::new());
        }
        let part = |part: Rectangle| match part_fault(dtype.bits(), shape, &part.origin, &part.extent) {
            Some(reason) => Err(fault(reason)),
            None => Ok(part),
        };
        let whole = Rectangle::whole(shape);
        let shards = (0..rule.parts).map_while(|i| whole.shard(rule.dim, rule.parts, i));
        shards.take_while(|shard| shard.extent[rule.dim] > 0).map(part).collect()
    }
}

impl FromStr for Split {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut rules = Vec::new();
        for rule in text.split(',').filter(|rule| !rule.is_empty()) {
            let wrong = || {
                let presets = PRESETS.iter().flat_map(|preset| preset.names.split(' ')).collect::<Vec<_>>().join(", ");
                let expected = format!("PATTERN=DIM:N, or PRESET:N with a preset of {presets}");
                Error::InvalidArgument(format!("the rule {} splits nothing: expected {expected}", Escaped(rule)))
            };
            let (what, parts) = rule.rsplit_once(':').ok_or_else(wrong)?;
            let parts: u64 = parts.parse().ok().filter(|&parts| parts > 0).ok_or_else(wrong)?;
            if let Some((pattern, dim)) = what.rsplit_once('=') {
                let dim = dim.parse().map_err(|_| wrong())?;
                rules.push(Rule { pattern: pattern.to_owned(), dim, parts, is_exact: true });
                continue;
            }
            let preset = PRESETS.iter().find(|preset| preset.names.split(' ').any(|name| name == what)).ok_or_else(wrong)?;
            for (dim, patterns) in [preset.rows, preset.columns].into_iter().enumerate() {
                let rule = |pattern: &str| Rule { pattern: pattern.to_owned(), dim, parts, is_exact: false };
                rules.extend(patterns.split(' ').map(rule));
            }
        }
        Ok(Self(rules))
    }
}

/// Whether a name matches a pattern with `*` and `?`. Time: at most the product of the lengths.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Where to continue if the rest does not match: after the last `*`, with one more byte of the name given to it.
    let mut retry: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                retry = Some((p + 1, n));
                p += 1;
            }
            Some(&byte) if byte == b'?' || byte == name[n] => (p, n) = (p + 1, n + 1),
            _ => match retry {
                Some((after, from)) => {
                    retry = Some((after, from + 1));
                    (p, n) = (after, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use tpde_core::lane::Dtype;

    fn info(name: &str, dtype: Dtype, shape: &[u64]) -> TensorInfo {
        TensorInfo { name: name.into(), dtype, shape: shape.to_vec() }
    }

    #[test]
    fn patterns_match_as_globs_do() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("*", "any.thing", true),
            ("a*c", "abcbc", true),
            ("a*c", "abcb", false),
            ("?", "", false),
            ("a?c", "abc", true),
            ("*.o_proj.weight", "layers.0.o_proj.weight", true),
            ("*.o_proj.weight", "layers.0.o_proj.bias", false),
            ("*.experts.*.w1.weight", "model.experts.12.w1.weight", true),
            ("*.experts.*.w1.weight", "model.experts.w1.weight", false),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn parts_have_the_sizes_of_torch_chunk() {
        for (length, parts, expected) in
            [(8, 4, &[2, 2, 2, 2][..]), (10, 4, &[3, 3, 3, 1]), (5, 4, &[2, 2, 1]), (7, 7, &[1; 7]), (3, 8, &[1; 3]), (4, 1, &[])]
        {
            let split: Split = format!("w=1:{parts}").parse().unwrap();
            let found = split.parts(&info("w", Dtype::F32, &[3, length])).unwrap();
            assert_eq!(found.iter().map(|part| part.extent[1]).collect::<Vec<_>>(), expected, "{length} in {parts}");
            let mut end = 0;
            for part in &found {
                assert_eq!((part.origin[0], part.extent[0], part.origin[1]), (0, 3, end));
                end += part.extent[1];
            }
            assert!(found.is_empty() || end == length);
        }
    }

    #[test]
    fn the_first_rule_that_matches_applies() {
        let split: Split = "*.k_proj.weight=0:1,llama:2".parse().unwrap();
        let cut = |name: &str, shape: &[u64]| split.parts(&info(name, Dtype::Bf16, shape)).unwrap().len();
        assert_eq!(cut("model.layers.0.self_attn.k_proj.weight", &[8, 8]), 0);
        assert_eq!(cut("model.layers.0.self_attn.q_proj.weight", &[8, 8]), 2);
        assert_eq!(cut("model.layers.0.self_attn.q_proj.bias", &[8]), 2);
        assert_eq!(cut("model.embed_tokens.weight", &[8, 8]), 2);
        assert_eq!(cut("model.norm.weight", &[8]), 0);
        assert_eq!(cut("model.layers.0.mlp.down_proj.weight", &[]), 0, "no such dimension");
        assert_eq!(cut("model.layers.0.mlp.down_proj.weight", &[0, 8]), 0, "an empty tensor");
    }

    #[test]
    fn rules_that_cannot_be_followed_are_refused() {
        for text in ["llama", "llama:0", "llama:x", "gpt:2", "w=0", "w=x:2", "w=-1:2", "=0:"] {
            assert!(matches!(text.parse::<Split>(), Err(Error::InvalidArgument(_))), "{text}");
        }
        let split: Split = "w=1:2".parse().unwrap();
        assert!(split.parts(&info("w", Dtype::F32, &[4])).is_err());
        assert!(split.parts(&info("w", Dtype::F4, &[4, 6])).is_err());
        assert_eq!(split.parts(&info("w", Dtype::F4, &[4, 8])).unwrap().len(), 2);
        assert!("".parse::<Split>().unwrap().is_empty());
    }
}
