"""Show what two GPUs do in one step. Each run adds its median step to steps.json; the last command draws all.

    python results/steps.py nn.DataParallel dp_train --epochs 1
    torchrun --standalone --nproc-per-node=2 results/steps.py DDP ddp_launch_train --epochs 1
    torchrun --standalone --nproc-per-node=2 results/steps.py "DDP --compile" ddp_launch_train --epochs 1 --compile
    python results/steps.py    # draws steps.svg; needs matplotlib

The profiler slows the CPU down. So with DDP, each GPU waits 50 ms before a step, until the CPU is ahead of it.
This wait is not counted. With nn.DataParallel, it would hide what the picture is to show.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

DATA = Path(__file__).with_name("steps.json")
STEPS = json.loads(DATA.read_text()) if DATA.exists() else {}
sys.path.append(str(Path(__file__).resolve().parents[1]))


class ProfiledLoader(torch.utils.data.DataLoader):
    """Tells the profiler of 18 training steps. A step ends when the next batch is asked for."""

    def __iter__(self):
        if not self.drop_last:  # the loader of the validation set
            yield from super().__iter__()
            return
        schedule = torch.profiler.schedule(skip_first=20, wait=0, warmup=1, active=18, repeat=1)
        options = dict(activities=[torch.profiler.ProfilerActivity.CUDA], schedule=schedule)
        with torch.profiler.profile(**options, on_trace_ready=self.write) as profiler:
            for batch in super().__iter__():
                torch.cuda._sleep(1 if sys.argv[2] == "dp_train" else 10**8)  # cycles: 50 ms
                yield batch
                profiler.step()

    def write(self, profiler):
        rank = int(os.environ.get("RANK", 0))
        profiler.export_chrome_trace(f"trace{rank}.json")
        if dist.is_initialized():
            dist.barrier()
        if rank == 0:
            traces = [Path(f"trace{rank}.json") for rank in range(int(os.environ.get("WORLD_SIZE", 1)))]
            events = [one for trace in traces for one in json.loads(trace.read_text())["traceEvents"]]
            DATA.write_text(json.dumps(STEPS | {sys.argv[1]: median_step(events)}) + "\n")


def median_step(events):
    """Return a step's milliseconds, and for each half of one how busy each GPU is: computing, exchanging data."""
    events = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spins = sorted((one["ts"], one["dur"]) for one in events if one["pid"] == 0 and "spin_kernel" in one["name"])
    starts = [begin + duration for begin, duration in spins]  # of the steps, in microseconds
    length, start = sorted((spin[0] - start, start) for spin, start in zip(spins[1:], starts))[len(spins) // 2 - 1]
    busy = torch.zeros(2, 2, int(length) // 500 * 500)  # of each GPU, computing or exchanging data, microsecond
    for one in events:
        begin, exchanging = int(one["ts"] - start), "nccl" in one["name"] or "PtoP" in one["name"]
        if "spin_kernel" not in one["name"]:
            busy[one["pid"], int(exchanging), max(begin, 0) : max(begin + int(one["dur"]), 0)] = 1
    return dict(ms=length / 1000, percent=busy.view(2, 2, -1, 500).mean(3).mul(100).round().int().tolist())


def draw(steps):
    import matplotlib.pyplot as plt

    text = dict.fromkeys(["text.color", "xtick.color", "ytick.color", "axes.labelcolor"], "#7b828a")
    # The same file each time, text as text. Ground and text are for white pages and for dark ones.
    plt.rcParams.update({"svg.hashsalt": "one", "svg.fonttype": "none", **text})
    figure, axes = plt.subplots(len(steps), sharex=True, figsize=(8, len(steps) + 0.8), layout="tight")
    colours = torch.tensor([[[0.2, 0.5, 0.8, 1]], [[1, 0.6, 0, 1]]])
    idle = torch.tensor([0.5, 0.5, 0.5, 0.25])  # a transparent grey
    for axis, (name, step) in zip(axes, steps.items()):
        busy = torch.tensor(step["percent"])[..., None] / 100  # GPU, computing or exchanging, half millisecond
        rows = idle + busy * (colours - idle)
        rows = torch.cat([rows[:, :1], rows, torch.zeros_like(rows[:, :1])], dim=1).flatten(0, 1)
        axis.imshow(rows, aspect="auto", interpolation="nearest", extent=(0, step["ms"], 2, 0))
        axis.set_title(f"{name}: {step['ms']:.0f} ms, computing {busy[:, 0].mean():.0%} of the time", loc="left")
        axis.set_yticks([0.4, 1.4], ["GPU 0", "GPU 1"])
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    axis.set_xlim(0, max(step["ms"] for step in steps.values()))
    axis.set_xlabel("milliseconds (blue: computing, orange: exchanging data, grey: idle)")
    figure.savefig(DATA.with_suffix(".svg"), metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        script = __import__(sys.argv[2])
        script.DataLoader = ProfiledLoader
        script.main(script.parse_args(sys.argv[3:]))
    else:
        draw(STEPS)
