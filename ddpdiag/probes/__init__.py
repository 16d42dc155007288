"""Functions that read the state of a host: each returns plain data and judges nothing.

A value that cannot be read is `None`. No module imports torch or pynvml at module level, because either may be slow,
hang or be missing. Readers of /sys and /proc take their root folder as a parameter; `sys_root` and `proc_root` of
host.kernel take it from the environment, for containers that mount the host's tree elsewhere and for tests.
"""
