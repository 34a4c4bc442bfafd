//! A proxy that understands just enough HTTP to break the request that it is told to. One request per connection.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

/// What happens to a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The connection is closed when its head has come.
    Drop,
    /// So much of its body gets through, then both sides are closed.
    DropInBody(usize),
    /// It is carried out, and nobody is told.
    LoseAnswer,
    /// This answer comes instead.
    Status(u16),
    /// So much of the answer's body gets through, then the connection is closed.
    Truncate(usize),
    /// So much of the answer's body gets through, then nothing any more.
    Stall(usize),
    /// The answer's body comes in small pieces, a pause before each.
    Trickle {
        /// Their length.
        piece_bytes: usize,
        /// Before each.
        pause: Duration,
    },
}

/// Which requests it happens to, and to how many of them.
#[derive(Debug)]
struct Rule {
    method: &'static str,
    /// In path and query.
    holds: &'static str,
    times: usize,
    fault: Fault,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<Rule>,
    /// Method, path and query of what came.
    seen: Vec<String>,
    /// Bytes of the bodies of requests that came through.
    sent_bytes: usize,
}

/// The proxy.
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Proxy {
    /// Starts it in front of `server`.
    ///
    /// # Panics
    /// When there is no port to be had.
    pub fn start(runtime: &Runtime, server: SocketAddr) -> Self {
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        runtime.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(client, server, Arc::clone(&shared)));
            }
        });
        Self { address, state }
    }

    /// The next `times` requests of `method` whose target holds `holds` meet `fault`.
    pub fn break_next(&self, times: usize, method: &'static str, holds: &'static str, fault: Fault) {
        self.state.lock().unwrap().rules.push(Rule { method, holds, times, fault });
    }

    /// From now on nothing is broken.
    pub fn mend(&self) {
        self.state.lock().unwrap().rules.clear();
    }

    /// How many requests are still to be broken.
    pub fn left(&self) -> usize {
        self.state.lock().unwrap().rules.iter().map(|rule| rule.times).sum()
    }

    /// Requests so far of `method` whose target holds `holds`.
    pub fn seen(&self, method: &str, holds: &str) -> usize {
        let state = self.state.lock().unwrap();
        state.seen.iter().filter(|line| line.starts_with(method) && line.contains(holds)).count()
    }

    /// Bytes of all requests' bodies so far.
    pub fn sent_bytes(&self) -> usize {
        self.state.lock().unwrap().sent_bytes
    }
}

/// The head of a message, and what of the body came with it.
struct Message {
    head: Vec<u8>,
    body: Vec<u8>,
    body_bytes: usize,
}

impl Message {
    fn line(&self) -> String {
        String::from_utf8_lossy(&self.head).lines().next().unwrap_or_default().to_owned()
    }
}

async fn message(from: &mut TcpStream) -> Option<Message> {
    let mut head = Vec::new();
    let end = loop {
        let mut piece = [0; 8192];
        let count = from.read(&mut piece).await.ok().filter(|&count| count > 0)?;
        head.extend_from_slice(&piece[..count]);
        if let Some(at) = head.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
    };
    let body = head.split_off(end);
    let text = String::from_utf8_lossy(&head).to_ascii_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length:"));
    let body_bytes = length.map_or(0, |length| length.trim().parse().unwrap());
    Some(Message { head, body, body_bytes })
}

/// Passes on the first `limit` bytes of the body; says how many there were.
async fn pass_body(
    message: &Message,
    from: &mut TcpStream,
    to: &mut TcpStream,
    limit: usize,
) -> Option<usize> {
    let limit = limit.min(message.body_bytes);
    let first = &message.body[..message.body.len().min(limit)];
    to.write_all(first).await.ok()?;
    let mut done = first.len();
    let mut piece = vec![0; 64 << 10];
    while done < limit {
        let most = piece.len().min(limit - done);
        let count = from.read(&mut piece[..most]).await.ok().filter(|&count| count > 0)?;
        to.write_all(&piece[..count]).await.ok()?;
        done += count;
    }
    Some(done)
}

