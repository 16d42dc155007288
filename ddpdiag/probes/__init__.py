"""Functions that read the state of a host. Each returns plain data and judges nothing.

A value that cannot be read is `None`. No module imports torch or pynvml at module level, because either may be slow,
hang or be missing. Functions that read /sys or /proc have the root folder as a parameter. `sys_root` and `proc_root` in
host/kernel.py return this folder, which variables can replace, for containers with the host's tree and for tests.
"""
