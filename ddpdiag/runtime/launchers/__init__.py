"""The place of this process, from launchers and the command line."""
