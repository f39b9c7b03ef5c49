//! `kozue serve`: the model over HTTP.

use crate::cli::{MachineArgs, at_least_one};
use crate::default_model::model_path;
use crate::draft::DraftArgs;
use crate::failure::Failure;
use clap::Args;
use kozue_engine::cache_folder::FolderOptions;
use kozue_engine::scheduler::{CacheSize, SchedulerOptions};
use kozue_engine::{LanguageModel, Loaded};
use kozue_server::{ServeError, ServerOptions, serve};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

#[derive(Args)]
pub struct ServeArgs {
    /// Model directory, GGUF file or name on the hub
    pub named: Option<PathBuf>,
    /// The same, as an option
    #[arg(long, value_name = "MODEL", conflicts_with = "named")]
    pub model: Option<PathBuf>,
    /// Name or address to listen at
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port (0: any that is free)
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// A key that clients must send (may be given several times; also KOZUE_API_KEY)
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<String>,
    /// Let other machines ask without a key
    #[arg(long)]
    pub insecure: bool,
    /// A further name of this server, that browsers may use (may be given several times)
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// A further name of the model; * is any name (may be given several times)
    #[arg(long, value_name = "NAME")]
    pub alias: Vec<String>,
    /// Tokens of context [default: as many as the model was made for]
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub ctx: Option<usize>,
    /// Most requests answered at a time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one, allow_negative_numbers = true)]
    pub parallel: usize,
    /// Most requests that wait; further ones are told to try again
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub queue: usize,
    /// Compute every prompt from its beginning
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Megabytes of memory for what earlier prompts left behind [default: a quarter of what is free]
    #[arg(long, value_name = "MB", value_parser = at_least_one, allow_negative_numbers = true)]
    pub cache_size: Option<usize>,
    /// Folder to keep that in too, for the next start (it holds what users wrote)
    #[arg(long, value_name = "DIR", conflicts_with = "no_prefix_cache")]
    pub cache_dir: Option<PathBuf>,
    /// Megabytes of files in that folder
    #[arg(
        long,
        value_name = "MB",
        default_value_t = 8192,
        requires = "cache_dir"
    )]
    pub cache_dir_size: u64,
    /// Seconds to finish requests in when told to stop
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// Runs the command.
pub fn run(args: &ServeArgs) -> Result<(), Failure> {
    let path = model_path(args.named.as_deref().or(args.model.as_deref()))?;
    let mut loaded = Loaded::open(&path, args.machine.cpu(), args.machine.kv.into())?;
    args.draft.apply(&mut loaded, &path)?;
    for note in loaded.notes() {
        tracing::info!("{note}");
    }
    let longest = loaded.model.max_position();
    if let Some(ctx) = args.ctx.filter(|ctx| *ctx > longest) {
        return Err(Failure::Usage(format!(
            "--ctx {ctx} is more than the {longest} tokens that the model was made for"
        )));
    }
    let name = loaded.description().name.clone();
    let folder = match &args.cache_dir {
        None => None,
        Some(folder) => Some(FolderOptions {
            path: folder.clone(),
            bytes: args.cache_dir_size.saturating_mul(1 << 20),
            identity: loaded.state_identity(&path)?,
        }),
    };
    let options = ServerOptions {
        host: args.host.clone(),
        port: args.port,
        keys: keys(args),
        insecure: args.insecure,
        hosts: args.allow_host.clone(),
        aliases: args.alias.clone(),
        scheduler: SchedulerOptions {
            parallel: args.parallel,
            memory: None,
            queue: args.queue,
            context: args.ctx,
            cache: match (args.no_prefix_cache, args.cache_size) {
                (true, _) => CacheSize::Off,
                (false, None) => CacheSize::Share,
                (false, Some(megabytes)) => CacheSize::Bytes(megabytes.saturating_mul(1 << 20)),
            },
            folder,
        },
        grace: Duration::from_secs(args.grace),
        ..ServerOptions::default()
    };
    let result = serve(Arc::new(loaded), options, |address| {
        // Whoever started the server may have closed its output.
        let _ = writeln!(io::stderr(), "kozue: {name} at http://{address}");
    });
    result.map_err(|error| match error {
        ServeError::Open(_) | ServeError::Key => Failure::Usage(error.to_string()),
        error => Failure::failed(error),
    })
}

/// From the command line, and from the environment, where other users do not see them.
fn keys(args: &ServeArgs) -> Vec<String> {
    let variable = std::env::var("KOZUE_API_KEY").ok();
    let variable = variable.filter(|key| !key.is_empty());
    args.api_key.iter().cloned().chain(variable).collect()
}
