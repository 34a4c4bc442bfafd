//! The HTTP server of metrics: one response per connection. Any program that reaches the port can send requests, and this
//! process holds the job: the time, memory and threads that a request can use are bounded here.

use crate::sys::deadline::{ACCEPT_RETRY_INTERVAL, SCRAPE_TIMEOUT};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest request that is read, line and headers (bytes).
const REQUEST_MAX_BYTES: usize = 8 << 10;

/// A response.
pub struct Answer {
    /// The code and the text of the status line.
    pub status: &'static str,
    /// The body.
    pub text: String,
}

/// A request: a method, and a path without the query.
pub struct Request<'a> {
    /// `GET`, `HEAD`, …
    pub method: &'a str,
    /// Usually begins with a slash.
    pub path: &'a str,
}

/// A listening socket, served until it is dropped.
pub struct Server {
    listener: Arc<TcpListener>,
    is_stopping: Arc<AtomicBool>,
}

impl Server {
    /// Serves `listener` in a new thread.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(
        listener: TcpListener,
        answer: impl Fn(&Request) -> Answer + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_with(listener, SCRAPE_TIMEOUT, answer)
    }

    /// The same with another time to ask, and to read the answer.
    fn start_with(
        listener: TcpListener,
        limit: Duration,
        answer: impl Fn(&Request) -> Answer + Send + 'static,
    ) -> io::Result<Self> {
        let server = Self { listener: Arc::new(listener), is_stopping: Arc::default() };
        let (listener, is_stopping) = (Arc::clone(&server.listener), Arc::clone(&server.is_stopping));
        let accept = move || listener.accept().map(|(stream, _)| stream);
        std::thread::Builder::new()
            .name("metrics".to_owned())
            .spawn(move || serve(accept, &is_stopping, limit, &answer))?;
        Ok(server)
    }
}

impl Drop for Server {
    /// Stops accepting. Does not wait for the thread: its current connection ends within the limits, or with the process.
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        if let Err(error) = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both) {
            tracing::debug!("the socket of metrics cannot be shut down: {error}");
        }
    }
}

fn serve(
    mut accept: impl FnMut() -> io::Result<TcpStream>,
    is_stopping: &AtomicBool,
    limit: Duration,
    answer: &dyn Fn(&Request) -> Answer,
) {
    let mut is_reported = false;
    while !is_stopping.load(Ordering::SeqCst) {
        match accept() {
            Ok(stream) => {
                is_reported = false;
                if let Err(error) = converse(&stream, limit, answer) {
                    tracing::debug!("a scrape of the metrics failed: {error}");
                }
            }
            Err(_) if is_stopping.load(Ordering::SeqCst) => return,
            Err(error) => {
                if !is_reported {
                    tracing::warn!("the metrics cannot be scraped for now: {error}");
                    is_reported = true;
                }
                std::thread::sleep(ACCEPT_RETRY_INTERVAL);
            }
        }
    }
}

/// One request and its response. A body is not read: no supported request has one.
fn converse(stream: &TcpStream, limit: Duration, answer: &dyn Fn(&Request) -> Answer) -> io::Result<()> {
    let refused = |status, text: &str| Answer { status, text: text.to_owned() };
    let head = read_head(stream, Instant::now() + limit)?;
    let request = head.as_deref().map(parse_request);
    let is_head = matches!(&request, Some(Some(request)) if request.method == "HEAD");
    let Answer { status, text } = match request {
        None => refused("431 Request Header Fields Too Large", "the request is too long\n"),
        Some(None) => refused("400 Bad Request", "this is not HTTP\n"),
        Some(Some(request)) => answer(&request),
    };
    let mut response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        text.len()
    );
    if !is_head {
        response.push_str(&text);
    }
    write_within(stream, response.as_bytes(), Instant::now() + limit)?;
    stream.shutdown(Shutdown::Write)
}

/// The request up to the empty line that ends its headers; `None` if it is too long.
fn read_head(mut stream: &TcpStream, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
    let mut head = Vec::new();
    let mut part = [0; 1024];
    loop {
        stream.set_read_timeout(Some(remaining(deadline)?))?;
        let count = match stream.read(&mut part) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        // The empty line may lie across two parts.
        let seen = head.len().saturating_sub(3);
        head.extend_from_slice(&part[..count]);
        let new = &head[seen..];
        if new.windows(4).any(|end| end == b"\r\n\r\n") || new.windows(2).any(|end| end == b"\n\n") {
            return Ok(Some(head));
        }
        if head.len() > REQUEST_MAX_BYTES {
            return Ok(None);
        }
    }
}

/// Parses the first line of a request.
fn parse_request(head: &[u8]) -> Option<Request<'_>> {
    let line = head.split(|&byte| byte == b'\n').next()?;
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    let path = target.split('?').next().unwrap_or_default();
    (version.starts_with("HTTP/1.") && words.next().is_none()).then_some(Request { method, path })
}

