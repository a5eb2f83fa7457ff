"""Draw batches.svg: the speed of two H200s over the images per GPU, from runs.csv.

python results/draw.py    # needs matplotlib
"""

import csv
import re
from pathlib import Path

import matplotlib.pyplot as plt

FOLDER = Path(__file__).resolve().parent
plt.rcParams.update({"svg.hashsalt": "one", "svg.fonttype": "none"})  # the same file each time, text as text
figure, axis = plt.subplots(figsize=(6, 3.5))
for compile, label in (" --compile", "with --compile"), ("", "without --compile"):
    points = []  # images per GPU, speed of the last epoch
    for row in csv.DictReader((FOLDER / "runs.csv").open(newline="")):
        flags = re.fullmatch(rf"ddp_launch_train.py --batch-size (\d+) --epochs 3{compile}", row["command"])
        if flags and row["hardware"] == "2 x NVIDIA H200":
            points.append((int(flags[1]) // 2, float(row["images_per_second"].split()[-1])))
    axis.plot(*zip(*sorted(points)), marker="o", label=label)
    for point in points:
        place = dict(xytext=(-4, 6), ha="right") if compile else dict(xytext=(4, -14), ha="left")
        axis.annotate(f"{point[1]:,.0f}", point, textcoords="offset points", **place)
axis.set_xscale("log", base=2)
axis.set_xticks(*[[images for images, _ in points]] * 2)
axis.set(xlabel="images per GPU and step", ylabel="images/s over both GPUs", ylim=(0, 50_000), xmargin=0.18)
axis.yaxis.set_major_formatter("{x:,.0f}")
axis.legend(loc="upper left")
figure.savefig(FOLDER / "batches.svg", metadata={"Date": None}, bbox_inches="tight")
