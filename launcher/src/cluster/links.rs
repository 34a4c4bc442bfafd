//! The threads of the connections: one that reads and one that writes for each, and one that accepts new ones at node 0.

use super::connection::{self, ClusterKey, ConnectionError, Receiver, Sender, Side};
use super::host::Input;
use super::messages::{Join, Message};
use crate::sys::deadline::{ACCEPT_RETRY_INTERVAL, NODE_CONNECTION_TIMEOUT};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

type Inputs = crossbeam_channel::Sender<Input>;

/// Connections that have not said who they are, beyond one for each node. More are closed at once.
const MOST_STRANGERS: usize = 64;
/// Stack of each thread: node 0 has two for each other node.
const STACK_BYTES: usize = 256 << 10;

/// The connection to another node.
#[derive(Debug)]
pub(super) struct Link {
    /// Tells its messages from those of an earlier connection of the same node.
    pub(super) number: u64,
    outbox: crossbeam_channel::Sender<Message>,
    writer: JoinHandle<()>,
}

impl Link {
    /// Starts the threads. What is read, and the end, goes to `inputs` with the node's rank.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub(super) fn start(
        rank: u32,
        number: u64,
        (mut sender, mut receiver): (Sender, Receiver),
        inputs: &Inputs,
    ) -> io::Result<Self> {
        let (outbox, messages) = crossbeam_channel::unbounded();
        let events = inputs.clone();
        let write = move || {
            for message in messages {
                if let Err(error) = sender.send(&message) {
                    let _ = events.send(Input::Lost { rank, number, why: error.to_string() });
                    break;
                }
            }
            sender.close();
        };
        let writer = thread("node-writer", write)?;
        let events = inputs.clone();
        let read = move || {
            if let Err(error) = receiver.set_timeout(None) {
                tracing::debug!("a connection keeps its time-out: {error}");
            }
            loop {
                let input = match receiver.receive() {
                    Ok(message) => Input::Received { rank, number, message },
                    Err(error) => Input::Lost { rank, number, why: error.to_string() },
                };
                let is_over = matches!(input, Input::Lost { .. });
                if events.send(input).is_err() || is_over {
                    return;
                }
            }
        };
        thread("node-reader", read)?;
        Ok(Self { number, outbox, writer })
    }

    /// Queues a message.
    pub(super) fn send(&self, message: Message) {
        // A writer that has ended has reported it.
        let _ = self.outbox.send(message);
    }

    /// Sends what is queued, then closes the connection.
    pub(super) fn finish(self) {
        drop(self.outbox);
        let _ = self.writer.join();
    }
}

/// A node that has proved that it has the key, and asks to join.
#[derive(Debug)]
pub(super) struct Joining {
    pub(super) join: Join,
    pub(super) connection: (Sender, Receiver),
    /// The address of its machine, and the one of this machine to which it has connected.
    pub(super) machines: (IpAddr, IpAddr),
}

/// Listens for nodes. Those that have the key go to `inputs`.
///
/// # Errors
/// When the address cannot be listened at, or the thread cannot be started.
pub(super) fn listen(
    addresses: &[SocketAddr],
    nodes: u32,
    key: &ClusterKey,
    inputs: &Inputs,
) -> io::Result<()> {
    let most = MOST_STRANGERS + nodes as usize;
    let listener = TcpListener::bind(addresses)?;
    let (key, inputs) = (key.clone(), inputs.clone());
    let greet = move |stream: TcpStream, address: SocketAddr, _stranger: Stranger| match greet(stream, &key) {
        Ok(joining) => drop(inputs.send(Input::Joining(Box::new(joining)))),
        Err(error) => tracing::warn!("a connection from {address} is refused: {error}"),
    };
    accept(("node-accept", "node-greeter"), listener, most, greet)
}

/// A connection that has not proved yet that it has the key. Dropped, another one may come.
#[derive(Debug)]
pub(super) struct Stranger(Arc<AtomicUsize>);

impl Drop for Stranger {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Accepts connections in a thread, the first of `threads`, and serves each in one of its own. At most so many strangers have a
/// connection at a time.
///
/// # Errors
/// When the thread cannot be started.
pub(super) fn accept(
    threads: (&'static str, &'static str),
    listener: TcpListener,
    most: usize,
    serve: impl Fn(TcpStream, SocketAddr, Stranger) + Send + Sync + 'static,
) -> io::Result<()> {
    let serve = Arc::new(serve);
    let accept = move || {
        let strangers = Arc::new(AtomicUsize::new(0));
        let mut is_full = false;
        loop {
            let Ok((stream, address)) = listener.accept() else {
                std::thread::sleep(ACCEPT_RETRY_INTERVAL);
                continue;
            };
            let was_full = std::mem::replace(&mut is_full, strangers.load(Ordering::SeqCst) >= most);
            if is_full {
                if !was_full {
                    tracing::warn!(
                        "{most} connections have not proved within {} s each that they have the key: new ones are closed, also those of nodes, which try again",
                        NODE_CONNECTION_TIMEOUT.as_secs()
                    );
                }
                continue;
            }
            strangers.fetch_add(1, Ordering::SeqCst);
            let (stranger, serve) = (Stranger(Arc::clone(&strangers)), Arc::clone(&serve));
            // Without a thread, it is closed.
            drop(thread(threads.1, move || serve(stream, address, stranger)));
        }
    };
    thread(threads.0, accept)?;
    Ok(())
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(run)
}

fn greet(stream: TcpStream, key: &ClusterKey) -> Result<Joining, ConnectionError> {
    let machines = (stream.peer_addr()?.ip().to_canonical(), stream.local_addr()?.ip().to_canonical());
    let (mut sender, mut receiver) =
        connection::open(stream, key, Side::Coordinator, NODE_CONNECTION_TIMEOUT)?;
    match receiver.receive() {
        Ok(Message::Join(join)) => Ok(Joining { join, connection: (sender, receiver), machines }),
        Ok(_) => Err(ConnectionError::Malformed("it does not begin with Join".to_owned())),
        Err(error) => {
            if matches!(error, ConnectionError::WrongKey) {
                sender.refuse_key();
            }
            Err(error)
        }
    }
}
