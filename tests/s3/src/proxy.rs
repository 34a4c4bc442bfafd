//! A proxy that injects faults into chosen HTTP requests. It serves one request per connection.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::Notify;

/// What happens to a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The connection is closed after the request's head.
    Drop,
    /// Both connections are closed after so many bytes of the request's body.
    DropInBody(usize),
    /// The server carries the request out, and the answer is dropped.
    LoseAnswer,
    /// The client gets no answer, and the server gets the request only after [`Proxy::deliver`].
    Late,
    /// The client gets no answer, and the server gets nothing: the connection stays open until [`Proxy::heal`].
    Silence,
    /// The client gets this status, and the server gets nothing.
    Status(u16),
    /// The connection is closed after so many bytes of the answer's body.
    Truncate(usize),
    /// The connection stays open without data after so many bytes of the answer's body.
    Stall(usize),
    /// The answer's body is sent slowly, in small pieces.
    Trickle {
        /// Length of a piece.
        piece_bytes: usize,
        /// Pause before each piece.
        pause: Duration,
    },
}

/// Which requests meet a fault, and how many of them.
#[derive(Debug)]
struct Rule {
    method: &'static str,
    /// What path and query contain.
    holds: &'static str,
    /// So many get through before.
    spared: usize,
    times: usize,
    fault: Fault,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<Rule>,
    /// Method, path and query of each request.
    seen: Vec<String>,
    /// Bytes of the bodies of requests that reached the server.
    sent_bytes: usize,
    /// Requests that wait for [`Proxy::deliver`], and those that the server has answered since.
    held: usize,
    delivered: usize,
    deliver: Arc<Notify>,
}

impl State {
    /// Records a request by its first line; returns the fault that it meets.
    fn take_fault(&mut self, line: String) -> Option<Fault> {
        let meets =
            |rule: &&mut Rule| rule.times > 0 && line.starts_with(rule.method) && line.contains(rule.holds);
        let fault = self.rules.iter_mut().find(meets).and_then(|rule| {
            if rule.spared > 0 {
                rule.spared -= 1;
                return None;
            }
            rule.times -= 1;
            Some(rule.fault.clone())
        });
        self.seen.push(line);
        fault
    }
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
    /// When no port is free.
    #[must_use]
    pub fn start(runtime: &Runtime, server: SocketAddr) -> Self {
        Self::at(runtime, std::net::TcpListener::bind("127.0.0.1:0").unwrap(), server)
    }

    /// The same, which listens at `listener`.
    ///
    /// # Panics
    /// When the socket cannot be used.
    #[must_use]
    pub fn at(runtime: &Runtime, listener: std::net::TcpListener, server: SocketAddr) -> Self {
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = runtime.block_on(async { TcpListener::from_std(listener) }).unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        runtime.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(serve(client, server, Arc::clone(&shared)));
            }
        });
        Self { address, state }
    }

    /// The URL for clients.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The next `times` requests of `method` whose target contains `holds` meet `fault`.
    pub fn break_next(&self, times: usize, method: &'static str, holds: &'static str, fault: Fault) {
        self.state.lock().unwrap().rules.push(Rule { method, holds, spared: 0, times, fault });
    }

    /// Removes all faults: from now on every request gets through.
    pub fn clear_faults(&self) {
        self.state.lock().unwrap().rules.clear();
    }

    /// Cuts the clients of this proxy off: after `spared` requests, each meets `fault`.
    pub fn cut_off(&self, spared: usize, fault: Fault) {
        let rule = Rule { method: "", holds: "", spared, times: usize::MAX, fault };
        self.state.lock().unwrap().rules.push(rule);
    }

    /// Ends that. Silent connections are closed, and late requests are delivered.
    pub fn heal(&self) {
        self.clear_faults();
        self.deliver();
    }

    /// How many requests are still to meet a fault.
    pub fn left(&self) -> usize {
        self.state.lock().unwrap().rules.iter().map(|rule| rule.times).sum()
    }

    /// How many requests of `method` whose target contains `holds` have arrived.
    pub fn seen(&self, method: &str, holds: &str) -> usize {
        let state = self.state.lock().unwrap();
        state.seen.iter().filter(|line| line.starts_with(method) && line.contains(holds)).count()
    }

    /// How many late requests wait to be delivered.
    pub fn held(&self) -> usize {
        self.state.lock().unwrap().held
    }

    /// Delivers the late requests to the server.
    pub fn deliver(&self) {
        self.state.lock().unwrap().deliver.notify_waiters();
    }

    /// How many late requests the server has answered.
    pub fn delivered(&self) -> usize {
        self.state.lock().unwrap().delivered
    }

    /// Bytes of the bodies of all requests so far.
    pub fn sent_bytes(&self) -> usize {
        self.state.lock().unwrap().sent_bytes
    }
}

