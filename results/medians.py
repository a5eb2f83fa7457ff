"""Print the speed of each kind of run in raw files: images/s of the last epoch, median and range of all runs.

    python results/medians.py results/2026-11-22-h200/scaling.txt ...
"""

import json
import statistics
import sys
from pathlib import Path

speeds = {}
for path in sys.argv[1:]:
    for line in Path(path).read_text().splitlines():
        if line.startswith("RESULT "):
            run = json.loads(line.removeprefix("RESULT "))
            kind = run["script"], run["precision"], run["image_size"], run["gpus"], run["batch_size"]
            speeds.setdefault((*kind, run.get("compile", False)), []).append(run["images_per_second"])
for (script, precision, size, gpus, batch, compile), found in sorted(speeds.items(), key=str):
    low, middle, high = min(found), statistics.median(found), max(found)
    name = f"{script} {precision}{' --compile' * compile}, {size} pixels, {gpus} GPUs, {batch} images per step"
    print(f"{name}: {middle:,.0f} ({low:,.0f} to {high:,.0f}, {len(found)} runs)")
