"""The ways in which processes find each other: names, interfaces, ports, directories, clocks."""
