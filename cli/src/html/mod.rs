//! Pages about pairs and stores: one file of HTML each, with drawings inside, without scripts and without other files.
//!
//! | file | work |
//! |---|---|
//! | `document` | what pages have in common |
//! | `names` | places of tensors in a model |
//! | `figures` | what the drawings of a pair show |
//! | `treemap` | areas of a treemap |
//! | `page` | the page of a pair |
//! | `versions` | the page of a store |

mod document;
mod figures;
mod names;
mod page;
mod treemap;
#[cfg(feature = "store")]
mod versions;

pub use document::shortened;
pub use figures::Figures;
pub use page::page;
#[cfg(feature = "store")]
pub use versions::{Branch as StoreBranch, Pair as StorePair, Version as StoreVersion, page as store_page};
