"""dp_train.py with the threads of nn.DataParallel instead of the loop, to compare their speeds.

    python results/dataparallel_train.py [flags of dp_train.py]
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
import dp_train


class ThreadsDataParallel(nn.DataParallel):
    def parallel_apply(self, replicas, inputs, kwargs):
        # Each thread has an autocast of its own: the threads ignore the dtype of an autocast outside.
        bf16 = args.precision == "bf16"
        forwards = [torch.autocast("cuda", torch.bfloat16, enabled=bf16)(replica.forward) for replica in replicas]
        return super().parallel_apply(forwards, inputs, kwargs)


if __name__ == "__main__":
    args = dp_train.parse_args()
    dp_train.LoopDataParallel = ThreadsDataParallel
    dp_train.main(args)
