"""RDZ006: the shared directory."""