/// All of the body, as it is on the wire.
async fn whole_body(message: Message, from: &mut TcpStream) -> Option<Vec<u8>> {
    let chunked = message.head.to_ascii_lowercase().windows(18).any(|some| some == b"transfer-encoding:");
    let mut body = message.body;
    let done = |body: &[u8]| {
        if chunked { body.ends_with(b"0\r\n\r\n") } else { body.len() >= message.body_bytes }
    };
    let mut piece = vec![0; 64 << 10];
    while !done(&body) {
        let count = from.read(&mut piece).await.ok().filter(|&count| count > 0)?;
        body.extend_from_slice(&piece[..count]);
    }
    Some(body)
}

async fn serve(mut client: TcpStream, server: SocketAddr, state: Arc<Mutex<State>>) -> Option<()> {
    let request = message(&mut client).await?;
    let fault = {
        let mut state = state.lock().unwrap();
        let line = request.line();
        let rule = state
            .rules
            .iter_mut()
            .find(|rule| rule.times > 0 && line.starts_with(rule.method) && line.contains(rule.holds));
        let fault = rule.map(|rule| {
            rule.times -= 1;
            rule.fault.clone()
        });
        state.seen.push(line);
        fault
    };
    let mut upstream = TcpStream::connect(server).await.ok()?;
    match fault {
        Some(Fault::Drop) => return None,
        Some(Fault::Status(status)) => {
            let mut nowhere = TcpStream::connect(drain().await?).await.ok()?;
            pass_body(&request, &mut client, &mut nowhere, usize::MAX).await?;
            let body = "<Error><Code>Trouble</Code><Message>made by the test</Message></Error>";
            let answer = format!("HTTP/1.1 {status} Trouble\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            return client.write_all(answer.as_bytes()).await.ok();
        }
        Some(Fault::DropInBody(limit)) => {
            upstream.write_all(&request.head).await.ok()?;
            pass_body(&request, &mut client, &mut upstream, limit).await?;
            return None;
        }
        _ => {}
    }
    upstream.write_all(&request.head).await.ok()?;
    let sent = pass_body(&request, &mut client, &mut upstream, usize::MAX).await?;
    state.lock().unwrap().sent_bytes += sent;
    let answer = message(&mut upstream).await?;
    let Some(fault) = fault else {
        client.write_all(&answer.head).await.ok()?;
        // The answer to HEAD says how long a body would be that does not come.
        if !request.line().starts_with("HEAD ") {
            client.write_all(&whole_body(answer, &mut upstream).await?).await.ok()?;
        }
        return Some(());
    };
    // A server that loses its client may leave what it does half done: it is heard to the end.
    let head = answer.head.clone();
    let body = whole_body(answer, &mut upstream).await?;
    if matches!(fault, Fault::LoseAnswer) {
        return None;
    }
    client.write_all(&head).await.ok()?;
    match fault {
        Fault::Truncate(limit) => client.write_all(&body[..limit.min(body.len())]).await.ok()?,
        Fault::Stall(limit) => {
            client.write_all(&body[..limit.min(body.len())]).await.ok()?;
            // Until the client has had enough.
            let _ = client.read(&mut [0; 1]).await;
        }
        Fault::Trickle { piece_bytes, pause } => {
            for piece in body.chunks(piece_bytes) {
                tokio::time::sleep(pause).await;
                client.write_all(piece).await.ok()?;
            }
        }
        _ => {}
    }
    Some(())
}

/// The address of somebody who takes everything.
async fn drain() -> Option<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await.ok()?;
    let address = listener.local_addr().ok()?;
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.ok()?;
        tokio::io::copy(&mut client, &mut tokio::io::sink()).await.ok()
    });
    Some(address)
}
