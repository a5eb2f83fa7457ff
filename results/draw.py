"""Draw README's figures from the raw lines that measure.sh wrote.

    pip install matplotlib
    python results/draw.py results/2026-11-21-h200

reads weak.txt, strong.txt and accuracy.txt in that folder, if they are there. It writes scaling.svg (images/s
over the number of GPUs, with the line of perfect scaling) and accuracy.svg (test accuracy over training seconds).
From profile.json.gz, a trace of a DDP script, it draws profile.svg: when a step computes and when it averages
gradients.
"""

import gzip
import json
import re
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

plt.switch_backend("svg")
matplotlib.rcParams["svg.hashsalt"] = "one"  # the same file from the same lines

NAMES = {
    "dp_train.py": "DataParallel",
    "ddp_launch_train.py": "DDP, torchrun",
    "ddp_spawn_train.py": "DDP, spawn",
    "apex_amp_train.py": "DDP, O1 (float16)",
}


def read(path):
    """Return the runs of a raw file, each as (RESULT, [(seconds, accuracy) after each epoch])."""
    runs, epochs, seconds = [], [], 0.0
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("$ "):
            epochs, seconds = [], 0.0
        elif found := re.match(r"epoch \d+ train_loss .* val_accuracy (\S+) seconds (\S+)", line):
            seconds += float(found[2])
            epochs.append((seconds, float(found[1])))
        elif line.startswith("RESULT "):
            runs.append((json.loads(line.removeprefix("RESULT ")), epochs))
    return runs


def draw_scaling(folder):
    """One panel for 512 images per GPU, one for 512 over all."""
    panels = {
        "512 images per GPU": read(folder / "weak.txt"),
        "512 images over all GPUs": read(folder / "strong.txt"),
    }
    panels = {title: runs for title, runs in panels.items() if runs}
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for axis, (title, runs) in zip(axes[0], panels.items(), strict=True):
        alone = None
        for script, name in NAMES.items():
            speeds = {}
            for result, _ in runs:
                if result["script"] == script and result["images_per_second"]:
                    speeds.setdefault(max(result["gpus"], 1), []).append(result["images_per_second"])
            medians = {gpus: sorted(found)[len(found) // 2] for gpus, found in sorted(speeds.items())}
            axis.plot(medians.keys(), medians.values(), marker="o", label=name)
            alone = alone or medians.get(1)
        most = max(max(result["gpus"], 1) for result, _ in runs)
        if alone:
            axis.plot([1, most], [alone, alone * most], linestyle=":", color="grey", label="ideal, bf16")
        axis.set(title=title, xlabel="GPUs", ylabel="images/s", ylim=(0, None))
        axis.set_xticks([2**n for n in range(most.bit_length())])
        axis.legend()
    figure.tight_layout()
    figure.savefig(folder / "scaling.svg", metadata={"Date": None})


def draw_accuracy(folder):
    """One line for each run."""
    figure, axis = plt.subplots(figsize=(5, 4))
    for result, epochs in read(folder / "accuracy.txt"):
        axis.plot(
            *zip(*epochs, strict=True), marker=".", label=f"{max(result['gpus'], 1)} GPUs, {epochs[-1][1]:.2%}"
        )
    axis.set(
        title="ResNet-50, CIFAR-10, all defaults", xlabel="seconds since the first step", ylabel="test accuracy"
    )
    axis.legend()
    figure.tight_layout()
    figure.savefig(folder / "accuracy.svg", metadata={"Date": None})


def draw_profile(folder):
    """A step of the trace: a row for forward, one for backward, one for the all-reduces, on a GPU one for SGD."""
    with gzip.open(folder / "profile.json.gz", "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    steps = [e for e in events if e["name"].startswith("ProfilerStep")]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    step = max(steps, key=lambda e: e["dur"] if kernels else e["ts"])  # the GPU's row of it is the longest
    rows = {
        "forward": [e for e in events if e["name"] == "DistributedDataParallel.forward"],
        "backward": [e for e in events if e["name"].startswith("autograd::engine::evaluate_function")],
        "all-reduce": [e for e in events if e["name"] == "gloo:all_reduce"],
    }
    if kernels:  # of a GPU, where a CUDA graph keeps no names but those of the kernels
        middle = next(e["ts"] for e in kernels if "softmax_warp_backward" in e["name"] and e["ts"] > step["ts"])
        rows = {"forward": [], "backward": [], "SGD": [], "all-reduce": []}
        for kernel in kernels:
            row = "forward" if kernel["ts"] < middle else "backward"
            row = "SGD" if "multi_tensor_apply" in kernel["name"] else row
            rows["all-reduce" if "nccl" in kernel["name"] else row].append(kernel)
    figure, axis = plt.subplots(figsize=(10, 2))
    whole = step["dur"] / 1e3
    for row, found in enumerate(rows.values()):
        spans = []
        for event in sorted(found, key=lambda event: event["ts"]):
            start = event["ts"] - step["ts"]
            end = start + event["dur"]
            if spans and start - spans[-1][1] < 5:  # microseconds, too short to see
                spans[-1][1] = max(end, spans[-1][1])
            elif start >= 0:
                spans.append([start, end])
        bars = [(start / 1e3, (end - start) / 1e3) for start, end in spans]
        axis.broken_barh(bars, (-row - 0.4, 0.8), color=f"C{row}")
    axis.set_yticks([-row for row in range(len(rows))], rows)
    axis.set(xlabel="milliseconds since the step began", xlim=(0, whole))
    figure.tight_layout()
    figure.savefig(folder / "profile.svg", metadata={"Date": None})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if (folder / "weak.txt").exists() or (folder / "strong.txt").exists():
        draw_scaling(folder)
    if (folder / "accuracy.txt").exists():
        draw_accuracy(folder)
    if (folder / "profile.json.gz").exists():
        draw_profile(folder)
