//! Models by name: fetched from the Hugging Face hub, or from a server that answers as it does,
//! into the cache that other programs share.
//!
//! [`Hub::find`] gives the place of a model on this machine and fetches what is missing;
//! [`Hub::pull`] asks for the newest version and checks every byte; [`Hub::cached`] lists, and
//! [`Hub::remove`] removes. Which files of a repository make a model, the caller says.
//!
//! The cache is the one of `huggingface_hub`: `models--ORG--NAME` with `blobs` (contents under
//! their checksums), `snapshots/COMMIT` (links to them under their names), `refs` (the commit of a
//! branch or tag) and `trees/COMMIT.json` (the files of a commit, their lengths and checksums: with
//! it a snapshot is known to be whole without a network). A file being fetched is
//! `blobs/CHECKSUM.incomplete`, locked through `.locks`.

mod cached;
mod checksum;
mod client;
mod download;
mod error;
mod events;
mod folder;
mod listing;
mod name;
mod pull;
mod remove;
mod settings;
mod space;

pub use cached::{Cached, CachedFile};
pub use error::Error;
pub use events::Event;
pub use name::Name;
pub use pull::{Choice, Choose, Found, Hub};
pub use remove::Removal;
pub use settings::Settings;
