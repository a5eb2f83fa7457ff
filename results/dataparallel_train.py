"""dp_train.py, but with nn.DataParallel's own threads in place of the loop, to compare their speeds.

    python results/dataparallel_train.py [the flags of dp_train.py]

autocast is inside the threads, since they do not know the dtype of an autocast outside.
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import dp_train


class ThreadsDataParallel(nn.DataParallel):
    def parallel_apply(self, replicas, inputs, kwargs):
        bf16 = args.precision == "bf16"
        forwards = [torch.autocast("cuda", torch.bfloat16, enabled=bf16)(replica.forward) for replica in replicas]
        return super().parallel_apply(forwards, inputs, kwargs)


if __name__ == "__main__":
    args = dp_train.parse_args()
    dp_train.LoopDataParallel = ThreadsDataParallel
    dp_train.main(args)
