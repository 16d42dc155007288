"""Who of many is bad: pairs, confirmation by others, cover. The same for three hosts and for 16,384."""
