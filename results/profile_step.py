"""Write a trace of three training steps of ddp_launch_train.py, to open in https://ui.perfetto.dev

    torchrun --standalone --nproc-per-node=gpu profile_step.py trace.json --epochs 1

The flags after the file name are those of ddp_launch_train.py. Copied beside your version of it, it traces that.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))
import ddp_launch_train as script


class ProfiledLoader(script.DataLoader):
    """A DataLoader that tells the profiler of each training step: a step ends when the next batch is asked for."""

    def __iter__(self):
        if not self.drop_last:  # the loader of the validation set
            yield from super().__iter__()
            return
        skip = max(0, min(20, len(self) - 5))
        schedule = torch.profiler.schedule(skip_first=skip, wait=0, warmup=1, active=3, repeat=1)
        with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profiler:
            for batch in super().__iter__():
                yield batch
                profiler.step()


def write(profiler):
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(sys.argv[1])


if __name__ == "__main__":
    script.DataLoader = ProfiledLoader
    script.main(script.parse_args(sys.argv[2:]))
