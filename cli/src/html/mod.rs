//! A page about a pair: one file of HTML with drawings inside, without scripts and without other files.
//!
//! | file | work |
//! |---|---|
//! | `names` | places of tensors in a model |
//! | `figures` | what the drawings show |
//! | `treemap` | areas of a treemap |
//! | `page` | the page |

mod figures;
mod names;
mod page;
mod treemap;

pub use figures::Figures;
pub use page::{Fact, page};
