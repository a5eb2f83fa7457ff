"""Measure the scripts: run the commands of a part, see COMMANDS, and append a row for each run to a CSV file.

    python results/measure.py PART [--csv FILE] [--gpus N] [flags for all scripts]

For medians, run a part three times. In the part `start`, `seconds` are those from the command to the first step.
"""

import argparse
import csv
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
CUDA = torch.cuda.is_available()
WITHOUT_TORCHRUN = "dp_train.py", "ddp_spawn_train.py", "results/ceiling.py", "results/dataparallel_train.py"

# Part, GPUs, command. n is the number of GPUs, 512n is 512 * n; [a|b] stands for two commands, with a and with b.
COMMANDS = """
table     1  dp_train.py --batch-size 512n --epochs 5 [|--compile]
table     n  [dp_train.py|ddp_spawn_train.py] --batch-size 512n --epochs 5
table     n  ddp_launch_train.py --batch-size 512n --epochs 5 [|--compile]
table     n  apex_amp_train.py --backend apex --opt-level [O0|O1|O2|O3] --batch-size 512n --epochs 5
table     n  apex_amp_train.py --batch-size 512n --epochs 5
scaling   n  dp_train.py --batch-size [512n|512] --epochs 5
scaling   n  [ddp_launch_train.py|apex_amp_train.py] --batch-size [512n|512] --epochs 5 [|--compile]
batches   n  ddp_launch_train.py --batch-size [64n|128n|256n|512n] --epochs 5 [|--compile]
ceilings  1  results/ceiling.py --precision [bf16|fp16] [|--compile] [|--graph]
ceilings  1  [dp_train.py|ddp_launch_train.py|apex_amp_train.py] --batch-size 512 --epochs 5 [|--compile]
peers     n  ddp_launch_train.py --batch-size 512n --epochs 5 [|--compile]
peers     n  results/peers.py [lightning|accelerate] --batch-size 512n --epochs 5 --workers 14
dp        n  [results/dataparallel_train.py|dp_train.py|ddp_launch_train.py] --batch-size 512n --epochs 5
accuracy  n  ddp_launch_train.py --seed [21|22|23] [|--compile]
start     n  ddp_launch_train.py --batch-size 512n --epochs 1 --log-every 1
"""


def commands(part, n):
    """Yield (number of GPUs, command as a list) for each run of a part on n GPUs."""
    lines = [line for line in COMMANDS.strip().splitlines() if line.split()[0] == part]
    while lines:
        line = lines.pop(0)
        if choice := re.search(r"\[(.*?)\]", line):
            lines[:0] = [line.replace(choice[0], word, 1) for word in choice[1].split("|")]
        else:
            line = re.sub(r"\b(\d+)n\b", lambda number: str(int(number[1]) * n), line)
            _, gpus, *command = line.split()
            yield n if gpus == "n" else int(gpus), command


def run(series, gpus, command):
    """Run a command on the first GPUs, show what it prints, and return its row, or None if it fails."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    start = [sys.executable] if command[0] in WITHOUT_TORCHRUN else [sys.executable, *torchrun]
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=",".join(map(str, range(gpus))))
    print("==", gpus, *command, flush=True)
    began, first_step, speeds, result = time.perf_counter(), "", [], {}
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment)
    with subprocess.Popen([*start, *command], **output) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if "epoch 1 step 1/" in line:
                first_step = f"{time.perf_counter() - began:.1f}"
            elif found := re.match(r"(?:epoch|ceiling) .*images_per_second (\S+)", line):
                speeds.append(found[1])
            elif line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
    if process.returncode:
        return print("failed, exit code", process.returncode, *command, flush=True)
    versions = [f"PyTorch {torch.__version__}", f"Python {sys.version.split()[0]}"]
    for package in {"lightning", "accelerate"}.intersection(command):
        versions.append(f"{package} {importlib.metadata.version(package)}")
    if "apex" in command:
        versions.append("Apex 25.04 " + ("with kernels" if importlib.util.find_spec("amp_C") else "Python only"))
    commit = subprocess.run("git rev-parse --short HEAD".split(), cwd=ROOT, capture_output=True, text=True).stdout
    return dict(
        date=time.strftime("%Y-%m-%d"),
        commit=commit.strip(),
        gpus=gpus if CUDA else 0,
        hardware=f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if CUDA else "CPU",
        versions=", ".join(versions),
        series=series,
        command=" ".join(command),
        images_per_second=" ".join(speeds),
        val_accuracy=result.get("val_accuracy", ""),
        val_loss=f"{result['val_loss']:.6g}" if result else "",
        seconds=first_step if series == "start" else f"{result['seconds']:.1f}" if result else "",
        peak_mib=result.get("peak_mib", ""),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted({line.split()[0] for line in COMMANDS.strip().splitlines()}))
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("runs.csv"))
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2, help="default: all")
    args, flags = parser.parse_known_args()
    for gpus, command in commands(args.part, args.gpus):
        if row := run(args.part, gpus, command + flags):
            with args.csv.open("a", newline="") as file:
                csv.DictWriter(file, row, lineterminator="\n").writerow(row)


if __name__ == "__main__":
    main()
