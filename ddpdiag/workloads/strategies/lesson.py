"""What every strategy trains: one network from the same first weights, on the same images in the same order."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import torch
from msgspec import Struct
from torch import Tensor, nn

from ddpdiag.workloads.mnist import CLASSES, Digits
from ddpdiag.workloads.training import prepared

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# Wide enough that a matrix is worth cutting, and quick on a CPU.
HIDDEN = 128
# Found by trial: 30 steps are enough to see the loss fall to a tenth.
LEARNING_RATE, MOMENTUM = 0.05, 0.9


class Lesson(Struct, frozen=True, kw_only=True):
    """What is trained. `batch` counts the images of one step over all ranks; `hidden` is the width of the last layers.

    GroupNorm stands where BatchNorm usually does: it normalises each image by itself, so that it does not matter which
    rank has which images. Nothing is random after the first weights.
    """

    steps: int
    batch: int
    hidden: int = HIDDEN
    dtype: str = "float32"
    seed: int = 0

    def network(self) -> nn.Sequential:
        """Images [n, 1, 28, 28] to logits [n, 10], in four blocks; with the same weights wherever it is called."""
        torch.manual_seed(self.seed)
        blocks = OrderedDict[str, nn.Module](
            near=nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.GELU(), nn.AvgPool2d(2)),
            far=nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.GELU(), nn.AvgPool2d(2)),
            hidden=nn.Sequential(nn.Flatten(), nn.Linear(32 * 7 * 7, self.hidden), nn.GELU()),
            output=nn.Linear(self.hidden, CLASSES),
        )
        return nn.Sequential(blocks).to(DTYPES[self.dtype])

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
        """SGD with momentum."""
        # One tensor at a time: torch's foreach kernels do not take plain tensors and DTensors together.
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM, foreach=False)

    def batches(self, digits: Digits, part: int, parts: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end, this part's images and labels of each step, ready for the network.

        The images of a step are the same however many parts there are: part r takes number r, r + parts, ...
        """
        count = len(digits.train_images)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))
        step = 0
        while True:
            chosen = order[torch.arange(step * self.batch, (step + 1) * self.batch) % count][part::parts]
            images, labels = prepared(digits.train_images[chosen], digits.train_labels[chosen], device)
            yield images.to(DTYPES[self.dtype]), labels
            step += 1


def exact() -> None:
    """Compute float32 as float32, for the rest of this process.

    GPUs round the inputs of convolutions to TF32's 10 bits, which is right for a job, and hides what is wrong here.
    """
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
