"""The only room that imports torch: collectives and training, over a process group that is already open."""
