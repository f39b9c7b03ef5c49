//! Real connections: leaving early, being slow, being refused, the end of the server.

mod support;

use kozue_server::app::router;
use kozue_server::guard::Guard;
use kozue_server::listen::{Limits, serve};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use support::{Script, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const CHAT: &str = "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}";
const STREAM: &str =
    "{\"stream\": true, \"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}";

struct Listening {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

async fn listen(server: &Server, limits: Limits, grace: Duration) -> Listening {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let router = router(Arc::clone(&server.app));
    let task = tokio::spawn(async move {
        let stop = async { drop(stopped.await) };
        serve(listener, router, limits, stop, grace).await;
    });
    Listening {
        address,
        stop,
        task,
    }
}

impl Listening {
    async fn send(&self, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        stream
    }

    async fn post(&self, body: &str) -> TcpStream {
        let length = body.len();
        self.send(&format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}"
        ))
        .await
    }
}

/// All that comes until the server closes the connection.
async fn rest(mut stream: TcpStream) -> String {
    let mut text = Vec::new();
    let read = stream.read_to_end(&mut text);
    let _ = tokio::time::timeout(Duration::from_secs(30), read)
        .await
        .expect("the connection stays open");
    String::from_utf8_lossy(&text).into_owned()
}

fn silent() -> Server {
    Server::new(Script {
        silent: true,
        ..Script::default()
    })
}

async fn within(time: Duration, what: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < time {
        if what() {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    false
}

/// Nobody is answered who has left, streaming or not: ohdearquant/lattice#744.
#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_gives_up_the_request() {
    for body in [CHAT, STREAM] {
        let server = silent();
        let listening = listen(&server, Limits::default(), Duration::ZERO).await;
        let stream = listening.post(body).await;
        let asked = || !server.backend.asked.lock().unwrap().is_empty();
        assert!(within(Duration::from_secs(10), asked).await);
        assert!(!server.backend.given_up.load(Ordering::SeqCst));
        drop(stream);
        let given_up = || server.backend.given_up.load(Ordering::SeqCst);
        assert!(within(Duration::from_secs(10), given_up).await, "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_serves_several_requests() {
    let server = Server::saying("Hello.");
    let listening = listen(&server, Limits::default(), Duration::ZERO).await;
    let get = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let close = "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let text = rest(listening.send(&format!("{get}{get}{close}")).await).await;
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 3, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_are_let_go() {
    let server = Server::saying("Hello.");
    let limits = Limits {
        header_time: Duration::from_millis(200),
        body_time: Duration::from_millis(200),
        ..Limits::default()
    };
    let listening = listen(&server, limits, Duration::ZERO).await;
    // Headers that never end.
    let text = rest(listening.send("GET /health HTTP/1.1\r\nhost: loc").await).await;
    assert!(!text.contains("200 OK"), "{text}");
    // A body that never ends.
    let half = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{";
    let text = rest(listening.send(half).await).await;
    assert!(text.starts_with("HTTP/1.1 408"), "{text}");
    assert!(text.contains("did not arrive in time"), "{text}");
    // The server is well.
    let text = rest(
        listening
            .send("GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await,
    )
    .await;
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn too_much_is_refused() {
    let server = Server::saying("Hello.");
    let limits = Limits {
        headers: 8 << 10,
        ..Limits::default()
    };
    let listening = listen(&server, limits, Duration::ZERO).await;
    let large = format!(
        "GET /health HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n",
        "x".repeat(20_000)
    );
    let many = format!(
        "GET /health HTTP/1.1\r\nhost: localhost\r\n{}\r\n",
        "a: b\r\n".repeat(200)
    );
    for request in [large, many] {
        let text = rest(listening.send(&request).await).await;
        assert!(text.starts_with("HTTP/1.1 431"), "{text}");
    }
    let body = format!("{{\"x\": \"{}\"}}", "x".repeat(2 << 20));
    let text = {
        let mut stream = listening.post(&body).await;
        let mut start = vec![0; 12];
        stream.read_exact(&mut start).await.unwrap();
        String::from_utf8(start).unwrap()
    };
    assert_eq!(text, "HTTP/1.1 413");
    for garbage in ["\0\0\0\r\n\r\n", "HELLO\r\n\r\n", "GET / HTTP/9.9\r\n\r\n"] {
        let text = rest(listening.send(garbage).await).await;
        assert!(
            text.is_empty() || text.starts_with("HTTP/1.1 400"),
            "{text}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_pages_and_strangers_are_refused() {
    let server = Server::saying("Hello.");
    let listening = listen(&server, Limits::default(), Duration::ZERO).await;
    let ask =
        |header: &str| format!("GET /v1/models HTTP/1.1\r\n{header}\r\nconnection: close\r\n\r\n");
    for (header, status) in [
        ("host: localhost", 200),
        ("host: rebound.example", 403),
        ("host: localhost\r\norigin: http://page.example", 403),
    ] {
        let text = rest(listening.send(&ask(header)).await).await;
        assert!(text.starts_with(&format!("HTTP/1.1 {status}")), "{text}");
        assert!(!text.to_lowercase().contains("access-control"), "{text}");
    }
    let guard = Guard {
        keys: vec!["secret".into()],
        hosts: Vec::new(),
    };
    let server = Server::guarded(Script::default(), guard);
    let listening = listen(&server, Limits::default(), Duration::ZERO).await;
    for (header, status) in [
        ("host: any.example\r\nauthorization: Bearer secret", 200),
        ("host: any.example\r\nx-api-key: secret", 200),
        ("host: localhost\r\nauthorization: Bearer wrong", 401),
        ("host: localhost", 401),
    ] {
        let text = rest(listening.send(&ask(header)).await).await;
        assert!(text.starts_with(&format!("HTTP/1.1 {status}")), "{text}");
        assert!(!text.contains("secret"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_waits_for_requests_in_progress_but_not_forever() {
    for grace in [Duration::from_millis(300), Duration::ZERO] {
        let server = silent();
        let listening = listen(&server, Limits::default(), grace).await;
        let stream = listening.post(CHAT).await;
        let asked = || !server.backend.asked.lock().unwrap().is_empty();
        assert!(within(Duration::from_secs(10), asked).await);
        let start = Instant::now();
        listening.stop.send(()).unwrap();
        listening.task.await.unwrap();
        assert!(start.elapsed() >= grace);
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(TcpStream::connect(listening.address).await.is_err());
        drop(stream);
    }
    // An idle connection does not keep the server.
    let server = Server::saying("Hello.");
    let listening = listen(&server, Limits::default(), Duration::from_secs(30)).await;
    let mut idle = listening.post(CHAT).await;
    let mut start = vec![0; 15];
    idle.read_exact(&mut start).await.unwrap();
    assert_eq!(start, b"HTTP/1.1 200 OK");
    listening.stop.send(()).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(10), listening.task);
    ended
        .await
        .expect("an idle connection keeps the server")
        .unwrap();
}
