"""Who of many is bad: pairs, confirmation by others, cover. Pure, and the same for three hosts and for 16,384."""
