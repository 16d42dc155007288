"""Checks of the ways in which processes find each other: names, interfaces, ports, links and directories."""
