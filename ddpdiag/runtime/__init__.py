"""The run itself: who this process is, the supervisor, its workers, and the control channel that joins the ranks."""
