"""Put the median step of a run into steps.json: what two GPUs do. Without arguments: draw steps.svg from it.

python results/steps.py dp_train --epochs 1
torchrun --standalone --nproc-per-node=gpu results/steps.py ddp_launch_train --epochs 1 --compile
"""

import json
import os
import sys
from pathlib import Path

import profile_step
import torch
import torch.distributed as dist

DATA, RANK = Path(__file__).with_name("steps.json"), int(os.environ.get("RANK", 0))
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {0}" font-family="sans-serif" font-size="15"
shape-rendering="crispEdges"><rect width="760" height="{0}" fill="#fff"/><text x="55" y="24"><tspan fill="#2f7ec7">
&#9632;</tspan> computing <tspan fill="#f08c00">&#160; &#9632;</tspan> exchanging data &#160;&#9633; idle</text>"""


class Loader(profile_step.ProfiledLoader):
    steps, activities = 18, [torch.profiler.ProfilerActivity.CUDA]

    def write(self, profiler):
        profiler.export_chrome_trace(f"trace{RANK}.json")
        trace = json.loads(Path(f"trace{RANK}.json").read_text())["traceEvents"]
        trace = [one for one in trace if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        parts = [[(int(one["ts"]), int(one["ts"] + one["dur"]), one["pid"], one["name"]) for one in trace]] * 2
        if dist.is_initialized():
            dist.all_gather_object(parts, parts[0])
        updates = sorted(start for start, _, gpu, name in sum(parts, []) if gpu == 0 and "FusedSgd" in name)
        starts = [start for before, start in zip([0, *updates], updates) if start - before > 5000]  # microseconds
        lengths = sorted((after - start, start) for start, after in zip(starts, starts[1:]))
        print("milliseconds of the steps:", *(length / 1000 for length, _ in lengths), flush=True)
        length, begin = lengths[len(lengths) // 2]
        busy = torch.zeros(2, 2, length // 500 * 500)  # GPU, kind of work, microsecond
        for start, end, gpu, name in sum(parts, []):
            busy[gpu, int("nccl" in name or "PtoP" in name), max(start - begin, 0) : max(end - begin, 0)] = 10
        name = " ".join(["nn.DataParallel" if sys.argv[1] == "dp_train" else "DDP", *sys.argv[4:]])
        tenths = busy.view(2, 2, -1, 500).mean(3).round().int().tolist()  # of each half millisecond
        if RANK == 0:
            steps = json.loads(DATA.read_text()) if DATA.exists() else {}
            steps[name] = dict(ms=length / 1000, computing=busy[:, 0].mean().item() / 10, tenths=tenths)
            DATA.write_text(json.dumps(steps) + "\n")


def draw(steps):
    scale, size = 690 / max(step["ms"] for step in steps.values()), 84 * len(steps) + 92
    parts = [HEAD.format(size), f'<text x="360" y="{size - 10}">milliseconds</text>']
    for time in range(0, int(690 / scale), 20):
        parts.append(f'<text x="{55 + time * scale:.0f}" y="{size - 30}" text-anchor="middle">{time}</text>')
    for row, (name, step) in enumerate(steps.items()):
        title = f"{name}: {step['ms']:.0f} ms, computing {step['computing']:.0%} of the time"
        parts.append(f'<text x="55" y="{84 * row + 60}">{title}</text>')
        for gpu in range(2):
            y = 84 * row + 68 + 28 * gpu
            styles = f'y="{y}" height="22" fill="#2f7ec7"', f'y="{y + 14}" height="8" fill="#f08c00"'
            for tenths, style in zip(step["tenths"][gpu], styles):
                places = [f'x="{55 + x * scale / 2:.1f}" width="{scale / 2:.1f}"' for x in range(len(tenths))]
                parts += [f'<rect {x} {style} opacity="{ten / 10}"/>' for x, ten in zip(places, tenths) if ten]
            frame = f'y="{y}" width="{step["ms"] * scale:.0f}" height="22" fill="none" stroke="#777"'
            parts.append(f'<text x="4" y="{y + 16}">GPU {gpu}</text><rect x="55" {frame}/>')
    DATA.with_suffix(".svg").write_text("\n".join([*parts, "</svg>\n"]))


if __name__ == "__main__":
    if sys.argv[1:]:
        script = __import__(sys.argv[1])
        script.DataLoader = Loader
        script.main(script.parse_args(sys.argv[2:]))
    else:
        draw(json.loads(DATA.read_text()))
