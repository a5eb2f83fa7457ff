"""Draw README's figures from raw files: those that measure.sh wrote, and a trace by profile_step.py.

    pip install matplotlib
    python results/draw.py results/2026-11-22-h200

writes batches.svg (images/s over images per GPU, with and without --compile, as medians.py prints them),
accuracy.svg (test accuracy over seconds; from accuracy.txt) and profile.svg (what a GPU does in one step).
"""

import gzip
import json
import statistics
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from medians import read, speeds

plt.switch_backend("svg")
matplotlib.rcParams["svg.hashsalt"] = "one"  # the same file from the same lines


def save(figure, path):
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw_batches(folder):
    """Two lines, eager and compiled: the median speed of all runs over images per GPU."""
    figure, axis = plt.subplots(figsize=(6, 3.5))
    for compile, label in (True, "--compile"), (False, "eager"):
        points = [
            (images // 2, statistics.median(found))
            for (script, _, compiled, gpus, images), found in sorted(speeds(folder).items())
            if (script, compiled, gpus) == ("ddp_launch_train.py", compile, 2)
        ]
        axis.plot(*zip(*points, strict=True), marker="o", label=label)
        for images, speed in points:
            place = dict(xytext=(-4, 6), ha="right") if compile else dict(xytext=(4, -14), ha="left")
            axis.annotate(f"{speed:,.0f}", (images, speed), textcoords="offset points", **place)
    axis.set_xscale("log", base=2)
    axis.set_xticks([images for images, _ in points], [images for images, _ in points])
    axis.set(xlabel="images per GPU and step", ylabel="images/s over both GPUs", ylim=(0, 50_000))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.margins(x=0.15)
    axis.legend(loc="upper left")
    save(figure, folder / "batches.svg")


def draw_accuracy(folder):
    """One line for each run: test accuracy over the seconds of training, without those of validation."""
    figure, axis = plt.subplots(figsize=(6, 3.5))
    for result, epochs in read(folder / "accuracy.txt"):
        images = 50_000 // result["batch_size"] * result["batch_size"]
        seconds = [sum(images / speed for speed, _ in epochs[: n + 1]) for n in range(len(epochs))]
        label = f"seed {result['seed']}{' --compile' * result['compile']}: {epochs[-1][1]:.2%}"
        style = dict(color="C0" if result["compile"] else "C1", linestyle=["-", "--", ":"][result["seed"] % 3])
        axis.plot(seconds, [accuracy for _, accuracy in epochs], marker=".", label=label, **style)
    axis.set(xlabel="seconds of training", ylabel="test accuracy", xlim=(0, None), ylim=(0, 1))
    axis.legend(loc="lower right")
    save(figure, folder / "accuracy.svg")


def draw_profile(folder):
    """The kernels of the trace's last step: a row for forward, backward, NCCL and SGD."""
    with gzip.open(folder / "profile.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    ends = [e["ts"] + e["dur"] for e in kernels if "multi_tensor_apply" in e["name"]]  # of SGD
    ends = [a for a, b in zip(ends, [*ends[1:], float("inf")], strict=True) if b - a > 2000]  # of each step
    start, end = ends[-2], ends[-1]
    kernels = [e for e in kernels if start <= e["ts"] < end]
    middle = next(e["ts"] for e in kernels if "softmax_warp_backward" in e["name"])
    rows = {"forward": [], "backward": [], "NCCL": [], "SGD": []}
    for e in kernels:
        row = "forward" if e["ts"] < middle else "backward"
        spans = rows["SGD" if "multi_tensor_apply" in e["name"] else "NCCL" if "nccl" in e["name"] else row]
        begin, stop = (e["ts"] - start) / 1e3, (e["ts"] - start + e["dur"]) / 1e3
        if spans and begin - spans[-1][1] < 0.05:  # a gap too short to see
            spans[-1][1] = max(stop, spans[-1][1])
        else:
            spans.append([begin, stop])
    figure, axis = plt.subplots(figsize=(10, 2))
    for row, spans in enumerate(rows.values()):
        axis.broken_barh([(begin, stop - begin) for begin, stop in spans], (-row - 0.4, 0.8), color=f"C{row}")
    axis.set_yticks([-row for row in range(len(rows))], rows)
    axis.set(xlabel="milliseconds since the step before ended", xlim=(0, (end - start) / 1e3))
    save(figure, folder / "profile.svg")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, draw in dict(batches=draw_batches, accuracy=draw_accuracy).items():
        if (folder / f"{name}.txt").exists():
            draw(folder)
    if (folder / "profile.json.gz").exists():
        draw_profile(folder)
