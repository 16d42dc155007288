"""How processes find each other: names, interfaces, ports, directories, clocks."""
