//! Every timeout, delay and polling interval that is not an option, named by its purpose.

use std::time::{Duration, Instant};

// Agents of the interposer

/// Pause before the next connection is accepted when descriptors or threads are exhausted.
pub const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Time for a new connection to say hello. A slower connection is closed, and the agent connects again.
pub const AGENT_HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for one write to an agent. An agent always reads, so only a stopped process reaches this timeout.
pub const AGENT_WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for the job's processes to release their GPUs before they are killed.
pub const GPU_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for a process to exit after it has closed its files.
pub const AGENT_EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Polling interval for the existence of a process of the job.
pub const PROCESS_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time that one request of a process that comes back waits for other processes, before it is asked again.
pub const RETURN_STEP_TIMEOUT: Duration = Duration::from_millis(200);
/// Time for a connection to close after the agent's goodbye: a child that was just forked may still hold it.
pub const AGENT_CLOSE_TIMEOUT: Duration = Duration::from_millis(200);
/// Time of one attempt to bring all ranks of NCCL to the same step. Ranks that are ahead wait meanwhile, so all attempts
/// together have to be far below NCCL's watchdogs (8 minutes for PyTorch's heartbeat).
pub const CUT_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of attempts for a checkpoint.
pub const CUT_ATTEMPTS: u32 = 3;
/// Time for which the ranks run after the first attempt; it doubles after each.
pub const CUT_BACK_OFF: Duration = Duration::from_secs(1);
/// Polling interval for the answer of an agent whose deadline has passed.
pub const STUCK_AGENT_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Time for NVML to answer.
pub const GPU_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for its first answer: it initialises the GPUs that no process has open, which takes seconds for each.
pub const GPU_FIRST_ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long NVML is not asked again after it has failed; twice as long with each failure in a row.
pub const GPU_SILENCE: Duration = Duration::from_secs(60);
/// At most so long.
pub const GPU_LONGEST_SILENCE: Duration = Duration::from_secs(3600);
/// Time for a killed process that has asked NVML to end.
pub const GPU_HELPER_END_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for the device files of the GPUs to open. The driver initialises a GPU that no process has open, which takes seconds.
pub const DEVICE_OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Polling interval for free device memory before a restore. The time for that is `--gpu-timeout`.
pub const DEVICE_MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Time for an interposer to report GPU activity to the watchdog. A stopped process does not answer.
pub const ACTIVITY_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Time for which a rank of NCCL may let others wait before it is named. Far below the watchdogs of frameworks (10 minutes
/// for PyTorch's).
pub const LATE_RANK_TIMEOUT: Duration = Duration::from_secs(30);
/// Time after which a job in which nothing happens hangs, with `--hang-timeout auto`.
pub const AUTO_HANG_TIMEOUT: Duration = Duration::from_secs(600);

// The demo

/// Time for each step of `ckpt-run demo`, on a machine that is busy.
pub const DEMO_TIMEOUT: Duration = Duration::from_secs(300);
/// Polling interval of the demo for steps and ends of its processes.
pub const DEMO_POLL_INTERVAL: Duration = Duration::from_millis(5);

// Stores

/// Time without an answer of a store in a directory after which ckpt-run ends, at a start or in a resume. Longer than object
/// stores are retried (5 minutes), and than a file server takes to restart.
pub const STORE_ANSWER_TIMEOUT: Duration = Duration::from_secs(600);
/// Time after which such a store is reported.
pub const STORE_ANSWER_REPORT: Duration = Duration::from_secs(30);
/// Polling interval for that.
pub const STORE_ANSWER_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Total time for retries against an object store before a start, or a command, fails.
pub const STORE_RETRY_TIMEOUT: Duration = Duration::from_secs(15);
/// Time for which a command that only reads retries requests to an object store. It asks no more after that.
pub const STORE_LOOK_RETRY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time without progress after which a request for the job's record fails. The record is small.
pub const RECORD_STALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest pause of an upload: one part is then sent, however busy the network is.
pub const UPLOAD_LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Time for the copying thread to notice that it has been cancelled.
pub const COPIER_END_TIMEOUT: Duration = Duration::from_secs(1);
/// Polling interval for a reason to stop waiting for the last copy or upload.
pub const LAST_COPY_POLL_INTERVAL: Duration = Duration::from_millis(50);

// The job and its end

/// Polling interval for the end of a killed job before its restart.
pub const KILLED_JOB_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Delay of the first retry after a failed checkpoint. The delay doubles with each failure, up to the interval.
pub const CHECKPOINT_FIRST_RETRY: Duration = Duration::from_secs(10);
/// Time for processes that the job left running to end after SIGTERM.
pub const LEFTOVER_EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for the last output of the job to be relayed.
pub const LAST_OUTPUT_TIMEOUT: Duration = Duration::from_secs(30);
/// Time to try again to write the job's output to a file, and the pause between two tries.
pub const OUTPUT_RETRY_TIMEOUT: Duration = Duration::from_secs(60);
/// See [`OUTPUT_RETRY_TIMEOUT`].
pub const OUTPUT_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// A job that ends with an error within this time after its user stopped it has not failed.
pub const USER_STOP_WINDOW: Duration = Duration::from_secs(600);
/// The signal that began the ending of the job, sent again within this time, is the same request.
pub const REPEATED_SIGNAL_WINDOW: Duration = Duration::from_secs(2);
/// The same for Ctrl-C: `timeout -s INT` sends it twice, and a person presses it again on purpose.
pub const REPEATED_KEY_WINDOW: Duration = Duration::from_millis(100);
/// Time for the end of a killed job to be reported. Its namespace is then ended.
pub const KILLED_JOB_REPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for the outcome of the job to be written to the store.
pub const OUTCOME_WRITE_TIMEOUT: Duration = Duration::from_secs(600);
/// Pause before the outcome is written again after an error.
pub const OUTCOME_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time for the outcome of the job to be written again after an error of the store.
pub const OUTCOME_RETRY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which messages between launcher and init are tried again while the kernel lacks memory for them.
pub const MESSAGE_RETRY_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between two of these tries.
pub const MESSAGE_RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Time for a cancelled checkpoint to stop storing.
pub const CANCELLED_CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which a start that waits for processes of the job's earlier session says so.
pub const EARLIER_SESSION_REPORT: Duration = Duration::from_secs(2);
/// Time for the init to end the job by itself, before it is killed.
pub const INIT_END_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for a namespace to end. The kernel needs a while to free much memory.
pub const NAMESPACE_END_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for py-spy to read the stacks of one process.
pub const PY_SPY_TIMEOUT: Duration = Duration::from_secs(10);

// Checkpoint and resume

/// Pause before the content of a file of the paused job is read again after an error.
pub const FILE_RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Time for reading the options of the job's sockets while it is paused: 1,000 sockets take a small part of it.
pub const SOCKET_OPTIONS_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay between two tries of a dump.
pub const DUMP_RETRY_DELAY: Duration = Duration::from_millis(200);
/// For a CRIU that takes too long to be between two of its changes to the job's processes, before it is killed.
pub const CRIU_STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// For a CRIU that was killed to be gone.
pub const CRIU_END_TIMEOUT: Duration = Duration::from_secs(10);
/// Polling interval for that.
pub const CRIU_END_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time for the last output of a frozen job to reach a regular file.
pub const FROZEN_OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);
/// Time to wait for the checkpoint of another job that holds the lock of link names. A job that hangs must not block the
/// checkpoints of all other jobs, and clashing names are rare.
pub const NAMES_LOCK_TIMEOUT: Duration = Duration::from_secs(120);
/// Polling interval for that lock.
pub const NAMES_LOCK_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// A command waits for that long until a job runs.
pub const START_WAIT_LIMIT: Duration = Duration::from_secs(600);
/// Polling interval for that.
pub const START_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Names that a killed dump has left are deleted once the processes of its job have ended; a checkpoint waits for that long.
pub const LEFT_LINKS_PATIENCE: Duration = Duration::from_secs(5);
/// Restores that fail within this time count as one failure of the snapshot: a machine in trouble, on which each of many
/// tries fails, must not mark a good snapshot as bad.
pub const RESTORE_FAILURE_WINDOW: Duration = Duration::from_secs(600);
/// Time after which a restore fails in which no process has used the CPU or waited for a disk. CRIU waits for ever for a
/// process that is killed while it is restored. File systems in user space are given this time to answer.
pub const RESTORE_STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Polling interval for that.
pub const RESTORE_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Poll of whether a round of pre-copy is still wanted.
pub const PRECOPY_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for a port of the job to become free. The kernel keeps the port of a killed listener for a minute (TIME_WAIT)
/// unless the job set SO_REUSEADDR.
pub const PORT_RETRY_TIMEOUT: Duration = Duration::from_secs(75);
/// Delay between two tries of a resume that waits for a port.
pub const PORT_RETRY_DELAY: Duration = Duration::from_secs(1);

