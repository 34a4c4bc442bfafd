//! Data-parallel training: which of several processes this one is, and NCCL's communicator of all of them.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::process::{Child, Command, exit};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use cudarc::nccl::result::NcclError;
use cudarc::nccl::{Comm, Id, ReduceOp, group_end, group_start};

/// How long the ranks wait for each other at the beginning.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Variables of torchrun, which are also set for the processes that rank 0 starts.
const RANK: &str = "RANK";
const WORLD_SIZE: &str = "WORLD_SIZE";
const LOCAL_RANK: &str = "LOCAL_RANK";
const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";

/// This process among the ranks.
pub struct Ranks {
    pub rank: usize,
    pub count: usize,
    local_rank: usize,
    meeting: Meeting,
    /// Threads that wait for the other ranks, if rank 0 has started them.
    others: Vec<JoinHandle<()>>,
}

/// How the ranks get NCCL's unique ID.
enum Meeting {
    /// Rank 0 sends it to all that connect.
    Listen(TcpListener),
    Connect(Vec<SocketAddr>),
}

impl Ranks {
    /// The place that the environment says, as torchrun sets it. Without that, this process is rank 0 and starts the
    /// others with its own arguments.
    pub fn find(count: usize) -> Result<Self> {
        let Some(rank) = variable::<usize>(RANK)? else { return Self::start_others(count) };
        let world = variable(WORLD_SIZE)?.unwrap_or(count);
        ensure!(world == count, "--ranks is {count}, and {WORLD_SIZE} is {world}");
        ensure!(rank < count, "{RANK} is {rank} of {count} ranks");
        let host: String = variable(MASTER_ADDR)?.unwrap_or_else(|| Ipv4Addr::LOCALHOST.to_string());
        // The port itself is the rendezvous's.
        let port: u16 =
            variable(MASTER_PORT)?.with_context(|| format!("{RANK} is set without {MASTER_PORT}"))?;
        let port = port.checked_add(1).context("no port after the rendezvous's")?;
        let meeting = if rank == 0 {
            Meeting::Listen(TcpListener::bind(("0.0.0.0", port)).with_context(|| format!("port {port}"))?)
        } else {
            Meeting::Connect((host.as_str(), port).to_socket_addrs().context(host.clone())?.collect())
        };
        let local_rank = variable(LOCAL_RANK)?.unwrap_or(rank);
        Ok(Self { rank, count, local_rank, meeting, others: Vec::new() })
    }

    fn start_others(count: usize) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let rendezvous = listener.local_addr()?.port() - 1;
        let program = std::env::current_exe()?;
        let start = |rank: usize| -> std::io::Result<_> {
            let mut command = Command::new(&program);
            command.args(std::env::args_os().skip(1));
            command.env(RANK, rank.to_string()).env(LOCAL_RANK, rank.to_string());
            command.env(WORLD_SIZE, count.to_string()).env(MASTER_PORT, rendezvous.to_string());
            let child = command.env(MASTER_ADDR, Ipv4Addr::LOCALHOST.to_string()).spawn()?;
            Ok(std::thread::spawn(move || wait_for(child, rank)))
        };
        let others = (1..count).map(start).collect::<std::io::Result<_>>().context("starting the ranks")?;
        Ok(Self { rank: 0, count, local_rank: 0, meeting: Meeting::Listen(listener), others })
    }

    /// The device of this rank. With fewer devices than ranks, several ranks share one.
    pub fn device(&self) -> Result<usize> {
        let devices = usize::try_from(CudaContext::device_count().context("counting devices")?)?;
        ensure!(devices > 0, "there is no device");
        Ok(self.local_rank % devices)
    }

    /// The communicator of all ranks, for work on `stream`.
    pub fn communicator(&mut self, stream: &Arc<CudaStream>) -> Result<Communicator> {
        let id = match &self.meeting {
            Meeting::Listen(listener) => {
                let id = Id::new().map_err(nccl("ncclGetUniqueId"))?;
                let bytes = id.internal().map(i8::cast_unsigned);
                let deadline = Instant::now() + TIMEOUT;
                listener.set_nonblocking(true)?;
                for _ in 1..self.count {
                    accept(listener, deadline)?.write_all(&bytes)?;
                }
                id
            }
            Meeting::Connect(addresses) => {
                let mut bytes = [0; 128];
                connect(addresses, Instant::now() + TIMEOUT)?.read_exact(&mut bytes)?;
                Id::uninit(bytes.map(u8::cast_signed))
            }
        };
        let comm = Comm::from_rank(Arc::clone(stream), self.rank, self.count, id);
        Ok(Communicator(comm.map_err(nccl("ncclCommInitRank"))?))
    }

    /// Waits for the ranks that rank 0 has started.
    pub fn finish(self) {
        self.others.into_iter().for_each(|one| one.join().expect("a thread that waits"));
    }
}

/// Ends this process if the rank fails: NCCL would wait for it for ever.
fn wait_for(mut child: Child, rank: usize) {
    match child.wait() {
        Ok(status) if status.success() => {}
        outcome => {
            eprintln!("rank {rank} has failed: {outcome:?}");
            exit(1);
        }
    }
}

/// NCCL's communicator of all ranks.
pub struct Communicator(Comm);

impl Communicator {
    /// Replaces each tensor by its mean over all ranks.
    pub fn mean<'a>(&self, tensors: impl Iterator<Item = &'a mut CudaSlice<f32>>) -> Result<()> {
        group_start().map_err(nccl("ncclGroupStart"))?;
        for tensor in tensors {
            self.0.all_reduce_in_place(tensor, &ReduceOp::Avg).map_err(nccl("ncclAllReduce"))?;
        }
        group_end().map_err(nccl("ncclGroupEnd"))?;
        Ok(())
    }
}

fn variable<T: std::str::FromStr>(name: &str) -> Result<Option<T>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| anyhow!("{name} is {text:?}"))
}

fn nccl(call: &'static str) -> impl FnOnce(NcclError) -> anyhow::Error {
    move |error| anyhow!("{call}: {:?}", error.0)
}

fn accept(listener: &TcpListener, deadline: Instant) -> Result<TcpStream> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        ensure!(Instant::now() < deadline, "a rank did not connect");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn connect(addresses: &[SocketAddr], deadline: Instant) -> Result<TcpStream> {
    loop {
        match TcpStream::connect(addresses) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= deadline => return Err(error).context("connecting to rank 0"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
