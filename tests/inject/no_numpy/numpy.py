"""In front of NumPy on PYTHONPATH: an environment without it."""

raise ModuleNotFoundError("No module named 'numpy'")
