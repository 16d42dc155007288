"""The run itself: who this process is, the supervisor, its workers, and the board that joins the ranks."""
