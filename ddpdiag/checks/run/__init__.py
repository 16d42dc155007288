"""The run itself: who joined, who stayed, what ended."""
