//! What the programs that start a job on several nodes say of it in the environment: Slurm's `srun`, `mpirun`, and
//! Kubernetes' indexed Jobs.
//!
//! | | number of nodes | rank | coordinator |
//! |---|---|---|---|
//! | a step of Slurm on several nodes | `SLURM_STEP_NUM_NODES` | `SLURM_NODEID` | the first node of `SLURM_STEP_NODELIST`, and those of spares |
//! | Open MPI | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_RANK` | |
//! | Hydra (MPICH, Intel MPI) | `PMI_SIZE` | `PMI_RANK` | |
//! | an indexed Job of Kubernetes | | `JOB_COMPLETION_INDEX` | |
//!
//! Slurm alone says everything, so a step of several nodes is a job on several nodes. The others only complete options
//! that say that it is one. Sources: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; mpirun(1) of Open MPI; the documentation of
//! Kubernetes, "Indexed Job".

use super::options::{Coordinator, NodeOptions};

/// The ports of coordinators under Slurm: above those that Linux gives to outgoing connections.
const FIRST_PORT: u64 = 61_000;
const PORTS: u64 = 4_000;
/// More nodes in a list are not understood.
const MOST_NAMES: usize = 10_000;

/// Reads a variable of the environment.
type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What an engine says of the launchers that it has started.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Engine {
    name: &'static str,
    /// Number of launchers.
    nodes: Option<u32>,
    rank: u32,
    /// All nodes, in their order.
    coordinator: Option<Coordinator>,
    /// Launchers on a node, in the engine's words, if there is more than one.
    crowd: Option<String>,
    /// How one on each node is started.
    remedy: &'static str,
}

/// What the environment says cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Several launchers on a node.
    #[error(
        "{engine} has started several tasks on a node ({crowd}), and a job on several nodes needs one ckpt-run on each: use {remedy}. For jobs that have nothing to do with each other, use --nodes 1"
    )]
    Crowded {
        /// The engine.
        engine: &'static str,
        /// Its words.
        crowd: String,
        /// What to change.
        remedy: &'static str,
    },
    /// There are fewer nodes than the option says.
    #[error(
        "{engine} has started ckpt-run on {found} nodes, fewer than --nodes {nodes}: give --node-rank and --coordinator too, or leave --nodes out"
    )]
    OtherNumber {
        /// The engine.
        engine: &'static str,
        /// Its number.
        found: u32,
        /// That of the option.
        nodes: u32,
    },
    /// A step of a heterogeneous job.
    #[error(
        "this is a heterogeneous job of Slurm, whose nodes are not numbered together: give --nodes, --node-rank and --coordinator"
    )]
    Heterogeneous,
    /// A list of nodes that is not understood.
    #[error("the list of nodes {0:?} (SLURM_STEP_NODELIST) is not understood: give --coordinator")]
    NodeList(String),
}

impl NodeOptions {
    /// Completes what was not given from the environment. Given options stay as they are.
    ///
    /// # Errors
    /// See [`EngineError`].
    pub fn complete(&mut self, variable: Variable) -> Result<(), EngineError> {
        let is_complete = self.nodes.is_some() && self.rank.is_some() && self.coordinator.is_some();
        if is_complete || self.nodes == Some(1) {
            return Ok(());
        }
        let is_meant = self.nodes.is_some() || self.coordinator.is_some();
        let found = match slurm(variable)? {
            Some(step) if is_meant || step.nodes > Some(1) => Some(step),
            _ if is_meant => mpi(variable).or_else(|| kubernetes(variable)),
            _ => None,
        };
        let Some(engine) = found else { return Ok(()) };
        if let Some(crowd) = engine.crowd {
            return Err(EngineError::Crowded { engine: engine.name, crowd, remedy: engine.remedy });
        }
        // More than the job has are spares.
        if let (Some(nodes), Some(found)) = (self.nodes, engine.nodes)
            && nodes > found
        {
            return Err(EngineError::OtherNumber { engine: engine.name, found, nodes });
        }
        self.nodes = self.nodes.or(engine.nodes);
        self.rank = self.rank.or(Some(engine.rank));
        // The first node, and the spares.
        let of_engine = engine.coordinator.map(|all| {
            let spares = all.hosts.iter().skip(self.nodes.map_or(usize::MAX, |nodes| nodes as usize));
            Coordinator { hosts: all.hosts.first().into_iter().chain(spares).cloned().collect(), ..all }
        });
        self.coordinator = self.coordinator.take().or(of_engine);
        self.engine = Some(engine.name);
        Ok(())
    }
}

