//! A directed graph and its cycles.

use std::collections::{BTreeMap, BTreeSet};

/// Nodes by name. An edge from a node to itself is dropped.
pub struct Graph {
    edges: BTreeMap<String, BTreeSet<String>>,
}

impl Graph {
    /// Makes a graph of its edges.
    pub fn new(edges: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut graph = Self { edges: BTreeMap::new() };
        for (from, to) in edges {
            if from != to {
                graph.edges.entry(to.clone()).or_default();
                graph.edges.entry(from).or_default().insert(to);
            }
        }
        graph
    }

    /// The strongly connected components of more than one node, the largest first.
    pub fn cycles(&self) -> Vec<Vec<String>> {
        let reached: BTreeMap<&String, _> = self.edges.keys().map(|node| (node, self.reach(node))).collect();
        let mut placed = BTreeSet::new();
        let mut cycles = Vec::new();
        for (node, from_node) in &reached {
            if placed.contains(node) {
                continue;
            }
            let mutual = from_node.iter().filter(|other| reached[*other].contains(*node));
            let component: Vec<_> = mutual.copied().collect();
            placed.extend(component.iter().copied());
            if component.len() > 1 {
                cycles.push(component.into_iter().cloned().collect());
            }
        }
        cycles.sort_by_key(|cycle: &Vec<_>| std::cmp::Reverse(cycle.len()));
        cycles
    }

    /// All nodes that edges lead to from `start`. `start` is one of them only if it is part of a cycle.
    fn reach<'a>(&'a self, start: &'a String) -> BTreeSet<&'a String> {
        let mut reached = BTreeSet::new();
        let mut open = vec![start];
        while let Some(node) = open.pop() {
            open.extend(self.edges[node].iter().filter(|next| reached.insert(*next)));
        }
        reached
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycles(edges: &[(&str, &str)]) -> Vec<Vec<String>> {
        Graph::new(edges.iter().map(|(from, to)| ((*from).to_owned(), (*to).to_owned()))).cycles()
    }

    #[test]
    fn finds_cycles_and_what_only_leads_to_them() {
        let edges = [("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("c", "e"), ("x", "y"), ("y", "x")];
        assert_eq!(cycles(&edges), [vec!["a", "b", "c"], vec!["x", "y"]]);
    }

    #[test]
    fn no_cycle_in_a_diamond_or_in_one_node() {
        assert!(cycles(&[("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "a")]).is_empty());
    }
}
