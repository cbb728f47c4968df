//! The page of `tpde inspect --html`.

use super::{Inspect, Summary, summary};
use crate::common::Common;
use crate::html::{self, Figures};
use crate::inputs::open;
use crate::text;
use std::path::Path;
use std::time::SystemTime;
use tpde::{Apply, Checkpoint, Escaped, FileSource, Moves, OutputFile, Pair, PairPaths, Result};

impl Inspect {
    /// Writes a page that describes the pair.
    pub fn write_page(&self, pair: &Pair<FileSource>, path: &Path, common: &Common) -> Result<()> {
        let base = self.base.as_deref().map(open).transpose()?;
        let paths = PairPaths::new(&self.pair);
        let inputs: Vec<_> = base.iter().flat_map(|base| base.paths()).chain([paths.index, paths.blob]).collect();
        let file = OutputFile::create(path, &inputs, self.force)?;
        let moves = base.map(|base| self.moves(pair, &base, common)).transpose()?;
        let summary = summary(pair.index(), PairPaths::new(&self.pair));
        let page = html::page(&self.title(&summary), &summary.facts(), &Figures::new(pair.index(), moves));
        file.publish(page.as_bytes())
    }

    /// Name of the pair, its base as far as it is known, its target, and when its index was written. Names are cut.
    fn title(&self, summary: &Summary) -> String {
        const MOST: usize = 60;
        let name = |path: &Path| path.file_name().map(|name| Escaped(&name.to_string_lossy()).to_string()).unwrap_or_default();
        let base = match &self.base {
            Some(path) => name(path),
            None if summary.base_bytes == 0 => "no base".into(),
            None => format!("base {}", &summary.base_root[..8]),
        };
        let target = match &summary.files[..] {
            [first, rest @ ..] if !first.name.is_empty() => {
                let others =
                    if rest.is_empty() { String::new() } else { format!(" and {}", text::counted(rest.len() as u64, "file")) };
                format!("{}{others}", html::shortened(&Escaped(&first.name).to_string(), MOST))
            }
            _ => format!("target {}", &summary.target_root[..8]),
        };
        let written = summary.index.metadata().and_then(|metadata| metadata.modified()).ok();
        let written = written.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let written = written.map_or("–".into(), |time| text::date(time.as_secs()));
        let pair = name(&summary.index.with_extension(""));
        format!("{}: {} → {target}, {written} UTC", html::shortened(&pair, MOST), html::shortened(&base, MOST))
    }

    /// How far the lanes of all tensors move.
    fn moves(&self, pair: &Pair<FileSource>, base: &dyn Checkpoint, common: &Common) -> Result<Moves> {
        let bar = common.bar("inspect", pair.index().tensor_bytes().1);
        let apply = Apply::new(pair).base(base).progress(|bytes| bar.inc(bytes));
        let mut names: Vec<_> = pair.index().tensors().map(|tensor| tensor.name.to_owned()).collect();
        names.dedup(); // the parts of a tensor follow one another
        let mut all = Moves::default();
        for name in names {
            all.add(&apply.moves(&name)?);
        }
        bar.finish_and_clear();
        Ok(all)
    }
}
