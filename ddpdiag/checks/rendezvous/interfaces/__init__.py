"""RDZ003: the interface that every host offers to its peers."""