// Jobs on several nodes

/// Time to connect to another node and to exchange the first messages; also for one write.
pub const NODE_CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for one of several hosts at which node 0 may be.
pub const NODE_SEARCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for the holder of replicas to answer a request. Content of several connections may be on its way to it.
pub const REPLICA_ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after which a holder that could not be asked is asked again. It doubles, up to [`LONGEST_REPLICA_PAUSE`].
pub const FIRST_REPLICA_PAUSE: Duration = Duration::from_secs(5);
/// The longest such time.
pub const LONGEST_REPLICA_PAUSE: Duration = Duration::from_secs(160);
/// How long a node tries to get its part from the holder before an older snapshot is resumed.
pub const REPLICA_PATIENCE: Duration = Duration::from_secs(20);
/// Interval of these tries.
pub const REPLICA_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Time for a launcher that had the network of a job on this machine to end. The others wait longer for this one.
pub const NODE_INTERFACE_LIMIT: Duration = Duration::from_secs(10);
/// Time for the network of a job to reach all other nodes, whose launchers may still make theirs.
pub const NODE_REACH_LIMIT: Duration = Duration::from_secs(20);
/// Time for one try of that. A packet that is lost is sent again after a second.
pub const NODE_REACH_TRY: Duration = Duration::from_millis(1500);
/// Pause before the second try to connect to node 0. It doubles, up to [`NODE_RETRY_INTERVAL`].
pub const NODE_FIRST_RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// The longest pause before the next try to connect to node 0, or to make the network of a job.
pub const NODE_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Time after which a launcher says for which other nodes it waits.
pub const NODE_WAIT_REPORT: Duration = Duration::from_secs(3);
/// Time between two entries of the journal that say for which other nodes a launcher waits.
pub const NODE_WAIT_RECORD: Duration = Duration::from_secs(300);
/// Time in which the end of a part may turn out to be the consequence of the loss of another node.
pub const NODE_CAUSE_WINDOW: Duration = Duration::from_secs(1);
/// How long a node may be missing, after another launcher was lost and all that are left are there, before a spare takes its
/// place.
pub const SPARE_REJOIN_PATIENCE: Duration = Duration::from_secs(3);
/// The same if there are more nodes missing than there are spares: the others end their parts. More than that takes.
pub const SPARE_SLOW_PATIENCE: Duration = Duration::from_secs(20);
/// How long launchers that started again wait for the lost one, unless they are told to wait.
pub const REJOIN_LIMIT: Duration = Duration::from_secs(600);
/// The same when all launchers start: some machines are slower than others.
pub const SPARE_START_PATIENCE: Duration = Duration::from_secs(60);
/// Node 0 and a spare that hear nothing of each other for this long are lost to each other, or for `--node-timeout`.
pub const SPARE_SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which a spare that nodes take for node 0 looks whether the job has something to resume.
pub const SPARE_ASKS_STORE_INTERVAL: Duration = Duration::from_secs(5);
/// Time until a spare whose place is not free after all looks again whether it is needed.
pub const SPARE_AGAIN_PAUSE: Duration = Duration::from_secs(5);
/// A node that has looked for node 0 at a spare within this time does so still: each try at another host may take
/// [`NODE_SEARCH_TIMEOUT`].
pub const NODE_SOUGHT_TIME: Duration = Duration::from_secs(6);
/// A spare that has not joined within this time after it was given a place gets no more: another spare may.
pub const SPARE_TAKES_LIMIT: Duration = Duration::from_secs(60);
/// What a node has told of its ranks does not count any more after this time. It tells it each 4 s.
pub const RANK_REPORT_LIFE: Duration = Duration::from_secs(15);
/// Interval at which node 0 shows that it is there.
pub const NODE_BEAT_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest `--node-timeout`: some beats may be late.
pub const SHORTEST_NODE_TIMEOUT: Duration = Duration::from_secs(3);
/// A connection to another launcher on which nothing has come for this long is probed.
pub const NODE_SILENCE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which an order or a request to the log without an answer is repeated.
pub const NODE_REPEAT_INTERVAL: Duration = Duration::from_secs(5);
/// Time for each step in which the job is paused, beyond `--freeze-timeout`.
pub const NODE_STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for a part to be prepared (`--precopy`), stored or restored.
pub const NODE_TRANSFER_TIMEOUT: Duration = Duration::from_secs(6 * 3600);
/// Time for connections of an earlier session to end before a resume blocks their ports.
pub const NODE_CONNECTIONS_END_TIMEOUT: Duration = Duration::from_secs(20);
/// Time in which they may end by themselves.
pub const NODE_CONNECTIONS_PATIENCE: Duration = Duration::from_secs(1);
/// Polling interval for that.
pub const NODE_CONNECTIONS_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// In a cut, time for connections of other programs to end.
pub const NODE_CLOSING_PATIENCE: Duration = Duration::from_millis(100);
/// Polling interval for that.
pub const NODE_CLOSING_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// What is sent has to be acknowledged within this time of a check, and twice that for which packets were blocked before.
pub const NODE_PROGRESS_PATIENCE: Duration = Duration::from_secs(15);
/// A connection on which nothing comes for this long of a check, and nothing has to, is in order.
pub const NODE_PROGRESS_QUIET: Duration = Duration::from_secs(1);
/// The longest check of progress; less than [`NODE_STEP_TIMEOUT`].
pub const NODE_PROGRESS_LIMIT: Duration = Duration::from_secs(45);
/// Polling interval for that.
pub const NODE_PROGRESS_POLL_INTERVAL: Duration = Duration::from_millis(100);

