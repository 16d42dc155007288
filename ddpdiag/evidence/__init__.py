"""Evidence that others wrote on a job: its readers, one model of what a rank did, and the attribution of a hang."""
