//! A tree of drafted tokens.

use crate::Error;

/// Drafted tokens below one committed sequence, parents before children.
///
/// Node 0 is the root: the newest token, which the target chose itself and has not yet read.
/// A node at depth d stands at position `len + d` of its sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    tokens: Vec<u32>,
    parents: Vec<i32>,
    depths: Vec<u32>,
}

impl Tree {
    /// A tree of the root alone.
    pub fn new(root: u32) -> Self {
        Self {
            tokens: vec![root],
            parents: vec![-1],
            depths: vec![0],
        }
    }

    /// Adds `token` below node `parent` and returns the new node's index.
    ///
    /// # Errors
    /// If there is no node `parent`.
    pub fn push(&mut self, parent: usize, token: u32) -> Result<usize, Error> {
        let depth = *self
            .depths
            .get(parent)
            .ok_or_else(|| Error::Tree(format!("no node {parent} to grow below")))?;
        self.tokens.push(token);
        self.parents.push(parent as i32);
        self.depths.push(depth + 1);
        Ok(self.tokens.len() - 1)
    }

    /// Keeps the first `nodes` nodes, the root at least; parents come first, so no kept node
    /// loses its parent.
    pub fn truncate(&mut self, nodes: usize) {
        let nodes = nodes.max(1);
        self.tokens.truncate(nodes);
        self.parents.truncate(nodes);
        self.depths.truncate(nodes);
    }

    /// Number of nodes, the root included.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether the tree has no node; never so, since the root is always there.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Token of every node.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Parent of every node; -1 for the root.
    pub fn parents(&self) -> &[i32] {
        &self.parents
    }

    /// Edges between the root and every node.
    pub fn depths(&self) -> &[u32] {
        &self.depths
    }

    /// Nodes from the root to `node`, both included.
    pub fn path(&self, node: usize) -> Vec<usize> {
        let mut path = Vec::with_capacity(self.depths[node] as usize + 1);
        let mut at = node as i32;
        while at >= 0 {
            path.push(at as usize);
            at = self.parents[at as usize];
        }
        path.reverse();
        path
    }

    /// Children of `node`, in order of their index.
    pub fn children(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        (node + 1..self.len()).filter(move |&i| self.parents[i] == node as i32)
    }

    /// Fails unless `path` starts at the root and each node is a child of the one before.
    pub(crate) fn check_path(&self, path: &[usize]) -> Result<(), Error> {
        let mut above = -1;
        for &node in path {
            if self.parents.get(node) != Some(&above) {
                return Err(Error::Tree(format!(
                    "path {path:?} leaves the tree at node {node}"
                )));
            }
            above = node as i32;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_follow_parents() {
        let mut tree = Tree::new(5);
        let a = tree.push(0, 6).unwrap();
        let b = tree.push(0, 7).unwrap();
        let c = tree.push(a, 8).unwrap();
        assert_eq!(tree.path(c), vec![0, a, c]);
        assert_eq!(tree.depths(), &[0, 1, 1, 2]);
        assert_eq!(tree.children(0).collect::<Vec<_>>(), vec![a, b]);
        assert!(tree.check_path(&[0, a, c]).is_ok());
        assert!(tree.check_path(&[0, b, c]).is_err());
        assert!(tree.check_path(&[a]).is_err());
        assert!(tree.check_path(&[0, 9]).is_err());
        assert!(tree.push(9, 1).is_err());
    }
}