// Commands and scrapes

/// Time for one notification to be sent (`--notify`).
pub const NOTIFY_TIMEOUT: Duration = Duration::from_secs(20);
/// Wait before a notification is sent again. It doubles, up to [`NOTIFY_LONGEST_RETRY`].
pub const NOTIFY_FIRST_RETRY: Duration = Duration::from_millis(500);
/// See [`NOTIFY_FIRST_RETRY`].
pub const NOTIFY_LONGEST_RETRY: Duration = Duration::from_secs(60);
/// A notification that could not be sent for this long is given up.
pub const NOTIFY_GIVE_UP: Duration = Duration::from_secs(600);
/// Time for the last notifications to be sent when ckpt-run ends.
pub const NOTIFY_LAST_TIMEOUT: Duration = Duration::from_secs(5);
/// The shortest time between two copies of the journal into the object store, but for what ends a session or begins one.
pub const JOURNAL_COPY_INTERVAL: Duration = Duration::from_secs(60);
/// Time for the last copy when ckpt-run ends.
pub const JOURNAL_LAST_COPY_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which it is looked how much memory is left, while a snapshot is in memory.
pub const MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The same while much is left.
pub const LONGEST_MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Interval of progress messages to a waiting command.
pub const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// A caller that sends nothing for this long is disconnected.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// A launcher that sends nothing for this long may be stopped.
pub const STOPPED_AFTER: Duration = Duration::from_secs(1);
/// Time for answers under way to be sent when the launcher ends.
pub const LAST_ANSWERS_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for one scrape to ask, and again to read its answer. Connections are served one after the other.
pub const SCRAPE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for a launcher to end after it has reported the end of its job.
pub const LAUNCHER_END_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which a launcher records that its job runs.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// Interval at which the record of what files the job writes goes to the disk. After a crash of the machine, more recent
/// changes are not attributed by it.
pub const RECORD_SYNC_INTERVAL: Duration = Duration::from_secs(5);
/// Polling interval of `status --watch`.
pub const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// The same for an object store, where each request costs money.
pub const WATCH_INTERVAL_OBJECT_STORE: Duration = Duration::from_secs(15);
/// Polling interval for keys and signals in `status --watch`.
pub const KEY_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs `work` in a thread of its own, since it may wait for a store; `None` if it has not finished by `until`.
pub fn within<T: Send + 'static>(until: Instant, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, is_done) = crossbeam_channel::bounded(1);
    let work = move || {
        let _ = done.send(work());
    };
    let started = std::thread::Builder::new().name("record".to_owned()).spawn(work);
    started
        .inspect_err(|error| tracing::warn!("cannot start a thread for the job's record: {error}"))
        .ok()?;
    is_done.recv_deadline(until).ok()
}
