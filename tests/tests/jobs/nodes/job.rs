//! A job on several machines, for the tests.

use ckpt_run_tests::machines::Machines;
use ckpt_run_tests::{Running, python, torchrun, train_script};
use ckpt_test_skip::is_full_run_or_skip;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// That many machines, or nothing if there can be none here.
pub fn machines(count: usize) -> Option<Machines> {
    if !is_full_run_or_skip() {
        return None;
    }
    match Machines::make(count) {
        Ok(machines) => Some(machines),
        Err(why) => {
            ckpt_test_skip::skip(&why);
            None
        }
    }
}

/// A job on all machines.
pub struct Job {
    pub machines: Machines,
    /// The command of each part.
    commands: Vec<Vec<String>>,
    pub options: Vec<String>,
    /// Machines of spares that can take the place of node 0.
    pub standbys: Vec<usize>,
    /// Whether all nodes have a key file.
    pub has_key_file: bool,
    /// What is preloaded.
    pub interpose: String,
    /// The machine of each node. Its directory and its store stay those of the machine with the number of the node.
    pub places: Vec<usize>,
    /// Of a training: how many ranks each node has, and how many workers load data for each rank.
    pub ranks: usize,
    pub workers: usize,
}

impl Job {
    pub fn new(machines: Machines, command: impl Fn(&Machines, usize) -> Vec<String>) -> Self {
        let commands = (0..machines.sandboxes.len()).map(|node| command(&machines, node)).collect();
        for sandbox in &machines.sandboxes {
            set_key(sandbox.path(), 7);
        }
        let places = (0..machines.sandboxes.len()).collect();
        let (options, interpose, standbys) = (Vec::new(), "off".to_owned(), Vec::new());
        let (ranks, workers) = (1, 0);
        let job = Self {
            machines,
            commands,
            options,
            standbys,
            has_key_file: true,
            interpose,
            places,
            ranks,
            workers,
        };
        job.slow_down();
        job
    }

    /// A connection with much data under way in both directions.
    pub fn stream(machines: Machines, blocks: usize) -> Self {
        let address = machines.address(0);
        Self::stream_to(machines, blocks, &address)
    }

    /// The same; node 0 listens at `host`.
    pub fn stream_to(machines: Machines, blocks: usize, host: &str) -> Self {
        Self::pair(machines, "stream.py", blocks, host)
    }

    /// Messages from one machine to the other, each with a connection of its own.
    pub fn messages(machines: Machines, messages: usize) -> Self {
        let address = machines.address(0);
        Self::pair(machines, "messages.py", messages, &address)
    }

    /// A program for two machines that takes their rank, an address, a port and a number.
    fn pair(machines: Machines, program: &str, number: usize, host: &str) -> Self {
        Self::new(machines, |_, node| {
            let program = ckpt_run_tests::programs().join("nodes").join(program);
            let mut command = vec![python().display().to_string(), program.display().to_string()];
            command.extend([node.to_string(), host.to_owned(), "5000".to_owned(), number.to_string()]);
            command
        })
    }

    /// A part on each machine that needs no other.
    pub fn works(machines: Machines, steps: usize) -> Self {
        Self::new(machines, |_, _| {
            let program = ckpt_run_tests::programs().join("nodes/works.py");
            vec![python().display().to_string(), program.display().to_string(), steps.to_string()]
        })
    }

    /// A connection from each machine to the next one.
    pub fn ring(machines: Machines, rounds: usize) -> Self {
        Self::new(machines, |machines, node| {
            let program = ckpt_run_tests::programs().join("nodes/ring.py");
            let mut command = vec![python().display().to_string(), program.display().to_string()];
            command.extend([node.to_string(), rounds.to_string(), "5000".to_owned()]);
            command.extend((0..machines.sandboxes.len()).map(|node| machines.address(node)));
            command
        })
    }

    /// torchrun with one rank on each machine.
    pub fn training(machines: Machines, steps: usize) -> Self {
        let (nodes, address) = (machines.sandboxes.len(), machines.address(0));
        Self::training_at(machines, steps, (nodes, &address))
    }

