"""Show what two GPUs do in one step. Each run adds its median step to steps.json; the last command draws all.

    python results/steps.py dp_train --epochs 1
    torchrun --standalone --nproc-per-node=2 results/steps.py ddp_launch_train --epochs 1 [--compile]
    python results/steps.py    # draws steps.svg; needs matplotlib

The profiler slows the CPU down. So with DDP, each GPU waits 50 ms before a step, until the CPU is ahead of it.
This wait is not counted. With nn.DataParallel, it would hide what the picture is to show.
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

    def __iter__(self):
        for batch in super().__iter__():
            torch.cuda._sleep(1 if sys.argv[1] == "dp_train" else 10**8)  # cycles: 50 ms
            yield batch

    def write(self, profiler):
        profiler.export_chrome_trace(f"trace{RANK}.json")
        events = json.loads(Path(f"trace{RANK}.json").read_text())["traceEvents"]
        events = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        of_ranks = [events] * int(os.environ.get("WORLD_SIZE", "1"))
        if dist.is_initialized():
            dist.all_gather_object(of_ranks, events)
        if RANK == "0":
            name = " ".join(["nn.DataParallel" if sys.argv[1] == "dp_train" else "DDP", *sys.argv[4:]])
            steps = json.loads(DATA.read_text()) if DATA.exists() else {}
            DATA.write_text(json.dumps(steps | {name: median_step(sum(of_ranks, []))}) + "\n")


def median_step(events):
    """Return a step's milliseconds, and for each half of one how busy each GPU is: computing, exchanging data."""
    spins = sorted((one["ts"], one["dur"]) for one in events if one["pid"] == 0 and "spin_kernel" in one["name"])
    starts = [begin + duration for begin, duration in spins]  # of the steps, in microseconds
    steps = sorted((spins[i + 1][0] - starts[i], starts[i]) for i in range(len(spins) - 1))
    length, start = steps[len(steps) // 2]
    busy = torch.zeros(2, 2, int(length) // 500 * 500)  # of each GPU, computing or exchanging data, microsecond
    for one in events:
        begin, exchanging = int(one["ts"] - start), "nccl" in one["name"] or "PtoP" in one["name"]
        if "spin_kernel" not in one["name"]:
            busy[one["pid"], int(exchanging), max(begin, 0) : max(begin + int(one["dur"]), 0)] = 1
    return dict(ms=length / 1000, percent=busy.view(2, 2, -1, 500).mean(3).mul(100).round().int().tolist())


def draw(steps):
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "one", "svg.fonttype": "none"})  # the same file each time, text as text
    figure, axis = plt.subplots(figsize=(8, len(steps) + 0.8), layout="tight")
    grey, blue, orange = torch.tensor([[0.9, 0.9, 0.9], [0.2, 0.5, 0.8], [1, 0.6, 0]])
    for row, (name, step) in enumerate(steps.items()):
        busy = torch.tensor(step["percent"])[..., None] / 100
        share = f"computing {100 * busy[:, 0].mean():.0f}% of the time"
        axis.text(0, 3 * row - 0.2, f"{name}: {step['ms']:.0f} ms, {share}")
        for gpu, shares in enumerate(busy, 3 * row):
            for share, colour, top, bottom in zip(shares, (blue, orange), (0, 0.55), (0.55, 0.8)):
                place = dict(extent=(0, step["ms"], gpu + bottom, gpu + top), interpolation="nearest")
                axis.imshow((grey + share * (colour - grey))[None], aspect="auto", **place)
            axis.text(-1, gpu + 0.6, f"GPU {gpu - 3 * row}", ha="right")
    axis.set(xlim=(0, max(step["ms"] for step in steps.values()) + 1), ylim=(3 * len(steps) - 1, -1), yticks=[])
    axis.set_xlabel("milliseconds (blue: computing, orange: exchanging data, grey: idle)")
    axis.spines[["left", "right", "top"]].set_visible(False)
    figure.savefig(DATA.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:]:
        script = __import__(sys.argv[1])
        script.DataLoader = Loader
        script.main(script.parse_args(sys.argv[2:]))
    else:
        draw(json.loads(DATA.read_text()))
