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

    steps, activities = 3, None  # None: the CPU and the GPU

    def __iter__(self):
        if not self.drop_last:  # the loader of the validation set
            yield from super().__iter__()
            return
        skip = max(0, min(20, len(self) - self.steps - 2))
        schedule = torch.profiler.schedule(skip_first=skip, wait=0, warmup=1, active=self.steps, repeat=1)
        options = dict(activities=self.activities, schedule=schedule, on_trace_ready=self.write)
        with torch.profiler.profile(**options) as profiler:
            for batch in super().__iter__():
                yield batch
                profiler.step()

    def write(self, profiler):
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(sys.argv[1])


if __name__ == "__main__":
    script.DataLoader = ProfiledLoader
    script.main(script.parse_args(sys.argv[2:]))
