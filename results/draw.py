"""Print the median speed of each kind of run in runs.csv, and draw batches.svg from them.

    python results/draw.py [SERIES]    # needs matplotlib

The speed of a run is that of its last epoch. Runs are of one kind if script, flags, number of GPUs, hardware and
versions are equal, apart from --epochs, --seed and --checkpoint. Without SERIES, the runs that measure the
accuracy are left out.
"""

import csv
import re
import statistics
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def kind_of(row):
    """Return (script, flags with important defaults, number of GPUs, hardware, versions) of a row."""
    script = row["command"].partition(" --")[0]
    flags = {"--batch-size": str(512 * max(1, int(row["gpus"])))} if "_train.py" in script else {}
    if script.startswith("apex_amp_train.py"):
        flags |= {"--backend": "torch", "--opt-level": "O1"}
    flags |= dict(re.findall(r"(--[a-z-]+) ?((?!--)\S*)", row["command"]))
    same = sorted(flags.keys() - {"--epochs", "--seed", "--checkpoint"})
    flags = " ".join(f"{name} {flags[name]}".strip() for name in same)
    return script, flags, row["gpus"], row["hardware"], row["versions"]


def speeds(series=None):
    """Return {kind: [speed of each run]} of one series, or of all but `accuracy`."""
    kinds = {}
    with (FOLDER / "runs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            wanted = row["series"] == series if series else row["series"] != "accuracy"
            if wanted and row["images_per_second"]:
                kinds.setdefault(kind_of(row), []).append(float(row["images_per_second"].split()[-1]))
    return kinds


def draw(kinds):
    """Draw images/s over images per GPU, with and without --compile, on two H200s."""
    import matplotlib.pyplot as plt

    plt.switch_backend("svg")
    plt.rcParams.update({"svg.hashsalt": "one", "svg.fonttype": "none"})  # the same file each time, text as text
    figure, axis = plt.subplots(figsize=(6, 3.5))
    sizes = set()
    for compile, label in (" --compile", "with --compile"), ("", "without --compile"):
        points = []
        for (script, flags, gpus, hardware, _), found in kinds.items():
            images = re.fullmatch(rf"--batch-size (\d+){compile}", flags)
            if (script, gpus, hardware) == ("ddp_launch_train.py", "2", "2 x NVIDIA H200") and images:
                points.append((int(images[1]) // 2, statistics.median(found)))
        sizes |= {images for images, _ in points}
        axis.plot(*zip(*sorted(points)), marker="o", label=label)
        for images, speed in points:
            place = dict(xytext=(-4, 6), ha="right") if compile else dict(xytext=(4, -14), ha="left")
            axis.annotate(f"{speed:,.0f}", (images, speed), textcoords="offset points", **place)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(sizes), sorted(sizes))
    axis.set(xlabel="images per GPU and step", ylabel="images/s over both GPUs", ylim=(0, 50_000), xmargin=0.18)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.legend(loc="upper left")
    figure.savefig(FOLDER / "batches.svg", metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    for (script, flags, gpus, hardware, versions), found in sorted(speeds(*sys.argv[1:]).items()):
        middle = f"{statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f}, {len(found)} runs)"
        print(f"{middle}: {script} {flags}, {gpus} of {hardware}, {versions}")
    draw(speeds())
