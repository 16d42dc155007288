"""Thin readers of the world: each returns plain data and judges nothing.

What cannot be read is `None`. Nothing here imports torch or pynvml at module level, because either may be slow, hang or
be missing. Readers of /sys and /proc take their root as a parameter; `sys_root` and `proc_root` of host.kernel let the
environment replace it, for containers that mount the host's tree elsewhere and for tests.
"""
