"""Who this process is, from what launchers and the command line say."""