    /// The same on so many of the machines; the ranks meet at `host`.
    pub fn training_at(machines: Machines, steps: usize, (nodes, host): (usize, &str)) -> Self {
        let mut job = Self::new(machines, |_, node| {
            let mut command = vec![torchrun().display().to_string()];
            command.extend(["-r", "1", "-t", "1", "--nproc_per_node=1"].map(str::to_owned));
            command.push(format!("--nnodes={nodes}"));
            command.push(format!("--node_rank={node}"));
            command.push(format!("--master_addr={host}"));
            command.extend(["--master_port=5001".to_owned(), train_script().display().to_string()]);
            let steps = steps.to_string();
            let options =
                ["--steps", &steps, "--step-ms", "400", "--slow-while", "slow", "--log", "losses.txt"];
            command.extend(options.map(str::to_owned));
            command
        });
        for sandbox in &mut job.machines.sandboxes {
            sandbox.variables.push(("GLOO_SOCKET_IFNAME".to_owned(), "eth0".to_owned()));
        }
        job.places.truncate(nodes);
        job
    }

    /// A training with so many ranks on each node, and so many workers that load data for each rank.
    pub fn with_ranks(mut self, ranks: usize, workers: usize) -> Self {
        for command in &mut self.commands {
            let one = command.iter_mut().find(|word| *word == "--nproc_per_node=1").expect("a training");
            *one = format!("--nproc_per_node={ranks}");
            command.extend(["--workers".to_owned(), workers.to_string()]);
        }
        Self { ranks, workers, ..self }
    }

    /// Number of nodes.
    pub fn nodes(&self) -> usize {
        self.places.len()
    }

    fn arguments(&self, node: usize) -> Vec<String> {
        let mut arguments = vec!["--nodes".to_owned(), self.nodes().to_string()];
        arguments.extend(["--node-rank".to_owned(), node.to_string(), "--coordinator".to_owned()]);
        let hosts = self.places[..1].iter().chain(&self.standbys);
        let hosts: Vec<_> = hosts.map(|machine| self.machines.address(*machine)).collect();
        arguments.extend([format!("{}:7070", hosts.join(","))]);
        if self.has_key_file {
            arguments.extend(["--cluster-key-file", "key"].map(str::to_owned));
        }
        arguments.extend(["--job", "both", "--interpose"].map(str::to_owned));
        arguments.push(self.interpose.clone());
        arguments.extend(self.options.iter().cloned());
        arguments.push("--".to_owned());
        arguments.extend(self.commands[node].iter().cloned());
        arguments
    }

    /// Gives a node another command; returns the one before.
    pub fn change_command(&mut self, node: usize, command: Vec<String>) -> Vec<String> {
        std::mem::replace(&mut self.commands[node], command)
    }

    pub fn start_one(&self, node: usize) -> Running {
        self.machines.start(self.places[node], node, &self.arguments(node))
    }

    /// A spare on the machine of this number, for this node: with its directory and its store.
    pub fn start_spare(&self, machine: usize, node: usize) -> Running {
        let command = self.spare(machine, node, &[]);
        self.machines.sandboxes[machine].start_command("spare", command)
    }

    /// A spare with the node's directory, and a store of its own.
    pub fn start_spare_with_own_store(&self, machine: usize, node: usize) -> Running {
        let own = &self.machines.sandboxes[machine];
        let mut command = self.spare(machine, node, &[]);
        command.env("CKPT_STORE", &own.store);
        own.start_command("spare", command)
    }

    /// What a spare does that takes itself for node 0 and has a state directory of its own.
    pub fn start_as_node_0(&self, machine: usize) -> Running {
        let own = &self.machines.sandboxes[machine];
        let mut command = self.spare(machine, 0, &["__rejoin", "0", "begun", "-"]);
        command.env("XDG_STATE_HOME", own.path().join("state"));
        own.start_command("spare", command)
    }

    fn spare(&self, machine: usize, node: usize, first: &[&str]) -> Command {
        let sandbox = &self.machines.sandboxes[node];
        let mut arguments = self.arguments(node);
        let rank = arguments.iter().position(|argument| argument == "--node-rank").expect("a rank") + 1;
        arguments[rank] = (self.nodes() + machine).to_string();
        arguments.splice(..0, first.iter().map(|argument| (*argument).to_owned()));
        let mut command = self.machines.on(machine, &sandbox.command(arguments));
        command.current_dir(sandbox.path());
        // It is looked for after a kill.
        fs::create_dir_all(&self.machines.sandboxes[machine].store).unwrap();
        command
    }

