"""Seven ways to train one network, each in a file that reads from top to bottom.

Each has one function, `train`, with the loop that a training script has: read `ddp` first, then hold the others
against it. The common parts (the network, the images of each step, the clock) are in `trainer`. In each of
them the loss of every step is that of `single`, which is one process alone: same first weights, same images.

    single            one process, one device
    dp                nn.DataParallel: one process, all its GPUs
    ddp               DistributedDataParallel: one process for each device, gradients averaged
    fsdp              fully_shard: as ddp, but each rank keeps its part of parameters and optimizer state only
    tensor_parallel   DTensor: all ranks compute each image, each with its columns or rows of the large matrices
    pipeline          each rank has some layers, and hands small batches on to the next one
    model_parallel    each rank cuts the network over several devices of its own, under DistributedDataParallel
"""
