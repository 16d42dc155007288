"""Reports as text: for people (terminal), for scripts (JSON), and where that text goes.

Everything here turns a finished `Report` into characters. Nothing is judged, and nothing is measured.
"""