fn number<T: std::str::FromStr>(variable: Variable, name: &str) -> Option<T> {
    variable(name)?.trim().parse().ok()
}

fn slurm(variable: Variable) -> Result<Option<Engine>, EngineError> {
    let step = (
        number::<u32>(variable, "SLURM_STEP_NUM_NODES"),
        number(variable, "SLURM_NODEID"),
        variable("SLURM_STEP_NODELIST"),
    );
    // A batch script is no step: its variables are those of the job.
    let (Some(nodes), Some(rank), Some(list)) = step else { return Ok(None) };
    if nodes > 1 && number::<u32>(variable, "SLURM_HET_SIZE").is_some_and(|components| components > 1) {
        return Err(EngineError::Heterogeneous);
    }
    let hosts = names(&list).ok_or_else(|| EngineError::NodeList(list.clone()))?;
    let id = |name| number::<u64>(variable, name).unwrap_or(0);
    // Steps of a job may run at the same time.
    let port = FIRST_PORT + id("SLURM_JOB_ID").wrapping_mul(7).wrapping_add(id("SLURM_STEP_ID")) % PORTS;
    let port = u16::try_from(port).expect("a port has 16 bits");
    let tasks = variable("SLURM_STEP_TASKS_PER_NODE").unwrap_or_else(|| "1".to_owned());
    let is_crowded = tasks.split(',').any(|tasks| tasks.split('(').next() != Some("1"));
    Ok(Some(Engine {
        name: "Slurm",
        nodes: Some(nodes),
        rank,
        coordinator: Some(Coordinator { hosts, port }),
        crowd: is_crowded.then(|| format!("SLURM_STEP_TASKS_PER_NODE={tasks}")),
        remedy: "srun --ntasks-per-node=1",
    }))
}

/// The names of a list in Slurm's form, such as `n[01-03,7]-x,m1`, in order.
fn names(list: &str) -> Option<Vec<String>> {
    let (mut names, mut rest) = (Vec::new(), list);
    loop {
        // Commas in brackets belong to a range.
        let mut depth = 0;
        let end = rest.find(|char| {
            depth += i32::from(char == '[') - i32::from(char == ']');
            char == ',' && depth == 0
        });
        names.extend(expanded(&rest[..end.unwrap_or(rest.len())], MOST_NAMES.checked_sub(names.len())?)?);
        match end {
            Some(end) => rest = &rest[end + 1..],
            None => break,
        }
    }
    let is_name = |name: &String| {
        !name.is_empty() && name.chars().all(|char| char.is_ascii_alphanumeric() || "-_.".contains(char))
    };
    names.iter().all(is_name).then_some(names)
}

/// One entry of such a list, if it stands for `most` names at most.
fn expanded(entry: &str, most: usize) -> Option<Vec<String>> {
    let Some((before, rest)) = entry.split_once('[') else { return Some(vec![entry.to_owned()]) };
    let (ranges, after) = rest.split_once(']')?;
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let width = first.len();
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || last - first >= most as u64 {
            return None;
        }
        numbers.extend((first..=last).map(|number| format!("{number:0width$}")));
    }
    let after = expanded(after, most)?;
    let is_short = numbers.len().checked_mul(after.len())? <= most;
    let all =
        numbers.iter().flat_map(|number| after.iter().map(move |after| format!("{before}{number}{after}")));
    is_short.then(|| all.collect())
}

