"""Write a trace of three training steps of ddp_launch_train.py, to open in https://ui.perfetto.dev

    torchrun --standalone --nproc-per-node=gpu results/profile_step.py trace.json --epochs 1

The flags after the file name are those of ddp_launch_train.py. Copied beside your version of it, it traces that.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parent.parent))
import ddp_launch_train as script

train_epoch = script.train_epoch


def profiled_epoch(args, device, epoch, loader, *others):
    """Train one epoch and trace three of its steps, after the first 20."""
    skip = max(0, min(20, len(loader) - 5))
    schedule = torch.profiler.schedule(skip_first=skip, wait=0, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profiler:
        return train_epoch(args, device, epoch, Stepping(loader, profiler), *others)


class Stepping:
    """A loader that tells the profiler of each step."""

    def __init__(self, loader, profiler):
        self.loader, self.profiler = loader, profiler

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            yield batch
            self.profiler.step()


def write(profiler):
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(sys.argv[1])


if __name__ == "__main__":
    script.train_epoch = profiled_epoch
    script.main(script.parse_args(sys.argv[2:]))