    pub fn start(&self) -> Vec<Running> {
        (0..self.nodes()).map(|node| self.start_one(node)).collect()
    }

    /// Lines of a file of a node.
    pub fn lines(&self, node: usize, file: &str) -> usize {
        self.machines.sandboxes[node].read(file).lines().count()
    }

    /// Waits until a file has that many lines on all nodes.
    pub fn until_lines(&self, running: &mut [Running], file: &str, lines: usize) {
        for (node, running) in running.iter_mut().enumerate() {
            running.until("lines of the job", || (self.lines(node, file) >= lines).then_some(()));
        }
    }

    /// Waits until a file has that many lines more on all nodes than it has on the one that is ahead.
    pub fn until_more(&self, running: &mut [Running], file: &str, more: usize) {
        let now = (0..self.nodes()).map(|node| self.lines(node, file)).max().unwrap_or(0);
        self.until_lines(running, file, now + more);
    }

    pub fn checkpoint(&self, running: &[Running]) {
        running[0].checkpoint(&self.machines.sandboxes[0]);
    }

    /// A machine without a node.
    pub fn free_machine(&self) -> usize {
        (0..self.machines.sandboxes.len())
            .find(|machine| !self.places.contains(machine))
            .expect("a spare machine")
    }

    pub fn until_answering(&self, running: &mut [Running]) {
        for (one, sandbox) in running.iter_mut().zip(&self.machines.sandboxes) {
            one.until_answering(sandbox);
        }
    }

    /// The job, after it has run for a while.
    pub fn begun(&self, file: &str) -> Vec<Running> {
        let mut running = self.start();
        self.until_lines(&mut running, file, 5);
        self.until_answering(&mut running);
        running
    }

    pub fn slow_down(&self) {
        for sandbox in &self.machines.sandboxes {
            fs::write(sandbox.path().join("slow"), "").unwrap();
        }
    }

    pub fn full_speed(&self) {
        for sandbox in &self.machines.sandboxes {
            let _ = fs::remove_file(sandbox.path().join("slow"));
        }
    }

    pub fn snapshots(&self) -> Vec<usize> {
        self.machines.sandboxes.iter().map(|sandbox| sandbox.snapshots().len()).collect()
    }

    /// Gives the launcher of a node a fault point, or none.
    pub fn fault(&mut self, node: usize, point: Option<&str>) {
        let variables = &mut self.machines.sandboxes[node].variables;
        variables.retain(|(name, _)| name != "CKPT_FAULT");
        variables.extend(point.map(|point| ("CKPT_FAULT".to_owned(), point.to_owned())));
    }

    /// Whether the launcher of a node has resumed the job so often.
    pub fn has_resumed(&self, node: usize, times: usize) -> bool {
        let said = self.machines.sandboxes[node].read("job.err");
        said.matches("resumed from snapshot").count() == times
    }

    /// Whether a launcher has said this since its start.
    pub fn has_said(&self, node: usize, text: &str) -> bool {
        self.machines.sandboxes[node].read("job.err").contains(text)
    }
}

/// Kills the processes of the job's program on a machine, and nothing else: those with `script` in their command line.
/// Returns how many there were.
pub fn kill_processes(running: &Running, script: &str) -> usize {
    signal_processes(running, script, rustix::process::Signal::KILL)
}

/// Sends a signal to them.
pub fn signal_processes(running: &Running, script: &str, signal: rustix::process::Signal) -> usize {
    let is_it = |pid: &i32| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| {
            let line = String::from_utf8_lossy(&line);
            line.contains(script) && !line.contains("--node-rank")
        })
    };
    let pids: Vec<_> = running.descendants().into_iter().filter(is_it).collect();
    for pid in &pids {
        let pid = rustix::process::Pid::from_raw(*pid).expect("a PID");
        // One of them may have ended with another.
        let _ = rustix::process::kill_process(pid, signal);
    }
    pids.len()
}

/// Everything that the launchers have said.
pub fn said(running: &[Running]) -> String {
    running.iter().map(Running::said).collect()
}

/// Waits for the end of all launchers.
pub fn codes(running: &mut [Running]) -> Vec<i32> {
    running.iter_mut().map(Running::wait).collect()
}

pub fn set_key(dir: &Path, byte: u8) {
    let path = dir.join("key");
    fs::write(&path, format!("{byte:02x}").repeat(31) + "5c").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
}
