"""Measure the scripts: run the commands of a part, see COMMANDS, and append a row for each run to a CSV file.

    python results/measure.py PART [--csv FILE] [--gpus N] [flags for all scripts]
    python results/measure.py run_all --logs logs/FOLDER [--csv FILE]   # rows from the logs of run_all.sh

run_all.sh measures the scripts with 512 images per GPU. For medians, run a part three times.
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
VISIBLE = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(8)))).split(",")
WITHOUT_TORCHRUN = "dp_train.py", "ddp_spawn_train.py", "results/ceiling.py"

# Part, GPUs, command. n is the number of GPUs, 512n is 512 * n; [a|b] stands for two commands, with a and with b.
COMMANDS = """
batches   n  ddp_launch_train.py --batch-size [64n|128n|256n] --epochs 3 [|--compile]
workers   n  ddp_launch_train.py --epochs 3 --workers [0|2|4] [|--compile]
peers     n  ddp_launch_train.py --batch-size 512n --epochs 3 [|--compile]
peers     n  results/peers.py [lightning|accelerate] --batch-size 512n --epochs 3 --workers 14
ceiling   1  [results/ceiling.py|dp_train.py] --epochs 3 [|--compile]
apex      n  ddp_launch_train.py --epochs 3
apex      n  apex_amp_train.py --backend apex --opt-level [O1|O2] --epochs 3
accuracy  [n|1]  ddp_launch_train.py --compile --seed [21|22|23]
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
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=",".join(VISIBLE[:gpus]))
    print("==", gpus, *command, flush=True)
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment)
    lines, times = [], []
    with subprocess.Popen([*start, *command], **output) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
            times += [time.monotonic()] * ("epochs are done" in line or line.startswith("RESULT "))
    if process.returncode:
        return print("failed, exit code", process.returncode, *command, flush=True)
    hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if CUDA else "CPU"
    versions = f"PyTorch {torch.__version__}, Python {sys.version.split()[0]}"
    return row_of(series, gpus if CUDA else 0, hardware, versions, command, lines, times and times[-1] - times[0])


def rows_of_logs(folder):
    """Yield a row for each log that run_all.sh has written into a folder."""
    machine = (folder / "table.md").read_text().splitlines()[0]
    hardware, versions = re.search(r", ([^,]+), (PyTorch .*)", machine).groups()
    for log in sorted(folder.glob("*.log")):
        first, *lines = log.read_text().splitlines()
        command = re.search(r"\w+_train\.py.*", first)[0].split()
        for result in (json.loads(line[7:]) for line in lines if line.startswith("RESULT ")):
            command += ["--batch-size", str(result["batch_size"])]
            yield row_of("run_all", result["gpus"], hardware, versions, command, lines)


def row_of(series, gpus, hardware, versions, command, lines, seconds=None):
    """Return the row of a run from the lines that it printed. `seconds` is the time of all epochs."""
    speed = re.compile(r"epoch .*images_per_second (\S+)")
    speeds = [found[1] for line in lines if (found := speed.match(line))]
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    result = results[0] if results else {}
    for package in {"lightning", "accelerate"}.intersection(command):
        versions += f", {package} {importlib.metadata.version(package)}"
    if "apex" in command:
        versions += ", Apex 25.04 " + ("with kernels" if importlib.util.find_spec("amp_C") else "Python only")
    commit = subprocess.run("git rev-parse --short HEAD".split(), cwd=ROOT, capture_output=True, text=True).stdout
    return dict(
        date=time.strftime("%Y-%m-%d"),
        commit=commit.strip(),
        gpus=gpus,
        hardware=hardware,
        versions=versions,
        series=series,
        command=" ".join(command),
        images_per_second=" ".join(speeds),
        val_accuracy=result.get("val_accuracy", ""),
        val_loss=f"{result['val_loss']:.6g}" if result else "",
        seconds=f"{seconds:.1f}" if seconds else "",
        peak_mib=result.get("peak_mib", ""),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {line.split()[0] for line in COMMANDS.strip().splitlines()}
    parser.add_argument("part", choices=sorted(parts | {"run_all"}))
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("runs.csv"))
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2, help="default: all")
    parser.add_argument("--logs", type=Path, help="folder with the logs of run_all.sh, for the part run_all")
    args, flags = parser.parse_known_args()
    if args.part == "run_all":
        if not args.logs:
            parser.error("the part run_all needs --logs")
        rows = rows_of_logs(args.logs)
    else:
        rows = (run(args.part, gpus, command + flags) for gpus, command in commands(args.part, args.gpus))
    for row in filter(None, rows):
        with args.csv.open("a", newline="") as file:
            csv.DictWriter(file, row, lineterminator="\n").writerow(row)


if __name__ == "__main__":
    main()
