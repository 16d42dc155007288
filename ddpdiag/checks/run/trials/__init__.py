"""RUN003: trials that did not end by themselves."""