fn write_within(mut stream: &TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(remaining(deadline)?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The time left until the deadline, never zero: a socket refuses a timeout of zero.
fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    /// Longer than any connection may take.
    const TEST_TIMEOUT: Duration = Duration::from_secs(300);

    fn start() -> (Server, SocketAddr) {
        start_with(TEST_TIMEOUT)
    }

    fn start_with(limit: Duration) -> (Server, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answer = |asked: &Request| Answer { status: "200 OK", text: format!("{}!\n", asked.path) };
        (Server::start_with(listener, limit, answer).unwrap(), address)
    }

    fn connect(address: SocketAddr) -> TcpStream {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TEST_TIMEOUT)).unwrap();
        stream
    }

    /// Reads until the server closes or resets the connection.
    fn read_all(mut stream: &TcpStream) -> String {
        let mut said = Vec::new();
        match stream.read_to_end(&mut said) {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => panic!("{error}"),
            _ => String::from_utf8(said).unwrap(),
        }
    }

    fn send(address: SocketAddr, request: &str) -> String {
        let mut stream = connect(address);
        stream.write_all(request.as_bytes()).unwrap();
        read_all(&stream)
    }

    fn is_served(address: SocketAddr) {
        let said = send(address, "GET /metrics?x=1 HTTP/1.1\r\nHost: here\r\n\r\n");
        assert!(said.starts_with("HTTP/1.1 200 OK\r\n") && said.ends_with("\r\n\r\n/metrics!\n"), "{said}");
        assert!(said.contains("Content-Length: 10\r\n") && said.contains("Connection: close\r\n"), "{said}");
    }

    #[test]
    fn a_body_is_never_waited_for_nor_made_room_for() {
        let (server, address) = start();
        for length in ["5000", "1000000000000000", "99999999999999999999", "-1"] {
            let said = send(address, &format!("GET /metrics HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"));
            assert!(said.starts_with("HTTP/1.1 200 OK"), "{said}");
        }
        let chunked = "GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert!(send(address, chunked).starts_with("HTTP/1.1 200 OK"));
        is_served(address);
        drop(server);
    }

    #[test]
    fn a_request_without_an_end_is_cut_off() {
        let (server, address) = start();
        let mut stream = connect(address);
        let line = [b'x'; 4096];
        // Until the server resets the connection.
        let sent = (0..1 << 16).take_while(|_| stream.write_all(&line).is_ok()).count() * line.len();
        assert!(sent < 1 << 28, "{sent} bytes were taken");
        drop(stream);
        is_served(address);
        drop(server);
    }

    #[test]
    fn a_few_bytes_too_many_are_refused() {
        let (server, address) = start();
        let said = send(address, &format!("GET /metrics HTTP/1.1\r\n{}", "x".repeat(REQUEST_MAX_BYTES - 20)));
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 431"), "{said}");
        for other in ["GET /metrics\r\n\r\n", "\u{1}\u{2}\n\n", "GET /a b HTTP/1.1\n\n"] {
            assert!(send(address, other).starts_with("HTTP/1.1 400"), "{other:?}");
        }
        let head = send(address, "HEAD / HTTP/1.0\n\n");
        assert!(head.contains("Content-Length: 3\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        drop(server);
    }

    /// A slow client must block neither its connection nor the next ones.
    #[test]
    fn a_slow_client_is_disconnected() {
        let limit = Duration::from_secs(3);
        let (server, address) = start_with(limit);
        let begun = Instant::now();
        let mut slow = connect(address);
        while slow.write_all(b"x").is_ok() {
            assert!(begun.elapsed() < TEST_TIMEOUT, "the server reads without a limit");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(begun.elapsed() >= limit);
        is_served(address);
        drop(server);
    }

    #[test]
    fn dropping_the_server_waits_for_no_client() {
        let (server, address) = start();
        let mut silent = connect(address);
        silent.write_all(b"GET /metrics HTTP/1.1\r\nContent-Length: 5000\r\n").unwrap();
        // The server reads from it, and another client waits.
        let _other = connect(address);
        let begun = Instant::now();
        drop(server);
        assert!(begun.elapsed() < TEST_TIMEOUT / 2, "{:?}", begun.elapsed());
        assert!(TcpStream::connect(address).is_err(), "the server has stopped listening");
    }

    #[test]
    fn accept_is_retried_after_a_failure() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = connect(address);
        let is_stopping = AtomicBool::new(false);
        let mut failures = 3;
        let mut accepted = 0;
        let accept = || {
            if failures > 0 {
                failures -= 1;
                return Err(io::Error::from_raw_os_error(libc::EMFILE));
            }
            accepted += 1;
            is_stopping.store(accepted > 1, Ordering::SeqCst);
            if accepted > 1 { Err(io::ErrorKind::InvalidInput.into()) } else { Ok(listener.accept()?.0) }
        };
        (&client).write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        serve(accept, &is_stopping, TEST_TIMEOUT, &|_| Answer {
            status: "200 OK",
            text: "here\n".to_owned(),
        });
        assert!(read_all(&client).ends_with("here\n"));
    }
}