fn mpi(variable: Variable) -> Option<Engine> {
    let one = |name, names: [&str; 3], remedy| {
        let [size, rank, local] = names;
        let (nodes, rank) = (number(variable, size)?, number(variable, rank)?);
        let on_node: Option<u32> = number(variable, local);
        // Without this number nobody knows how many there are on a node.
        let on_node = on_node?;
        let crowd = (on_node != 1).then(|| format!("{local}={on_node}"));
        Some(Engine { name, nodes: Some(nodes), rank, coordinator: None, crowd, remedy })
    };
    let open_mpi = ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"];
    let hydra = ["PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"];
    one("Open MPI", open_mpi, "mpirun --map-by ppr:1:node").or_else(|| one("MPI", hydra, "mpiexec -ppn 1"))
}

fn kubernetes(variable: Variable) -> Option<Engine> {
    let rank = number(variable, "JOB_COMPLETION_INDEX")?;
    Some(Engine {
        name: "Kubernetes",
        nodes: None,
        rank,
        coordinator: None,
        crowd: None,
        remedy: "one container of each pod",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: [(&str, &str); 6] = [
        ("SLURM_JOB_ID", "1234"),
        ("SLURM_STEP_ID", "2"),
        ("SLURM_STEP_NUM_NODES", "4"),
        ("SLURM_NODEID", "3"),
        ("SLURM_STEP_NODELIST", "gpu[07-09,12]"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x4)"),
    ];

    fn completed(options: &NodeOptions, variables: &[(&str, &str)]) -> Result<NodeOptions, EngineError> {
        let mut options = options.clone();
        let find = |name: &str| variables.iter().rev().find(|one| one.0 == name).map(|one| one.1.to_owned());
        options.complete(&find).map(|()| options)
    }

    fn with<'a>(variables: &[(&'a str, &'a str)], more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        [variables, more].concat()
    }

    fn given(nodes: Option<u32>, rank: Option<u32>, coordinator: Option<&str>) -> NodeOptions {
        let coordinator = coordinator.map(|text| Coordinator::parse(text).unwrap());
        NodeOptions { nodes, rank, coordinator, ..NodeOptions::default() }
    }

    fn summary(options: &NodeOptions) -> (Option<u32>, Option<u32>, Option<String>) {
        (options.nodes, options.rank, options.coordinator.as_ref().map(ToString::to_string))
    }

    #[test]
    fn the_nodes_of_a_list_are_found() {
        for (list, expected) in [
            ("n1", "n1"),
            ("n1,n2", "n1 n2"),
            ("n[1-4]", "n1 n2 n3 n4"),
            ("gpu[07-09,12],cpu1", "gpu07 gpu08 gpu09 gpu12 cpu1"),
            ("n[9-11]", "n9 n10 n11"),
            (
                "rack[2,1]-n[010-011].cluster",
                "rack2-n010.cluster rack2-n011.cluster rack1-n010.cluster rack1-n011.cluster",
            ),
        ] {
            assert_eq!(names(list).map(|names| names.join(" ")).as_deref(), Some(expected), "{list}");
        }
        for bad in
            ["", ",", "n[1-4", "a b", "$(x)", "n[]]", "n[4-1]", "n[1-99999]", "n[1-999][1-999]", "n1,,n2"]
        {
            assert_eq!(names(bad), None, "{bad}");
        }
    }

    #[test]
    fn any_list_has_nodes_or_none() {
        ckpt_test_mutate::mutations(&[b"rack[2,1]-n[010-012].cluster,m1".to_vec()], |bytes| {
            if let Ok(text) = std::str::from_utf8(bytes) {
                let _ = names(text);
            }
        });
    }

    #[test]
    fn a_step_of_slurm_on_several_nodes_is_a_job_on_several_nodes() {
        let found = completed(&NodeOptions::default(), &STEP).unwrap();
        assert_eq!(summary(&found), (Some(4), Some(3), Some("gpu07:61640".to_owned())));
        assert_eq!(found.engine, Some("Slurm"));
        // A step on one node, however many tasks it has, and a batch script are as without Slurm.
        let one = with(&STEP, &[("SLURM_STEP_NUM_NODES", "1"), ("SLURM_STEP_TASKS_PER_NODE", "8")]);
        for variables in [&one[..], &STEP[..2], &[("SLURM_JOB_NUM_NODES", "4"), ("SLURM_NODEID", "0")]] {
            let found = completed(&NodeOptions::default(), variables).unwrap();
            assert_eq!(summary(&found), (None, None, None), "{variables:?}");
        }
    }

    #[test]
    fn several_tasks_on_a_node_are_refused() {
        for tasks in ["2(x4)", "1(x3),2", "2,1(x3)", "8"] {
            let crowded = with(&STEP, &[("SLURM_STEP_TASKS_PER_NODE", tasks)]);
            let error = completed(&NodeOptions::default(), &crowded).unwrap_err().to_string();
            assert!(error.contains("srun --ntasks-per-node=1") && error.contains(tasks), "{error}");
            let alone = completed(&given(Some(1), None, None), &crowded).unwrap();
            assert_eq!(summary(&alone), (Some(1), None, None));
        }
        let mixed = with(&STEP, &[("SLURM_HET_SIZE", "2")]);
        assert!(matches!(completed(&NodeOptions::default(), &mixed), Err(EngineError::Heterogeneous)));
        let unknown = with(&STEP, &[("SLURM_STEP_NODELIST", "n[1")]);
        assert!(matches!(completed(&NodeOptions::default(), &unknown), Err(EngineError::NodeList(_))));
    }

    #[test]
    fn given_options_win() {
        let all = given(Some(2), Some(1), Some("a:1"));
        assert_eq!(summary(&completed(&all, &STEP).unwrap()), summary(&all));
        let some = completed(&given(Some(4), None, Some("a:1")), &STEP).unwrap();
        assert_eq!(summary(&some), (Some(4), Some(3), Some("a:1".to_owned())));
        let some = completed(&given(None, Some(0), None), &STEP).unwrap();
        assert_eq!(summary(&some), (Some(4), Some(0), Some("gpu07:61640".to_owned())));
        let error = completed(&given(Some(5), None, None), &STEP).unwrap_err().to_string();
        assert!(error.contains("on 4 nodes, fewer than --nodes 5"), "{error}");
        // Node 3 of 4, of a job on three.
        let spare = completed(&given(Some(3), None, None), &STEP).unwrap();
        assert_eq!(summary(&spare), (Some(3), Some(3), Some("gpu07,gpu12:61640".to_owned())));
        assert!(spare.is_spare() && !all.is_spare());
    }

    #[test]
    fn mpi_and_kubernetes_complete_what_is_given() {
        let open_mpi = [
            ("OMPI_COMM_WORLD_SIZE", "3"),
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
        ];
        let hydra = [("PMI_SIZE", "3"), ("PMI_RANK", "2"), ("MPI_LOCALNRANKS", "1")];
        for variables in [&open_mpi[..], &hydra] {
            let found = completed(&given(None, None, Some("a:1")), variables).unwrap();
            assert_eq!(summary(&found), (Some(3), Some(2), Some("a:1".to_owned())));
            let none = completed(&NodeOptions::default(), variables).unwrap();
            assert_eq!(summary(&none), (None, None, None), "they may have nothing to do with each other");
            let crowded = with(variables, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "2"), ("MPI_LOCALNRANKS", "2")]);
            let error = completed(&given(None, None, Some("a:1")), &crowded).unwrap_err().to_string();
            assert!(error.contains("several tasks on a node"), "{error}");
        }
        // How many there are on a node is not known.
        let found = completed(&given(Some(3), None, Some("a:1")), &hydra[..2]).unwrap();
        assert_eq!(summary(&found), (Some(3), None, Some("a:1".to_owned())));
        let index = [("JOB_COMPLETION_INDEX", "2")];
        let found = completed(&given(Some(3), None, Some("a:1")), &index).unwrap();
        assert_eq!(summary(&found), (Some(3), Some(2), Some("a:1".to_owned())));
        assert_eq!(summary(&completed(&NodeOptions::default(), &index).unwrap()), (None, None, None));
    }
}