/// The head of a message, and the part of its body that arrived with it.
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

/// Passes on the first `limit` bytes of the body; returns how many there were.
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
    let fault = state.lock().unwrap().take_fault(request.line());
    let mut upstream = TcpStream::connect(server).await.ok()?;
    match fault {
        Some(Fault::Drop) => return None,
        Some(Fault::Silence) => {
            let healed = Arc::clone(&state.lock().unwrap().deliver).notified_owned();
            healed.await;
            return None;
        }
        Some(Fault::Late) => return deliver_late(request, &mut client, &mut upstream, &state).await,
        Some(Fault::Status(status)) => return refuse(status, &request, &mut client).await,
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
    if let Some(fault) = fault {
        return break_answer(fault, answer, &mut upstream, &mut client).await;
    }
    client.write_all(&answer.head).await.ok()?;
    // The answer to HEAD states the length of a body that does not follow.
    if !request.line().starts_with("HEAD ") {
        client.write_all(&whole_body(answer, &mut upstream).await?).await.ok()?;
    }
    Some(())
}

/// Sends the request to the server when it is to be delivered. Its client may be gone by then.
async fn deliver_late(
    request: Message,
    client: &mut TcpStream,
    upstream: &mut TcpStream,
    state: &Mutex<State>,
) -> Option<()> {
    let head = request.head.clone();
    let body = whole_body(request, client).await?;
    let deliver = {
        let mut state = state.lock().unwrap();
        state.held += 1;
        Arc::clone(&state.deliver).notified_owned()
    };
    deliver.await;
    upstream.write_all(&[head, body].concat()).await.ok()?;
    message(upstream).await?;
    let mut state = state.lock().unwrap();
    (state.held, state.delivered) = (state.held - 1, state.delivered + 1);
    None
}

/// Answers the request with an error, without the server.
async fn refuse(status: u16, request: &Message, client: &mut TcpStream) -> Option<()> {
    let mut nowhere = TcpStream::connect(drain().await?).await.ok()?;
    pass_body(request, client, &mut nowhere, usize::MAX).await?;
    let body = "<Error><Code>Trouble</Code><Message>made by the test</Message></Error>";
    let answer = format!("HTTP/1.1 {status} Trouble\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    client.write_all(answer.as_bytes()).await.ok()
}

/// Passes on as much of the answer as `fault` lets through.
async fn break_answer(
    fault: Fault,
    answer: Message,
    upstream: &mut TcpStream,
    client: &mut TcpStream,
) -> Option<()> {
    // The whole answer is read first: a server that loses its client may leave its work half done.
    let head = answer.head.clone();
    let body = whole_body(answer, upstream).await?;
    if matches!(fault, Fault::LoseAnswer) {
        return None;
    }
    client.write_all(&head).await.ok()?;
    match fault {
        Fault::Truncate(limit) => client.write_all(&body[..limit.min(body.len())]).await.ok()?,
        Fault::Stall(limit) => {
            client.write_all(&body[..limit.min(body.len())]).await.ok()?;
            // Until the client closes the connection.
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

/// The address of a server that reads all data and drops it.
async fn drain() -> Option<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await.ok()?;
    let address = listener.local_addr().ok()?;
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.ok()?;
        tokio::io::copy(&mut client, &mut tokio::io::sink()).await.ok()
    });
    Some(address)
}
