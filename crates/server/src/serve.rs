//! Starting and stopping.

use crate::app::{App, router};
use crate::guard::Guard;
use crate::listen::{self, Limits};
use crate::metrics::Metrics;
use crate::preparing::Places;
use crate::served::Served;
use kozue_engine::Loaded;
use kozue_engine::scheduler::{Scheduler, SchedulerOptions};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Name or address to listen at.
    pub host: String,
    /// Port; 0 = any that is free.
    pub port: u16,
    /// Keys of which one is needed.
    pub keys: Vec<String>,
    /// Whether others than this machine may ask without a key.
    pub insecure: bool,
    /// Names of this server besides IP addresses and localhost.
    pub hosts: Vec<String>,
    /// Further names of the model; `*` = any.
    pub aliases: Vec<String>,
    /// Bounds of the engine's work.
    pub scheduler: SchedulerOptions,
    /// Longest wait for the requests in progress when the server is told to stop.
    pub grace: Duration,
    /// Bounds of connections.
    pub limits: Limits,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            host: "127.0.0.1".to_string(),
            port: 8000,
            keys: Vec::new(),
            insecure: false,
            hosts: Vec::new(),
            aliases: Vec::new(),
            scheduler: SchedulerOptions::default(),
            grace: Duration::from_secs(30),
            limits: Limits::default(),
        }
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address means nothing or is taken.
    #[error("cannot listen at {host}:{port}: {error}")]
    Listen {
        /// As given.
        host: String,
        /// As given.
        port: u16,
        /// What the system says.
        error: std::io::Error,
    },
    /// Strangers could ask.
    #[error(
        "{0} is reachable by other machines: give --api-key, or --insecure if everyone may use the model"
    )]
    Open(String),
    /// A key that could never be sent.
    #[error("an API key must be printable ASCII without spaces, and not empty")]
    Key,
    /// The system gives no threads or signals.
    #[error("cannot start the server: {0}")]
    System(std::io::Error),
    /// The model cannot be served.
    #[error(transparent)]
    Model(#[from] kozue_engine::Error),
}

/// Serves until SIGTERM or Ctrl-C, then finishes what is in progress; a second signal ends that
/// too. `ready` hears the address.
pub fn serve(
    loaded: Arc<Loaded>,
    options: ServerOptions,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    if options.keys.iter().any(|key| !is_key(key)) {
        return Err(ServeError::Key);
    }
    let address = address(&options)?;
    let scheduler = Arc::new(Scheduler::start(
        Arc::clone(&loaded),
        options.scheduler.clone(),
    )?);
    let backend = Arc::clone(&scheduler);
    let app = Arc::new(App {
        served: Served::new(
            loaded,
            options.aliases.clone(),
            options.scheduler.context,
            backend,
        )?,
        metrics: Metrics::default(),
        guard: Guard {
            keys: options.keys.clone(),
            hosts: options.hosts.clone(),
        },
        places: Places::default(),
        body_limit: options.limits.body,
    });
    // The model's threads need the cores; the server's only pass text on.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("kozue-http")
        .enable_all()
        .build()
        .map_err(ServeError::System)?;
    let result = runtime.block_on(run(app, address, &options, ready));
    scheduler.stop(Duration::ZERO);
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn run(
    app: Arc<App>,
    address: SocketAddr,
    options: &ServerOptions,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    let taken = |error| ServeError::Listen {
        host: options.host.clone(),
        port: options.port,
        error,
    };
    let mut signals = Signals::listen().map_err(ServeError::System)?;
    let listener = TcpListener::bind(address).await.map_err(taken)?;
    ready(listener.local_addr().map_err(taken)?);
    let router = router(app);
    let mut again = Signals::listen().map_err(ServeError::System)?;
    let served = listen::serve(
        listener,
        router,
        options.limits,
        async move { signals.next().await },
        options.grace,
    );
    tokio::select! {
        () = served => {}
        // The first signal is for both; the second ends the grace.
        () = async { again.next().await; again.next().await } => {}
    }
    Ok(())
}

/// What asks a server to stop.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

fn is_key(key: &str) -> bool {
    !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Errors: no such host; one that strangers reach, without leave.
fn address(options: &ServerOptions) -> Result<SocketAddr, ServeError> {
    let host = options
        .host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(&options.host);
    let failed = |error| ServeError::Listen {
        host: options.host.clone(),
        port: options.port,
        error,
    };
    let address = (host, options.port)
        .to_socket_addrs()
        .map_err(failed)?
        .next()
        .ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))?;
    let guarded = !options.keys.is_empty() || options.insecure;
    if !address.ip().is_loopback() && !guarded {
        return Err(ServeError::Open(options.host.clone()));
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(host: &str, key: Option<&str>, insecure: bool) -> Result<SocketAddr, ServeError> {
        address(&ServerOptions {
            host: host.to_string(),
            keys: key.into_iter().map(String::from).collect(),
            insecure,
            ..ServerOptions::default()
        })
    }

    #[test]
    fn strangers_need_a_key() {
        for host in ["127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3"] {
            assert!(at(host, None, false).is_ok(), "{host}");
        }
        for host in ["0.0.0.0", "::", "192.168.1.1"] {
            assert!(
                matches!(at(host, None, false), Err(ServeError::Open(_))),
                "{host}"
            );
            assert!(at(host, Some("k"), false).is_ok());
            assert!(at(host, None, true).is_ok());
        }
        assert!(matches!(
            at("", None, false),
            Err(ServeError::Listen { .. })
        ));
    }

    #[test]
    fn keys_can_be_sent() {
        for (key, fine) in [
            ("sk-1", true),
            ("", false),
            ("a b", false),
            ("é", false),
            ("a\n", false),
        ] {
            assert_eq!(is_key(key), fine, "{key:?}");
        }
    }
}
