"""Seven strategies of training one network, each in a file of its own.

Each file has one function, `train`, with the loop of a training script. Read `ddp` first, then compare the others with
it. The common parts (the network, the images of each step, the clock) are in `trainer`. Each strategy must give the
losses of `single`, which is one process alone: the first weights and the images of each step are the same.

    single            one process, one device
    dp                nn.DataParallel: one process, all its GPUs
    ddp               DistributedDataParallel: one process for each device, gradients averaged
    fsdp              fully_shard: as ddp, but each rank keeps its part of parameters and optimizer state only
    tensor_parallel   DTensor: all ranks compute each image, each with its columns or rows of the large matrices
    pipeline          each rank has some layers, and sends its output for small batches to the next rank
    model_parallel    each rank distributes the network over several devices, under DistributedDataParallel
"""
