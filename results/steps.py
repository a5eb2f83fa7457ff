"""Show what two GPUs do in one step. Each run adds its median step to steps.json; the last command draws all.

    python results/steps.py dp_train --epochs 1
    torchrun --standalone --nproc-per-node=2 results/steps.py ddp_launch_train --epochs 1 [--compile]
    python results/steps.py    # draws steps.svg; needs matplotlib

The profiler records the GPUs alone: recording the CPU, too, would slow the run down.
"""

import json
import os
import sys
from pathlib import Path

import profile_step
import torch
import torch.distributed as dist

DATA, RANK = Path(__file__).with_name("steps.json"), os.environ.get("RANK", "0")


class Loader(profile_step.ProfiledLoader):
    steps, activities = 18, [torch.profiler.ProfilerActivity.CUDA]

    def write(self, profiler):
        profiler.export_chrome_trace(f"trace{RANK}.json")
        parts = [json.loads(Path(f"trace{RANK}.json").read_text())["traceEvents"]] * 2
        if dist.is_initialized():
            dist.all_gather_object(parts, parts[0])
        if RANK == "0":
            name = " ".join(["nn.DataParallel" if sys.argv[1] == "dp_train" else "DDP", *sys.argv[4:]])
            steps = json.loads(DATA.read_text()) if DATA.exists() else {}
            DATA.write_text(json.dumps(steps | {name: median_step(sum(parts, []))}) + "\n")


def median_step(events):
    """Return a step's milliseconds, and for each half of one how busy each GPU is: computing, exchanging data."""
    events = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    updates = sorted(one["ts"] for one in events if one["pid"] == 0 and "FusedSgd" in one["name"])  # microseconds
    starts = [time for before, time in zip([0, *updates], updates) if time - before > 5000]  # of the steps
    length, start = sorted((after - start, start) for start, after in zip(starts, starts[1:]))[len(starts) // 2]
    busy = torch.zeros(2, 2, int(length) // 500 * 500)  # of each GPU, computing or exchanging data, microsecond
    for one in events:
        begin = int(one["ts"] - start)
        exchanging = int("nccl" in one["name"] or "PtoP" in one["name"])
        busy[one["pid"], exchanging, max(begin, 0) : max(begin + int(one["dur"]), 0)] = 1
    return dict(ms=length / 1000, percent=busy.view(2, 2, -1, 500).mean(3).mul(100).round().int().tolist())


def draw(steps):
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "one", "svg.fonttype": "none"})  # the same file each time, text as text
    figure, axis = plt.subplots(figsize=(8, len(steps) + 0.8), layout="tight")
    for row, (name, step) in enumerate(steps.items()):
        percent = torch.tensor(step["percent"])
        computing = percent[:, 0].float().mean()
        axis.text(0, -3 * row - 0.1, f"{name}: {step['ms']:.0f} ms, computing {computing:.0f}% of the time")
        for gpu, bottom in (0, -3 * row - 1.1), (1, -3 * row - 2.1):
            place = dict(extent=(0, step["ms"], bottom, bottom + 0.8), aspect="auto", interpolation="nearest")
            for share, colour in zip(percent[gpu], ((0.2, 0.5, 0.8), (1, 0.6, 0))):
                pixels = torch.tensor(colour).expand(1, len(share), 3)
                axis.imshow(torch.cat([pixels, share[None, :, None] / 100], 2), **place)  # paler if less busy
            axis.add_patch(plt.Rectangle((0, bottom), step["ms"], 0.8, fill=False, edgecolor="grey"))
            axis.text(-1, bottom + 0.2, f"GPU {gpu}", ha="right")
    axis.set(xlim=(0, max(step["ms"] for step in steps.values()) + 1), ylim=(0.7 - 3 * len(steps), 0.6), yticks=[])
    axis.set_xlabel("milliseconds (blue: computing, orange: exchanging data, white: idle)")
    axis.spines[["left", "right", "top"]].set_visible(False)
    figure.savefig(DATA.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:]:
        script = __import__(sys.argv[1])
        script.DataLoader = Loader
        script.main(script.parse_args(sys.argv[2:]))
    else:
        draw(json.loads(DATA.read_text()))
