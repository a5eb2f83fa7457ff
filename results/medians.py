"""Print the speed of each kind of run: images/s, the median of all runs (their range, and how many).

    python results/medians.py results/2026-11-22-h200

The speed of one run is the median of its epochs without the first, which has the start and the compilation.
The runs are those in FILES: their training steps compute the same, so they can be compared.
"""

import json
import re
import statistics
import sys
from pathlib import Path

FILES = """
accuracy accuracy_ebd827c batches ceilings dp_3ad4050 kernels one_gpu peers scaling
table table_6cd39d1 table_ebd827c two_gpus
""".split()


def read(*paths):
    """Return the runs of raw files, each as (RESULT, [(images/s, accuracy) of each epoch])."""
    runs, epochs, named = [], [], None
    for path in paths:
        for line in path.read_text().splitlines():
            if line.startswith(("$ ", "## ")):
                epochs, named = [], re.search(r"\w+_train\.py", line)
            elif found := re.match(r"epoch \d+ .*val_accuracy (\S+) .*images_per_second (\S+)", line):
                epochs.append((float(found[2]), float(found[1])))
            elif line.startswith("RESULT "):
                run = json.loads(line.removeprefix("RESULT "))
                runs.append((run | ({"script": named[0]} if named else {}), epochs))
    return runs


def speeds(folder):
    """Return the speeds of all runs of each kind (script, precision, --compile, GPUs, images per step)."""
    kinds = {}
    for run, epochs in read(*(Path(folder) / f"{name}.txt" for name in FILES)):
        if len(epochs) > 1:
            kind = run["script"], run["precision"], run.get("compile", False), run["gpus"], run["batch_size"]
            kinds.setdefault(kind, []).append(statistics.median(speed for speed, _ in epochs[1:]))
    return kinds


if __name__ == "__main__":
    for (script, precision, compile, gpus, images), found in sorted(speeds(sys.argv[1]).items()):
        name = f"{script} {precision}{' --compile' * compile}, {gpus} GPUs, {images} images"
        middle = f"{statistics.median(found):,.0f}"
        print(f"{name}: {middle} ({min(found):,.0f} to {max(found):,.0f}, {len(found)} runs)")
